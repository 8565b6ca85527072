"""What a run's files tell of its rates: training from the metrics, generation from the history of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.run.journal import Line
from headrace.run.measured import fit_speed, measure
from headrace.run.now import EnvironmentNow, Now, ReplicaNow
from tests.support.page_runs import START, write_events

STEP_S = 10.0
METRICS = {
    "timing/train/total_step_time": STEP_S,
    "timing/train/exposed_generation": 4.0,
    "timing/train/weight_sync": 1.0,
    "mean_gen_tokens_per_sample": 5.0,
    "scoring_time/math": 0.5,
}


def config(**asynchrony: Any) -> Config:
    grpo = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "async_grpo": {"enabled": True, **asynchrony}}
    return Config.model_validate({"grpo": grpo})


def lines(*changes: dict[str, float]) -> list[Line]:
    return [
        Line("train", step, "a", START + STEP_S * (step + 1), {**METRICS, **change})
        for step, change in enumerate(changes)
    ]


def one_group(folder: Path, at: float = 0.0) -> Path:
    """Two trajectories, of four and two tokens, side by side for two seconds; the longer one takes two more."""
    return write_events(
        folder,
        (at + 1, "0-1", "leased", {"replica": "one"}),
        (at + 3, "0-1", "pushed", {"index": 0, "tokens": 2}),
        (at + 5, "0-1", "pushed", {"index": 1, "tokens": 4}),
        (at + 6, "0-1", "ready", {}),
    )


def now(*states: str, capacity: int | None = 8) -> Now:
    replicas = [ReplicaNow(f"rollout-{place}", state, 1, 0, 0.0) for place, state in enumerate(states)]
    environments = [EnvironmentNow("math", 0, 0, False, capacity=capacity)]
    return Now(0.0, 1, 0, False, {}, {}, replicas, [], environments, [])


def test_training_and_refits_are_what_the_steps_took(tmp_path: Path) -> None:
    one_group(tmp_path)
    in_flight = config(in_flight_weight_updates=True, max_trajectory_age_steps=2)
    found = measure(
        tmp_path, in_flight, lines({}, {"timing/train/weight_sync": 3.0}), now=now("HEALTHY", "DEAD", "STALE")
    )
    work = found.workload
    assert (work.training_s, work.refit_s, work.drains) == (pytest.approx(4.0), pytest.approx(2.0), False)
    assert (work.age, work.replicas, work.prompts) == (2, 2, 2)
    assert (work.scoring_s, work.scoring_places) == (0.5, 8)
    assert (found.balance.step_s, found.balance.busy) == (STEP_S, pytest.approx(0.6))
    assert found.trained_tokens == 5.0 * 4


def test_a_draining_refit_takes_the_least_that_one_took(tmp_path: Path) -> None:
    one_group(tmp_path)
    found = measure(tmp_path, config(), lines({}, {"timing/train/weight_sync": 3.0}), now=now(capacity=None))
    assert (found.workload.refit_s, found.workload.drains) == (1.0, True)
    # no replica is up, and an environment does not say how much it takes
    assert (found.workload.replicas, found.workload.scoring_places) == (1, None)


def test_generation_is_what_the_history_of_groups_tells(tmp_path: Path) -> None:
    one_group(tmp_path)
    work = measure(tmp_path, config(), lines({})).workload
    assert list(work.lengths) == [(2.0, 4.0)]
    # 6 tokens in 6 seconds of trajectories
    load = (2 * 2.0 + 4 * 1.5) / 6
    assert work.token_s + work.per_sequence_s * load == pytest.approx(1.0)


def test_an_event_that_stands_in_two_files_counts_once(tmp_path: Path) -> None:
    path = one_group(tmp_path)
    path.with_name(path.name.replace("0_", "1_", 1)).write_bytes(path.read_bytes())
    assert list(measure(tmp_path, config(), lines({})).workload.lengths) == [(2.0, 4.0)]


def test_validations_take_a_replicas_time_but_are_not_trained(tmp_path: Path) -> None:
    write_events(
        tmp_path,
        (1, "0-1", "leased", {}),
        (1, "held-out", "leased", {}),
        (2, "held-out", "pushed", {"index": 0, "tokens": 9}),
        (2, "held-out", "evaluated", {}),
        (3, "0-1", "pushed", {"index": 0, "tokens": 2}),
        (3, "0-1", "ready", {}),
    )
    found = measure(tmp_path, config(), lines({}))
    assert list(found.workload.lengths) == [(2.0,)]
    assert found.balance.generating == pytest.approx(0.2)


def test_dynamic_sampling_generates_what_it_filters(tmp_path: Path) -> None:
    one_group(tmp_path)
    filtering = {"dynamic_sampling_scored_groups": 6.0, "dynamic_sampling_filtered_groups": 4.0}
    assert measure(tmp_path, config(), lines(filtering)).workload.prompts == 6


def test_the_window_and_starts_are_left_out(tmp_path: Path) -> None:
    one_group(tmp_path, at=100)
    start = {"efficiency/init/total_s": 30.0, "timing/train/total_step_time": 100.0}
    last = {"timing/train/total_step_time": 5.0}
    measured = lines(start, *[{}] * 10, last)
    found = measure(tmp_path, config(), measured)
    assert (found.steps, found.balance.step_s) == (11, pytest.approx(105 / 11))
    assert measure(tmp_path, config(), measured, "10").balance.step_s == pytest.approx(9.5)


def test_a_run_that_tells_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no timed step"):
        measure(tmp_path, config(), [])
    with pytest.raises(ConfigError, match="no history of groups"):
        measure(tmp_path, config(), lines({}))


@pytest.mark.parametrize(("token_s", "per_sequence_s"), [(0.02, 0.0), (0.02, 0.001), (0.5, 0.02)])
def test_the_speed_of_a_sequence_is_found_again(token_s: float, per_sequence_s: float) -> None:
    chance = np.random.default_rng(0)
    tokens, beside = chance.uniform(10, 100, 200), chance.uniform(1, 64, 200)
    found = fit_speed(tokens, tokens * (token_s + per_sequence_s * beside), beside)
    assert found == (pytest.approx(token_s, rel=0.02), pytest.approx(per_sequence_s, abs=1e-9))


def test_a_speed_that_would_be_negative_is_all_of_one_kind() -> None:
    """Together the trajectories still take what they took."""
    tokens, beside = np.array([10.0, 10.0]), np.array([1.0, 3.0])
    assert fit_speed(tokens, np.array([4.0, 2.0]), beside) == (pytest.approx(0.3), 0.0)
    token_s, per_sequence_s = fit_speed(tokens, np.array([0.0, 6.0]), beside)
    assert token_s > 0
    assert token_s + 2 * per_sequence_s == pytest.approx(0.3)
