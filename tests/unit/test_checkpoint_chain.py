"""Which checkpoints are a run's: trainers that start, publish, freeze, wake up late and are set back, in any order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ServiceError
from headrace.run.checkpoints import (
    CHAIN,
    FolderLock,
    Start,
    append_start,
    find_abandoned,
    find_published,
    find_timeline,
    first_chain,
    in_effect,
    on_chain,
    read_chain,
    removable,
)

# what happens next: a trainer starts, `rewind` goes back some checkpoints, or the trainer that started so many starts ago publishes
events = st.lists(
    st.one_of(
        st.just(("start", 0)),
        st.tuples(st.just("rewind"), st.integers(0, 2)),
        st.tuples(st.just("publish"), st.sampled_from([0, 0, 0, 1, 2])),
    ),
    max_size=30,
)


@given(events=events)
def test_a_run_goes_on_from_its_newest_trainers_work_alone(events: list[tuple[str, int]]) -> None:
    starts: list[Start] = []
    at: dict[str, int] = {}  # the version that each trainer has come to
    found: dict[int, str | None] = {}  # what is in the folder, under its version
    history: dict[int, str] = {}  # what the newest weights come from
    for number, (what, back) in enumerate(events):
        if what == "publish" and not at:
            continue
        if what == "publish":
            timeline = list(at)[-1 - back % len(at)]
            at[timeline] += 2
            found[at[timeline]] = timeline  # however late, and over whatever is there
            if starts[-1].timeline == timeline:
                history[at[timeline]] = timeline
            elif at[timeline] in history:
                del history[at[timeline]]  # it is hidden: `publish` does not let that happen
        else:
            versions = on_chain(starts, found)
            newest = [0, *versions][-1 - min(back, len(versions))]
            history = {version: timeline for version, timeline in history.items() if version <= newest}
            starts.append(Start(f"{what}-{number}", newest))
            if what == "start":
                at[starts[-1].timeline] = newest
        assert on_chain(starts, found) == sorted(history)
        for version, timeline in history.items():
            assert find_timeline(starts, version) == timeline
        began = [start.version for start in in_effect(starts)]
        assert began == sorted(set(began))


names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=6, unique=True)


@given(timelines=names, remover=st.sampled_from("abcdx"), left=st.lists(st.sampled_from("abcdx"), unique=True))
def test_nobody_removes_what_a_newer_or_unknown_one_writes(timelines: list[str], remover: str, left: list[str]) -> None:
    starts = [Start(timeline, 2 * i) for i, timeline in enumerate(timelines)]
    remains = {f".unfinished-step_{i}-{timeline}": timeline for i, timeline in enumerate(left)}
    gone = removable(starts, remover, [*remains, "step_4", "abandoned-step_4-a", ".unfinished-notes"])
    if remover != timelines[-1]:
        assert gone == []
    else:
        assert {remains[name] for name in gone} == set(left) & set(timelines)


def test_what_builds_left_that_knew_no_chain_goes() -> None:
    remains = [".unfinished-step_4", ".unfinished-removed-2"]
    assert removable([Start("a", 0)], "a", remains) == remains


@given(
    began=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    strays=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), max_size=3),
)
def test_a_folder_without_a_chain_gets_its_newest_checkpoints(began: list[int], strays: list[tuple[int, int]]) -> None:
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    version = 0
    for number, count in enumerate(began):
        for _ in range(count):
            version += 2
            found[version] = f"t{number}", tuple(f"t{i}" for i in range(number))
    own = sorted(found)
    for _, at in strays:
        if at < version and at % 2:
            found[at] = "stray", ()
    starts = first_chain(found)
    assert on_chain(starts, {at: timeline for at, (timeline, _) in found.items()}) == own


def publish(folder: Path, version: int, timeline: str) -> None:
    (folder / f"step_{version}").mkdir(parents=True)
    (folder / f"step_{version}" / "state.json").write_text(f'{{"version": {version}, "timeline": "{timeline}"}}')


def test_the_chain_is_begun_from_what_is_there_and_grows_by_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert (read_chain(folder), find_published(folder)) == ([], [])
    publish(folder, 4, "old")
    assert (find_published(folder), read_chain(folder)) == ([4], [Start("old", 0)])
    append_start(folder, Start("new", 4))
    publish(folder, 6, "old")
    publish(folder, 8, "new")
    assert read_chain(folder) == [Start("old", 0), Start("new", 4)]
    assert (find_published(folder), find_abandoned(folder)) == ([4, 8], {6: "old"})


def test_half_a_line_is_no_start(tmp_path: Path) -> None:
    append_start(tmp_path, Start("a", 0))
    with (tmp_path / CHAIN).open("a") as file:
        file.write('{"timeline": "b", "ver')
    assert read_chain(tmp_path) == [Start("a", 0)]
    append_start(tmp_path, Start("c", 2))
    assert read_chain(tmp_path) == [Start("a", 0), Start("c", 2)]


@pytest.mark.parametrize("begun", ["", '{"timeline": "b", "ver'])
def test_a_chain_without_a_whole_line_hides_no_checkpoint(tmp_path: Path, begun: str) -> None:
    """As a full disk or a power cut leaves it at the first start on what came from elsewhere."""
    publish(tmp_path, 4, "a")
    (tmp_path / CHAIN).write_text(begun)
    assert find_published(tmp_path) == [4]
    append_start(tmp_path, Start("b", 4))
    assert read_chain(tmp_path) == [Start("a", 0), Start("b", 4)]


def test_a_line_that_is_no_start_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / CHAIN).write_text('{"timeline": 3}\n')
    with pytest.raises(ServiceError, match=r"chain\.jsonl.*move it away"):
        find_published(tmp_path)


def test_a_checkpoint_whose_state_can_t_be_read_is_not_passed_over(tmp_path: Path) -> None:
    append_start(tmp_path, Start("a", 0))
    publish(tmp_path, 2, "a")
    publish(tmp_path, 4, "a")
    (tmp_path / "step_4" / "state.json").write_text("{")
    assert find_published(tmp_path) == [2, 4]


def test_a_lock_names_its_holder_and_passes_on(tmp_path: Path) -> None:
    first, second, third = (FolderLock(tmp_path) for _ in range(3))
    assert first.take() is None
    held = second.take()
    assert held is not None
    assert held.startswith("process ")
    first.release()
    while third.try_take() is None:  # until the second has it
        third.release()
        third = FolderLock(tmp_path)
    second.release()
