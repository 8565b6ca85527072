"""Tells from a run's history why it is slow, what waits for what, and what teaches nothing: a few rules, each with its remedy.

A rule reads means over the training steps of a window, and the configuration. Shares of the time are of the steps' total time. The first
step after each start of a trainer counts for none of them, because the replicas load their models in it. docs/watching.md lists the rules,
their thresholds, and why they are what they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from headrace.config import Config
from headrace.config.environments.combine import CombineConfig
from headrace.config.environments.custom import CustomConfig
from headrace.run.balance import enough_replicas
from headrace.run.headlines import follows_start
from headrace.run.journal import Line
from headrace.run.now import EnvironmentNow, Now, count_replicas

Severity = Literal["error", "warning", "info"]
Window = Literal["last", "10", "all"]

# Shares of the time from which a loss is reported, and from which it is a warning.
LOSS, GREAT_LOSS = 0.1, 0.3
# The share of the time from which training itself bounds the run.
BUSY = 0.8
# Shares of groups without spread, or filtered ones, from which most of what is generated teaches nothing.
WASTED = 0.5
# An advantage that no reward has if it is divided by the deviation of its whole group (at most the root of the group's size), nor one of a
# thousand tokens if all are whitened.
EXTREME = 50.0
# The share of completions that are cut off.
CUT_OFF = 0.2
# Shares of tokens that have moved further from the weights that sampled them than the loss trusts: a healthy run has fewer than the first.
OFF_POLICY, MOSTLY_OFF_POLICY = 0.1, 0.5

MOST_SHOWN = 3  # on a terminal

Metrics = Mapping[str, float]
TOTAL = "timing/train/total_step_time"


class Evidence(msgspec.Struct, frozen=True):
    """Where a person sees it for themselves: a view of the run's page, and its query."""

    view: Literal["metrics", "prompts", "group", "timeline", "system"]
    query: dict[str, Any]


class Finding(msgspec.Struct, frozen=True):
    """What is amiss, and the remedy: a `key=value` for the command line, or words. `share` is of the time, if it costs time."""

    title: str
    remedy: str
    evidence: Evidence
    severity: Severity = "warning"
    share: float | None = None

    def __str__(self) -> str:
        share = "" if self.share is None else f"{100 * self.share:.0f} % of the time: "
        return f"{share}{self.title}; {self.remedy}"


class Part(NamedTuple):
    """A part of a step's time, and the metric that has its seconds."""

    name: str
    metric: str


# They don't overlap. What remains of the step is the rest.
PARTS = (
    Part("policy training", "timing/train/policy_training"),
    Part("log-probabilities", "timing/train/policy_and_reference_logprobs"),
    Part("value training", "timing/train/value_training"),
    Part("waiting for generation", "timing/train/wait_for_generation"),
    Part("waiting for scores", "timing/train/wait_for_scores"),
    Part("refit", "timing/train/weight_sync"),
    Part("validation", "timing/train/validation"),
    Part("checkpoint", "timing/train/checkpointing"),
)
# Reading the batch, lineage, metrics and samples, and deciding what to do.
REST = "rest"


def split(metrics: Metrics) -> dict[str, float]:
    """Return the seconds of each part of a step and of the rest, which add up to the time of the step."""
    seconds = {part.name: metrics.get(part.metric, 0.0) for part in PARTS}
    return {**seconds, REST: max(0.0, metrics.get(TOTAL, 0.0) - sum(seconds.values()))}


def in_window(lines: Sequence[Line], window: Window) -> list[Line]:
    """Return the lines of the window's training steps."""
    steps = [line for line in lines if line.kind == "train"]
    return steps[-int(window) :] if window == "10" else steps[-1:] if window == "last" else steps


