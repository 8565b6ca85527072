"""The rules that tell why a run is slow and what teaches nothing: each fires from its threshold on, and not below."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.config import Config
from headrace.run import findings
from headrace.run.findings import REST, TOTAL, Finding, find, in_window, split
from headrace.run.journal import Line
from headrace.run.now import EnvironmentNow, Now, ReplicaNow

# A step of ten seconds that loses nothing.
WELL = {
    TOTAL: 10.0,
    "timing/train/policy_training": 6.0,
    "groups_without_spread": 0.2,
    "truncation_rate": 0.0,
    "off_policy_tokens": 0.01,
    "failed_prompts": 0.0,
}
ASYNC = {"grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True}}}


def config(values: dict[str, Any] | None = None) -> Config:
    return Config.model_validate(ASYNC if values is None else values)


def lines(*steps: dict[str, float]) -> list[Line]:
    return [Line("train", step, "a", float(step), metrics) for step, metrics in enumerate(steps)]


def now(**changes: Any) -> Now:
    return Now(0.0, 1, 0, False, {}, {}, **{"replicas": [], "runners": [], "environments": [], "waits": []} | changes)


def part(name: str) -> str:
    return f"timing/train/{name}"


def only(*found: Finding) -> Finding:
    (one,) = found
    return one


RULES = [
    (part("wait_for_generation"), 0.9, 1.0, "rollout.replicas=2"),
    (part("wait_for_scores"), 0.9, 1.0, "faster environment"),
    (part("validation"), 0.9, 1.0, "grpo.val_period=20"),
    (part("weight_sync"), 0.9, 1.0, "num_prompts_per_step"),
    (part("checkpointing"), 0.9, 1.0, "checkpointing.save_period=20"),
    (part("policy_training"), 7.9, 8.0, "policy.sequence_packing.enabled=true"),
    ("groups_without_spread", 0.49, 0.5, "grpo.use_dynamic_sampling=true"),
    ("truncation_rate", 0.19, 0.2, "max_"),
    ("off_policy_tokens", 0.09, 0.1, "max_trajectory_age_steps=1"),
    ("failed_prompts", 0.0, 1.0, "headrace samples"),
    ("store_failures", 0.0, 1.0, "headrace status"),
    ("offer_failures", 0.0, 1.0, "headrace status"),
]


@pytest.mark.parametrize(("metric", "below", "from_", "remedy"), RULES, ids=[rule[0] for rule in RULES])
def test_a_rule_fires_from_its_threshold_on(metric: str, below: float, from_: float, remedy: str) -> None:
    assert find(lines({**WELL, metric: below}), config()) == []
    found = only(*find(lines({**WELL, metric: from_}), config()))
    assert remedy in found.remedy
    if metric.startswith("timing/"):
        assert found.share == pytest.approx(from_ / 10)
        assert f"train:{metric}" in found.evidence.query["metric"] or metric == part("policy_training")
    else:
        assert found.share is None


def test_a_great_loss_is_a_warning_and_comes_first() -> None:
    step = {**WELL, part("validation"): 3.0, part("checkpointing"): 1.0, part("weight_sync"): 2.0, TOTAL: 12.0}
    found = find(lines(step), config())
    assert [(each.severity, round(each.share or 0, 2)) for each in found] == [("info", 0.25), ("info", 0.17)]
    found = find(lines({**step, TOTAL: 10.0}), config())
    assert [each.severity for each in found] == ["warning", "info", "info"]
    assert "30 % of the time" in findings.top(found)[0]


def test_the_step_after_a_start_counts_for_no_share_of_the_time() -> None:
    first = {**WELL, "efficiency/init/total_s": 5.0, part("wait_for_generation"): 9.0}
    assert find(lines(first), config()) == []
    assert find(lines(first, *[WELL] * 3), config(), "all") == []


def test_a_window_has_the_last_step_the_last_ten_or_all() -> None:
    steps = [{**WELL, part("validation"): 5.0}, *[WELL] * 10, {**WELL, part("wait_for_scores"): 5.0}]
    assert [len(in_window(lines(*steps), window)) for window in ("last", "10", "all")] == [1, 10, 12]
    shares = {
        window: {each.title: each.share for each in find(lines(*steps), config(), window)}
        for window in ("last", "10", "all")
    }
    assert list(shares["last"].values()) == [0.5]
    assert shares["10"] == shares["all"] == {}


def test_the_parts_of_a_step_add_up_to_it() -> None:
    assert split({}) == dict.fromkeys([*(each.name for each in findings.PARTS), REST], 0.0)
    seconds = split({TOTAL: 10.0, **{each.metric: 0.5 for each in findings.PARTS}})
    assert sum(seconds.values()) == 10.0
    assert seconds[REST] == 10.0 - 0.5 * len(findings.PARTS)


def test_generation_that_alternates_with_training_is_to_overlap_it() -> None:
    step = {**WELL, part("wait_for_generation"): 4.0, part("weight_sync"): 1.0}
    waits, refit = find(lines(step), config({"grpo": {}}))
    assert "async_grpo.enabled=true" in waits.remedy
    assert "in_flight_weight_updates=true" in refit.remedy


def test_the_slowest_environment_is_named_with_what_is_slow_in_it() -> None:
    step = {
        **WELL, part("wait_for_scores"): 4.0,
        "scoring_wait/a": 3.0, "scoring_time/a": 0.5, "scoring_wait/judge": 1.0, "scoring_time/judge": 8.0,
    }  # fmt: skip
    found = only(*find(lines(step), config()))
    assert "judge (1 s waiting for it, 8 s in it)" in found.title
    assert "faster environment" in found.remedy
    busy = [EnvironmentNow("judge", 7, 4, broken=False, capacity=4)]
    assert "4 of 4 places busy" in only(*find(lines(step), config(), now=now(environments=busy))).title
    queue = {**step, "scoring_wait/judge": 9.0}
    assert only(*find(lines(queue), config())).remedy == "reward.workers=3"
    own = {**ASYNC, "env": {"judge": {"target": "127.0.0.1:1"}}}
    assert "processes of it" in only(*find(lines(queue), config(own))).remedy


def test_the_slowest_part_of_a_combination_is_named() -> None:
    env = {
        "both": {"type": "combine", "parts": {"math": 1.0, "brief": 0.5}, "timeout_s": 100},
        "math": {"type": "math"},
    }
    combined = config({**ASYNC, "env": {**env, "brief": {"type": "length", "max_tokens": 9}}})
    step = {**WELL, part("wait_for_scores"): 4.0, "scoring_wait/both": 1.0, "scoring_time/both": 8.0}
    assert "its parts math, brief" in only(*find(lines(step), combined)).title
    parts = [
        EnvironmentNow("brief", 0, 0, broken=False, p50_s=0.01),
        EnvironmentNow("math", 0, 2, broken=False, p50_s=3.0, capacity=2),
    ]
    title = only(*find(lines(step), combined, now=now(environments=parts))).title
    assert "its part math" in title
    assert "2 of 2 places" in title
    waits = {**step, "scoring_wait/both": 9.0}
    assert only(*find(lines(waits), combined)).remedy == "reward.workers=3"
    own = {"target": "127.0.0.1:1"}
    for brief, math, remedy in (
        (own, own, "processes of math, brief"),
        (own, env["math"], "reward.workers, or more concurrency of an environment's own"),
    ):
        found = find(lines(waits), config({**ASYNC, "env": {**env, "math": math, "brief": brief}}))
        assert remedy in only(*found).remedy
    served = config({**ASYNC, "env": {**env, "math": own, "brief": own}})
    assert "processes of math" in only(*find(lines(waits), served, now=now(environments=parts))).remedy


def test_what_teaches_nothing_is_to_be_easier_or_harder() -> None:
    for end, remedy in ((0, "easier"), (1, "harder")):
        step = {**WELL, "groups_without_spread": 0.8, f"baseline_reward/pct_{end}": 70.0}
        assert remedy in only(*find(lines(step), config())).remedy
    filtered = {**WELL, "dynamic_sampling_scored_groups": 10.0, "dynamic_sampling_filtered_groups": 4.0}
    assert find(lines(filtered), config()) == []
    found = only(*find(lines({**filtered, "dynamic_sampling_filtered_groups": 5.0}), config()))
    assert found.evidence.query == {"state": "filtered"}


@pytest.mark.parametrize(
    "values",
    [
        {"ppo": {"num_generations_per_prompt": 1}},
        {"grpo": {"adv_estimator": {"name": "opd", "teacher_model_name": "t"}}},
        {"grpo": {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}}},
    ],
    ids=["a value model", "a teacher", "the batch"],
)
def test_equal_rewards_teach_where_advantages_are_not_of_a_group(
    values: dict[str, Any],
) -> None:
    assert find(lines({**WELL, "groups_without_spread": 1.0}), config(values)) == []


@pytest.mark.parametrize(("source", "corrected"), [("recompute", False), ("generation", True)])
def test_old_tokens_are_to_be_corrected_for_if_they_are_not(source: str, corrected: bool) -> None:
    chosen = config({**ASYNC, "loss_fn": {"prev_logprobs_source": source}})
    remedy = only(*find(lines({**WELL, "off_policy_tokens": 0.2}), chosen)).remedy
    assert remedy.startswith("loss_fn.use_importance_sampling_correction=true") is not corrected


def test_an_advantage_that_outweighs_a_batch_is_told() -> None:
    """Fourteen rewards of 1, one of 0.995 and one of 0 make an advantage of -774."""
    assert find(lines({**WELL, "advantages/min": -49.0, "advantages/max": 49.0}), config()) == []
    extreme = lines({**WELL, "advantages/min": -774.0}, WELL)
    found = only(*find(extreme, config()))
    assert "774" in found.title
    assert found.remedy.startswith("grpo.use_leave_one_out_baseline=false, or grpo.advantage_clip_low=-5")
    for others in ({"grpo": {"use_leave_one_out_baseline": False}}, {"grpo": {"normalize_rewards": False}}):
        assert only(*find(extreme, config(others))).remedy.startswith("grpo.advantage_clip_low")
    assert only(*find(extreme, config({"ppo": {}}))).remedy.startswith("ppo.advantage_clip_low")
    taught = {"grpo": {"adv_estimator": {"name": "opd", "teacher_model_name": "t"}}}
    assert find(extreme, config(taught)) == [], "the nats between a teacher and a policy"


def test_a_replica_that_admission_never_gives_a_group_is_too_many() -> None:
    few = {"grpo": {"num_prompts_per_step": 2}, "rollout": {"replicas": 2}}
    assert find([], config(few)) == []
    found = only(*find([], config({**few, "rollout": {"replicas": 3}})))
    assert found.remedy == "rollout.replicas=2"
    replicas = [ReplicaNow(str(place), "HEALTHY", 0, 0, 0.0) for place in range(4)]
    assert "2 have nothing to do" in only(*find([], config(few), now=now(replicas=replicas))).title


def test_replicas_whose_kv_cache_is_full_are_named_with_its_key() -> None:
    well = ReplicaNow("a", "HEALTHY", 0, 0, 0.0, kv_use=0.99, preemptions_per_s=0.0)
    assert find([], config(), now=now(replicas=[well])) == []
    short = msgspec.structs.replace(well, preemptions_per_s=2.5, running=12)
    found = only(*find([], config(), now=now(replicas=[well, short])))
    assert "1 of 2 replicas" in found.title
    assert "gpu_memory_utilization" in found.remedy
    assert "max_num_seqs=12" in found.remedy
    # a replica on a CPU has a cache of 256 MiB unless the key says otherwise
    on_cpu = now(replicas=[msgspec.structs.replace(short, device="cpu")])
    for size in (None, 2**28):
        sized = {"policy": {"generation": {"vllm_cfg": {"kv_cache_memory_bytes": size}}}}
        remedy = only(*find([], config(sized), now=on_cpu)).remedy
        assert f"policy.generation.vllm_cfg.kv_cache_memory_bytes={2**29}" in remedy


def test_metrics_that_are_no_numbers_are_no_finding() -> None:
    nan = float("nan")
    unknown = dict.fromkeys(("groups_without_spread", "truncation_rate", "off_policy_tokens", "failed_prompts"), nan)
    assert find(lines({**WELL, **unknown}), config()) == []
    assert find(lines({TOTAL: nan, part("validation"): nan}), config()) == []


def test_dead_replicas_are_not_idle() -> None:
    few = {"grpo": {"num_prompts_per_step": 2}, "rollout": {"replicas": 2}}
    states = ["HEALTHY", "STALE", "DEAD", "DEAD"]
    replicas = [ReplicaNow(str(place), state, 0, 0, 0.0) for place, state in enumerate(states)]
    assert find([], config(few), now=now(replicas=replicas)) == []


@pytest.mark.parametrize(("states", "named"), [(["HEALTHY", "HEALTHY", "DEAD"], 4), (["HEALTHY"] * 9, 6), ([], 2)])
def test_as_many_replicas_are_named_as_keep_pace_with_training(states: list[str], named: int) -> None:
    """The trainer waits for half of the time. With two prompts a step and an age bound of two, six groups may be in flight."""
    grpo = {"grpo": {"num_prompts_per_step": 2, **ASYNC["grpo"]}}
    replicas = [ReplicaNow(str(place), state, 0, 0, 0.0) for place, state in enumerate(states)]
    found = find(lines({**WELL, part("wait_for_generation"): 5.0}), config(grpo), now=now(replicas=replicas))
    assert f"rollout.replicas={named}" in " ".join(each.remedy for each in found if "generation" in each.title)


def test_validations_that_hold_up_training_may_run_beside_it() -> None:
    steps = lines(*[{**WELL, part("validation"): 5.0, TOTAL: 15.0}] * 10)
    for replicas, wanted, told in ((1, 0, False), (2, 0, True), (2, 1, False)):
        of = config({**ASYNC, "rollout": {"replicas": replicas}, "trainer": {"validation_replicas": wanted}})
        assert any("trainer.validation_replicas=1" in str(found) for found in find(steps, of)) is told
