"""Shows how a run goes on: in a notebook as a picture that is redrawn, elsewhere as a line for each step."""

from __future__ import annotations

import dataclasses
import html
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.cli.display import LineDisplay
from headrace.run.headlines import accuracy_name
from headrace.run.history import Metric, RunHistory, values
from headrace.run.journal import Line, iter_from, size, surviving

_REDRAW_S = 2.0
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 360, 150, 48, 24, 20
_POINTS = 300
_DRAWN: tuple[Metric, ...] = (("train", "reward"), ("validation", "accuracy"))


class ProgressDisplay:
    """Shows what is new in the journal of a run that is up."""

    def __init__(
        self, journal: Path, summarize: Callable[[RunHistory], str], broken: Callable[[], Sequence[str]]
    ) -> None:
        """`broken` returns what the run waits for; `summarize` tells it too."""
        self._journal, self._summarize, self._broken = journal, summarize, broken
        self._told: Sequence[str] = ()
        self._lines: list[Line] = []
        self._handle = _open_display()
        # lines that an earlier start wrote are in a picture, and not shown again as text
        self._read = 0 if self._handle else size(journal)
        self._console = None if self._handle else LineDisplay(Console(soft_wrap=True))
        if self._console is not None:
            self._console.print(
                f"run {journal.parent.name} is in {journal.parent}; `headrace page {journal.parent}` shows it"
            )
        self._drawn_at = -math.inf

    def update(self, outline: RunHistory) -> None:
        """Show what is new. `outline` has the run's state."""
        new = [*iter_from(self._journal, self._read)]
        self._read = new[-1][1] if new else self._read
        if self._console is not None:
            for line, _ in new:
                if line.kind in ("train", "validation"):
                    self._console.metrics(line.kind, line.step, line.metrics)
            before, self._told = self._told, self._broken() if outline.state == "running" else ()
            for sentence in self._told:
                if sentence not in before:
                    self._console.print(sentence)
            return
        self._lines += (line for line, _ in new)
        is_last = outline.state != "running"
        if is_last or time.monotonic() >= self._drawn_at + _REDRAW_S:
            self._drawn_at = time.monotonic()
            kept = surviving(self._lines)
            past = dataclasses.replace(outline, lines=kept)
            title = f"run {past.config.run_folder.name}: {self._summarize(past)}"
            self._handle.update(_Html(draw(title, kept)))


class _Html:
    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text


def _open_display() -> Any:
    """Return the handle of a picture in the notebook whose cell this is; None elsewhere."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return display(_Html(""), display_id=True)


def draw(title: str, lines: Sequence[Line]) -> str:
    """Return HTML with the title, and the curves of the rewards and of the validations below it."""
    newest = next((line.metrics for line in reversed(lines) if line.kind == "validation"), {})
    names = {"reward": "reward", "accuracy": f"validation {accuracy_name(newest)}"}
    curves = [_curve(names[metric[1]], values(lines, metric)) for metric in _DRAWN]
    return f"<div>{html.escape(title)}</div>{''.join(curves)}"


def _curve(name: str, by_step: Mapping[int, float]) -> str:
    """Return a curve as SVG; nothing without two points. Of many points, each shown one is the mean of its neighbours."""
    finite = [(step, value) for step, value in sorted(by_step.items()) if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    share = -(-len(finite) // _POINTS)
    parts = [finite[start : start + share] for start in range(0, len(finite), share)]
    points = [(math.fsum(x for x, _ in part) / len(part), math.fsum(y for _, y in part) / len(part)) for part in parts]
    (first, *_), (last, *_) = finite[0], finite[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = (x - first) / (last - first) * (_WIDTH - _LEFT - 8)
        up = (y - low) / (high - low) if high > low else 0.5
        return f"{_LEFT + across:.1f},{_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    def text(x: int, y: int, anchor: str, what: str) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor">{html.escape(what)}</text>'

    marks = [
        text(_LEFT, 14, "start", f"{name} {finite[-1][1]:.4g}"),
        text(_LEFT - 6, _TOP + 4, "end", f"{high:.3g}"),
        text(_LEFT - 6, _HEIGHT - _BOTTOM, "end", f"{low:.3g}"),
        text(_LEFT, _HEIGHT - 4, "start", str(first)),
        text(_WIDTH - 8, _HEIGHT - 4, "end", f"step {last}"),
    ]
    line = " ".join(place(*point) for point in points)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(name)}">'
        f'{"".join(marks)}<polyline fill="none" stroke="#2a6fdb" stroke-width="1.5" points="{line}"/></svg>'
    )
