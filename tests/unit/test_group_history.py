"""Groups are found by what anybody knows of them, in files that are written, merged, damaged and copied meanwhile."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.records.group_event import GroupEvent
from headrace.run import group_files, group_index
from headrace.run.group_files import list_files, merge_files
from headrace.run.group_history import INDEX, GroupHistory
from headrace.run.group_query import DataRow, GroupQuery, parse_row
from headrace.run.group_record import GroupRecord
from tests.support.group_events import events, life, write

TRAINED = ("ready", {}), ("reserved", {"step": 5, "timeline": "t1"}), ("trained", {"step": 5, "timeline": "t1"})
ENDS = {
    "trained": TRAINED,
    "filtered": (("filtered", {}),),
    "failed": (("failed", {"reason": "the scorer raised KeyError"}),),
    "evaluated": (("evaluated", {}),),
    "unused": (("unused", {}),),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "groups"


def ids(history: GroupHistory, **query: object) -> list[str]:
    return [group.id for group in history.find(GroupQuery(**query))[1]]


@pytest.mark.parametrize("end", ENDS)
def test_each_end_is_found(folder: Path, end: str) -> None:
    told = [event for order, (name, how) in enumerate(ENDS.items()) for event in life(name, order, *how)]
    write(folder, events(*told))
    total, (found,) = GroupHistory(folder).find(GroupQuery(states=[end]))
    assert (total, found.id, found.state) == (1, end, end)
    assert found.ended is not None
    assert found.ended - found.enqueued == pytest.approx((6 + len(ENDS[end])) / 1000)
    assert GroupHistory(folder).states() == dict.fromkeys(ENDS, 1)


def test_a_group_has_what_its_events_say(folder: Path) -> None:
    write(folder, events(*life("g", 7, *TRAINED, rewards=(0.0, 1.0, 0.5))))
    _, (group,) = GroupHistory(folder).find(GroupQuery())
    assert (group.mean, group.rewards, group.tokens) == (0.5, (0.0, 1.0, 0.5), (4, 5, 6))
    assert group.spread == pytest.approx(0.408248)
    assert (group.step, group.timeline, group.age, group.attempts, group.replicas) == (5, "t1", 2, 1, ("r1",))
    assert (group.oldest_version, group.newest_version, group.build) == (3, 4, "b1")
    assert (group.prompt, group.source) == ("user: what is 7+1?", DataRow("/data/sums.jsonl", 8))


@pytest.mark.parametrize(
    ("builds", "rewards"), [(("", "b1"), (0.0, 1.0)), (("b1", "b2"), (None, 1.0)), (("b1", ""), (None, 1.0))]
)
def test_scores_of_another_build_are_void(
    folder: Path, builds: tuple[str, str], rewards: tuple[float | None, ...]
) -> None:
    """A score of build '' comes from a limit of the run, and goes with the build that scores after it."""
    told: list[tuple[str, str | None, dict[str, object]]]
    told = [("pushed", "g", {"index": index, "tokens": 4}) for index in range(2)]
    told += [("scored", "g", {"index": i, "reward": float(i), "build": build}) for i, build in enumerate(builds)]
    write(folder, events(*life("g", 0)[:1], *told))
    _, (group,) = GroupHistory(folder).find(GroupQuery())
    assert (group.rewards, group.build) == (rewards, builds[1] or None)


@pytest.mark.parametrize(
    "query",
    [
        {"text": "IS 17+1"},
        {"text": "17+"},
        {"text": "7+"},  # shorter than a trigram
        {"text": "sum 18"},
        {"text": "g17"},
        {"row": DataRow("sums.jsonl", 18)},
        {"row": DataRow("/data/sums.jsonl", 18)},
        {"lane": "train", "sort": "-order", "limit": 2, "offset": 2},
        {"states": ["failed"], "reason": "KEYERROR", "environment": "math", "task": "addition"},
        {"replica": "r1", "states": ["failed"], "build": "b1"},
    ],
)
def test_a_group_is_found_by(folder: Path, query: dict[str, object]) -> None:
    told = [event for order in range(20) if order != 7 for event in life(f"g{order}", order, *ENDS["filtered"])]
    told = [e for e in told if e[1] != "g17" or e[0] != "filtered"] + [("failed", "g17", {"reason": "KeyError in it"})]
    write(folder, events(*told))
    assert "g17" in ids(GroupHistory(folder), **query)
    assert len(ids(GroupHistory(folder), **query)) <= 2


def test_hostile_texts_are_only_searched(folder: Path) -> None:
    write(folder, events(*life("g", 7)))
    history = GroupHistory(folder)
    for text in ('" OR 1', "a'b", "%", "_", "\\", "*", "NEAR(", "\0\0\0", "💧", "x" * 10_000):
        assert ids(history, text=text) == []
        assert ids(history, reason=text) == []
        assert ids(history, replica=text) == []
        assert ids(history, row=DataRow(text, 8)) == []


def test_a_wrong_sort_or_state_names_those_there_are(folder: Path) -> None:
    write(folder, events(*life("g", 7)))
    with pytest.raises(ConfigError, match="reward"):
        GroupHistory(folder).find(GroupQuery(sort="beauty"))
    with pytest.raises(ConfigError, match="filtered"):
        GroupHistory(folder).find(GroupQuery(states=["lost"]))


@pytest.mark.parametrize(
    ("sort", "first"), [("reward", "low"), ("-reward", "high"), ("-ended", "high"), ("order", "high")]
)
def test_sorts_put_what_is_missing_last(folder: Path, sort: str, first: str) -> None:
    told = life("high", 0, ("filtered", {}), rewards=(1.0, 1.0)) + life("low", 1, rewards=(0.0, 0.0))
    write(folder, events(*told, ("enqueued", "new", {"lane": "train", "order": 2, "n": 2, "environment": "math"})))
    found = ids(GroupHistory(folder), sort=sort)
    assert (found[0], found[-1], len(found)) == (first, "new" if sort != "-ended" else found[-1], 3)


def test_the_story_tells_everything_in_order(folder: Path) -> None:
    told = life("g", 7, ("requeued", {"cause": "over_age", "reason": "step 9: over_age"}))
    write(folder, events(*life("f", 6), *told))
    write(folder, events(*[(what, g, f) for what, g, f in life("g", 7, *TRAINED)[1:]], start=5_000))
    write(folder, events(*life("h", 8), start=9_000))
    story = GroupHistory(folder).story("g")
    assert story is not None
    whats = [event.what for event in story.events]
    assert whats == [e[0] for e in told] + [e[0] for e in life("g", 7, *TRAINED)[1:]]
    assert (story.summary.state, story.prompt, story.expected) == ("trained", "user: what is 7+1?", "sum 8")
    assert story.messages == ({"role": "user", "content": "what is 7+1?"},)
    assert (story.previous, story.next) == ("f", "h")
    assert GroupHistory(folder).story("nobody") is None


def test_a_rewind_takes_back_what_was_trained(folder: Path) -> None:
    late = [(what, "late", fields) for what, _, fields in life("late", 8, *TRAINED)]
    write(folder, events(*life("early", 7, *[(w, {**f, "step": 4} if f else f) for w, f in TRAINED]), *late))
    write(folder, events(("rewound", None, {"version": 5, "timeline": "t2"}), start=5_000))
    history = GroupHistory(folder)
    assert history.states() == {"trained": 1, "queued": 1}
    write(folder, events(*late, start=6_000))
    assert history.states() == {"trained": 2}
    story = history.story("late")
    assert story is not None
    whats = [event.what for event in story.events]
    assert (whats.count("trained"), whats.count("rewound")) == (2, 1)
    assert whats.index("trained") < whats.index("rewound")


def test_a_restore_has_what_was_lost_enqueued_again(folder: Path) -> None:
    write(folder, events(*life("open", 6), *life("kept", 7, *TRAINED), *life("failed", 8, *ENDS["failed"])))
    validation = [("enqueued", "v0", {"lane": "validation", "order": 0, "environment": "math", "n": 1})]
    write(folder, events(*validation, ("restored", None, {"version": 6}), start=5_000))
    assert GroupHistory(folder).states() == {"queued": 1, "trained": 1, "failed": 1, "unused": 1}


def test_a_retry_of_a_failure_long_ago_names_only_its_order(folder: Path) -> None:
    write(folder, events(*life("g", 7, *ENDS["failed"]), ("retried", None, {"order": 7})))
    assert GroupHistory(folder).states() == {"queued": 1}


def test_events_that_are_read_twice_count_once(folder: Path) -> None:
    """A trainer that is killed between writing a file and clearing the stream writes its events again, and more."""
    first, more = life("g", 7, *TRAINED[:1]), [("reserved", "g", {"step": 5})]
    write(folder, events(*first))
    assert GroupHistory(folder).states() == {"ready": 1}
    write(folder, events(*first, *more))
    history = GroupHistory(folder)
    assert history.states() == {"reserved": 1}
    story = history.story("g")
    assert story is not None
    assert [event.what for event in story.events] == [e[0] for e in first + more]


def test_lost_events_are_counted_over_servers(folder: Path) -> None:
    history = GroupHistory(folder)
    for number, lost in enumerate((5, 12, 12, 3)):  # the last is another server's
        write(folder, events(("lost", None, {"lost": lost}), start=1000 * (number + 1)))
    assert history.lost() == 15


def many(folder: Path, files: int) -> None:
    for number in range(files):
        write(folder, events(*life(f"g{number}", number, *TRAINED), start=1000 * (number + 1)))


def test_merged_files_have_every_event(folder: Path) -> None:
    history = GroupHistory(folder)
    many(folder, 30)
    assert history.states() == {"trained": 30}
    before = history.story("g3")
    many(folder, group_files.MERGED + 1)
    merged = merge_files(folder)
    assert merged is not None
    assert len(list_files(folder)) == 2
    assert merge_files(folder) is None
    assert history.states() == {"trained": group_files.MERGED + 1}
    assert history.story("g3") == before
    (folder / INDEX).unlink()
    assert history.states() == {"trained": group_files.MERGED + 1}


def test_a_file_of_many_groups_is_taken_in_a_few_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [life(f"g{order}", order, *TRAINED) for order in range(3)]
    write(folder, events(*[event for side_by_side in zip(*told, strict=True) for event in side_by_side]))
    known = GroupHistory(folder).find(GroupQuery())
    assert known[0] == 3
    (folder / INDEX).unlink()
    monkeypatch.setattr(group_index, "_AT_ONCE", 2)
    assert GroupHistory(folder).find(GroupQuery()) == known


def test_what_was_taken_in_before_a_kill_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [event for order in range(6) for event in life(f"g{order}", order, *TRAINED)]
    monkeypatch.setattr(group_files, "_PART", 5)
    monkeypatch.setattr(group_files, "_AT_ONCE", 5)
    monkeypatch.setattr(group_index, "_AT_ONCE", 2)
    write(folder, events(*told))
    known, read = group_index.iterate_events, list[str]()

    def dying(path: Path, fields: list[str], first_ms: int) -> Iterator[GroupEvent]:
        for event in known(path, fields, first_ms):
            read.append(event.id)
            if len(read) == len(told) - 1:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(group_index, "iterate_events", dying)
    history, so_far = GroupHistory(folder), GroupHistory(folder, is_partial=True)
    with pytest.raises(KeyboardInterrupt):
        history.refresh()
    assert so_far.states() == {"trained": 5, "queued": 1}
    missing, share = history.missing()
    assert missing > 0
    assert 0.5 < share < 1
    before = len(read)
    assert history.states() == {"trained": 6}
    assert len(read) - before < len(told) / 2, "what was taken in is not read again"
    assert history.missing() == (0, 1.0)
    whole = history.find(GroupQuery())
    (folder / INDEX).unlink()
    assert GroupHistory(folder).find(GroupQuery()) == whole


def test_what_another_process_has_taken_in_is_left_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two build the index, and one goes on with the file of which the other has committed the beginning."""
    told = [event for order in range(3) for event in life(f"g{order}", order, *TRAINED)]
    last = life("g3", 3, *TRAINED)
    write(folder, events(*told, *last[:4]))
    write(folder, events(*last[4:], start=5_000))
    monkeypatch.setattr(group_index, "_AT_ONCE", 2)
    connect, said = sqlite3.connect, list[str]()

    class Overtaken(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if statement == "BEGIN IMMEDIATE" and said[-2:] == ["RELEASE of_file", "COMMIT"]:
                said.append("the other")
                monkeypatch.setattr(sqlite3, "connect", connect)
                GroupHistory(folder).refresh()
            said.append(statement)
            return super().execute(statement, *values)

    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, factory=Overtaken, **named))
    assert GroupHistory(folder).states() == {"trained": 4}
    assert "the other" in said


