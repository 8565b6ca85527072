"""What `benchmarks.fleet` found, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

# Of lengths in tokens.
EDGES = np.geomspace(16.0, 4096.0, 41)


def histogram(lengths: Sequence[float]) -> list[float]:
    counts, _ = np.histogram(lengths, EDGES)
    return [float(count) for count in counts / max(1, counts.sum())]


ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("trainer busy", lambda r: f"{r['utilisation']:.2f}"),
    ("groups dropped (over age)", lambda r: f"{r['dropped_share']:.1%}"),
    ("tokens masked", lambda r: f"{r['masked_share']:.1%}"),
    ("length bias of what is trained", lambda r: f"{r['length_bias']:+.1%}"),
    ("groups leased at the end", lambda r: f"{r['in_flight']:,}"),
    (
        "age of what counts: bound, largest",
        lambda r: f"{r['age_bound']}, {max(map(int, r['age_of_tokens_that_count']))}",
    ),
    ("age of groups: mean, largest", lambda r: "{:.1f}, {}".format(*_mean_and_most(r["age_of_groups"]))),
    ("server: CPU s a step", lambda r: f"{r['server_cpu_s_per_step']:.2f}"),
    ("server: share of a core while it ran", lambda r: f"{r['server_cpu_share']:.2f}"),
    ("server: commands a step", lambda r: f"{r['server_calls_per_step']:,.0f}"),
    (
        "server: MB in, out a step",
        lambda r: f"{r['server_bytes_in_per_step'] / 1e6:.1f}, {r['server_bytes_out_per_step'] / 1e6:.1f}",
    ),
    ("server: MB held at the end", lambda r: f"{r['server_memory_bytes'] / 1e6:.0f}"),
    ("seconds it ran", lambda r: f"{r['wall_s']:.0f}"),
)


def _mean_and_most(ages: dict[Any, int]) -> tuple[float, int]:
    total = sum(ages.values())
    return sum(int(age) * count for age, count in ages.items()) / total, max(map(int, ages))


def show(results: Sequence[dict[str, Any]]) -> None:
    first = results[0]
    size = f"{first['replicas']:,} replicas, {first['prompts_per_step']:,} groups of {first['generations']} a step"
    table = Table(title=f"{size}, {first['steps']} steps")
    table.add_column("")
    for result in results:
        table.add_column(result["policy"], justify="right")
    for name, cell in ROWS:
        table.add_row(name, *(cell(result) for result in results))
    table.add_section()
    for name in sorted(set().union(*(result["calls"] for result in results))):
        calls = [result["calls"].get(name) for result in results]
        cells = (f"{c['p50_ms']:.1f}, {c['p99_ms']:.1f}" if c else "" for c in calls)
        table.add_row(f"{name}: p50, p99 in ms", *cells)
    Console(width=100).print(table)


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(2, len(results), figsize=(4 * len(results), 6), squeeze=False, sharey="row")
    middle = np.sqrt(EDGES[:-1] * EDGES[1:])
    for column, result in enumerate(results):
        ages = {int(age): tokens for age, tokens in result["age_of_tokens_that_count"].items()}
        total = sum(ages.values())
        top, bottom = axes[0][column], axes[1][column]
        top.bar(list(ages), [tokens / total for tokens in ages.values()])
        top.axvline(result["age_bound"] + 0.5, color="red", linestyle=":")
        top.set(
            title=f"{result['policy']}: trainer busy {result['utilisation']:.2f}",
            xlabel="age of tokens that count, in steps",
        )
        bottom.step(middle, result["lengths_generated"], label="generated", where="mid")
        bottom.step(middle, result["lengths_trained"], label="trained", where="mid")
        bottom.set(xscale="log", xlabel="length in tokens")
    axes[0][0].set_ylabel("share of tokens")
    axes[1][0].set_ylabel("share of groups")
    axes[1][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
