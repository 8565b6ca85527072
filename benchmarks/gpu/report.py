"""The report: one page that needs nothing else, `report.html`, and its figures, `report.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.rows import Row
from benchmarks.gpu.runner import Outcome, figure
from headrace.base.files import atomic_write
from headrace_services.trainer.telemetry.plots import html_page, safe

TITLE = "The first 40 minutes on a GPU"
# Nothing is fetched and nothing runs, whatever a log or a driver says.
POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
STYLE = """
body { max-width: 1100px; margin: 24px auto; padding: 0 16px } section { margin: 14px 0; overflow-x: auto }
table { border-collapse: collapse; width: 100%; margin-top: 6px } th { text-align: left; font-weight: 400; color: var(--faint) }
td, th { padding: 3px 14px 3px 0; vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: anywhere }
.number { white-space: nowrap; font-variant-numeric: tabular-nums } .passed { color: #228833 } .failed { color: #b3261e; font-weight: 600 }
.fixed { table-layout: fixed } .fixed th:nth-child(1) { width: 33% } .fixed th:nth-child(2) { width: 27% }
.fixed th:nth-child(4) { width: 9% }
.not-run { color: var(--faint) } pre { font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0 0 }
"""
TOY = "No figure here says anything about a GPU: this is the code's own test, at toy size or on a CPU."


def write(folder: Path, about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """`report.html` and `report.json`."""
    parts = [
        {
            "name": outcome.part.name,
            "verdict": outcome.verdict,
            "problem": outcome.problem,
            "seconds": outcome.seconds,
            "rows": [dataclasses.asdict(row) for row in outcome.rows],
        }
        for outcome in outcomes
    ]
    for name, text in (
        ("report.json", json.dumps({"about": dict(about), "parts": parts}, indent=1) + "\n"),
        ("report.html", page(about, outcomes)),
    ):
        with atomic_write(folder / name) as unfinished:
            unfinished.write_text(text)


def page(about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    toy = (about["device"], about["size"]) != ("cuda", "full")
    body = [
        f'<p class="alarm">{safe(TOY)}</p>' if toy else "",
        _section("Parts", _table(("part", "what it answers", "", "minutes", "estimate"), map(_summary, outcomes))),
        _section("Machine", _machine(about)),
        *(_section(f"{one.part.group}: {one.part.name}", _part(one), one.part.name) for one in outcomes if one.seconds),
    ]
    return html_page(TITLE, "".join(body), style=STYLE, head=POLICY)


def _summary(outcome: Outcome) -> tuple[str, ...]:
    part = outcome.part
    minutes = f"{outcome.seconds / 60:.1f}" if outcome.seconds else ""
    name = f'<a href="#{safe(part.name)}">{safe(part.name)}</a>' if outcome.seconds else safe(part.name)
    why = f"<br>{safe(outcome.problem)}" if outcome.problem else ""
    return name, _asks(part) + why, _verdict(outcome.verdict), minutes, f"{part.minutes:g}"


def _asks(part: Part) -> str:
    return safe(part.asks.replace("`", ""))


def _machine(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    facts = {name: about[name] for name in ("date", "machine", "driver", "size", "model", "weights")}
    facts |= {"versions": versions, **{f"GPU {i}": gpu for i, gpu in enumerate(about["devices"])}}
    found = _table(("", ""), ((safe(name), safe(str(value))) for name, value in facts.items()))
    if len(about["topology"]) > 1:
        head = ("", *(f"GPU {i}" for i in range(len(about["topology"]))))
        found += _table(head, ((f"GPU {i}", *map(safe, row)) for i, row in enumerate(about["topology"])))
    return found


def _part(outcome: Outcome) -> str:
    found = f'<span class="note">{_asks(outcome.part)}</span>'
    if outcome.problem:
        found += f'<p class="{_css(outcome.verdict)}">{safe(outcome.problem)}</p>'
    if outcome.rows:
        found += _table(("what", "measured", "expected, or the limit", ""), map(_row, outcome.rows), "fixed")
    if outcome.said:
        found += f'<span class="note">the end of its log</span><pre>{safe(outcome.said)}</pre>'
    return found


def _row(row: Row) -> tuple[str, ...]:
    verdict = "" if row.passed is None else _verdict("passed" if row.passed else "failed")
    short = "" if isinstance(row.measured, str) else ' class="number"'
    return safe(row.what), f"<span{short}>{safe(figure(row))}</span>", safe(row.expected), verdict


def _verdict(verdict: str) -> str:
    return f'<span class="number {_css(verdict)}">{safe(verdict)}</span>'


def _css(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _section(title: str, body: str, name: str = "") -> str:
    return f'<section id="{safe(name)}"><h2>{safe(title)}</h2>{body}</section>' if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    """Of cells that are HTML."""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    titles = "<tr>" + "".join(f"<th>{safe(title)}</th>" for title in head) + "</tr>" if any(head) else ""
    return f'<table class="{css}">{titles}{lines}</table>'
