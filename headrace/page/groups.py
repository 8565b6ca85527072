"""The groups of a run: what became of each prompt. From the history of groups, lineage and sample files."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from headrace.base.errors import HeadraceError
from headrace.page.run_files import NotHere, RunFiles, check_file
from headrace.records.group_event import GroupEvent, GroupState
from headrace.records.origin import Origin
from headrace.records.trajectory import Message
from headrace.run.group_query import NO_BOUND, GroupQuery, GroupStory, GroupSummary
from headrace.run.lineage import FOLDER as LINEAGE
from headrace.run.lineage import LineageFiles
from headrace.run.now import Now
from headrace.run.sample_files import FAILED_BYTES, Kind, SampleFiles, read_heads, write_size
from headrace.run.samples import find_expected, write_prompt

# Prompts with a text, of which the groups are found: counting and sorting those of more takes seconds.
MOST_TEXTS = 10_000


class SampleHead(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a sample beside its group: all but its tokens."""

    group: str
    index: int
    attempt: int = 0
    task: str = ""
    environment: str = ""
    messages: tuple[Message, ...] = ()
    content: str = ""
    finish_reason: str = ""
    reward: float | None = msgspec.field(name="rewards", default=None)
    components: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    extra_env_info: dict[str, Any] = {}
    status: str = "SCORED"
    message: str = ""
    traceback: str = ""
    calls: list[msgspec.Raw] = []


# -- the list


def list_groups(run: RunFiles, query: GroupQuery) -> dict[str, Any]:
    """Return the groups that `query` finds, and how many there are by state. Raises `ConfigError` without pyarrow."""
    history, problems = run.indexing.history()
    query = dataclasses.replace(query, most_texts=MOST_TEXTS if query.text else NO_BOUND)
    total, found = history.find(query)
    states, lost, problems = history.states(query), history.lost(), [*problems, *history.damaged]
    if history.has_more_texts(query):
        problems.append(f"more than {MOST_TEXTS:,} prompts have this text; only groups of the first are shown")
    shown = [describe_group(group) for group in found]
    return {"total": total, "groups": shown, "states": states, "lost_events": lost, "problems": problems}


def count_groups(run: RunFiles, state: Now | None) -> tuple[dict[str, int], list[str]]:
    """Return the number of groups by state, training groups and those that were evaluated, and what could not be read: from the history of
    groups, and while the run is up with its own newer counts."""
    problems: list[str] = []
    counts: dict[str, int] = {}
    try:
        history, problems = run.indexing.history()
        if found := history.states():  # without any, nothing is known
            counts = dict.fromkeys(get_args(GroupState), 0) | history.states(GroupQuery(lane="train"))
            counts["evaluated"] = found.get("evaluated", 0)
        problems += history.damaged
    except HeadraceError as error:
        problems = [str(error)]
    if state is not None and (run.history.state == "running" or not counts):
        counts |= state.counts
    return counts, problems


def describe_group(group: GroupSummary) -> dict[str, Any]:
    fields = dataclasses.asdict(group)
    fields["source"] = None if group.source is None else {"file": group.source.file, "line": group.source.line}
    return fields


# -- one group


def describe_story(run: RunFiles, group_id: str) -> dict[str, Any]:
    """Return all about a group. Raises `NotHere` for an unknown one, and `CodecError` for files of it that can't be read."""
    story, problems = find_story(run, group_id)
    summary = story.summary
    heads, of_samples = _sample_heads(run, summary)
    origins, of_lineage = _origins(run, summary)
    messages: Sequence[Mapping[str, Any]] | None = story.messages
    expected, prompt = story.expected, story.prompt
    if heads and messages is None:
        first = next(iter(heads.values()))
        messages, expected, prompt = first.messages, find_expected(first.extra_env_info), write_prompt(first.messages)
    return {
        **describe_group(summary),
        "prompt": prompt,
        "messages": None if messages is None else list(messages),
        "expected": expected,
        "previous": story.previous,
        "next": story.next,
        "story": [_describe_event(event) for event in story.events],
        "trajectories": _trajectories(story, heads, origins),
        "unkept": None if heads else say_unkept(run, summary),
        "problems": [*problems, *of_samples, *of_lineage],
    }


def find_story(run: RunFiles, group_id: str) -> tuple[GroupStory, list[str]]:
    """Return the story of a group, and what could not be read. Raises `NotHere`."""
    history, problems = run.indexing.history()
    problems = [*problems, *history.damaged]
    if (story := history.story(group_id)) is None:
        said = f" ({'; '.join(problems)})" if problems else ""
        raise NotHere(f"run {run.name} has no group {group_id!r:.100}{said}")
    return story, problems


def _describe_event(event: GroupEvent) -> dict[str, Any]:
    return {
        "time": event.time,
        "what": event.what,
        "text": say(event),
        "index": event.index,
        "replica": event.replica,
        "step": event.step,
        "attempt": event.attempt,
        "reward": event.reward,
        "build": event.build,
        "reason": event.reason or event.cause,
    }


def say(event: GroupEvent) -> str:
    """Return what happened, as a sentence without its end."""
    which = "the group" if event.index is None else f"trajectory {event.index}"
    by = f" by {event.replica}" if event.replica else ""
    why = event.reason or event.cause
    because = f": {why}" if why else ""
    step = "" if event.step is None else f" for step {event.step}"
    attempt = "" if event.attempt is None else f", attempt {event.attempt}"
    match event.what:
        case "enqueued":
            return "the prompt was queued"
        case "leased":
            return f"leased{by}{attempt}"
        case "pushed":
            length = "" if event.tokens is None else f", {event.tokens} tokens"
            return f"{which} was pushed{by}{length}"
        case "scored":
            reward = "without a reward" if event.reward is None else f"with reward {event.reward:.6g}"
            return f"{which} was scored {reward}{because}"
        case "scoring":
            return "every trajectory is there, and waits for its score"
        case "ready":
            return "every trajectory has a score: the group is ready"
        case "trained":
            return f"trained{step.replace('for', 'in', 1)}"
        case "evaluated":
            return "evaluated" if event.step is None else f"evaluated version {event.step}"
        case "reserved":
            return f"reserved{step}"
        case "rewound" | "restored":
            version = "" if event.version is None else f" to version {event.version}"
            return f"the run was {event.what}{version}"
        case _:
            return f"{which}: {event.what.replace('_', ' ')}{by}{step}{because}"


