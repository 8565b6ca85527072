"""The replicas of a run, as its trainer sees them: each version of the weights is given to them, and those that fail in a row are
quarantined."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.records.trajectory import Float32, Int32
from headrace.replay import Replica, frequent

from ...refit.probe import (
    Differences,
    choose_token_ids,
    differences,
    is_bounded_by_rounding,
    is_exact,
    probe_length,
    repeat_text,
    rollout_dtype,
    tolerance,
    unseen_window,
)
from ..telemetry import alarm
from ..telemetry.alarm import ReplicaDisagreement
from . import decisions
from .context import TrainerContext
from .decisions import Backoff
from .rank import Weights

log = logging.getLogger(__name__)


class Fleet:
    """The replicas of one trainer's run.

    `alive` are the replicas that took part at the last look. `healthy_at` is when a healthy or loading replica was last seen, or one that
    works under older weights, which it pulled, or the wait for one began. `refitted`: a refit to the newest weights has been carried out,
    successful or not.
    """

    def __init__(self, config: Config, context: TrainerContext, timeline: str) -> None:
        self.alive: frozenset[str] = frozenset()
        self.healthy_at = context.began
        self.refitted = False
        self._config = config
        self._context = context
        self._replay, self._retry = context.replay, context.retry
        self._timeline = timeline
        self._ever_verified = False  # some replica was, since this trainer started
        self._backoffs: dict[str, Backoff] = {}
        self._probe: tuple[Int32, Float32, Differences] | None = None  # and the tolerance
        # by replica, in a row: refits that it failed, and steps in which its log-probabilities stood apart
        self._failed_refits: dict[str, int] = {}
        self._outliers: dict[str, int] = {}

    def look(self, replicas: Sequence[Replica], held: int) -> int:
        """Note which replicas take part. Return the number of those that hold verified weights of version `held`."""
        self.alive = frozenset(replica.id for replica in decisions.alive(replicas))
        healthy = decisions.count_verified(replicas, held, self._timeline)
        works = healthy > 0 or decisions.may_work(replicas, held - self._config.algorithm.ahead_steps, self._timeline)
        self._ever_verified |= works
        if works or decisions.is_loading(replicas):
            self.healthy_at = self._context.clock()
        if self.refitted or not self.alive:
            self._context.readiness.problem = None if works else "no rollout replica holds verified weights"
        return healthy

    def refit_due(self, replicas: Sequence[Replica], version: int) -> bool:
        """Return whether some replica that is not at `version` may be refitted now."""
        behind = decisions.behind(replicas, version, self._timeline)
        return decisions.refit_due(behind, self._backoffs, self._context.clock())

    def outdate(self) -> None:
        """Note that there are newer weights than those that the fleet was given."""
        self.refitted, self._probe, self._backoffs = False, None, {}

    async def refit(self, version: int) -> None:
        """Give the fleet the weights, which are of `version`. Raises `ServiceError` if it turns out that no replica can ever take them."""
        lead = self._context.lead
        token_ids, logprobs, accepted = await self.probe()
        states = None
        if self._failed_refits:  # only then, because it takes another pass of the model
            states = await self._context.torch(lambda: lead.probe_states(token_ids.tolist()))
        adapter = Weights(lead, adapter_alone=True) if self._config.policy.lora_cfg.adapter_alone else None
        report = await self._retry(
            lambda: self._context.sender.refit(
                version,
                self._timeline,
                Weights(lead),
                token_ids,
                logprobs,
                adapter=adapter,
                tolerance=accepted,
                states=states,
            )
        )
        self.refitted = True
        self._context.telemetry.note_given_up(report.given_up)
        failed = {replica: f"its refit failed: {report.refused[replica]}" for replica in report.failed}
        self._failed_refits = await self._judge(self._failed_refits, report.verified, failed)
        behind = decisions.behind(await self._retry(self._replay.replicas), version, self._timeline)
        self._backoffs = decisions.next_backoffs(behind, self._backoffs, self._context.clock())
        log.info("version %d: %d of %d replicas verified", version, len(report.verified), len(report.members))
        for replica, reason in report.refused.items():
            log.warning("replica %s did not take version %d: %s", replica, version, reason)
        self._ever_verified |= bool(report.verified)
        if not version and not self._ever_verified:
            self._end_without_model(await self._retry(self._replay.replicas), report.refused)

    async def probe(self) -> tuple[Int32, Float32, Differences]:
        """Return the probe of the newest weights: tokens, their log-probabilities, and how far those of a replica may be from them."""
        if self._probe is None:
            self._probe = await self._make_probe()
        return self._probe

    async def _make_probe(self) -> tuple[Int32, Float32, Differences]:
        context, lead, policy = self._context, self._context.lead, self._context.lead.learner.policy
        window, longest = policy.window, self._config.policy.max_total_sequence_length
        length = probe_length(longest, policy.vocab_size, None if self._ever_verified else window)
        if not self._ever_verified and (unseen := unseen_window(longest, length, window)):
            log.warning("%s", unseen)
        if is_exact(self._config):
            ids = choose_token_ids(policy.vocab_size, length)
        else:
            ids = repeat_text((tokens for _, tokens in context.prompts.encode()), length)
        logprobs = await context.torch(lambda: lead.probe(ids.tolist()))
        rounded = None
        if is_bounded_by_rounding(self._config):
            rounded = await context.torch(lambda: lead.probe_rounded(ids.tolist()))
        accepted = tolerance(self._config, None if rounded is None else differences(logprobs, rounded))
        context.telemetry.agree(accepted)
        return ids, logprobs, accepted

    def _end_without_model(self, replicas: Sequence[Replica], refused: Mapping[str, str]) -> None:
        """Raise `ServiceError` if the whole fleet has failed with the initial weights too often to be tried again: training has not begun,
        so it is the model that trainer and replicas do not share."""
        rollout = self._config.rollout
        if decisions.is_hopeless(replicas, self._failed_refits, rollout.replicas, rollout.quarantine_after):
            policy, model = self._config.policy, self._context.lead.learner.policy
            raise ServiceError(
                f"no replica can be verified with the initial weights: {'; '.join(frequent(list(refused.values())))}. Trainer and engine "
                f"compute {policy.model_name!r} differently, or the engine can't be given its weights. Compare what they compute: here "
                f"{policy.precision} (policy.precision), {model.attention} attention; there {rollout_dtype(self._config)} "
                "(policy.generation.vllm_cfg.precision), and what the replica's log says of the engine. Of the model's configuration, what "
                f"can make a difference begin {'; '.join(model.suspects) or 'nowhere'}; policy.hf_config_overrides changes both sides. If "
                "these agree, use a model of another family, or report this one (docs/architecture.md, The probe)"
            )

    async def compare(self, step: int, errors: Mapping[str, ReplicaDisagreement]) -> None:
        """Report to the buffer how far the log-probabilities of each replica that takes part are from the trainer's. Quarantine replicas
        that stand apart repeatedly."""
        errors = {replica: error for replica, error in errors.items() if replica in self.alive}
        means = {replica: of.error for replica, of in errors.items()}
        await self._retry(lambda: self._replay.disagreements(step, self._timeline, means))
        outliers = alarm.outliers(errors, self._config.logger.train_inference_alarm.token_mult_prob_error)
        what = {
            replica: f"its log-probabilities stand apart: in step {step} token_mult_prob_error is {errors[replica].error:.4g} on its "
            f"tokens, at a mean age of {errors[replica].age:.1f}"
            for replica in outliers
        }
        for replica in outliers - self._outliers.keys():
            log.warning("replica %s: %s", replica, what[replica])
        well = errors.keys() - outliers if len(errors) > 1 else ()  # a single replica has no others to stand apart from
        self._outliers = await self._judge(self._outliers, well, what)

    async def _judge(self, streaks: Mapping[str, int], well: Iterable[str], ill: Mapping[str, str]) -> dict[str, int]:
        """Count how many times in a row each replica failed, and quarantine those that failed `rollout.quarantine_after` times. `ill` says
        what went wrong now, by replica; the replicas in `well` were fine. Returns the counts of the replicas that still take part."""
        most, counts = self._config.rollout.quarantine_after, decisions.next_streaks(streaks, well, ill)
        quarantined = set()
        for replica, what in ill.items():
            reason = f"{what}; {counts[replica]} times in a row"
            if most is None or counts[replica] < most:
                continue
            if await self._retry(partial(self._replay.quarantine, replica, self._timeline, reason)):
                quarantined.add(replica)
                log.error("replica %s is quarantined: %s. Fix the cause, and restart the replica", replica, reason)
        return {id_: times for id_, times in counts.items() if id_ in self.alive - quarantined}
