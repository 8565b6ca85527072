"""Trajectories for people: what a line of a file holds, which files stay, which trajectories are shown."""

from __future__ import annotations

import io
import os
import random
import tempfile
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.records.score import Score
from headrace.records.trajectory import Span, Trajectory
from headrace.replay import Evaluated
from headrace.run.journal import JOURNAL, Journal
from headrace.run.sample_files import Kind, SampleFiles
from headrace.run.samples import COLUMNS, by_group, failed_groups, make_sample
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.telemetry.batch_samples import as_markdown, choose, show, training_records, write_groups
from headrace_services.trainer.telemetry.telemetry import Telemetry
from tests.support.buffer import make_group
from tests.support.stored_samples import hostile_episode, hostile_sample

PROMPT = make_group(
    0,
    n=1,
    group_id="0-0-7",
    env_name="sums",
    task_name="sums",
    messages=({"role": "user", "content": "2+2"},),
    prompt_token_ids=np.array([5, 6], np.int32),
    dataset_index=7,
)
# the environment wrote the third of five tokens; the first two are of older weights
TRAJECTORY = Trajectory(
    group_id="0-0-7",
    attempt=0,
    index=3,
    prompt_token_ids=np.array([5, 6], np.int32),
    completion_token_ids=np.array([1, 2, 3, 4, 5], np.int32),
    logprobs=np.array([-0.5, -1.0, 0.0, -2.0, -0.25], np.float32),
    loss_mask=np.array([1, 1, 0, 1, 1], np.uint8),
    spans=(Span(2, 0, 2), Span(4, 2, 5)),
    finish_reason="length",
    text="four\n[bold]not markup[/bold]",
    replica="r1",
)
SCORE = Score("SCORED", 0.5, {"exact": 0.0}, {"judge": "short"}, environment="sums", build="3f2a")


class Digits:
    """A tokenizer whose tokens are their ids."""

    def __len__(self) -> int:
        return 10

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(str, ids))


def trained(old: tuple[float, ...] = (-0.5, -1.25, -2.0, -0.25)) -> Batch:
    """The trajectory after step 4, of a batch of its own."""
    batch = Batch.of([TRAJECTORY], [SCORE], places=[0], groups=[0], multipliers=[0.0], step=4, max_age=1)
    batch.rewards = np.array([1.5])
    batch.advantages = np.array([0.1, 0.2, 0.3, 1 / 3])
    batch.old_logprobs = np.array(old, np.float32)
    return batch


def one_line(batch: Batch) -> dict[str, Any]:
    (line,) = training_records(4, [PROMPT], batch)
    return line


def test_a_line_says_of_every_token_who_wrote_it_and_how_it_counted() -> None:
    record = one_line(trained())
    assert record["token_ids"] == [1, 2, 3, 4, 5]
    assert record["token_loss_mask"] == [0, 0, 0, 1, 1]
    assert np.isnan(record["advantages"][2])
    assert [record["advantages"][i] for i in (0, 1, 3, 4)] == [0.1, 0.2, 0.3, 0.333333]
    assert [record["generation_logprobs"][i] for i in (0, 1, 3, 4)] == [-0.5, -1.0, -2.0, -0.25]
    assert record["prev_logprobs"][1] == -1.25
    assert record["reference_policy_logprobs"] is None
    assert (record["environment"], record["build"]) == ("sums", "3f2a")
    assert (record["rewards"], record["total_reward"], record["sample_loss_mask"]) == (0.5, 1.5, 0.0)
    assert record["spans"] == [[2, 0, 2], [4, 2, 5]]
    assert (record["input_lengths"], record["finish_reason"], record["components"]) == (7, "length", {"exact": 0.0})


def test_a_trajectory_without_a_pass_has_no_trainers_probabilities() -> None:
    assert one_line(trained((np.nan,) * 4))["prev_logprobs"] is None


