"""What the benchmarks of learning share: the model they start from, results that survive an interruption, how a panel looks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from rich.console import Console

C = TypeVar("C")


def model_folder(text: str) -> Path:
    """An argument of the command line: a folder with a model."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"no model in {text}; make one with `headrace model tiny {text}`")
    return Path(text)


def kept(path: Path) -> list[dict[str, Any]]:
    """What an earlier call of `gather` wrote."""
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def gather(
    running: Iterable[Future[C]], curves: list[C], path: Path, draw: Callable[[list[C], Path], None], console: Console
) -> None:
    """Add each curve (a dataclass of JSON's types) to `curves` when it is measured, write all to `path`, and draw them beside it."""
    for future in as_completed(running):
        curve: Any = future.result()
        curves.append(curve)
        console.print(curve.line())
        path.write_text(json.dumps([dataclasses.asdict(each) for each in curves]))  # type: ignore[call-overload]
        draw(curves, path.with_suffix(".png"))
    draw(curves, path.with_suffix(".png"))  # where all was measured before
    console.print(f"picture: {path.with_suffix('.png')}")


def dress(axes: Axes, title: str | None = None, below: str = "step") -> None:
    """Values from 0 to 1 over `below`."""
    if title is not None:
        axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(below, fontsize=10)
    axes.set_ylim(0, 1.05)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", lw=0.8)
    axes.set_axisbelow(True)
