"""What is shown of a run."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from headrace.cli.display import LineDisplay, closing_table, draw, failures
from headrace.cli.status import failures as failed_lines
from headrace.cli.status import list_findings, progress, waits_for
from headrace.cli.up import continues, why_it_ended
from headrace.config import Config
from headrace.launch.summary import KEPT_STEPS, UPDATING, RunSummary, ServiceLine, Wait
from headrace.replay import EnvironmentState, RunState
from headrace.run.journal import Line


def run() -> RunSummary:
    run = RunSummary(run_id="adder", max_steps=30, folder="runs/adder")
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


def shown(renderable: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
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


def test_of_a_long_run_the_first_step_and_the_newest_are_kept() -> None:
    long = RunSummary(run_id="long", max_steps=9000)
    for step in range(KEPT_STEPS + 500):
        long.add(f"1-{step}", "train", step, {"reward": step / 1e4})
    assert len(long.train) == KEPT_STEPS + 1
    assert list(long.train)[:2] == [0, 500]
    assert "0.150 (step 1499)" in shown(closing_table(long, 1.0))
    assert "0.000 (step 0)" in shown(closing_table(long, 1.0))


def test_the_live_display_says_why_the_buffer_cant_be_read() -> None:
    unreadable = run()
    unreadable.buffer = "the Redis server can't be reached"
    assert "Redis server" in shown(draw(unreadable))


def test_a_rewind_voids_the_steps_after_it() -> None:
    rewound = run()
    rewound.add("3-0", "train", 1, {"reward": 0.9})
    assert {step: metrics["reward"] for step, metrics in rewound.train.items()} == {0: 0.5, 1: 0.9}
    assert rewound.last_entry == "3-0"


def test_the_summary_names_both_ends() -> None:
    text = shown(closing_table(run(), 178.4))
    for expected in ("0.370 (step 0)", "0.500 (step 0)", "0.800 (step 3)", "7 queued", "2 min 58 s"):
        assert expected in text


def test_the_log_prints_each_change_of_state_once_and_no_refit() -> None:
    console = Console(file=io.StringIO(), width=40)
    display, now = LineDisplay(console), run()
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
    display.metrics("validation", 6, {"accuracy": 0.9, "partial_credit": 0.5})
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "rollout-1: starting",
        "rollout-1: ready",
        "rollout-1: restarting",
        "step 3: reward 0.500, age 1.0, 900 tokens/s, 1.50 s",
        "step 5: validation accuracy 0.900",
        "step 6: validation mean reward 0.900",
    ]


def test_an_alarm_is_shown_until_a_step_is_without_one() -> None:
    alarmed = run()
    alarmed.add("3-0", "train", 4, {"reward": 0.5, "train_inference_alarm": 1.0, "token_mult_prob_error": 1.31})
    assert "step 4: trainer and inference disagree (token_mult_prob_error 1.310)" in shown(draw(alarmed))
    alarmed.add("4-0", "train", 5, {"reward": 0.5, "train_inference_alarm": 0.0})
    assert "disagree" not in shown(draw(alarmed))
    console = Console(file=io.StringIO(), width=200)
    LineDisplay(console).metrics(
        "train", 4, {"reward": 0.5, "train_inference_alarm": 1.0, "token_mult_prob_error": 1.31}
    )
    assert "disagree" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_alarm_that_stays_is_one_line_until_it_changes() -> None:
    console = Console(file=io.StringIO(), width=400)
    display = LineDisplay(console)
    for step, level in enumerate((1.0, 1.0, 2.0, 2.0, 0.0, 2.0)):
        display.metrics("train", step, {"reward": 0.5, "weight_channel_alarm": level})
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.partition(":")[0] for line in said.splitlines() if "NCCL" in line] == ["step 0", "step 2", "step 5"]


def test_status_tells_the_newest_step_and_an_alarm_with_its_picture(tmp_path: Path) -> None:
    old = Line("validation", 10, "a", 0.0, {"accuracy": 0.5})
    alarmed = {"reward": 0.25, "train_inference_alarm": 1.0, "token_mult_prob_error": 1.2}
    (tmp_path / "disagreement_step12.png").touch()
    told = dict(progress([old, Line("train", 12, "a", 0.0, alarmed)], tmp_path))
    assert told["train"] == "step 12: reward 0.250"
    assert told["validation"] == "step 10: accuracy 0.500"
    assert "step 12: trainer and inference disagree (token_mult_prob_error 1.200)" in told["alarm"]
    assert told[""] == f"see {tmp_path / 'disagreement_step12.png'}"
    assert progress([], tmp_path) == []


def test_a_validation_without_all_its_results_is_never_told_as_a_zero(tmp_path: Path) -> None:
    lost = {"evaluated": 0.0, "failed": 0.0, "pending": 3.0}
    before = {"accuracy": 0.5, "pending": 0.0}
    lines = [Line("validation", step, "a", 0.0, metrics) for step, metrics in ((10, before), (12, lost))]
    said = "3 prompts have no result"
    assert progress(lines, tmp_path) == [("validation", f"step 12: {said}"), ("validation", "step 10: accuracy 0.500")]
    console = Console(file=io.StringIO(), width=400)
    LineDisplay(console).metrics("validation", 12, lost)
    line = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 12: validation accuracy" in line
    assert said in line
    assert "0.0" not in line


def test_what_the_trainer_waited_for_is_told_of_a_step_and_of_a_run() -> None:
    waited_for = run()
    first = {
        "efficiency/init/total_s": 9.0,
        "timing/train/total_step_time": 90.0,
        "timing/train/wait_for_generation": 90.0,
    }
    steady = {"timing/train/total_step_time": 10.0, "timing/train/wait_for_scores": 6.0}
    waited_for.train = {0: first, 1: steady}
    assert "step 1: 60 % of the time: the trainer waited for scores" in shown(draw(waited_for))
    waited_for.train = {0: first}
    assert "of the time" not in shown(draw(waited_for))
    lines = [Line("train", step, "a", 0.0, metrics) for step, metrics in enumerate((first, steady, steady))]
    ((name, said),) = list_findings(lines, Config())
    assert name == "finding"
    assert "60 % of the time: the trainer waited for scores" in said
    assert list_findings(lines[:1], Config()) == []


def test_a_wait_is_a_line_at_first_each_minute_and_at_its_end() -> None:
    console = Console(file=io.StringIO(), width=40)
    display, summary = LineDisplay(console), RunSummary(run_id="adder", max_steps=3)
    for seconds in (0.0, 2.9, 3.1, 40.0, 63.5, 100.0, None):
        summary.waits = [] if seconds is None else [Wait("environment told at 127.0.0.1:5", seconds, "no answer")]
        display.update(summary)
    for seconds in (1.0, None):  # too short to speak of
        summary.waits = [] if seconds is None else [Wait("environment quick", seconds, "no answer")]
        display.update(summary)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "waits for environment told at 127.0.0.1:5, 3 s: no answer",
        "waits for environment told at 127.0.0.1:5, 64 s: no answer",
        "no longer waits for environment told at 127.0.0.1:5",
    ]
    summary.waits = [Wait("environment told", 0.4, "\x1b[2Jgone")]
    assert r"waits for environment told, 0 s: \x1b[2Jgone" in shown(draw(summary))


def test_failed_prompts_are_shown_with_their_reasons() -> None:
    failing = run()
    failing.add("3-0", "train", 4, {"reward": 0.5, "failed_prompts": 3.0})
    failing.counts["failed"] = 5
    failing.failures = ["4 x scoring failed 3 times: FAILED: \x1b[2J"]
    for text in (shown(draw(failing)), failures(failing)):
        assert "5 prompts failed; `headrace samples runs/adder --failed`" in text
        assert "4 x scoring failed 3 times" in text
    assert "\x1b" not in shown(draw(failing))
    assert re.search(r"4/30 +0\.500.* 3 *$", shown(draw(failing)), re.MULTILINE)
    console = Console(file=io.StringIO(), width=40)
    display = LineDisplay(console)
    display.metrics("train", 4, {"reward": 0.5, "failed_prompts": 3.0})
    display.metrics("validation", 5, {"accuracy": 0.9, "failed": 2.0})
    for count in (0, 5, 5, 6):
        failing.services, failing.counts["failed"] = [], count
        display.update(failing)
    step, validation, *told = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert (step.endswith(", 3 prompts failed"), validation) == (
        True,
        "step 5: validation accuracy 0.900, 2 prompts failed",
    )
    assert [line.startswith("5 prompts failed;") for line in told] == [True, False], "not a line for each"


def test_status_counts_failed_prompts_by_their_reasons() -> None:
    reasons = [
        f"scoring failed {times} times: FAILED: KeyError\n(my_env.py:{line})" for times, line in ((3, 8), (6, 8))
    ]
    state = RunState("adder", "t", "i", 3, 0, 9, False, {"failed": 7})
    assert list(failed_lines(state, ["the engine refused it", *reasons], Path("runs/adder"))) == [
        ("failed", "7 prompts; `headrace samples runs/adder --failed` shows them. Reasons of the newest 3:"),
        ("", "2 x scoring failed 3 times: FAILED: KeyError (my_env.py:8)"),
        ("", "1 x the engine refused it"),
    ]
    assert list(failed_lines(RunState("adder", "t", "i", 3, 0, 9, False), [], Path("runs/adder"))) == []


def test_status_names_a_broken_environment_with_its_traceback() -> None:
    works = EnvironmentState("fine", 3, 0, 1, 0, False)
    broken = EnvironmentState("told", 7, 0, 1, 0, True, "FAILING", "KeyError: 'anwser'", "Traceback:\n  line 1\n", 62.0)
    away = EnvironmentState("away", 2, 0, 0, 0, True, "NOT_STARTED", "can't be reached", broken_s=5.0)
    assert list(waits_for([works, broken, away])) == [
        ("waits for", "environment told, broken for 62 s, 8 trajectories: KeyError: 'anwser'"),
        ("", "Traceback:"),
        ("", "  line 1"),
        ("waits for", "environment away, unavailable for 5 s, 2 trajectories: can't be reached"),
    ]


def test_the_end_says_which_key_decided_it() -> None:
    stop = {"stop_at_validation_metric": "val:accuracy", "stop_at_validation_threshold": 0.9}
    config = Config.model_validate({"run": {"id": "r"}, "grpo": {"max_num_steps": 4, **stop}})
    run = RunSummary(run_id="r", max_steps=4)
    assert why_it_ended(config, run) is None
    run.train |= {0: {}, 1: {}}
    run.validation[2] = {"accuracy": 0.5}
    said = why_it_ended(config, run)
    assert said.startswith("ended after 2 of 4 steps")
    assert "grpo.max_num_epochs" in said
    assert said.endswith("run.id=r continues")
    run.validation[2] = {"accuracy": 0.95}
    assert "val:accuracy has reached grpo.stop_at_validation_threshold 0.9" in (why_it_ended(config, run) or "")
    run.train |= {2: {}, 3: {}}
    assert why_it_ended(config, run) is None


def test_a_run_that_goes_on_says_from_where_or_that_no_step_is_left(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"id": "r", "dir": str(tmp_path)}, "grpo": {"max_num_steps": 4}})
    assert continues(config) is None
    for version, said in (
        (3, f"continues from checkpoint 3 ({tmp_path}/r/checkpoints/step_3)"),
        (
            4,
            "checkpoint 4 is the last step, so nothing is left to train; a higher grpo.max_num_steps continues the run",
        ),
    ):
        checkpoint = config.checkpoint_folder / f"step_{version}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text('{"timeline": "a"}')
        assert continues(config) == said


def test_a_narrow_terminal_cuts_no_address_off() -> None:
    narrow = run()
    address = "https://a-machine-with-a-long-name.example.org:8396"
    narrow.services = [ServiceLine("environment-exact", "restarting", 12, "waits for the buffer", address)]
    text = shown(draw(narrow), 80)
    assert "…" not in text
    assert ":8396" in text


def test_the_live_display_says_how_long_the_rest_takes() -> None:
    timed = run()
    assert "left" not in shown(draw(timed))
    timed.add("4-0", "train", 4, {"timing/train/total_step_time": 10.0})
    assert "about 4 min 10 s left" in shown(draw(timed))
    timed.add("4-1", "train", 29, {"timing/train/total_step_time": 10.0})
    assert " left" not in shown(draw(timed))