def test_a_line_says_what_the_loss_made_of_each_token() -> None:
    batch = trained()
    batch.mask_reasons = np.array([3, 3, 0, 0], np.int8)
    batch.policy_logprobs = np.array([-0.5, -1.0, -2.0, -0.25], np.float32)
    batch.clipped = np.array([np.nan, np.nan, -1, 0], np.float32)
    batch.token_losses = np.array([0, 0, 1.2345678e-8, -2.5e-7], np.float32)
    batch.values = np.array([0.5] * 4, np.float32)
    record = msgspec.json.decode(msgspec.json.encode(one_line(batch)))
    assert record["mask_reasons"] == [3, 3, 1, 0, 0]
    assert record["clipped"] == [None, None, None, -1, 0]
    assert [record["token_losses"][place] for place in (0, 3, 4)] == pytest.approx([0, 1.2345678e-8, -2.5e-7], rel=1e-6)
    assert record["policy_logprobs"] == [-0.5, -1.0, None, -2.0, -0.25]
    assert record["values"][4] == 0.5
    written = {"mask_reasons", "policy_logprobs", "clipped", "token_losses", "values"}
    assert written < set(COLUMNS)
    assert set(record) & set(COLUMNS) - set(one_line(trained())) == written


async def test_the_files_of_steps_and_validations_have_the_texts_of_tokens(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"id": "r", "dir": str(tmp_path)}, "logger": {"monitor_gpus": False}})
    telemetry = Telemetry(config, Journal(config.run_folder / JOURNAL))
    telemetry.start(Digits())
    await telemetry.report_step(4, [PROMPT], trained(), {"reward": 0.5})
    await telemetry.report_validation(4, [Evaluated(PROMPT, ((TRAJECTORY, SCORE),))], [])
    await telemetry.aclose(finished=False)
    files = SampleFiles(config.log_folder, None)
    for kind in get_args(Kind)[:2]:
        (record,) = files.read(kind, 4)
        assert record["token_texts"] == ["1", "2", "3", "4", "5"]
        assert record["prompt_token_texts"] == ["5", "6"]
        assert record["metadata"] == {"judge": "short"}


def test_what_was_written_is_read_and_environment_tokens_are_null(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path / "logs", keep=3)
    files.write("train", 4, [one_line(trained())])
    (record,) = files.read("train", 4)
    assert record["advantages"] == [0.1, 0.2, None, 0.3, 0.333333]
    assert record["content"] == TRAJECTORY.text
    assert files.read("val", 4) == []


def test_of_each_kind_the_newest_files_stay(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, keep=2)
    for step in (7, 8, 9):
        files.write("train", step, [{"step": step}])
    files.write("val", 1, [{}])
    files.write("train", 3, [{"step": 3}])  # the run was taken back
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "train_data_step3.jsonl.gz",
        "train_data_step9.jsonl.gz",
        "val_data_step1.jsonl.gz",
    ]


@given(
    written=st.lists(
        st.tuples(st.sampled_from(["train", "val", "val_failed"]), st.integers(0, 4), st.integers(0, 3000)), max_size=14
    ),
    keep=st.one_of(st.none(), st.integers(1, 4)),
    most=st.integers(0, 6000),
)
def test_samples_never_take_more_than_the_bound_and_a_step(
    written: list[tuple[Kind, int, int]], keep: int | None, most: int
) -> None:
    """Law of `SampleFiles`: after every write the bound holds, or only the newest of each kind are left; what went first came first."""
    with tempfile.TemporaryDirectory() as folder:
        files = SampleFiles(Path(folder), keep, most)
        order: list[Path] = []  # those there are, the oldest first
        for moment, (kind, step, size) in enumerate(written):
            path = files.path(kind, step)
            files.write(kind, step, [{"step": step, "noise": random.Random(moment).randbytes(size).hex()}])
            os.utime(path, ns=(moment, moment))  # the clock of a file system is coarse
            order = [each for each in order if each != path] + [path]
            newest = {each.name.partition("_data")[0]: each for each in order}.values()
            left = [each for each in order if each.exists()]
            sizes = {each: each.stat().st_size for each in left}
            assert set(newest) <= set(left)
            assert sum(sizes.values()) <= max(most, sum(sizes[each] for each in newest))
            assert {each.name for each in Path(folder).iterdir()} == {each.name for each in left}
            if keep is None:
                others = [each for each in order if each not in newest]
                staying = [each for each in others if each in left]
                assert staying == others[len(others) - len(staying) :], "the oldest go first"
            order = left


