"""Sample files as readers take them: which steps there are, which groups are shown, and completions that failed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.errors import CodecError, ServiceError
from headrace.records.score import Score
from headrace.records.trajectory import Group, Sampling, Span
from headrace.run.sample_files import FAILED, SampleFiles
from headrace.run.samples import StoredSample, by_group, choose_groups, failed_groups, make_sample, record
from tests.support.episodes import call, episode
from tests.support.stored_samples import sample, write

GROUPS = by_group(
    [
        sample("a", 0, 0.0),
        sample("a", 1, 1.0),
        sample("b", 0, 1.0, messages=({"role": "user", "content": "What is ÄB?"},)),
        sample("c", 0, None, status="FAILED"),
        sample("d", 0, 0.25),
        sample("d", 1, 0.0),
    ]
)


@pytest.mark.parametrize(
    ("ranking", "shown"),
    [
        (None, [("a", [0, 1]), ("b", [0]), ("c", [0])]),
        ("best", [("b", [0]), ("a", [1, 0]), ("d", [0, 1])]),
        ("worst", [("d", [1, 0]), ("a", [0, 1]), ("b", [0])]),
    ],
)
def test_groups_come_in_their_order_or_by_their_reward(ranking: str | None, shown: list[tuple[str, list[int]]]) -> None:
    chosen = choose_groups(GROUPS, ranking, "", 3)  # type: ignore[arg-type]
    assert [(group.id, [sample.index for sample in group.samples]) for group in chosen] == shown


def test_a_prompt_is_found_by_its_text_whatever_the_case() -> None:
    assert [group.id for group in choose_groups(GROUPS, None, "is äb", 9)] == ["b"]
    assert choose_groups(GROUPS, None, "nowhere", 9) == []


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"answer": "42"}, "42"),
        ({"answer": 0, "hint": "x"}, "0"),
        ({"tests": ["f(1) == 2"]}, '{"tests": ["f(1) == 2"]}'),
        ({}, None),
        ({"answer": None}, None),
    ],
)
def test_the_expected_answer_is_what_the_data_set_says(info: dict[str, object], expected: str | None) -> None:
    assert sample("a", extra_env_info=info).expected == expected


def test_the_newest_step_is_the_one_written_last(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    assert files.steps("train") == []
    for place, step in enumerate((7, 10, 3)):  # the run was taken back
        write(tmp_path, "train", step, [sample("a")])
        os.utime(files.path("train", step), ns=(place, place))
    write(tmp_path, "val", 5, [])
    assert files.steps("train") == [7, 10, 3]
    assert files.samples("train", 3) == [sample("a")]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    for damage in (b"\x1f\x8b\x08\x00", b"no gzip"):
        files.path("train", 3).write_bytes(damage)
        with pytest.raises(CodecError, match=r"train_data_step3\.jsonl\.gz:"):
            files.samples("train", 3)


def test_a_group_that_fails_again_is_shown_with_its_last_failure(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    files.append_failed([sample("a", 0, None, reason="old"), sample("b", 1, None, reason="bad")])  # type: ignore[list-item]
    files.append_failed([sample("a", 1, None, reason="new"), sample("a", 2, None, reason="new")])  # type: ignore[list-item]
    found = [
        (group.id, group.reason, [sample.index for sample in group.samples])
        for group in failed_groups(files.read_failed())
    ]
    assert found == [("a", "new", [1, 2]), ("b", "bad", [1])]


def test_of_completions_that_failed_two_files_stay(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    for number in range(6):
        files.append_failed([sample(f"g{number}", 0, None)], segment_bytes=1)  # type: ignore[list-item]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed_data.1.jsonl", FAILED]
    assert [sample.group for sample in files.read_failed()] == ["g4", "g5"]
    SampleFiles(tmp_path / "none", 0).append_failed([sample("a", 0, None)])  # type: ignore[list-item]
    assert not (tmp_path / "none").exists()


def test_a_deleted_run_is_not_made_again(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path / "run" / "logs", None)
    files.write("train", 0, [])
    shutil.rmtree(tmp_path / "run")
    for again in (lambda: files.write("train", 1, []), lambda: files.append_failed([sample("a", 0, None)])):  # type: ignore[list-item]
        with pytest.raises(ServiceError, match="No such file"):
            again()
    assert not [*tmp_path.iterdir()]


def test_the_half_line_of_a_killed_scorer_is_left_out(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    files.append_failed([sample("whole", 0, None)])  # type: ignore[list-item]
    with (tmp_path / FAILED).open("ab") as file:
        file.write(b'{"group": "ha')
    assert [sample.group for sample in files.read_failed()] == ["whole"]
    files.append_failed([sample("next", 0, None)])  # type: ignore[list-item]
    assert [sample.group for sample in files.read_failed()] == ["whole", "next"]


# -- episodes ------------------------------------------------------------------------------------------------------------


def an_episode() -> StoredSample:
    """Call 2 is a branch that is not trained; the policy says what looks like the head of a call, and like another message."""
    asked = {"role": "user", "content": "47+85"}
    tool = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"all": [47, 85]}'}}
    first = {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm.\ntool: 0",
        "tool_calls": [tool, {"function": "add"}],
    }
    calls = [
        call(-1, [1], [2, 3], version=3, messages=(asked,), answer=first),
        call(
            0,
            [4],
            [5, 6],
            spans=(Span(3, 0, 1), Span(4, 1, 2)),
            replica="r\n1",
            messages=({"role": "tool", "content": "132"},),
            answer={"role": "assistant", "content": "It is\ncall 9 (tokens 0-1)"},
        ),
        call(0, [7], [8], version=4, trained=False, answer={"role": "assistant", "content": ""}),
    ]
    group = Group("g", "train", 0, "sums", "math", (asked,), np.array([1], np.int32), {}, 0, 2, Sampling(1.0, 4))
    return make_sample(group, episode(calls, truncated=True), Score("SCORED", 0.5, environment="math"))


def test_an_episode_reads_as_a_conversation_with_each_calls_tokens() -> None:
    assert an_episode().text == (
        "call 0 (tokens 0-2, weights 3, r0)\n"
        "  assistant thinks: Hm.\n"
        "    tool: 0\n"
        '  assistant calls: add({"all": [47, 85]})\n'
        '  assistant calls: {"function": "add"}\n'
        "\n"
        r"call 1 continues call 0 (tokens 2-4, weights 3 to 4, r\n1)"
        "\n"
        "  tool: 132\n"
        "  assistant: It is\n"
        "    call 9 (tokens 0-1)\n"
        "\n"
        "call 2 continues call 0 (tokens 4-5, weights 4, r0, not trained)\n"
        "  assistant: "
    )


def test_the_lists_of_an_episode_are_of_its_calls_completions() -> None:
    found = an_episode()
    assert found.token_ids == (2, 3, 5, 6, 8)
    assert found.generation_logprobs == (-0.5, -0.5, -0.5, -0.5, None)
    assert found.spans == ((3, 0, 3), (4, 3, 5))
    assert (found.truncated, found.reward, found.content) == (True, 0.5, "")
    assert [one.tokens for one in found.calls] == [(0, 2), (2, 4), (4, 5)]


def test_a_single_completion_reads_as_its_content_alone() -> None:
    assert (sample("g").text, sample("g").weights()) == ("2", "weights 3")
    group = Group("g", "train", 0, "sums", "math", (), np.array([1], np.int32), {}, 0, 2, Sampling(1.0, 4))
    (path,) = episode([call(-1, [1], [2])]).paths()
    assert "calls" not in record(group, path, Score("SCORED", 0.5))


def test_what_a_program_left_is_kept_and_shown_with_its_conversation(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "47+85"}
    made = call(-1, [1], [2], messages=(asked,), answer={"role": "assistant", "content": "132"})
    group = Group("g", "train", 0, "sums", "math", (asked,), np.array([1], np.int32), {}, 0, 2, Sampling(1.0, 4))
    left = {"board": [1, None], "é": "so\ncall 9"}
    played = msgspec.structs.replace(episode([made]), artifacts=left)
    line = record(group, played, Score("SCORED", 0.5))
    found = make_sample(group, played, Score("SCORED", 0.5))
    assert line["artifacts"] == found.artifacts == left
    assert found.text == (
        'call 0 (tokens 0-1, weights 0, r0)\n  assistant: 132\n\nartifacts: {"board": [1, null], "é": "so\\ncall 9"}'
    )
    SampleFiles(tmp_path, None).write("train", 1, [{**line, "step": 1}])
    assert SampleFiles(tmp_path, None).samples("train", 1)[0].artifacts == left
    without = record(group, episode([made, made]), Score("SCORED", 0.5))
    assert "artifacts" not in without
    assert make_sample(group, episode([made]), None).left == ""
    large = msgspec.structs.replace(played, artifacts={"patch": "x" * 100_000})
    shown = make_sample(group, large, None)
    assert shown.left == '{"patch": "' + "x" * 9989 + "… (100013 characters)"
    assert shown.artifacts == large.artifacts