def test_of_a_text_of_many_prompts_the_first_are_found(folder: Path) -> None:
    many(folder, 5)
    history = GroupHistory(folder)
    bounded = GroupQuery(text="is", most_texts=3)
    assert history.find(bounded)[0] == 3
    assert history.has_more_texts(bounded)
    assert not history.has_more_texts(GroupQuery(text="is", most_texts=5))
    assert not history.has_more_texts(GroupQuery(text="is"))
    assert history.find(GroupQuery(text="is"))[0] == 5


def test_a_file_that_was_merged_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, read = GroupHistory(folder), list[str]()
    monkeypatch.setattr(group_files, "_AT_ONCE", 8)
    known = group_index.iterate_events

    def counting(path: Path, fields: list[str], first_ms: int) -> Iterator[GroupEvent]:
        for event in known(path, fields, first_ms):
            read.append(event.id)
            yield event

    monkeypatch.setattr(group_index, "iterate_events", counting)
    many(folder, group_files.MERGED)
    assert history.states() == {"trained": group_files.MERGED}
    whole = len(read)
    assert merge_files(folder) is not None
    assert history.states() == {"trained": group_files.MERGED}
    assert len(read) == whole + 1


def test_what_a_damaged_file_lacked_is_found_once_it_is_merged(folder: Path) -> None:
    history = GroupHistory(folder)
    many(folder, group_files.MERGED)
    path = list_files(folder)[5].path
    good = path.read_bytes()
    path.write_bytes(b"half")
    assert history.states() == {"trained": group_files.MERGED - 1}
    path.write_bytes(good)
    assert merge_files(folder) is not None
    assert history.states() == {"trained": group_files.MERGED}