def usual(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines of steps without those that follow a start, unless there are no others."""
    return [line for line in lines if not follows_start(line.metrics)] or lines


def find(lines: Sequence[Line], config: Config, window: Window = "10", now: Now | None = None) -> list[Finding]:
    """Return what the rules find, the gravest first. `lines` are the surviving ones; `now` tells more of a run that is up."""
    steps: list[Metrics] = [line.metrics for line in in_window(lines, window)]
    found = [
        *_times(steps, config, now),
        *_without_lesson(steps, config),
        *_outweighed(steps, config),
        *_cut_off(steps, config),
        *_old_data(steps, config),
        *_failed(steps),
        *_not_stored(steps),
        *_idle_replicas(config, now),
        *_preempted(config, now),
    ]
    order = get_args(Severity)
    return sorted(found, key=lambda finding: (order.index(finding.severity), -(finding.share or 0.0)))


# -- shares of the time


def waiting(steps: Sequence[Metrics], config: Config | None = None, now: Now | None = None) -> Iterator[Finding]:
    """Yield what the trainer waited for through much of these steps' time."""
    times = _shares(steps)
    if not times:
        return
    names = " and ".join(_replicas_and_age(steps, config, now))
    yield from _loss(
        times,
        "waiting for generation",
        "the trainer waited for generation",
        f"more replicas, or a wider age bound ({names})",
    )
    place, remedy = _slowest(steps, config, now)
    yield from _loss(times, "waiting for scores", f"the trainer waited for scores{place}", remedy)


def long_wait(metrics: Metrics) -> str | None:
    """Return what the trainer waited for through much of one step, and the remedy; None if it did not."""
    return next((str(found) for found in waiting([metrics]) if found.severity == "warning"), None)


def top(found: Sequence[Finding]) -> list[str]:
    """Return the gravest findings, a line each."""
    return [str(finding) for finding in found[:MOST_SHOWN]]


def _times(steps: Sequence[Metrics], config: Config, now: Now | None) -> Iterator[Finding]:
    algorithm, asynchrony = config.algorithm, config.algorithm.asynchrony
    times, key = _shares(steps), f"{algorithm.name}.async_{algorithm.name}"
    yield from waiting(steps, config, now)
    period = (
        f"{algorithm.name}.val_period={2 * algorithm.val_period}" if algorithm.val_period else "validate less often"
    )
    can_be_beside = config.rollout.replicas > 1 and not config.has_episodes and not config.trainer.validation_replicas
    beside = "trainer.validation_replicas=1, so that the other replicas go on, " if can_be_beside else ""
    yield from _loss(
        times,
        "validation",
        "validations held up training",
        f"{beside}{period}, or fewer held-out prompts ({algorithm.name}.max_val_samples)",
    )
    in_flight = asynchrony.enabled and asynchrony.in_flight_weight_updates
    yield from _loss(
        times,
        "refit",
        "the weights were sent to the replicas, and training waited",
        f"larger steps ({algorithm.name}.num_prompts_per_step), which are sent more rarely, or a faster network"
        if in_flight
        else f"{key}.in_flight_weight_updates=true, so that running completions are not awaited first",
    )
    yield from _loss(
        times,
        "checkpoint",
        "training waited for checkpoints",
        f"checkpointing.save_period={2 * config.checkpointing.save_period}, or a faster disk",
    )
    training = sum(times.get(part, 0.0) for part in ("policy training", "log-probabilities", "value training"))
    if training >= BUSY:
        packed = config.policy.sequence_packing.enabled
        remedy = (
            f"policy.train_micro_batch_size={2 * config.policy.train_micro_batch_size} if memory allows, or more GPUs for the trainer"
            if packed
            else "policy.sequence_packing.enabled=true, larger micro-batches, or more GPUs for the trainer"
        )
        yield Finding(
            "the trainer trains, and nothing keeps it waiting",
            remedy,
            _metrics("efficiency/efficiency_pct"),
            "info",
            training,
        )


def _shares(steps: Sequence[Metrics]) -> dict[str, float]:
    """Return each part's share of the time of the steps that follow no start; none without such a step."""
    usual = [step for step in steps if not follows_start(step)]
    total, parts = sum(_values(usual, TOTAL)), [split(step) for step in usual]
    return {name: sum(each[name] for each in parts) / total for name in parts[0]} if total > 0 else {}


def _loss(times: Mapping[str, float], name: str, title: str, remedy: str) -> Iterator[Finding]:
    share = times.get(name, 0.0)
    if share >= LOSS:
        metric = next(part.metric for part in PARTS if part.name == name)
        severity: Severity = "warning" if share >= GREAT_LOSS else "info"
        yield Finding(title, remedy, _metrics(TOTAL, metric), severity, share)


def _replicas_and_age(steps: Sequence[Metrics], config: Config | None, now: Now | None) -> tuple[str, str]:
    """Return what makes generation faster, as keys with values if they are known: as many replicas as keep pace with training
    (`headrace plan balance` also knows what stragglers and the age bound cost)."""
    if config is None:
        return "rollout.replicas", "max_trajectory_age_steps"
    algorithm = config.algorithm
    usual = [step for step in steps if not follows_start(step)]
    waited = sum(step.get("timing/train/wait_for_generation", 0.0) for step in usual)
    enough = enough_replicas(count_replicas(config, now), sum(_values(usual, TOTAL)), waited)
    most = algorithm.num_prompts_per_step * (algorithm.ahead_steps + 1)
    section = f"{algorithm.name}.async_{algorithm.name}"
    wider = f"max_trajectory_age_steps={algorithm.asynchrony.max_trajectory_age_steps + 1}"
    return (
        f"rollout.replicas={min(enough, most)}",
        f"{section}.{wider if algorithm.max_age else 'enabled=true'}",
    )


def _slowest(steps: Sequence[Metrics], config: Config | None, now: Now | None) -> tuple[str, str]:
    """Return the environment whose scores took longest, as the end of a sentence, and the remedy."""
    took: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        for metric, seconds in step.items():
            if metric.startswith("scoring_time/"):
                name = metric.removeprefix("scoring_time/")
                took.setdefault(name, []).append((step.get(f"scoring_wait/{name}", 0.0), seconds))
    if not took:
        return "", "a faster environment"
    means = {name: (_mean(wait for wait, _ in each), _mean(work for _, work in each)) for name, each in took.items()}
    name, (wait, work) = max(means.items(), key=lambda item: sum(item[1]))
    place = f" of {name} ({wait:.3g} s waiting for it, {work:.3g} s in it"
    environment = None if config is None else config.env.get(name)
    asked, known = name, {each.name: each for each in now.environments} if now is not None else {}
    if isinstance(environment, CombineConfig):
        parts = [known[part] for part in environment.parts if part in known and known[part].p50_s is not None]
        if parts:
            asked = max(parts, key=lambda part: part.p50_s or 0.0).name
            place += f", most of it in its part {asked}"
        else:
            place += f", in its parts {', '.join(environment.parts)}"
    if asked in known and (busy := _busy(known[asked])):
        place += f": {busy}"
    remedy = "a faster environment"
    if wait > work:
        scorers = list(environment.parts) if isinstance(environment, CombineConfig) and asked == name else [asked]
        own = {config is not None and isinstance(config.env.get(each), CustomConfig) for each in scorers}
        if own == {True}:
            remedy = f"more concurrency, or more processes of {'it' if scorers == [name] else ', '.join(scorers)}"
        elif own == {False} and config is not None:
            remedy = f"reward.workers={config.reward.workers + 1}"
        else:
            remedy = "reward.workers, or more concurrency of an environment's own process"
    return f"{place})", remedy


def _busy(environment: EnvironmentNow) -> str:
    if environment.capacity is None:
        return ""
    return f"{min(environment.in_hand, environment.capacity)} of {environment.capacity} places busy"


# -- what teaches nothing


def _without_lesson(steps: Sequence[Metrics], config: Config) -> Iterator[Finding]:
    """Groups whose rewards are all equal have no advantage if it is measured in the group, so what was spent on them is lost."""
    scored = sum(step.get("dynamic_sampling_scored_groups", 0.0) for step in steps)
    filtered = sum(step.get("dynamic_sampling_filtered_groups", 0.0) for step in steps)
    failing, succeeding = (_mean(_values(steps, f"baseline_reward/pct_{end}")) for end in (0, 1))
    remedy = "harder prompts" if succeeding > failing else "easier prompts, or a reward with partial credit"
    if scored and filtered >= WASTED * scored:
        share = (
            f"{100 * filtered / scored:.0f} % of the scored groups were filtered, because their rewards were all equal"
        )
        yield Finding(
            share,
            f"{remedy}: each step generates several batches",
            Evidence("prompts", {"state": "filtered"}),
        )
    equal = _mean(_values(steps, "groups_without_spread"))
    if equal >= WASTED and config.algorithm.adv_estimator.has_group_baseline:
        yield Finding(
            f"{100 * equal:.0f} % of the groups taught nothing: their rewards are all equal",
            f"{remedy}, or {config.algorithm.name}.use_dynamic_sampling=true",
            Evidence("prompts", {"sort": "spread"}),
        )


def _outweighed(steps: Sequence[Metrics], config: Config) -> Iterator[Finding]:
    """A gradient is cut to a norm, so that a trajectory with an extreme advantage leaves nothing of the others in it."""
    largest = max(map(abs, [*_values(steps, "advantages/min"), *_values(steps, "advantages/max")]), default=0.0)
    grpo, name = config.grpo, config.algorithm.adv_estimator.name
    if largest < EXTREME or config.algorithm.adv_estimator.has_teacher:
        return
    # where the others have almost equal rewards, their deviation is almost 0
    of_others = grpo is not None and name != "reinforce_plus_plus" and grpo.leaves_one_out and grpo.normalizes
    yield Finding(
        f"an advantage was {largest:.0f}, so that one trajectory outweighed its batch",
        f"{'grpo.use_leave_one_out_baseline=false, or ' if of_others else ''}{config.algorithm.name}.advantage_clip_low=-5 and _high=5",
        _metrics("advantages/min", "advantages/max"),
    )


def _cut_off(steps: Sequence[Metrics], config: Config) -> Iterator[Finding]:
    share, limit = _mean(_values(steps, "truncation_rate")), config.policy.generation.max_new_tokens
    if share >= CUT_OFF:
        whole = config.policy.max_total_sequence_length
        remedy = (
            f"policy.generation.max_new_tokens={2 * limit}"
            if 2 * limit < whole
            else f"policy.max_total_sequence_length={2 * whole}"
        )
        yield Finding(
            f"{100 * share:.0f} % of the completions were cut off at the length limit",
            remedy,
            _metrics("truncation_rate"),
        )


def _old_data(steps: Sequence[Metrics], config: Config) -> Iterator[Finding]:
    share, algorithm = _mean(_values(steps, "off_policy_tokens")), config.algorithm
    if share >= OFF_POLICY:
        section = f"{algorithm.name}.async_{algorithm.name}"
        age = algorithm.max_age
        remedy = "" if config.loss_fn.corrects_for_sampling else "loss_fn.use_importance_sampling_correction=true, or "
        remedy += "a lower learning rate" + (f", or {section}.max_trajectory_age_steps={age - 1}" if age > 1 else "")
        yield Finding(
            f"{100 * share:.0f} % of the tokens are further from the weights that sampled them than the clip of the ratio",
            remedy,
            _metrics("off_policy_tokens", "avg_trajectory_age"),
            "warning" if share >= MOSTLY_OFF_POLICY else "info",
        )


def _failed(steps: Sequence[Metrics]) -> Iterator[Finding]:
    if failed := sum(_values(steps, "failed_prompts")):
        yield Finding(
            f"{failed:.0f} prompts failed and were replaced by later ones",
            "`headrace samples RUN --failed` shows why",
            Evidence("prompts", {"state": "failed"}),
        )


def _not_stored(steps: Sequence[Metrics]) -> Iterator[Finding]:
    for metric, lost, effect in (
        ("store_failures", "checkpoints", "a lost machine costs the steps since the last that did"),
        ("offer_failures", "weights", "replicas that pull work under older ones, or wait"),
    ):
        if failures := sum(_values(steps, metric)):
            yield Finding(
                f"{lost} did not reach the store in {failures:.0f} tries, so {effect}",
                "`headrace status RUN` shows why",
                _metrics(metric),
            )


def _idle_replicas(config: Config, now: Now | None) -> Iterator[Finding]:
    """Admission lets no more than the groups of `ahead_steps + 1` steps be in flight, so a further replica never gets one."""
    algorithm = config.algorithm
    most = algorithm.num_prompts_per_step * (algorithm.ahead_steps + 1)
    replicas = count_replicas(config, now)
    if replicas > most:
        yield Finding(
            f"{replicas} replicas share at most {most} groups: {replicas - most} have nothing to do",
            f"rollout.replicas={most}",
            Evidence("timeline", {}),
        )


def _preempted(config: Config, now: Now | None) -> Iterator[Finding]:
    """A sequence that loses its KV cache to others is computed again from its prompt on."""
    short = [each for each in ([] if now is None else now.replicas) if (each.preemptions_per_s or 0.0) > 0]
    if now is None or not short:
        return
    key = "policy.generation.vllm_cfg"
    vllm_cfg = config.policy.generation.vllm_cfg.resolve(on_cpu=short[0].device == "cpu")
    larger = (
        f"more than {key}.gpu_memory_utilization={vllm_cfg.gpu_memory_utilization}"
        if vllm_cfg.kv_cache_memory_bytes is None
        else f"{key}.kv_cache_memory_bytes={2 * vllm_cfg.kv_cache_memory_bytes}"
    )
    rate = sum(each.preemptions_per_s or 0.0 for each in short)
    fit = max(1, *(each.running or 0 for each in short))
    yield Finding(
        f"the KV cache of {len(short)} of {len(now.replicas)} replicas is full: {rate:.2g} sequences a second lose their place in it, "
        "and are computed again",
        f"{larger}, or no more sequences at a time than fit ({key}.max_num_seqs={fit})",
        Evidence("system", {}),
    )


def _metrics(*names: str) -> Evidence:
    return Evidence("metrics", {"metric": [f"train:{name}" for name in names]})


def _values(steps: Sequence[Metrics], name: str) -> list[float]:
    return [step[name] for step in steps if name in step and step[name] == step[name]]


def _mean(values: Any) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0
