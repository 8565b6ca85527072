"""What a run left behind, read raw: files and a dump of Redis. Imports nothing of Headrace, so that a mistake there is not made here.

story.json            the run's shape, the faults that were planned and struck, how each process ended
problems.jsonl        the prompts, in the order they have to be taken; which of them can't be scored
archive/step_V/       state.json, ledger.json and trained.roaring of every checkpoint that was published
lineage/              step_S-<timeline>.jsonl.gz: what the trainer says each step was made of
metrics.jsonl         what the trainer says happened: train, validation and rewind lines
held_out.jsonl        the prompts of a validation
observed.jsonl        batches as they lay in Redis while they were reserved, seen by the driver
buffer.msgpack        every key of the run in Redis, once it was over
store/                the objects of the object store
logs/up.log           what `headrace up` said
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgpack
from pyroaring import BitMap

from tests.chaos.store import Objects

ENDS = ("failed", "filtered", "unused")


@dataclasses.dataclass(frozen=True)
class Call:
    """Of an episode: what followed the completion of the call `parent`, what was sampled behind it, and with which version each token;
    `asked` is what the program said before it."""

    parent: int
    context: tuple[int, ...]
    completion: tuple[int, ...]
    versions: tuple[int, ...]
    trained: bool
    asked: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """`versions`: of the weights that wrote its tokens. `right_reward`: what its environment must have said, if its text was seen. `tries`:
    attempts at scoring or playing it that were charged, and the last. `replica`: which handed it in, if it was seen. `calls`: of an episode
    that was seen."""

    index: int
    versions: tuple[int, ...]
    reward: float | None
    status: str = "SCORED"
    right_reward: float | None = None
    tries: int = 1
    replica: str = ""
    calls: tuple[Call, ...] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """`charged`: attempts that it was charged, if it was seen in the buffer."""

    id: str
    order: int
    trajectories: tuple[Trajectory, ...]
    charged: int = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """The groups of one step on one timeline, of one incarnation of the buffer where it was seen there."""

    step: int
    timeline: str
    groups: tuple[Group, ...]
    incarnation: str = ""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """`ledger`: step -> group ids, since the checkpoint before. `trained`: places in the order of prompts, all so far."""

    version: int
    timeline: str
    ancestors: tuple[str, ...]
    ledger: dict[int, list[str]]
    trained: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint in the object store. `wrong`: objects that are not there as its manifest says."""

    version: int
    timeline: str
    wrong: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Line:
    """Of metrics.jsonl: `kind` train, validation or rewind. `groups`: of a validation, how many were evaluated, failed, are pending."""

    kind: str
    step: int
    timeline: str
    time: float
    age_max: float | None
    groups: tuple[float, float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Exit:
    name: str
    code: int
    by_us: bool
    last_words: str
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class Moved:
    """A clock that was moved: by how many seconds, how far off its machine found it, which living replicas the buffer believed dead, and
    from when to when."""

    machine: str
    asked_s: float
    seen_s: float
    dead: tuple[str, ...]
    since: float
    over: float


@dataclasses.dataclass(frozen=True)
class Quarantined:
    """A replica that computed something else: the timeline and the newest version when it was quarantined, groups that it held some steps
    later, and who was healthy then."""

    replica: str
    timeline: str
    version: int
    holds: int
    healthy: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Restarted:
    """What `headrace up` said of a service that ended: with which code (negative: by which signal)."""

    name: str
    code: int


@dataclasses.dataclass(frozen=True)
class Evidence:
    """`states`: of every training group that the buffer still knows, by place in the order; `ended`: its bitmap of them.

    `counts`: groups by state as the buffer counts them. `lost_writes`: times of the faults that take writes from the server, or the newest
    checkpoint from the trainer; `server_killed`: of those that killed the server. `failures`: of the failed ones the reason, by place in
    the order. `struck_alone`: of a group, how often it was alone with a replica that was struck or cut off. `misconduct`: kinds of the
    faults that hit the environment. `held_out`: prompts of a validation. `killed`: names of what was killed by faults or by the deadly
    prompt, once for each time. Under `headrace up`: `restarted`, and `said` is what it printed (else None). `episodes`: every trajectory is
    one. `open`: those that each runner had open in the end, if it said so. `kept`: keys of payloads and scores that no group names.
    `bytes_held`: by the run's count, and by those of its groups. `stored`: checkpoints in the object store, None if the run has none.
    """

    prompts_per_step: int
    generations: int
    max_age: int
    policy: str
    moods: tuple[str, ...]
    planned: int
    struck: int
    lost_writes: tuple[float, ...]
    server_killed: tuple[float, ...]
    checkpoints: tuple[Checkpoint, ...]
    stored: tuple[Stored, ...] | None
    lineage: tuple[Batch, ...]
    lines: tuple[Line, ...]
    observed: tuple[Batch, ...]
    states: dict[int, str]
    ended: frozenset[int]
    failures: dict[int, str]
    struck_alone: Counter[str]
    misconduct: frozenset[str]
    held_out: int
    moved: tuple[Moved, ...]
    quarantined: tuple[Quarantined, ...]
    killed: tuple[str, ...]
    restarted: tuple[Restarted, ...]
    said: str | None
    counts: dict[str, int]
    closed: bool
    exits: tuple[Exit, ...]
    episodes: bool
    open: dict[str, int | None]
    kept: tuple[str, ...]
    bytes_held: tuple[int, int]


def group_id(order: int) -> str:
    """Prompts are not shuffled and come once."""
    return f"e0-train-{order}"


def read(folder: Path) -> Evidence:
    """Raises what Python raises for a file that is missing or malformed: then there is no verdict."""
    story = json.loads((folder / "story.json").read_text())
    shape = story["shape"]
    problems = _lines(folder / "problems.jsonl")
    buffer = msgpack.unpackb((folder / "buffer.msgpack").read_bytes(), strict_map_key=False)
    run, base = _run_of(buffer)
    lines = tuple(_line(line) for line in _lines(folder / "metrics.jsonl"))
    return Evidence(
        prompts_per_step=shape["prompts_per_step"],
        generations=shape["generations"],
        max_age=shape["max_age"],
        policy=shape["policy"],
        moods=tuple(problem["mood"] for problem in problems),
        planned=story["planned"],
        struck=len(story["struck"]),
        lost_writes=tuple(s["time"] for s in story["struck"] if _loses_writes(s["fault"], shape["sentinels"])),
        server_killed=tuple(
            struck["time"]
            for struck in story["struck"]
            if struck["victim"] == "server"
            and (struck["fault"]["kind"].startswith("torn") or struck["fault"]["kind"] == "kill")
        ),
        checkpoints=_surviving(map(_checkpoint, (folder / "archive").glob("step_*")), lines),
        stored=_stored(Objects(folder / "store")) if shape["store"] else None,
        lineage=tuple(sorted(map(_lineage, (folder / "lineage").glob("step_*.jsonl.gz")), key=lambda b: b.step)),
        lines=lines,
        observed=tuple(_observed(line, problems) for line in _lines(folder / "observed.jsonl")),
        states=_states(buffer, base),
        ended=_bits(buffer.get(base + "ended", b"")),
        failures=_failures(buffer, base),
        struck_alone=Counter(
            held[0]
            for held in (
                *(held for s in story["struck"] for held in s["held"]),
                *(m["held"] for m in story["murdered"]),
            )
            if len(held) == 1
        ),
        misconduct=frozenset(s["fault"]["kind"] for s in story["struck"] if s["fault"]["target"] == "environment"),
        held_out=len(_lines(folder / "held_out.jsonl")),
        moved=tuple(_moved(moved, story["struck"][moved["number"]]["time"]) for moved in story["moved"]),
        quarantined=tuple(
            Quarantined(q["replica"], q["timeline"], q["version"], q["holds"], tuple(q["healthy"]))
            for q in story["quarantined"]
        ),
        killed=(
            *(s["victim"] for s in story["struck"] if s["fault"]["kind"] == "kill"),
            *(murder["name"] for murder in story["murdered"]),
        ),
        restarted=_restarted(said := _said(folder) if shape["topology"] == "up" else None),
        said=said,
        counts={
            name.decode().removeprefix("train:"): int(count)
            for name, count in buffer.get(base + "counts", {}).items()
            if name.startswith(b"train:")
        },
        closed=run[b"closed"] == b"1",
        exits=tuple(Exit(e["name"], e["code"], e["by_us"], e["last_words"], e["time"]) for e in story["exits"]),
        episodes=shape["episodes"],
        open=story["open"],
        kept=_kept(buffer, base),
        bytes_held=(int(run.get(b"bytes", 0)), sum(int(group.get(b"held", 0)) for group in _groups(buffer, base))),
    )


def _loses_writes(fault: dict[str, Any], sentinels: bool) -> bool:
    """Of the server, or the newest checkpoints. Sentinels may promote a replica that lags, whatever is wrong with the primary."""
    kind, target = fault["kind"], fault["target"]
    by_machine = kind == "node" and target in ("server", "replay", "trainer", "up")
    by_sentinels = sentinels and target == "server"
    return kind.startswith("torn") or kind in ("failover", "damaged") or by_machine or by_sentinels


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _line(line: dict[str, Any]) -> Line:
    metrics = line["metrics"]
    ends = tuple(metrics.get(end) for end in ("evaluated", "failed", "pending"))
    return Line(
        line["kind"], line["step"], line["timeline"], line["time"], metrics.get("max_trajectory_age"),
        ends if line["kind"] == "validation" else None,
    )  # fmt: skip


def _moved(moved: dict[str, Any], since: float) -> Moved:
    return Moved(moved["machine"], moved["asked_s"], moved["seen_s"], tuple(moved["dead"]), since, moved["over"])


def _said(folder: Path) -> str:
    return (folder / "logs" / "up.log").read_text()


def _restarted(said: str | None) -> tuple[Restarted, ...]:
    found = re.findall(r"^(\S+): (exit code|killed by signal) (\d+).*restarting it", said or "", re.MULTILINE)
    return tuple(Restarted(name, int(code) * (1 if how == "exit code" else -1)) for name, how, code in found)


def _run_of(buffer: dict[str, Any]) -> tuple[dict[bytes, bytes], str]:
    """The run's hash, and what the keys of its incarnation begin with."""
    key = next(key for key in buffer if re.fullmatch(r"hr:\{[^}]*\}", key))
    return buffer[key], f"{key}:{buffer[key][b'incarnation'].decode()}:"


def _groups(buffer: dict[str, Any], base: str) -> list[dict[bytes, bytes]]:
    return [value for key, value in buffer.items() if key.startswith(base + "g:")]


def _kept(buffer: dict[str, Any], base: str) -> tuple[str, ...]:
    """Payloads (and calls) and scores that no group names."""
    named = {
        value.split(b" ")[0].decode()
        for group in _groups(buffer, base)
        for field, value in group.items()
        if re.fullmatch(rb"[pq]\d+", field)
    }
    payloads = [key for key in buffer if re.match(re.escape(base) + "[ps]:", key)]
    return tuple(sorted(key for key in payloads if key.rpartition(":")[2] not in named))


def _states(buffer: dict[str, Any], base: str) -> dict[int, str]:
    groups = (value for key, value in buffer.items() if key.startswith(base + "g:"))
    return {int(group[b"order"]): group[b"state"].decode() for group in groups if group[b"lane"] == b"train"}


def _failures(buffer: dict[str, Any], base: str) -> dict[int, str]:
    groups = (value for key, value in buffer.items() if key.startswith(base + "g:") and value[b"state"] == b"failed")
    return {int(group[b"order"]): group[b"reason"].decode() for group in groups if group[b"lane"] == b"train"}


def _bits(bitmap: bytes) -> frozenset[int]:
    """Redis counts bits from the most significant one of the first byte."""
    return frozenset(8 * at + bit for at, byte in enumerate(bitmap) for bit in range(8) if byte & (128 >> bit))


def _checkpoint(folder: Path) -> Checkpoint:
    state = json.loads((folder / "state.json").read_text())
    return Checkpoint(
        version=state["version"],
        timeline=state["timeline"],
        ancestors=tuple(state["ancestors"]),
        ledger={int(step): ids for step, ids in json.loads((folder / "ledger.json").read_text()).items()},
        trained=frozenset(BitMap.deserialize((folder / "trained.roaring").read_bytes())),
    )


def _surviving(checkpoints: Iterable[Checkpoint], lines: Sequence[Line]) -> tuple[Checkpoint, ...]:
    """Those that were not lost with their trainer's machine: no rewind went back before them, and what was made there isn't known."""
    starts = [(line.timeline, line.step) for line in lines if line.kind == "rewind"]
    timelines = [*dict.fromkeys(line.timeline for line in lines)]

    def survives(checkpoint: Checkpoint) -> bool:
        later = timelines[timelines.index(checkpoint.timeline) + 1 :] if checkpoint.timeline in timelines else None
        return later is not None and all(checkpoint.version <= step for of, step in starts if of in later)

    return tuple(sorted(filter(survives, checkpoints), key=lambda checkpoint: checkpoint.version))


def _stored(objects: Objects) -> tuple[Stored, ...]:
    manifests = [json.loads(objects[name].data) for name in objects if "/manifests/" in name]
    return tuple(
        _checked(objects, manifest) for manifest in sorted(manifests, key=lambda manifest: manifest["version"])
    )


def _checked(objects: Objects, manifest: dict[str, Any]) -> Stored:
    version, timeline = manifest["version"], manifest["timeline"]
    wrong = []
    for name, file in manifest["files"].items():
        found = objects.get(f"runs/{manifest['run_id']}/step_{version}-{timeline}/{name}")
        if found is None or hashlib.sha256(found.data).hexdigest() != file["sha256"]:
            wrong.append(name)
    return Stored(version, timeline, tuple(wrong))


def _lineage(path: Path) -> Batch:
    with gzip.open(path, "rt") as file:
        header, *groups = [json.loads(line) for line in file]
    return Batch(
        step=header["step"],
        timeline=header["timeline"],
        groups=tuple(
            Group(
                group["group"],
                group["order"],
                tuple(Trajectory(t["index"], written_by(t["ranges"]), t["reward"]) for t in group["trajectories"]),
            )
            for group in groups
        ),
    )


def written_by(ranges: list[dict[str, Any]]) -> tuple[int, ...]:
    """Versions of the weights, in the order of the tokens. Two replicas may have written under the same, one after the other."""
    return tuple(version for version, _ in itertools.groupby(r["version"] for r in ranges))


def _observed(line: dict[str, Any], problems: list[dict[str, Any]]) -> Batch:
    return Batch(
        step=line["step"],
        timeline=line["timeline"],
        incarnation=line["incarnation"],
        groups=tuple(
            Group(
                group["id"],
                group["order"],
                tuple(
                    Trajectory(
                        t["index"],
                        _versions_of(t),
                        t["reward"],
                        t["status"],
                        right_reward(problems[group["order"]], t["text"]),
                        t["tries"],
                        t["replica"],
                        tuple(map(_call, t.get("calls", ()))),
                    )
                    for t in group["trajectories"]
                ),
                group["charged"],
            )
            for group in line["groups"]
        ),
    )


def _versions_of(seen: dict[str, Any]) -> tuple[int, ...]:
    if "calls" not in seen:
        return tuple(version for version, _, _ in seen["spans"])
    spans = [span for call in seen["calls"] if call["trained"] for span in call["spans"]]
    return tuple(version for version, _ in itertools.groupby(version for version, _, _ in spans))


def _call(seen: dict[str, Any]) -> Call:
    versions = [version for version, start, end in seen["spans"] for _ in range(start, end)]
    return Call(
        seen["parent"], tuple(seen["context"]), tuple(seen["completion"]), tuple(versions), seen["trained"], tuple(seen["asked"])
    )  # fmt: skip


def right_reward(problem: dict[str, Any], answer: str) -> float:
    """What the environment of a chaos run is defined to say."""
    if problem["mood"] == "flat":
        return 0.5
    return zlib.crc32(f"{problem['input']}|{answer}".encode()) % 1000 / 1000