def test_a_kill_while_files_are_merged_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(folder, group_files.MERGED)
    deleted: list[Path] = []

    def die_at_the_third(path: Path, missing_ok: bool = False) -> None:
        deleted.append(path)
        if len(deleted) == 3:
            raise KeyboardInterrupt
        os.unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            merge_files(folder)
    history = GroupHistory(folder)
    assert history.states() == {"trained": group_files.MERGED}
    story = history.story("g10")
    assert story is not None
    assert len(story.events) == 10


def test_a_damaged_file_is_named_and_the_rest_is_read(folder: Path) -> None:
    many(folder, 3)
    damaged = list_files(folder)[1].path
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:200])
    history = GroupHistory(folder)
    assert ids(history) == ["g0", "g2"]
    (problem,) = history.damaged
    assert damaged.name in problem
    assert "move it away" in problem
    assert history.story("g1") is None
    damaged.write_bytes(whole)  # a backup is there
    assert sorted(ids(history)) == ["g0", "g1", "g2"]
    assert history.damaged == []


def test_a_folder_that_is_copied_piece_by_piece(folder: Path, tmp_path: Path) -> None:
    many(folder, 3)
    copied = tmp_path / "copied"
    copied.mkdir()
    history = GroupHistory(copied)
    for file in reversed(list_files(folder)):
        shutil.copy(file.path, copied)
        history.states()
    assert ids(history) == ["g0", "g1", "g2"]