def _trajectories(
    story: GroupStory, heads: Mapping[int, SampleHead], origins: Mapping[int, Origin]
) -> list[dict[str, Any]]:
    newest: dict[int, dict[str, GroupEvent]] = {}
    by: dict[int, str | None] = {}  # who had the lease when it was pushed
    holder: str | None = None
    for event in story.events:
        if event.what == "leased":
            holder = event.replica
        if event.index is not None:
            if event.what == "pushed":
                by[event.index] = event.replica or holder
            newest.setdefault(event.index, {})[event.what] = event
    summary = story.summary
    found = []
    for index in sorted({*newest, *heads, *origins, *range(len(summary.rewards))}):
        events, head, origin = newest.get(index, {}), heads.get(index), origins.get(index)
        pushed, scored, dropped = (events.get(what) for what in ("pushed", "scored", "dropped"))
        reward = next((each.reward for each in (scored, origin, head) if each), None)
        if reward is None and index < len(summary.rewards):
            reward = summary.rewards[index]
        tokens = next((each.tokens for each in (pushed, origin) if each), None)
        if tokens is None and index < len(summary.tokens):
            tokens = summary.tokens[index]
        ranges = [[part.version, part.start, part.end] for part in origin.ranges] if origin else []
        if not ranges and pushed and pushed.oldest is not None and pushed.oldest == pushed.newest:
            ranges = [[pushed.oldest, 0, tokens or 0]]
        attempts = (each.attempt for each in (scored or dropped or pushed, head) if each and each.attempt is not None)
        pushed_by = by.get(index) or next((part.replica for part in (origin.ranges if origin else ())), None)
        status = "SCORED" if reward is not None else "DROPPED" if dropped else ""
        sample = head or SampleHead(group=summary.id, index=index, status=status)
        found.append(
            {
                "index": index,
                "attempt": next(attempts, None),
                "replica": pushed_by,
                "reward": reward,
                "advantage": origin.advantage if origin else None,
                "components": sample.components,
                "status": sample.status,
                "message": sample.message or (dropped.reason if dropped and dropped.reason else ""),
                "traceback": sample.traceback,
                "tokens": tokens,
                "finish_reason": next((each.finish_reason for each in (origin, head) if each), None),
                "versions": ranges,
                "kept": head is not None,
                "content": head.content if head else None,
                "metadata": sample.metadata,
                "calls": len(sample.calls),
            }
        )
    return found


def sample_places(run: RunFiles, summary: GroupSummary) -> list[tuple[Kind | Literal["failed"], int]]:
    """Return the kinds and steps of the sample files that may have the trajectories of a group, the likeliest first."""
    places: list[tuple[Kind | Literal["failed"], int]] = []
    if summary.lane == "validation":
        # a validation is of one version, which its trajectories name
        steps = SampleFiles.of(run.config).steps("val")
        places += [("val", step) for step in sorted(steps, key=lambda step: step != summary.newest_version)]
    elif summary.step is not None:
        places.append(("train", summary.step))
    if summary.state == "failed":
        places.append(("failed", 0))
    return places


def say_unkept(run: RunFiles, summary: GroupSummary) -> str:
    """Return why no samples of a group are kept."""
    files = SampleFiles.of(run.config)
    if summary.state in ("trained", "evaluated"):
        return files.say_removed("train" if summary.lane == "train" else "val")
    if summary.state == "failed":
        return f"the newest {write_size(2 * FAILED_BYTES)} of completions that failed are kept, and a group may fail without one"
    return f"they are written of groups that were trained, evaluated or failed, and this one is {summary.state}"


def _sample_heads(run: RunFiles, summary: GroupSummary) -> tuple[dict[int, SampleHead], list[str]]:
    """Return the samples of a group that are kept, by index, and what could not be read."""
    files = SampleFiles.of(run.config)
    problems = []
    for kind, step in sample_places(run, summary):
        paths = files.failed_paths if kind == "failed" else (files.path(kind, step),)
        heads: dict[int, SampleHead] = {}
        for path in paths:
            try:
                for head in _read_heads(path, summary):
                    heads[head.index] = head
            except HeadraceError as error:
                problems.append(str(error))
        if heads:
            return heads, problems
    return {}, problems


def _read_heads(path: Path, summary: GroupSummary) -> Iterator[SampleHead]:
    """Yield the samples of one group in a file. Raises `CodecError`."""
    with contextlib.suppress(FileNotFoundError):
        yield from read_heads(check_file(path, path.parent), summary.id, SampleHead)


def _origins(run: RunFiles, summary: GroupSummary) -> tuple[dict[int, Origin], list[str]]:
    """Return the origins of a trained group's trajectories, by index, and what could not be read."""
    if summary.step is None or summary.state != "trained":
        return {}, []
    try:
        for group in LineageFiles(run.config.checkpoint_folder / LINEAGE).read(summary.step):
            if group.group == summary.id:
                return {origin.index: origin for origin in group.trajectories}, []
    except HeadraceError as error:
        return {}, [str(error)]
    return {}, []
