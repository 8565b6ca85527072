"""The golden files: what the product gave when they were renewed last, and how what it gives now is compared with that.

`make golden RENEW=1` writes them anew, and shows what has changed.
"""

from __future__ import annotations

import difflib
import functools
import json
import lzma
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "kept"
RENEW = "GOLDEN_RENEW"
# Numbers may differ by so much of themselves, or of the largest in their list, on the processor that computed those that are kept; and on
# another one, whose sums run in another order.
HERE, ELSEWHERE = 1e-6, 2e-5
# A difference that is nothing but rounding, likewise: sums that nearly cancel.
NOTHING_HERE, NOTHING_ELSEWHERE = 1e-9, 1e-6
DIGITS = 8  # of a number that is kept
_NUMBERS = re.compile(r"\[[-+.\deE,\s]+\]")
_SHOWN = 60  # differences


def renewing() -> bool:
    return bool(os.environ.get(RENEW))


def check_text(name: str, text: str) -> None:
    """Byte for byte."""
    file = FOLDER / name
    old = file.read_text() if file.exists() else ""
    if old == text:
        return
    lines = difflib.unified_diff(old.splitlines(), text.splitlines(), f"{name} (kept)", f"{name} (now)", "", "", 1, "")
    _changed(file, text.encode(), list(lines))


def check_numbers(name: str, found: Any, elsewhere: float = ELSEWHERE) -> None:
    """What JSON can hold: numbers nearly equal (`HERE`, `elsewhere`), all else equal."""
    file = FOLDER / name
    kept = json.loads(file.read_text()) if file.exists() else {"processor": None, "found": None}
    same = kept["processor"] == processor()
    bounds = (HERE, NOTHING_HERE) if same else (elsewhere, NOTHING_ELSEWHERE)
    if differences := differing(kept["found"], found, *bounds):
        _changed(file, _readable({"processor": processor(), "found": found}).encode(), differences)


@functools.cache
def processor() -> str:
    """Its name, and which of its instructions torch uses."""
    import torch  # takes two seconds, which tests without numbers have no use for

    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{name[1] if name else 'unknown'}, {torch.backends.cpu.get_cpu_capability()}"


def _readable(found: Any) -> str:
    """JSON with a list of numbers in a line, and no more digits than are compared."""
    text = json.dumps(_rounded(found), indent=1, sort_keys=True)
    return _NUMBERS.sub(lambda match: f"[{' '.join(match[0][1:-1].split())}]", text) + "\n"


def _rounded(value: Any) -> Any:
    match value:
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list():
            return [_rounded(each) for each in value]
        case float():
            return float(f"{value:.{DIGITS}g}")
    return value


def check_answers(name: str, found: list[Any]) -> None:
    """Equal; in a compressed file."""
    file = FOLDER / name
    old = json.loads(lzma.decompress(file.read_bytes())) if file.exists() else None
    new = json.loads(json.dumps(found))
    if differences := differing(old, new, 0.0, 0.0):
        _changed(file, compressed(json.dumps(new, separators=(",", ":")).encode()), differences)


def compressed(content: bytes) -> bytes:
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)


def differing(old: Any, new: Any, tolerance: float, nothing: float, place: str = "") -> list[str]:
    """The places where `new` is another value than `old`, and both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = [f"{place}/{key}: gone" for key in old.keys() - new.keys()]
        found += [f"{place}/{key}: new" for key in new.keys() - old.keys()]
        for key in old.keys() & new.keys():
            found += differing(old[key], new[key], tolerance, nothing, f"{place}/{key}")
        return sorted(found)
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [f"{place}: {len(old)} entries -> {len(new)}"]
        scale = max((abs(x) for x in old if _is_number(x) and math.isfinite(x)), default=0.0)
        return [
            line
            for i, (one, other) in enumerate(zip(old, new, strict=True))
            for line in (
                _apart(one, other, tolerance, nothing, scale, f"{place}[{i}]")
                if _is_number(one) and _is_number(other)
                else differing(one, other, tolerance, nothing, f"{place}[{i}]")
            )
        ]
    if _is_number(old) and _is_number(new):
        return _apart(old, new, tolerance, nothing, 0.0, place)
    return [] if old == new and type(old) is type(new) else [f"{place}: {old!r} -> {new!r}"]


def _apart(old: float, new: float, tolerance: float, nothing: float, scale: float, place: str) -> list[str]:
    if old == new or (math.isnan(old) and math.isnan(new)):
        return []
    if abs(old - new) <= max(tolerance * max(abs(old), abs(new), scale), nothing):
        return []
    return [f"{place}: {old!r} -> {new!r}"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _changed(file: Path, content: bytes, differences: list[str]) -> None:
    more = [f"… and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
    text = "\n".join([f"{file.name}:", *differences[:_SHOWN], *more])
    if not renewing():
        raise AssertionError(f"{text}\nIf this is meant, renew it: make golden RENEW=1")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    sys.stdout.write(f"{text}\n")