def test_no_folder_has_no_groups(folder: Path) -> None:
    history = GroupHistory(folder)
    assert (history.find(GroupQuery()), history.states(), history.lost(), history.damaged) == ((0, []), {}, 0, [])
    assert not folder.exists()


def test_an_index_that_is_no_database_is_built_anew(folder: Path) -> None:
    many(folder, 2)
    (folder / INDEX).write_bytes(b"not a database" * 1000)
    assert GroupHistory(folder).states() == {"trained": 2}


def test_an_index_of_another_schema_is_built_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(folder, 2)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.run.group_index._SCHEMA", 0)
        assert GroupHistory(folder).states() == {"trained": 2}
    assert GroupHistory(folder).states() == {"trained": 2}


def test_the_index_of_a_folder_that_cant_be_written_is_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(folder, 2)
    (folder / INDEX).mkdir()  # whoever may do everything, as in a container, can write to any folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert GroupHistory(folder).states() == {"trained": 2}
    assert list((tmp_path / "cache" / "headrace").glob("groups-*.sqlite"))


def test_without_trigrams_texts_are_searched_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.run.group_index._FULL_TEXT", "CREATE VIRTUAL TABLE found USING nothing (x);")
    many(folder, 3)
    assert ids(GroupHistory(folder), text="IS 1+1") == ["g1"]


@pytest.mark.parametrize("files", [12, 1])
def test_several_processes_build_one_index(folder: Path, files: int) -> None:
    for first in range(0, 12, 12 // files):
        told = [life(f"g{order}", order, *TRAINED) for order in range(first, first + 12 // files)]
        write(folder, events(*[event for each in told for event in each], start=1_000 * (first + 1)))
    code = """
import sys
from pathlib import Path
from typing import Any
from headrace.run import group_index
from headrace.run.group_history import GroupHistory
group_index._AT_ONCE = 1
print(GroupHistory(Path(sys.argv[1])).states())
"""
    asked = [
        subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert {process.communicate(timeout=120)[0].strip() for process in asked} == {"{'trained': 12}"}


def test_a_row_is_a_file_and_a_line() -> None:
    assert parse_row("data/sums.jsonl:18") == DataRow("data/sums.jsonl", 18)
    assert parse_row("C:\\sums.jsonl:18") == DataRow("C:\\sums.jsonl", 18)
    assert [parse_row(text) for text in ("sums.jsonl", ":3", "a:b", "a:", "a:-1", "a:²")] == [None] * 6


@pytest.mark.parametrize(("version", "state"), [(2, "trained"), (1, "queued")])
def test_what_a_restored_checkpoint_was_trained_on_is_trained(version: int, state: str) -> None:
    record = GroupRecord("e0-train-0")
    for event in (
        GroupEvent("1-0", 0, "enqueued", record.id, lane="train", order=0, n=1),
        GroupEvent("2-0", 0, "reserved", record.id, step=1, timeline="a"),
        GroupEvent("3-0", 0, "restored", version=version),
    ):
        record.apply(event)
    assert record.state == state
