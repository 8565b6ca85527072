"""Folders of runs for the page, written as a run writes them, without one that ran."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.records.origin import GroupLineage, Origin, TokenRange
from headrace.run import group_files
from headrace.run.history import RECORD, RunRecord
from headrace.run.journal import JOURNAL
from headrace.run.lineage import Header
from headrace.run.sample_files import SampleFiles
from headrace.run.start import START as START_RECORD
from headrace.run.start import ChangedKeys, StartRecord

START = 1_764_000_000.0
STEP_S = 2.0  # of a long run
STEPS, PROMPTS, SAMPLES = 6, 2, 3
CONFIG = """
run: {{id: {id}, dir: elsewhere}}
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 3, max_num_steps: 10}}
policy: {{model_name: models/tiny, precision: float32}}
data: {{train: {{dataset_name: arithmetic, env_name: math}}}}
env: {{math: {{type: math}}}}
"""
REPLICA = "rollout-1"
# Of a group: seconds after START, the group, what happened, and other fields.
Event = tuple[float, str, str, dict[str, Any]]


def recorded_run(parent: Path, name: str = "adder", *, text: str = "1+1", groups: bool = True, **record: Any) -> Path:
    """A run of six steps, as its files record it; it has finished unless `record` says otherwise. `text` stands wherever the policy, a data
    set or an environment can write. Without `groups` it has no history of them."""
    folder = parent / name
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(id=name))
    fields = {"started": START, "state": "finished", "since": START + 100.0, **record}
    (folder / RECORD).write_bytes(msgspec.json.encode(RunRecord(**fields)))
    lines = []
    for step in range(STEPS):
        metrics = {
            "reward": step / 10,
            "timing/train/total_step_time": 10.0,
            "timing/train/wait_for_generation": 6.0,
            "timing/train/policy_training": 3.0,
            "not/a known one": math.nan if step == 2 else 1.0,
        }
        lines.append(
            _line("train", step, START + 10 * (step + 1), metrics, builds={"math": ["old" if step < 3 else "new"]})
        )
    lines.insert(4, _line("rewind", 4, START + 45, {}))
    validation = {"accuracy": 0.5, "timing/validation/total_validation_time": 2.0}
    lines.append(_line("validation", STEPS, START + 66, validation))
    (folder / JOURNAL).write_text("".join(f"{line}\n" for line in lines))
    for step in range(STEPS):
        _lineage(folder, step)
    samples = SampleFiles(folder / "logs", None)
    last = [
        _sample(_group(STEPS - 1, place), index, STEPS - 1, text)
        for place in range(PROMPTS)
        for index in range(SAMPLES)
    ]
    samples.write("train", STEPS - 1, last)
    samples.write("val", STEPS, [_sample("validation-0", 0, STEPS, text)])
    if groups:
        _history(folder / group_files.FOLDER, text)
    (folder / "logs" / "trainer.log").write_text(
        "2026-11-26 12:00:00,500 INFO headrace.trainer: step 0\n"
        f"2026-11-26 12:00:01,000 ERROR headrace.trainer: {text.splitlines()[0]}\nTraceback: of it\n"
    )
    (folder / "logs" / "replay.log").write_text("2026-11-26 12:00:00,750 WARNING headrace.replay: between\n")
    return folder


def with_steps(run: Path, steps: Iterable[Mapping[str, float]]) -> Path:
    """Give a run another journal: steps of ten seconds with these metrics."""
    lines = (
        _line("train", step, START + 10.0 * (step + 1), {"timing/train/total_step_time": 10.0, **metrics})
        for step, metrics in enumerate(steps)
    )
    (run / JOURNAL).write_text("".join(f"{line}\n" for line in lines))
    return run


def started_with(run: Path, *changes: tuple[float, Sequence[str]]) -> None:
    """Record that starts of a run, so many seconds after its first, changed these keys."""
    found = tuple(ChangedKeys(START + seconds, tuple(keys)) for seconds, keys in changes)
    record = StartRecord(START, "headrace up run.yaml", {}, None, {}, changes=found)
    (run / START_RECORD).write_bytes(msgspec.json.encode(record))


def long_run(parent: Path, name: str, steps: int, metrics: int) -> Path:
    """A run with a journal of so many steps and metrics."""
    folder, chance = parent / name, random.Random(0)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(id=name))
    names = [f"metric_{number}" for number in range(metrics - 3)]
    with (folder / JOURNAL).open("w") as file:
        for step in range(steps):
            values = {metric: chance.random() for metric in names}
            values |= {
                "reward": step / steps,
                "timing/train/total_step_time": STEP_S,
                "timing/train/policy_training": 1.0,
            }
            file.write(_line("train", step, START + STEP_S * (step + 1), values) + "\n")
    return folder


def write_events(run: Path, *events: Event) -> Path:
    """Write a file of the history of groups."""
    rows = [
        {"id": f"{int((START + seconds) * 1000)}-{place}", "part": 0, "time": int((START + seconds) * 1000)}
        | {"group": group, "what": what, **more}
        for place, (seconds, group, what, more) in enumerate(events)
    ]
    names = [name for name in group_files.COLUMNS if any(name in row for row in rows)]
    return group_files.write_file(run / group_files.FOLDER, {name: [row.get(name) for row in rows] for name in names})


def _line(kind: str, step: int, time: float, metrics: Mapping[str, float], **more: Any) -> str:
    return json.dumps({"kind": kind, "step": step, "timeline": "a", "time": time, "metrics": metrics, **more})


def _group(step: int, place: int) -> str:
    return f"0-{step * PROMPTS + place}"


def _lineage(folder: Path, step: int) -> None:
    groups = []
    for place in range(PROMPTS):
        origins = tuple(
            Origin(
                index=index,
                attempt=1,
                tokens=2,
                ranges=(TokenRange(0, 2, REPLICA, step, "a"),),
                finish_reason="stop",
                environment="math",
                build="new",
                reward=float(index),
                advantage=index - 1.0,
            )
            for index in range(SAMPLES)
        )
        order = step * PROMPTS + place
        groups.append(GroupLineage(_group(step, place), "trained", "sums", "math", order, step, "a", origins))
    header = Header(1, step, "a", START + 10 * (step + 1), tuple(group.group for group in groups))
    lineage = folder / "checkpoints" / "lineage"
    lineage.mkdir(parents=True, exist_ok=True)
    with gzip.open(lineage / f"step_{step}-a.jsonl.gz", "wb") as file:
        file.write(b"".join(msgspec.json.encode(each) + b"\n" for each in (header, *groups)))


def _sample(group: str, index: int, step: int, text: str) -> dict[str, Any]:
    return {
        "group": group,
        "task": "sums",
        "index": index,
        "attempt": 1,
        "environment": "math",
        "build": "new",
        "rewards": float(index),
        "components": {text: 1.0},
        "finish_reason": "stop",
        "spans": [[step, 0, 2]],
        "replica": REPLICA,
        "messages": [{"role": "user", "content": text}],
        "extra_env_info": {"answer": text},
        "content": text,
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [5, 6],
        "generation_logprobs": [-0.5, None],
        "advantages": [0.25, None],
        "token_losses": [-0.00025, 0.00075],
        "step": step,
        "metadata": {"judge": text},
        **(_episode(text) if index == 1 else {}),
    }


def _episode(text: str) -> dict[str, Any]:
    """What a sample has more if its trajectory was an episode of one call."""
    call = {
        "parent": -1,
        "context_token_ids": [1, 2],
        "context_token_texts": ["a", text],
        "tokens": [0, 2],
        "trained": True,
        "finish_reason": "stop",
        "replica": REPLICA,
        "messages": [{"role": "user", "content": text}],
        "answer": {"role": "assistant", "content": text},
        "timings": {"generation": 0.5},
    }
    return {"calls": [call], "artifacts": {text: text}, "token_texts": ["x", text], "clipped": [0, 1]}


def _history(folder: Path, text: str) -> None:
    """The events of the trained groups, of one that was filtered and one that failed, and of a validation."""
    events: list[dict[str, Any]] = []

    def add(seconds: float, group: str, what: str, **fields: Any) -> None:
        moment = int((START + seconds) * 1000)
        events.append(
            {"id": f"{moment}-{len(events)}", "part": 0, "time": moment, "group": group, "what": what, **fields}
        )

    def begin(seconds: float, group: str, order: int, lane: str = "train", n: int = SAMPLES) -> None:
        messages = json.dumps([{"role": "user", "content": text}])
        about = {
            "lane": lane,
            "order": order,
            "epoch": 0,
            "n": n,
            "environment": "math",
            "task": "sums",
            "prompt": text,
        }
        add(
            seconds, group, "enqueued", **about, messages=messages, expected="2", file="data/sums.jsonl", line=order + 1
        )
        add(seconds + 1, group, "leased", replica=REPLICA, attempt=1)

    def generate(seconds: float, group: str, rewards: Sequence[float], version: int) -> None:
        for index in range(len(rewards)):
            about = {"index": index, "attempt": 1, "tokens": 2, "oldest": version, "newest": version}
            add(seconds + 2 + index / 10, group, "pushed", **about)
        add(seconds + 2.5, group, "scoring")
        for index, reward in enumerate(rewards):
            add(seconds + 3 + index / 10, group, "scored", index=index, attempt=1, reward=reward, build="new")

    for step in range(STEPS):
        for place in range(PROMPTS):
            group, seconds = _group(step, place), 10.0 * step
            begin(seconds, group, step * PROMPTS + place)
            generate(seconds, group, [0.0, 1.0, 2.0], step)
            add(seconds + 4, group, "ready")
            add(seconds + 5, group, "reserved", step=step)
            add(seconds + 9, group, "trained", step=step, timeline="a")
    begin(50, "0-90", 90)
    generate(50, "0-90", [1.0, 1.0, 1.0], 5)
    add(55, "0-90", "filtered", reason="equal rewards")
    begin(50, "0-91", 91)
    add(56, "0-91", "failed", reason=f"the environment says {text}")
    begin(60, "validation-0", 0, "validation", 1)
    generate(60, "validation-0", [0.5], STEPS)
    add(64, "validation-0", "evaluated", step=STEPS)
    names = [name for name in group_files.COLUMNS if any(name in event for event in events)]
    events.sort(key=lambda event: event["time"])
    group_files.write_file(folder, {name: [event.get(name) for event in events] for name in names})
