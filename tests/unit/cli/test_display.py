"""What is shown of a run."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from headrace.cli.display import UPDATING, Display, RunSummary, ServiceLine, closing_table, draw
from headrace.cli.status import progress, waits_for
from headrace.replay import EnvironmentState


def run() -> RunSummary:
    run = RunSummary(run_id="adder", max_steps=30)
    run.add("1-0", "validation", 0, {"accuracy": 0.37})
    for step in range(4):
        run.add(
            f"2-{step}",
            "train",
            step,
            {"reward": 0.5 + step / 10, "avg_trajectory_age": 1.0, "performance/tokens_per_sec": 900.0},
        )
    run.services = [ServiceLine("rollout-1", "ready", 2, "weights 3, 8 groups")]
    run.counts = {"queued": 7, "failed": 0}
    return run


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_live_display_shows_services_steps_and_groups() -> None:
    text = shown(draw(run()))
    for expected in (
        "run adder",
        "rollout-1",
        "ready",
        "weights 3, 8 groups",
        "3/30",
        "0.800",
        "0.370",
        "900",
        "7 queued",
    ):
        assert expected in text
    assert "failed" not in text


def test_the_live_display_says_why_the_buffer_cant_be_read() -> None:
    unreadable = run()
    unreadable.buffer = "the Redis server can't be reached"
    assert "buffer: the Redis server can't be reached" in shown(draw(unreadable))


def test_a_rewind_voids_the_steps_after_it() -> None:
    rewound = run()
    rewound.add("3-0", "train", 1, {"reward": 0.9})
    assert {step: metrics["reward"] for step, metrics in rewound.train.items()} == {0: 0.5, 1: 0.9}
    assert rewound.last_entry == "3-0"


def test_the_summary_names_both_ends() -> None:
    text = shown(closing_table(run(), 178.4))
    for expected in ("0.370 (step 0)", "0.500 (step 0)", "0.800 (step 3)", "7 queued", "2 min 58 s"):
        assert expected in text


def test_the_log_display_prints_each_change_of_state_once_and_no_refit() -> None:
    console = Console(file=io.StringIO(), width=40)
    display, now = Display(console), run()
    for state in ("starting", "starting", "ready", UPDATING, "ready", "restarting"):
        now.services = [ServiceLine("rollout-1", state, 0, "")]
        display.update(now)
    display.metrics(
        "train",
        3,
        {
            "reward": 0.5,
            "avg_trajectory_age": 1.0,
            "performance/tokens_per_sec": 900.0,
            "timing/train/total_step_time": 1.5,
        },
    )
    display.metrics("validation", 5, {"accuracy": 0.9})
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "rollout-1: starting",
        "rollout-1: ready",
        "rollout-1: restarting",
        "step 3: reward 0.500, age 1.0, 900 tokens/s, 1.50 s",
        "step 5: validation accuracy 0.900",
    ]


def test_an_alarm_is_shown_until_a_step_is_without_one() -> None:
    alarmed = run()
    alarmed.add("3-0", "train", 4, {"reward": 0.5, "train_inference_alarm": 1.0, "token_mult_prob_error": 1.31})
    assert "step 4: trainer and inference disagree (token_mult_prob_error 1.310)" in shown(draw(alarmed))
    alarmed.add("4-0", "train", 5, {"reward": 0.5, "train_inference_alarm": 0.0})
    assert "disagree" not in shown(draw(alarmed))
    console = Console(file=io.StringIO(), width=200)
    Display(console).metrics("train", 4, {"reward": 0.5, "train_inference_alarm": 1.0, "token_mult_prob_error": 1.31})
    assert "disagree" in console.file.getvalue()  # type: ignore[attr-defined]


def test_status_tells_the_newest_step_and_an_alarm_with_its_picture(tmp_path: Path) -> None:
    old = ("1-0", "validation", 10, {"accuracy": 0.5})
    step = ("2-0", "train", 12, {"reward": 0.25, "train_inference_alarm": 1.0, "token_mult_prob_error": 1.2})
    (tmp_path / "disagreement_step12.png").touch()
    told = dict(progress([step, old], tmp_path))
    assert told["train"] == "step 12: reward 0.250"
    assert told["validation"] == "step 10: accuracy 0.500"
    assert told["alarm"].endswith(f"1.2); see {tmp_path / 'disagreement_step12.png'}")
    assert progress([], tmp_path) == []


def test_a_broken_environment_is_named_once_and_again_when_it_works() -> None:
    console = Console(file=io.StringIO(), width=40)
    display, summary = Display(console), RunSummary(run_id="adder", max_steps=3)
    for broken in ({}, {"told": "KeyError: 'anwser'"}, {"told": "another"}, {}):
        summary.broken = broken
        display.update(summary)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == [
        "waits for environment told, which is broken: KeyError: 'anwser'",
        "environment told works again",
    ]


def test_status_names_a_broken_environment_with_its_traceback() -> None:
    works = EnvironmentState("fine", 3, 0, 1, 0, False)
    broken = EnvironmentState("told", 7, 0, 1, 0, True, "FAILING", "KeyError: 'anwser'", "Traceback:\n  line 1\n", 62.0)
    assert list(waits_for([works, broken])) == [
        ("waits for", "environment told, broken for 62 s, 8 trajectories: KeyError: 'anwser'"),
        ("", "Traceback:"),
        ("", "  line 1"),
    ]