def test_the_oldest_samples_go_first_by_either_bound(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, keep=5, most_bytes=600)
    for step in range(4):
        files.write("train", step, [{"noise": random.Random(step).randbytes(100).hex()}])
    assert files.steps("train") == [1, 2, 3]
    assert "logger.keep_step_data_bytes=600" in files.say_removed("train")
    files.keep = 1
    files.write("train", 9, [{}])
    assert files.steps("train") == [9]
    assert "logger.keep_step_data=1" in files.say_removed("train")


@pytest.mark.parametrize(("keep", "left"), [(0, 0), (None, 30)])
def test_none_or_all_may_be_kept(tmp_path: Path, keep: int | None, left: int) -> None:
    files = SampleFiles(tmp_path, keep)
    for step in range(30):
        files.write("train", step, [{}])
    assert len(list(tmp_path.iterdir())) == left


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file stands in the way")
    with pytest.raises(ServiceError, match="keep_step_data=0"):
        SampleFiles(tmp_path / "logs", keep=1).write("train", 1, [{}])


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (0, []),
        (1, [0.5]),
        (2, [1.0, 0.0]),
        (3, [1.0, 0.5, 0.0]),
        (4, [1.0, 0.75, 0.25, 0.0]),
        (9, [1.0, 0.75, 0.5, 0.25, 0.0]),
    ],
)
def test_the_best_and_the_worst_are_shown(count: int, chosen: list[float]) -> None:
    rewards = [0.25, 1.0, 0.0, 0.5, 0.75]
    samples = [make_sample(PROMPT, TRAJECTORY, Score("SCORED", reward)) for reward in rewards]
    assert [sample.reward for sample in choose(samples, count)] == chosen


def test_a_sample_without_a_reward_has_the_reason_and_the_traceback() -> None:
    failed = make_sample(PROMPT, TRAJECTORY, Score("FAILED", message="KeyError", traceback="line 3"))
    assert (failed.status, failed.message, failed.traceback) == ("FAILED", "KeyError", "line 3")


def test_a_block_shows_prompt_answer_and_reward_as_they_are() -> None:
    one = make_sample(PROMPT, TRAJECTORY, SCORE)
    plain, coloured = io.StringIO(), io.StringIO()
    show(Console(file=plain, width=100), "validation of version 4", [one])
    show(Console(file=coloured, width=100, force_terminal=True), "validation of version 4", [one])
    for part in ("validation of version 4, 1 of 1", "user: 2+2", "[bold]not markup[/bold]", "reward 0.5", "cut off"):
        assert part in plain.getvalue()
    assert "\x1b[" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert "    [bold]not markup[/bold]" in as_markdown([one])


HOSTILE = "\x1b[2J</pre><script>x</script>\u202e&amp;\"'"
SHOWN = "\\x1b[2J&lt;/pre&gt;&lt;script&gt;x&lt;/script&gt;\\u202e&amp;amp;&quot;&#x27;"
MARKUP = ("<script", "\x1b", "\u202e", '&"')


def test_an_episode_is_a_conversation_in_a_file_of_groups(tmp_path: Path) -> None:
    write_groups(tmp_path / "groups.html", "tried", [], by_group([hostile_episode(HOSTILE)]))
    page = (tmp_path / "groups.html").read_text()
    heads = [f'<div class="note">call {number}' for number in ("0 (tokens 0-1", "1 continues call 0 (tokens 1-2")]
    assert [page.count(head) for head in heads] == [1, 1]
    said = [part.split("</pre>")[0] for part in page[page.index(heads[0]) :].split("<pre>")[1:]]
    assert said.pop().startswith("<b>artifacts:</b> {&quot;")
    # of each call: what the tool answered; what the program added, and what the policy answered, both with the call of a tool
    of_call = [part.split(": ")[0] for part in said[: len(said) // 2]]
    assert of_call == ["tool", SHOWN, f"{SHOWN} calls", SHOWN, f"{SHOWN} calls"]
    assert [part.split(": ")[0] for part in said] == of_call * 2
    assert not any(part in page for part in MARKUP)


def test_what_others_wrote_is_no_markup_in_a_file_of_groups(tmp_path: Path) -> None:
    failed = hostile_sample(HOSTILE, reward=None, reason=HOSTILE)
    write_groups(tmp_path / "groups.html", HOSTILE, [HOSTILE], failed_groups([failed]))
    page = (tmp_path / "groups.html").read_text()
    assert page.count(SHOWN) == 13
    assert not any(part in page for part in MARKUP)
