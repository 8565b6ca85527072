"""The list of runs, and two or more of them side by side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.base.errors import HeadraceError
from headrace.config.compare import diff, is_own
from headrace.page.metric_series import thin_out
from headrace.page.run_files import NotHere, RunFiles, RunFolder
from headrace.page.system import masked
from headrace.run.headlines import seconds_per_step
from headrace.run.history import RunHistory, parse_metric

SPARK_POINTS = 60
# Newest steps whose median tells how long a step takes.
_TIMED = 200

_log = logging.getLogger("headrace.page")


def list_runs(folder: RunFolder) -> dict[str, Any]:
    """Return all runs, those that were started last first. One that can't be read is a row that says why."""
    rows = [_describe_anyhow(folder, name) for name in folder.names()]
    rows.sort(key=lambda row: -(row["started"] or 0.0))
    folder.bound_memory()
    return {"folder": str(folder.folder), "runs": rows}


def _describe_anyhow(folder: RunFolder, name: str) -> dict[str, Any]:
    try:
        run = folder.find(name)
        with run.lock:
            return describe_run(run)
    except (HeadraceError, OSError) as error:
        return _unreadable(name, str(error))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the other runs can be shown
        _log.exception("run %s can't be described", name)
        return _unreadable(name, f"it can't be read ({type(error).__name__}: {error})")


def describe_run(run: RunFiles) -> dict[str, Any]:
    """Return the row of a run. Raises as `RunFiles.history` does, and `OSError`."""
    past = run.history
    config, last = past.config, past.last_step
    best = past.best()
    seconds = seconds_per_step([line.metrics for line in past.lines if line.kind == "train"][-_TIMED:])
    left = config.algorithm.max_num_steps - (0 if last is None else last + 1)
    return {
        "id": run.name,
        "state": past.state,
        "reason": past.reason,
        "started": past.started,
        "since": past.since,
        "step": None if last is None else last + 1,
        "max_steps": config.algorithm.max_num_steps,
        "seconds_per_step": seconds,
        "eta_s": left * seconds if seconds is not None and past.state == "running" else None,
        "best": None if best is None else {"metric": best.metric, "step": best.step, "value": best.value},
        "spark": _spark(run, past),
        "collapse": str(found) if (found := run.journal.collapse) else None,
        "error": None,
        "environments": sorted(config.env),
        "model": config.policy.model_name,
        "algorithm": config.algorithm.name,
    }


def _spark(run: RunFiles, past: RunHistory) -> dict[str, Any]:
    """Return a small curve of the metric that `best` is of."""
    best = past.best()
    name = best.metric if best is not None else "train:reward"
    kind, metric = parse_metric(name, past.lines)
    columns = run.journal.columns[kind]
    values, present = columns.values(metric)
    shown = present & np.isfinite(values)
    steps, means, _, _ = thin_out(columns.steps[shown], values[shown], SPARK_POINTS)
    return {"metric": name, "points": [[step, value] for step, value in zip(steps, means, strict=True)]}


def _unreadable(name: str, why: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("started", "since", "step", "max_steps", "seconds_per_step", "eta_s", "best", "collapse"))
    spark: dict[str, Any] = {"metric": "", "points": []}
    unknown: dict[str, Any] = {
        "id": name,
        "state": "unknown",
        "reason": "",
        "environments": [],
        "model": "",
        "algorithm": None,
    }
    return {**unknown, **nothing, "spark": spark, "error": why}


def compare_runs(folder: RunFolder, names: Sequence[str]) -> dict[str, Any]:
    """Return these runs, and the keys in which their configurations differ. Raises `NotHere`, and as `describe_run` does."""
    if len(names) < 2:
        raise NotHere("give two runs or more to compare, as run=A&run=B")
    rows, configs = [], []
    for name in names:
        run = folder.find(name)
        with run.lock:
            rows.append(describe_run(run))
            configs.append(run.config)
    values: dict[str, list[Any]] = {}
    first = configs[0]
    for place, other in enumerate(configs[1:], start=1):
        for change in diff(first, other):
            if not is_own(change.key):
                of_key = values.setdefault(change.key, [change.before] * len(configs))
                of_key[place] = change.after
    shown = [{"key": key, "values": [masked(value) for value in of_key]} for key, of_key in values.items()]
    return {"runs": rows, "differences": shown}
