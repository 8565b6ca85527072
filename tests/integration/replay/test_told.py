"""What became of every group leaves the buffer by its stream, and reaches the run's folder: a kill at any moment loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import InvalidCall, ServiceError, WrongTimeline
from headrace.replay import BufferRetry, ReplayClient
from headrace.run.group_files import list_files
from headrace.run.group_history import GroupHistory
from headrace.run.group_query import GroupQuery
from headrace_services.trainer.control import history_writer
from headrace_services.trainer.control.history_writer import HistoryWriter
from tests.support.buffer import begin, enqueue, generate, make_group, nonce, push_all, reserve, score_all
from tests.support.group_events import find_sum

HISTORY = 100_000  # entries that the stream has at most (_run.lua)


class Killed(BaseException):
    pass


async def writer_of(replay: ReplayClient, folder: Path) -> HistoryWriter:
    return HistoryWriter(folder, replay, BufferRetry(1.0), (await replay.state()).timeline, find_sum)


async def write(replay: ReplayClient, folder: Path) -> GroupHistory:
    """A trainer starts, and ends."""
    writer = await writer_of(replay, folder)
    writer.start()
    await writer.close()
    return GroupHistory(folder)


async def test_every_end_reaches_the_folder(replay: ReplayClient, tmp_path: Path) -> None:
    replica = await begin(replay, 5)
    timeline = (await replay.state()).timeline
    await replay.enqueue([make_group(0, lane="validation")], timeline)
    leases = await replay.lease(replica, 8)
    failing = next(lease for lease in leases if lease.group.lane == "train")
    await replay.reject(failing, "the prompt is too long")
    for lease in leases:
        if lease is not failing:
            await push_all(replay, lease)
    await score_all(replay)
    await generate(replay, replica)
    await replay.close(timeline)
    await reserve(replay, 0)
    await replay.commit(1, timeline)
    history = await write(replay, tmp_path)
    assert history.find(GroupQuery(states=["failed"], reason="too long"))[1][0].id == failing.group.id
    assert history.states(GroupQuery(lane="validation")) == {"evaluated": 1}
    assert history.states(GroupQuery(lane="train")) == {
        state: count for state, count in (await replay.stats())["counts"]["train"].items() if count
    }
    assert history.states()["trained"] == 2
    assert await replay.read_history(1) == ([], 0)


async def test_a_kill_between_writing_and_clearing_loses_nothing(
    replay: ReplayClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await begin(replay, 2)

    async def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(replay, "clear_history", die)
        with pytest.raises(Killed):
            await (await writer_of(replay, tmp_path))._write_some()
    assert GroupHistory(tmp_path).states() == {"queued": 2}
    await generate(replay, replica)
    history = await write(replay, tmp_path)
    assert history.states() == {"ready": 2}
    story = history.story("e0-train-0")
    assert story is not None
    whats = [event.what for event in story.events]
    assert whats == ["enqueued", "leased", "pushed", "pushed", "scoring", "scored", "scored", "ready"]
    assert story.prompt == "user: what is 0+1?"


async def test_a_kill_before_a_file_is_written_loses_nothing(
    replay: ReplayClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(replay, 2)

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("headrace.run.group_files.fsync", die)
        with pytest.raises(Killed):
            (await writer_of(replay, tmp_path))._write(*await replay.read_history(100))
    assert GroupHistory(tmp_path).states() == {}
    assert (await write(replay, tmp_path)).states() == {"queued": 2}


async def test_a_rewind_shows_that_a_group_was_trained_twice(replay: ReplayClient, tmp_path: Path) -> None:
    replica = await begin(replay, 2)
    await generate(replay, replica)
    timeline = (await replay.state()).timeline
    await reserve(replay, 0)
    await replay.commit(1, timeline)
    assert (await write(replay, tmp_path)).states() == {"trained": 2}
    await replay.rewind(0, nonce())
    assert (await write(replay, tmp_path)).states() == {"queued": 2}  # to be enqueued again: it is not held any more
    await replay.enqueue([make_group(order) for order in range(2)], (await replay.state()).timeline, refill=True)
    assert (await write(replay, tmp_path)).states() == {"queued": 2}
    story = GroupHistory(tmp_path).story("e0-train-1")
    assert story is not None
    assert [event.what for event in story.events].count("enqueued") == 2


async def test_a_rewind_shows_which_groups_keep_their_step(replay: ReplayClient, tmp_path: Path) -> None:
    await generate(replay, await begin(replay, 4))
    await reserve(replay, 0)
    await enqueue(replay, [4])
    assert (await write(replay, tmp_path)).states() == {"reserved": 2, "ready": 2, "queued": 1}
    await replay.rewind(0, nonce())
    assert (await write(replay, tmp_path)).states() == {"ready": 4, "queued": 1}


async def test_a_batch_given_back_says_for_which_group_and_why(replay: ReplayClient, tmp_path: Path) -> None:
    await generate(replay, await begin(replay, 2))
    await reserve(replay, 0)
    await replay.reject_step(0, (await replay.state()).timeline, nonce(), {"e0-train-1": 1}, "it has no logits")
    story = (await write(replay, tmp_path)).story("e0-train-1")
    assert story is not None
    assert [(event.step, event.reason) for event in story.events if event.what == "rejected"] == [
        (0, "it has no logits")
    ]
    assert GroupHistory(tmp_path).states() == {"ready": 1, "queued": 1}


async def test_what_nobody_reads_is_cut_off_and_counted(replay: ReplayClient, tmp_path: Path) -> None:
    key = f"hr:{{{replay.run_id}}}:history"
    event = "'w', 'leased', 'g', 'e0-train-0', 'r', 'r', 'a', 1, 'v', 0"
    fill = f"for _ = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', {event}) end"
    await replay.redis.eval(fill, 1, key, HISTORY)
    await enqueue(replay, range(200))
    length = await replay.redis.xlen(key)
    lost = HISTORY + 200 - length
    assert HISTORY - 200 < length <= HISTORY
    assert (await write(replay, tmp_path)).lost() == lost > 0
    assert (await write(replay, tmp_path)).lost() == lost  # another trainer tells it again
    assert GroupHistory(tmp_path).find(GroupQuery(text="e0-train-199"))[0] == 1


async def test_a_disk_that_is_full_ends_the_writing(
    replay: ReplayClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(replay, 1)
    (tmp_path / "file").touch()
    writer = await writer_of(replay, tmp_path / "file")  # no folder can be made there
    with pytest.raises(ServiceError, match="can't write"):
        await writer._write_some()
    assert len((await replay.read_history(10))[0]) == 1


async def test_only_the_trainer_in_charge_clears(replay: ReplayClient) -> None:
    await begin(replay, 1)
    (entry, _), *_ = (await replay.read_history(1))[0]
    with pytest.raises(WrongTimeline):
        await replay.clear_history("another", entry)
    with pytest.raises(InvalidCall):
        await replay.clear_history((await replay.state()).timeline, "yesterday")
    assert (await replay.read_history(1))[0][0][0] == entry


async def test_files_are_merged_while_the_run_goes_on(
    replay: ReplayClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.run.group_files.MERGED", 4)
    for order in range(9):
        await enqueue(replay, [order])
        await write(replay, tmp_path)
    assert len(list_files(tmp_path)) == 3
    assert GroupHistory(tmp_path).states() == {"queued": 9}


async def test_a_long_history_is_read_in_parts(
    replay: ReplayClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_writer, "ENTRIES", 5)
    replica = await begin(replay, 6)
    (lease, *_) = await replay.lease(replica, 8)
    await push_all(replay, lease)
    await score_all(replay)
    history = await write(replay, tmp_path)
    assert sum(history.states().values()) == 6
    assert len(list_files(tmp_path)) > 1
