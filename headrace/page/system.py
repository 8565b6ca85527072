"""What a run was started with, and what its services logged."""

from __future__ import annotations

import heapq
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from headrace.base.errors import CodecError
from headrace.config.compare import flatten
from headrace.config.explain import known_keys, pattern
from headrace.config.in_yaml import without_password
from headrace.page.run_files import RunFiles, check_file
from headrace.run.folder import SAVED, resume_hint
from headrace.run.start import name_origin

LOGS = (
    "logs"  # in the run's folder, whatever `logger.log_dir` is: `headrace up` writes the output of the services there
)
_SUFFIXES = (".log", ".log.1")
_BLOCK = 1 << 18
# Bytes of one log that a request reads at most, from its end.
MOST_BYTES = 64 << 20
_LONGEST_TEXT = 20_000
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,(\d{3}))? (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)", re.DOTALL)


def describe_system(run: RunFiles) -> dict[str, Any]:
    """Return how a run was last started, its configuration, key by key, and its logs. Raises as `RunFiles.config` does, and `CodecError`
    for a record of its start that can't be read."""
    config, started = run.config, run.start
    saved = str(run.folder / SAVED)

    def describe(key: str, value: Any) -> dict[str, Any]:
        if started is None:  # only the saved configuration is known
            place, origin = saved, "default" if _is_default(key, value) else "file"
        else:
            place = started.origins.get(key, "")
            origin = name_origin(place)
        return {"key": key, "value": masked(value), "origin": origin, "file": place}

    return {
        "command": resume_hint(config) if started is None else started.command,
        "continues": resume_hint(config),
        "versions": {} if started is None else started.versions,
        "git": None if started is None or started.git is None else msgspec.to_builtins(started.git),
        "started_in": config.run.started_in,
        "config": [describe(key, value) for key, value in flatten(config.show())],
        "logs": [{"name": path.name, "bytes": path.stat().st_size} for path in _logs(run)],
    }


def masked(value: Any) -> Any:
    """Return the value of a key of a configuration without the password of an address."""
    return without_password(value) if isinstance(value, str) else value


def _is_default(key: str, value: Any) -> bool:
    field = known_keys().get(pattern(tuple(key.split("."))))
    if field is None or field.is_required():
        return False
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        default = default.model_dump(mode="json")
    return bool(json.loads(json.dumps(default, default=str)) == value)


def _logs(run: RunFiles) -> list[Path]:
    """Return the logs of the services. Raises `CodecError` for one that is a link out of the run's folder, or no file."""
    paths = sorted(path for path in (run.folder / LOGS).glob("*.log*") if path.name.endswith(_SUFFIXES))
    return [check_file(path, run.folder) for path in paths]


def read_logs(
    run: RunFiles,
    service: str | None = None,
    level: str | None = None,
    text: str = "",
    before: float | None = None,
    limit: int = 200,
) -> dict[str, Any]:
    """Return the newest `limit` records of the logs, the newest last, in the order of their times: those of one service, of one level, with
    `text` in them ignoring case, and older than `before`. `more` tells whether there are older ones. All records of the oldest time are
    returned, so `before` that time continues. Raises `CodecError`."""
    by_service: dict[str, list[Path]] = {}
    for path in _logs(run):
        by_service.setdefault(path.name.partition(".log")[0], []).append(path)
    streams = [_records(name, paths) for name, paths in by_service.items() if service is None or name == service]
    wanted = (
        record
        for record in heapq.merge(*streams, key=lambda record: -record["time"])
        if (before is None or record["time"] < before)
        and (level is None or record["level"] == level)
        and text.casefold() in record["text"].casefold()
    )
    found = list(itertools.islice(wanted, limit))
    more = False
    for record in wanted:
        if not found or record["time"] != found[-1]["time"] or len(found) >= 2 * limit:
            more = True
            break
        found.append(record)
    return {"lines": found[::-1], "more": more}


def _records(service: str, paths: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the records of a service's logs, the newest first. A line without a time belongs to the one before: that of a traceback, or
    what a library printed."""
    followers: list[str] = []
    for path in sorted(paths, key=lambda path: path.name.endswith(".1")):
        modified = path.stat().st_mtime
        for line in _backwards(path):
            match = _LINE.fullmatch(line)
            if match is None:
                followers.append(line)
                continue
            moment = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + int(match[2] or 0) / 1000
            said = "\n".join([match[4], *reversed(followers)])
            followers = []
            yield {"time": moment, "service": service, "level": match[3], "text": said[:_LONGEST_TEXT]}
    if followers:  # nothing in it has a time
        said = "\n".join(reversed(followers[-1000:]))
        yield {"time": modified, "service": service, "level": "INFO", "text": said[:_LONGEST_TEXT]}


def _backwards(path: Path) -> Iterator[str]:
    """Yield the lines of a file, the last one first: at most its last `MOST_BYTES`."""
    try:
        with path.open("rb") as file:
            place = file.seek(0, 2)
            end, rest = place, b""
            while place > 0 and end - place < MOST_BYTES:
                start = max(place - _BLOCK, 0)
                file.seek(start)
                first, *whole = (file.read(place - start) + rest).split(b"\n")
                for line in reversed(whole):
                    if line:
                        yield line.decode(errors="replace")
                # one line without an end must not grow for ever
                rest, place = first[-_LONGEST_TEXT * 4 :], start
            if rest:
                yield rest.decode(errors="replace")
    except OSError as error:
        raise CodecError(f"{path} can't be read ({error.strerror})") from error
