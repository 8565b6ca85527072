"""How a run stands: its state, its flow of groups, where its time goes, what is amiss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.errors import HeadraceError
from headrace.page.flow_rates import per_second
from headrace.page.groups import count_groups
from headrace.page.metric_series import thin_out
from headrace.page.run_files import RunFiles, check_file
from headrace.page.run_list import describe_run
from headrace.run import findings, group_files, now
from headrace.run.checkpoints import DAMAGE, find_published, list_set_aside, read_metrics
from headrace.run.findings import PARTS, REST, TOTAL, Window
from headrace.run.headlines import ALARMS, alarms
from headrace.run.history import RunHistory
from headrace.run.journal import Kind, Line
from headrace.run.now import NOW, Now
from headrace.run.object_store import OFFERS, STATUS, list_problems

STEPS = 500  # points of the curve of a step's parts
_NEWEST_ALARMS = 100
_LARGEST_NOW, _LARGEST_DAMAGE = 64 << 20, 1 << 20


def describe(run: RunFiles, window: Window = "10") -> dict[str, Any]:
    """Return the overview of a run; shares of the time are of the window's steps. Raises as `RunFiles.history` does. What else can't be
    read is in `problems`, and the rest is answered."""
    past, problems = run.history, list[str]()
    state: Now | None = None
    try:
        if (run.folder / NOW).exists():
            state = now.read(check_file(run.folder / NOW, run.folder, _LARGEST_NOW).parent)
    except HeadraceError as error:
        problems.append(str(error))
    counts, of_groups = count_groups(run, state)
    problems += of_groups
    checkpoints: list[dict[str, Any]] = []
    try:
        problems += _of_checkpoints(past.config.checkpoint_folder)
        checkpoints = _checkpoints(past)
    except HeadraceError as error:
        problems.append(str(error))
    found, parts = _judge(run, past, window, state)
    rates: dict[str, float] = {}
    try:
        rates = _rates(run, past, window)
    except HeadraceError as error:
        problems += [str(error)] if str(error) not in problems else []
    return {
        "run": describe_run(run),
        "now": None if state is None else msgspec.to_builtins(state),
        "newest": {"train": _newest(past, "train"), "validation": _newest(past, "validation")},
        "flow": {"counts": counts, "per_s": rates},
        "time": {"parts": parts, "steps": _steps(run)},
        "findings": found,
        "alarms": _alarms(run),
        "checkpoints": checkpoints,
        "window": window,
        "problems": problems,
    }


def _judge(
    run: RunFiles, past: RunHistory, window: Window, state: Now | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the findings and the parts of a step, over the window. Those of a whole run take a while, and are computed anew for each
    hundredth of it."""
    steps = findings.in_window(past.lines, window)

    def judge() -> Any:
        found = msgspec.to_builtins(findings.find(past.lines, past.config, window, state))
        return found, _parts([line.metrics for line in findings.usual(steps)])

    return judge() if window != "all" else run.remember("judged", len(steps) * 100 // 101, len(steps), judge)


def _rates(run: RunFiles, past: RunHistory, window: Window) -> dict[str, float]:
    """Return the groups per second of the window, computed anew as steps are trained and events are written; those of a whole run for each
    hundredth of it."""
    files = group_files.list_files(run.folder / group_files.FOLDER)
    begun, newest = (files[0].first[0], max(file.last[0] for file in files)) if files else (0, 0)
    newest += past.last_step or 0
    least = newest if window != "all" else newest - (newest - begun) // 100
    return run.remember(f"rates of {window}", least, newest, lambda: per_second(run, window))


def _newest(past: RunHistory, kind: Kind) -> dict[str, Any] | None:
    line: Line | None = next((line for line in reversed(past.lines) if line.kind == kind), None)
    return None if line is None else {"step": line.step, "time": line.time, "metrics": dict(line.metrics.items())}


def _parts(steps: list[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the mean seconds of each part of a step, and its share."""
    split = [findings.split(step) for step in steps if TOTAL in step]
    if not split:
        return []
    metrics = {part.name: part.metric for part in PARTS}
    means = {name: sum(parts[name] for parts in split) / len(split) for name in split[0]}
    total = sum(means.values())
    return [
        {"name": name, "metric": metrics.get(name, TOTAL), "seconds": mean, "share": mean / total if total else 0.0}
        for name, mean in means.items()
    ]


def _steps(run: RunFiles) -> dict[str, Any]:
    """Return the parts of all steps over the run, as means of neighbours."""
    columns = run.journal.columns["train"]
    total, timed = columns.values(TOTAL)
    rest, found = total.copy(), dict[str, Any]()
    for part in PARTS:
        seconds, present = columns.values(part.metric)
        seconds = np.where(present & np.isfinite(seconds), seconds, 0.0)
        rest -= seconds
        found[part.name] = thin_out(columns.steps[timed], seconds[timed], STEPS)[1]
    found[REST] = thin_out(columns.steps[timed], np.maximum(rest, 0.0)[timed], STEPS)[1]
    return {"step": thin_out(columns.steps[timed], total[timed], STEPS)[0], **found}


def _alarms(run: RunFiles) -> list[dict[str, Any]]:
    """Return the newest alarms, the newest last."""
    columns, found = run.journal.columns["train"], list[dict[str, Any]]()
    for name in ALARMS:
        metric = f"{name}_alarm"
        values, present = columns.values(metric)
        places = np.flatnonzero(present & (values != 0))[-_NEWEST_ALARMS:]
        evidence = {"view": "metrics", "query": {"metric": [f"train:{metric}"]}}
        for place in places.tolist():
            step = int(columns.steps[place])
            texts = alarms(step, columns.metrics(place), only=(name,))
            found += [{"step": step, "name": name, "text": text, "evidence": evidence} for text in texts]
    return sorted(found, key=lambda alarm: alarm["step"])[-_NEWEST_ALARMS:]


def _of_checkpoints(folder: Path) -> list[str]:
    """Return a line about each damaged checkpoint, and about those that do not reach the store. Raises `CodecError` for a reason that no
    trainer wrote."""
    for reason in (*folder.glob(f"*/{DAMAGE}"), *folder.glob(STATUS), *folder.glob(OFFERS)):
        check_file(reason, folder, _LARGEST_DAMAGE)
    return [*list_set_aside(folder), *list_problems(folder)]


def _checkpoints(past: RunHistory) -> list[dict[str, Any]]:
    """Return the published checkpoints, oldest first, with the metric that chooses among them. Raises as `find_published` does."""
    folder, best = past.config.checkpoint_folder, past.best()
    metric = past.config.checkpointing.metric_name or (best.metric if best is not None else "")
    # a step makes the version after it, and a validation is of its version
    version_of_best = None if best is None else best.step + (0 if best.metric.startswith("val:") else 1)
    return [
        {
            "step": version,
            "kept": True,
            "metric": read_metrics(folder, version).get(metric),
            "best": version == version_of_best,
        }
        for version in find_published(folder)
    ]
