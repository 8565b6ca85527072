"""The report: what was found beside what was expected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.rows import Expected, Row


@dataclasses.dataclass(frozen=True)
class PartReport:
    """`problem` is why a part has no more rows, None if it came to its end."""

    name: str
    expected: tuple[Expected, ...]
    rows: tuple[Row, ...]
    problem: str | None


def write(folder: Path, about: Mapping[str, str], reports: Sequence[PartReport]) -> None:
    """`report.md` and `report.json`."""
    (folder / "report.md").write_text(markdown(about, reports))
    found = {"about": dict(about), "parts": [dataclasses.asdict(report) for report in reports]}
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")


def markdown(about: Mapping[str, str], reports: Sequence[PartReport]) -> str:
    """What was expected and has no figure says why it has none."""
    lines = ["# On a GPU: measured, and expected", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    if (about["device"], about["size"]) != ("cuda", "full"):
        lines += ["", "**No figure here says anything about a GPU**: what is expected is of one H100 at size `full`."]
    for report in reports:
        lines += ["", f"## {report.name}", ""]
        if report.problem:
            lines += [report.problem, ""]
        lines += ["| what | measured | limit, same run | expected on an H100, not measured | from |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        expected = {row.what: row for row in report.expected}
        for row in report.rows:
            known = expected.pop(row.what, None)
            lines.append(
                _cells(row.what, row.measured, row.limit, *((known.figure, known.source) if known else ("", "")))
            )
        absent = report.problem or "not run on this device"
        lines += [_cells(row.what, absent, "", row.figure, row.source) for row in expected.values()]
    return "\n".join(lines) + "\n"


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
