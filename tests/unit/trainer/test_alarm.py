"""When trainer and inference are said to disagree, in which words, and with which picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from headrace.config import Config
from headrace.run.journal import JOURNAL, Journal
from headrace_services.refit.backends import Backend
from headrace_services.refit.probe import Differences, tolerance
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.telemetry import alarm
from headrace_services.trainer.telemetry.plots import draw_disagreement
from headrace_services.trainer.telemetry.telemetry import Telemetry
from tests.support.trainer import batch, trajectory

# What healthy runs measured: `examples/arithmetic_tiny.yaml` in float32 (age 0, then 1 and 2), bfloat16 on both sides (age 0).
FLOAT32 = [
    {"on_policy_token_mult_prob_error": 1.00001, "on_policy_gen_kl_error": 1e-9, "token_mult_prob_error": 1.00001},
    *({"token_mult_prob_error": error, "off_policy_tokens": 0.02} for error in (1.009, 1.024, 1.028, 1.025, 1.022)),
]
BFLOAT16 = {"on_policy_token_mult_prob_error": 1.072, "on_policy_gen_kl_error": 0.011, "token_mult_prob_error": 1.072}


@pytest.mark.parametrize(
    ("given_up", "alarm"), [((), None), (("nccl",), 1.0), (("nccl", "nccl-blocking"), 2.0), (("nccl-blocking",), 2.0)]
)
async def test_a_slower_way_of_the_weights_is_in_the_metrics_of_every_step(
    given_up: tuple[Backend, ...], alarm: float | None, tmp_path: Path
) -> None:
    given = config(run={"id": "run", "dir": str(tmp_path)}, logger={"keep_step_data": 0})
    telemetry = Telemetry(given, Journal(given.run_folder / JOURNAL))
    telemetry.note_given_up(given_up)
    for step in range(2):
        added = await telemetry.report_step(step, [], None, {"reward": 0.5})
        assert added.get("weight_channel_alarm") == alarm


def config(**changes: Any) -> Config:
    return Config.model_validate({"policy": {"precision": "float32"}, **changes})


LIMITS = alarm.alarm_limits(config())


def alarmed(steps: Sequence[Mapping[str, float]], limits: Mapping[str, float]) -> list[bool]:
    """Of which steps there is an alarm, as `Telemetry.report_step` decides it."""
    stale, found = alarm.Streak(alarm.OFF_POLICY_STEPS), []
    for metrics in steps:
        exceeded = [excess.on_policy for excess in alarm.find_exceeded(metrics, limits)]
        stale.count(not all(exceeded))
        found.append(any(exceeded) or stale.is_alarm)
    return found


CASES = {
    "a healthy run": (FLOAT32, {}, [False] * 6),
    "bfloat16, whose refits are verified as such": ([BFLOAT16] * 2, {"policy": {"precision": "bfloat16"}}, [False] * 2),
    "as much where refits agree to 1e-3": ([BFLOAT16], {}, [True]),
    "old data that the weights have learnt from": (
        [{"token_mult_prob_error": 1.4, "gen_kl_error": 0.05, "off_policy_tokens": 0.3}] * 9,
        {},
        [False] * 9,
    ),
    "most of it beyond the clip, steps in a row": ([{"off_policy_tokens": 0.6}] * 4, {}, [False, False, True, True]),
    "now and then": ([{"off_policy_tokens": share} for share in (0.6, 0.6, 0.4, 0.6, 0.6)], {}, [False] * 5),
    "at the limits": ([{"on_policy_token_mult_prob_error": 1.05, "on_policy_gen_kl_error": 0.01}], {}, [False]),
    "error": ([{"on_policy_token_mult_prob_error": 1.051, "on_policy_gen_kl_error": 0.0}], {}, [True]),
    "divergence": ([{"on_policy_token_mult_prob_error": 1.0, "on_policy_gen_kl_error": 0.011}], {}, [True]),
    "not finite": ([{"on_policy_token_mult_prob_error": math.nan}], {}, [True]),
    "not measured": ([{"loss": 1.0}], {}, [False]),
    "limits of null": (
        [{"on_policy_token_mult_prob_error": 99.0, "on_policy_gen_kl_error": 99.0, "off_policy_tokens": 1.0}] * 4,
        {"logger": {"train_inference_alarm": {"token_mult_prob_error": None, "gen_kl_error": None}}},
        [False] * 4,
    ),
}


@pytest.mark.parametrize(("steps", "changes", "expected"), CASES.values(), ids=CASES)
def test_when_trainer_and_inference_are_said_to_disagree(
    steps: Sequence[Mapping[str, float]], changes: Mapping[str, Any], expected: Sequence[bool]
) -> None:
    assert alarmed(steps, alarm.alarm_limits(config(**changes))) == expected


# trainer and inference that compute different models
WRONG = {"on_policy_token_mult_prob_error": 1.08, "on_policy_gen_kl_error": 0.009}


@pytest.mark.parametrize(
    ("precision", "rounding", "expected"),
    [("float32", None, True), ("bfloat16", (0.03, 0.01), True), ("bfloat16", (0.4, 0.08), False)],
    ids=["float32", "bfloat16, in which a small model differs little", "bfloat16, in which a model differs by as much"],
)
def test_an_on_policy_error_beyond_rounding_is_an_alarm_at_once(
    precision: str, rounding: tuple[float, float] | None, expected: bool
) -> None:
    chosen = config(policy={"precision": precision})
    accepted = tolerance(chosen, None if rounding is None else Differences(*rounding))
    assert alarmed([WRONG], alarm.alarm_limits(chosen, accepted)) == [expected]


@pytest.mark.parametrize(
    ("changes", "metrics", "equal"),
    [
        ({}, {"groups_without_spread": 1.0, "reward_std": 0.4}, True),
        ({}, {"groups_without_spread": 0.97, "reward_std": 0.1}, False),
        (
            {"grpo": {"adv_estimator": {"name": "reinforce_plus_plus"}}},
            {"groups_without_spread": 1.0, "reward_std": 0.4},
            True,
        ),
        (
            {"grpo": {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}}},
            {"groups_without_spread": 1.0, "reward_std": 0.4},
            False,
        ),
        ({"ppo": {"num_generations_per_prompt": 1}}, {"groups_without_spread": 1.0, "reward_std": 0.4}, False),
        ({"ppo": {"num_generations_per_prompt": 1}}, {"groups_without_spread": 1.0, "reward_std": 0.0}, True),
        ({"ppo": {}}, {"groups_without_spread": 1.0, "reward_std": float(np.full(48, 0.1).std())}, True),
        (
            {"grpo": {"adv_estimator": {"name": "opd", "teacher_model_name": "t"}}},
            {"groups_without_spread": 1.0, "reward_std": 0.0},
            False,
        ),
    ],
    ids=[
        "all groups",
        "not all",
        "reinforce++",
        "without a baseline",
        "ppo",
        "ppo, all the same",
        "rounding",
        "a teacher",
    ],
)
def test_rewards_are_equal_where_nothing_differs_from_its_baseline(
    changes: dict[str, Any], metrics: dict[str, float], equal: bool
) -> None:
    assert alarm.has_equal_rewards({"reward": 0.1, **metrics}, config(**changes)) is equal


def test_equal_rewards_are_told_after_steps_in_a_row_with_what_to_do() -> None:
    streak, told = alarm.Streak(alarm.EQUAL_STEPS), []
    for step in range(25):
        streak.count(step != 1)
        told += [step] if streak.is_reported else []
    assert told == [6, 16]
    said = alarm.equal_rewards_message(6, 5, 0.25)
    for part in ("step 6", "5 steps", "0.25", "temperature", "group size", "easier data", "harder data", "samples"):
        assert part in said


def compared(*rows: tuple[int, list[float], list[int] | None]) -> Batch:
    """A trajectory of each (group, old - rollout log-probabilities, which tokens count), at step 5; its first two tokens are of version 3,
    the others of version 5."""
    trajectories = [
        trajectory([1], range(len(apart)), group=f"g{group}", index=i, versions=[3, 3, *[5] * (len(apart) - 2)])
        for i, (group, apart, _) in enumerate(rows)
    ]
    found = batch(trajectories, step=5)
    found.mask = np.concatenate([np.array(mask or [1] * len(apart)) == 1 for _, apart, mask in rows])
    found.old_logprobs = found.rollout_logprobs + np.concatenate([apart for _, apart, _ in rows]).astype(np.float32)
    return found


def test_the_error_is_told_by_the_age_of_the_tokens() -> None:
    by_age = alarm.error_by_age(compared((0, [0.5, -0.5, 0.0, 0.0], None), (1, [9.0, 0.5, 0.0], [0, 1, 1])))
    assert list(by_age) == [0, 2]
    assert by_age[0] == 1.0
    assert by_age[2] == pytest.approx(math.exp(0.5))


def test_nothing_is_told_where_nothing_was_recomputed() -> None:
    found = compared((0, [1.0, 1.0, 1.0], None))
    found.old_logprobs = None
    assert alarm.error_by_age(found) == {}
    assert alarm.worst(found) == []


def test_the_worst_are_those_whose_tokens_differ_most_one_of_a_group() -> None:
    found = compared((0, [0.1] * 3, None), (1, [2.0] * 3, [0, 0, 0]), (2, [0.0, 0.0, 1.0], None), (3, [0.0] * 3, None))
    assert alarm.worst(found, 2) == [2, 0]
    assert alarm.worst(compared((0, [0.1] * 3, None), (1, [math.nan] * 3, None))) == [0]  # of which no pass was needed
    assert alarm.worst(compared((0, [0.5] * 3, None), (0, [0.6] * 3, None), (1, [0.1] * 3, None))) == [1, 2]


def written(*rows: tuple[str | tuple[str, int, str], list[float]]) -> Batch:
    """As `compared`, a trajectory of each (who wrote it, old - rollout): one replica, or (one, tokens of it, another)."""
    found = compared(*((group, apart, None) for group, (_, apart) in enumerate(rows)))
    trajectories = []
    for one, (who, apart) in zip(found.trajectories, rows, strict=True):
        begun, until, ended = (who, len(apart), who) if isinstance(who, str) else who
        writers = ((begun, 0, until), (ended, until, len(apart))) if until < len(apart) else ()
        trajectories.append(msgspec.structs.replace(one, replica=ended, writers=writers))
    found.trajectories = tuple(trajectories)
    return found


def test_the_error_is_told_by_the_replica_that_sampled_the_tokens() -> None:
    found = written(
        ("a", [0.0, 0.5, 0.0]),
        ("b", [-1.0, 1.0, 1.0]),
        (("a", 1, "b"), [0.5, 1.0, -1.0]),
        ("neither computed nor let through", [math.nan, -math.inf, math.nan]),
        ("liar", [1e30, 0.0, 0.0]),
    )
    found.mask[8] = False  # the last of the third, over age
    errors = alarm.error_by_replica(found)
    assert list(errors) == ["a", "b", "liar"]
    assert [of.tokens for of in errors.values()] == [4, 4, 3]
    assert errors["a"].error == pytest.approx((2 + 2 * math.exp(0.5)) / 4)
    assert errors["a"].age == 6 / 4  # versions 3, 3, 5 and 3 at step 5
    assert errors["b"].error == pytest.approx(math.e)
    assert 1e200 < errors["liar"].error < math.inf
    shares = [alarm.error_by_replica(found.take(places)) for places in ([0, 3], [1], [], [2, 4])]
    assert alarm.merge(shares) == {name: pytest.approx(of) for name, of in errors.items()}
    found.old_logprobs = None
    assert alarm.error_by_replica(found) == {}


@pytest.mark.parametrize(
    ("errors", "age", "apart"),
    [
        ({"a": 1.001, "b": 1.002}, 0.0, ""),
        ({"a": 1.001, "b": 1.06}, 0.0, "b"),
        ({"a": 1.001, "b": 1.049}, 0.0, ""),
        ({"a": 1.001, "b": 1.14}, 2.0, ""),
        ({"a": 1.001, "b": 1.16}, 2.0, "b"),
        ({"a": 1.05, "b": 1.10}, 0.0, ""),
        ({"a": 1.5, "b": 1.6, "c": 1.7}, 0.0, ""),
        ({"a": 1.0, "b": 1.0, "c": 3.0, "d": 4.0, "e": 1.0}, 0.0, "cd"),
        ({"a": 1.001, "b": 1e200}, 0.0, "b"),
        ({"b": 9.0}, 0.0, ""),
        ({}, 0.0, ""),
    ],
    ids=[
        *("agree", "one apart", "within the limit", "due to age", "in spite of age", "about as far as the other"),
        *("all of them", "two of five", "a liar", "alone", "nobody"),
    ],
)
def test_apart_is_who_exceeds_the_limit_and_the_others_by_far(errors: dict[str, float], age: float, apart: str) -> None:
    found = {name: alarm.ReplicaDisagreement(10 * error, 10 * age, 10) for name, error in errors.items()}
    assert alarm.outliers(found, 1.05) == set(apart)
    assert alarm.outliers(found, None) == set()


def test_the_words_name_step_value_limit_age_and_what_to_look_at() -> None:
    picture = Path("runs/a/logs/disagreement_step7.png")
    found = alarm.find_exceeded({"on_policy_token_mult_prob_error": 1.25}, LIMITS)
    said = alarm.disagreement_message(7, found, {0: 1.25, 2: 1.4}, picture)
    for part in ("step 7", "1.25, above 1.05", "0: 1.25", "2: 1.4", "precision", "disagreement_step7.png"):
        assert part in said
    assert "learning rate" not in said
    old = alarm.disagreement_message(7, alarm.find_exceeded({"off_policy_tokens": 0.75}, LIMITS), {2: 1.4}, None)
    for part in ("0.75, above 0.5", "beyond the clip", "learning rate", "age bound"):
        assert part in old
    assert "current weights" in said


def test_pictures_are_drawn_and_the_newest_stay(tmp_path: Path) -> None:
    found = compared((0, [0.1, 0.5, -0.2, 0.05], None), (1, [0.3, 0.0, 0.0], None))
    draw_disagreement(found, alarm.worst(found), 5, alarm.picture_path(tmp_path, 5))
    assert alarm.picture_path(tmp_path, 5).read_bytes().startswith(b"\x89PNG")
    for step in range(6, 20):
        alarm.picture_path(tmp_path, step).write_bytes(b"")
        alarm.drop_old_pictures(tmp_path)
    assert set(tmp_path.iterdir()) == {alarm.picture_path(tmp_path, step) for step in range(10, 20)}


def test_half_a_picture_of_a_trainer_that_died_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: Figure, path: Path) -> None:
        path.write_bytes(b"\x89PN")
        raise OSError("no space left")

    with monkeypatch.context() as fault:
        fault.setattr(Figure, "savefig", die)
        with pytest.raises(OSError, match="no space"):
            draw_disagreement(compared((0, [0.1, 0.5], None)), [0], 5, alarm.picture_path(tmp_path, 5))
    alarm.picture_path(tmp_path, 6).write_bytes(b"")
    alarm.drop_old_pictures(tmp_path)
    assert list(tmp_path.glob("disagreement*")) == [alarm.picture_path(tmp_path, 6)]
