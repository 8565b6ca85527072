"""The lineage files: what is written is found, what a rewind abandons is not, and nothing is half there."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.errors import CodecError, ServiceError
from headrace.records.origin import GroupLineage, Origin, TokenRange, trace_origin
from headrace.records.score import Score
from headrace.records.trajectory import Group, Span, Trajectory
from headrace.run.checkpoints import Start, append_start
from headrace.run.lineage import ABANDONED, LineageFiles
from headrace_services.trainer.control import lineage_writer
from headrace_services.trainer.control.lineage_writer import LineageWriter
from tests.support.buffer import make_group


def group(order: int) -> Group:
    return make_group(order, group_id=f"g{order}", task_name="sums", prompt_token_ids=np.arange(3, dtype=np.int32))


def origins(*groups: Group, versions: tuple[int, ...] = (0,)) -> dict[str, list[Origin]]:
    ranges = tuple(TokenRange(2 * i, 2 * i + 2, "replica", version) for i, version in enumerate(versions))
    made = [Origin(i, 1, 2 * len(versions), ranges, "stop", "math", "7", 0.5 * i, i - 0.5) for i in (1, 0)]
    return {each.id: made for each in groups}


def train(lineage: LineageWriter, step: int, *orders: int, versions: tuple[int, ...] = (0,)) -> None:
    groups = [group(order) for order in orders]
    lineage.write(step, groups, origins(*groups, versions=versions))


def made_on(found: GroupLineage | None) -> list[tuple[int, str | None]]:
    assert found is not None
    return [(r.version, r.timeline) for r in found.trajectories[0].ranges]


def test_a_trained_group_is_found_with_its_step_and_trajectories(tmp_path: Path) -> None:
    lineage = LineageWriter(tmp_path / "lineage", "one")
    train(lineage, 0, 4, 2)
    train(lineage, 1, 3)
    files = LineageFiles(tmp_path / "lineage")
    found = files.find("g2")
    assert found == GroupLineage(
        group="g2",
        state="trained",
        task="sums",
        env="math",
        order=2,
        step=0,
        timeline="one",
        trajectories=tuple(reversed(origins(group(2))["g2"])),
    )
    assert [each.group for each in files.read(0)] == ["g4", "g2"]
    assert files.find("g5") is None
    assert files.read(2) == []


def test_what_a_rewind_abandons_is_moved_aside_by_timeline(tmp_path: Path) -> None:
    first = LineageWriter(tmp_path, "one")
    for step in range(4):
        train(first, step, step, versions=(step,))
    second = LineageWriter(tmp_path, "two")
    second.supersede(2)
    second.supersede(2)
    files = LineageFiles(tmp_path)
    assert [step for step, _ in files.files()] == [0, 1]
    assert files.find("g2") is None
    assert sorted(path.name for path in (tmp_path / ABANDONED).iterdir()) == [
        "step_2-one.jsonl.gz",
        "step_3-one.jsonl.gz",
    ]
    train(second, 2, 2, versions=(0, 1, 2))
    train(second, 3, 3, versions=(2, 3))
    # step 1, of the first timeline, made version 2
    assert made_on(files.find("g2")) == [(0, None), (1, "one"), (2, "one")]
    assert made_on(files.find("g3")) == [(2, "one"), (3, "two")]
    assert files.timelines() == [(0, "one"), (2, "two")]


def test_a_step_that_two_trainers_wrote_is_that_of_the_chain(tmp_path: Path) -> None:
    folder = tmp_path / "lineage"
    late, successor = LineageWriter(folder, "late"), LineageWriter(folder, "successor")
    append_start(tmp_path, Start("late", 0))
    train(late, 0, 0)
    train(late, 1, 1)
    append_start(tmp_path, Start("successor", 1))
    successor.supersede(1)
    train(successor, 1, 2)
    train(late, 1, 1)  # it wakes up
    files = LineageFiles(folder)
    assert files.timelines() == [(0, "late"), (1, "successor")]
    assert (files.find("g1"), [group.group for group in files.read(1)]) == (None, ["g2"])
    LineageWriter(folder, "third").supersede(1)
    assert [(step, timeline) for step, timeline, _ in files.list_files()] == [(0, "late")]


def test_a_writer_that_dies_leaves_no_half_file_to_readers(tmp_path: Path) -> None:
    train(LineageWriter(tmp_path, "one"), 0, 0)
    (tmp_path / ".step_1-one.jsonl.gz").write_bytes(b"half")
    files = LineageFiles(tmp_path)
    assert files.find("g1") is None
    assert [step for step, _ in files.files()] == [0]


@pytest.mark.parametrize(
    "damage",
    [b"not gzip", gzip.compress(b'{"schema":2}\n'), gzip.compress(b"x" * 999)[:-9]],
    ids=["no archive", "another schema", "cut off"],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "step_0-one.jsonl.gz").write_bytes(damage)
    with pytest.raises(CodecError, match=r"step_0-one\.jsonl\.gz:"):
        LineageFiles(tmp_path).find("g0")


def test_a_folder_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "lineage").write_text("a file")
    with pytest.raises(ServiceError, match="write the lineage"):
        train(LineageWriter(tmp_path / "lineage", "one"), 0, 0)


def test_the_origin_of_a_trajectory_says_who_wrote_and_scored_it() -> None:
    trajectory = Trajectory(
        group_id="g",
        attempt=2,
        index=1,
        prompt_token_ids=np.arange(3, dtype=np.int32),
        completion_token_ids=np.arange(5, dtype=np.int32),
        logprobs=np.full(5, -1, dtype=np.float32),
        loss_mask=np.ones(5, dtype=np.uint8),
        spans=(Span(3, 0, 2), Span(4, 2, 5)),
        finish_reason="length",
        text="",
        replica="r1",
    )
    score = Score("SCORED", 1.0, environment="math", build="2.1")
    assert trace_origin(trajectory, score, 0.25) == Origin(
        index=1,
        attempt=2,
        tokens=5,
        ranges=(TokenRange(0, 2, "r1", 3), TokenRange(2, 5, "r1", 4)),
        finish_reason="length",
        environment="math",
        build="2.1",
        reward=1.0,
        advantage=0.25,
    )
    assert trace_origin(trajectory, None).reward is None
    # begun by one replica, gone on by another under the same weights, in two turns with an observation between them
    passed_on = msgspec.structs.replace(trajectory, writers=(("r0", 0, 1), ("r1", 1, 5)), turns=((0, 3), (4, 5)))
    assert trace_origin(passed_on, None).ranges == (
        TokenRange(0, 1, "r0", 3),
        TokenRange(1, 2, "r1", 3),
        TokenRange(2, 3, "r1", 4),
        TokenRange(4, 5, "r1", 4),
    )


@pytest.mark.timeout(60)  # where each turn is compared with each writer and version, it takes many minutes
def test_many_turns_writers_and_versions_have_their_origins() -> None:
    each = [(number, number + 1) for number in range(2000)]
    trajectory = Trajectory(
        group_id="g",
        attempt=0,
        index=0,
        prompt_token_ids=np.zeros(1, np.int32),
        completion_token_ids=np.zeros(2000, np.int32),
        logprobs=np.zeros(2000, np.float32),
        loss_mask=np.ones(2000, np.uint8),
        spans=tuple(Span(start, start, end) for start, end in each),
        finish_reason="stop",
        text="",
        replica="r",
        turns=tuple(each),
        writers=tuple((f"r{start}", start, end) for start, end in each),
    )
    assert trace_origin(trajectory, None).ranges == tuple(TokenRange(s, e, f"r{s}", s) for s, e in each)


def test_what_is_written_during_a_flush_is_flushed_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage, flushed = LineageWriter(tmp_path, "one"), []

    def fsync(path: Path) -> None:
        if not flushed:
            train(lineage, 1, 3)
        flushed.append(path.name)

    monkeypatch.setattr(lineage_writer, "fsync", fsync)
    train(lineage, 0, 4)
    lineage.fsync()
    assert "step_1-one.jsonl.gz" not in flushed
    lineage.fsync()
    assert flushed.count("step_1-one.jsonl.gz") == 1
    assert flushed.count("step_0-one.jsonl.gz") == 1
