"""When trainer and inference are said to disagree, in which words, and with which picture."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from headrace.config.logger import TrainInferenceAlarmConfig
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.telemetry import alarm
from headrace_services.trainer.telemetry.plots import draw_disagreement
from tests.support.trainer import batch, trajectory

LIMITS = TrainInferenceAlarmConfig()


@pytest.mark.parametrize(
    ("metrics", "passed"),
    [
        ({"token_mult_prob_error": 1.05, "gen_kl_error": 0.01}, []),
        ({"token_mult_prob_error": 1.051, "gen_kl_error": 0.0}, ["token_mult_prob_error"]),
        ({"token_mult_prob_error": 1.0, "gen_kl_error": 0.011}, ["gen_kl_error"]),
        ({"token_mult_prob_error": math.inf, "gen_kl_error": math.nan}, ["token_mult_prob_error", "gen_kl_error"]),
        ({"loss": 1.0}, []),
        ({"token_mult_prob_error": 1.14, "gen_kl_error": 0.08, "avg_trajectory_age": 2.0}, []),
        ({"token_mult_prob_error": 1.16, "gen_kl_error": 0.0, "avg_trajectory_age": 2.0}, ["token_mult_prob_error"]),
        ({"token_mult_prob_error": 1.0, "gen_kl_error": 0.091, "avg_trajectory_age": 2.0}, ["gen_kl_error"]),
    ],
    ids=[
        "at the limits",
        "error",
        "divergence",
        "not finite",
        "not measured",
        "due to age",
        "error with age",
        "divergence with age",
    ],
)
def test_an_alarm_is_a_limit_that_was_passed(metrics: dict[str, float], passed: list[str]) -> None:
    assert [excess.metric for excess in alarm.violations(metrics, LIMITS)] == passed


def test_a_limit_of_null_is_never_passed() -> None:
    never = TrainInferenceAlarmConfig(token_mult_prob_error=None, gen_kl_error=None)
    assert alarm.violations({"token_mult_prob_error": 99.0, "gen_kl_error": 99.0}, never) == []


def test_of_a_streak_the_first_is_told_and_then_one_in_ten() -> None:
    streak = alarm.Streak()
    told = [step for step in range(25) if streak.is_reported(step != 12)]
    assert told == [0, 10, 13, 23]


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


def test_the_worst_are_those_whose_tokens_differ_most() -> None:
    found = compared((0, [0.1] * 3, None), (1, [2.0] * 3, [0, 0, 0]), (2, [0.0, 0.0, 1.0], None), (3, [0.0] * 3, None))
    assert alarm.worst(found, 2) == [2, 0]


def test_a_trajectory_that_needed_no_pass_is_not_compared() -> None:
    found = compared((0, [0.1] * 3, None), (1, [math.nan] * 3, None))
    assert alarm.worst(found) == [0]


def test_of_a_group_one_trajectory_is_shown() -> None:
    assert alarm.worst(compared((0, [0.5] * 3, None), (0, [0.6] * 3, None), (1, [0.1] * 3, None))) == [1, 2]


def test_the_words_name_step_value_limit_age_and_what_to_look_at() -> None:
    found = alarm.violations({"token_mult_prob_error": 1.25, "avg_trajectory_age": 1.0}, LIMITS)
    said = alarm.message(7, found, {0: 1.0001, 2: 1.4}, Path("runs/a/logs/disagreement_step7.png"))
    for part in (
        "step 7",
        "1.25",
        "above the 1.1 that",
        "mean age of 1.0",
        "0: 1",
        "2: 1.4",
        "learning rate",
        "disagreement_step7.png",
    ):
        assert part in said


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
