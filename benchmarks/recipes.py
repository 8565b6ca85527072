"""Every recipe in `examples/*_arithmetic.yaml` as `headrace up` runs it, with several seeds: rewards against steps, in one picture.

    python -m benchmarks.recipes --model models/tiny [--seeds 3] [--recipe NAME …] [--teacher DIR] [--jobs 1] [--out DIR] [KEY=VALUE …]

Each run is the whole pipeline with the recipe's own steps, sizes and age bound; only the seed, the model's path and the ports are set,
and whatever KEY=VALUE says. Rewards are shares of the largest that an answer can have: that is accuracy, but for GDPO, whose environment
also rewards digits. Distillation needs a teacher, and is left out without one. What has been measured is kept in
`recipes.json` in DIR; a run found there is not run again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.curves import dress, gather, kept, model_folder
from benchmarks.peer import free_port, run

EXAMPLES = Path(__file__).parent.parent / "examples"
BASE = "grpo"  # the recipe that the others build on
DISTILLATION = "opd"
REWARD, ACCURACY = "#4477aa", "#cc6677"
COLUMNS = 3
# What an answer is worth at most, where it isn't 1: a point for the sum and one for being a number.
LARGEST = {"gdpo": 2.0}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run: (step, mean training reward) and (version, greedy accuracy on the held-out problems)."""

    recipe: str
    seed: int
    rewards: tuple[tuple[int, float], ...]
    accuracies: tuple[tuple[int, float], ...]

    def shares(self, values: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
        """Of the largest reward that an answer can have."""
        return tuple((step, value / LARGEST.get(self.recipe, 1.0)) for step, value in values)

    def line(self) -> str:
        accuracies = self.shares(self.accuracies)
        (_, first), (last, end) = accuracies[0], accuracies[-1]
        return f"{self.recipe}, seed {self.seed}: held-out reward {first:.2f} -> {end:.2f} at step {last}"


def recipes() -> dict[str, Path]:
    """Configurations by the recipe's name, the base first."""
    others = sorted(EXAMPLES.glob("*_arithmetic.yaml"))
    return {
        BASE: EXAMPLES / "arithmetic_tiny.yaml",
        **{path.stem.removesuffix("_arithmetic"): path for path in others},
    }


def main() -> None:
    known = recipes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, required=True, help="what `headrace model tiny` wrote")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--recipe", action="append", choices=list(known), help="only this one; may be given several times"
    )
    parser.add_argument(
        "--teacher", type=Path, help="what `opd` learns from: a checkpoint's policy/ of the base recipe"
    )
    parser.add_argument("--jobs", type=int, default=1, help="pipelines at a time, about two cores each")
    parser.add_argument("--out", type=Path, default=Path("runs") / "recipes")
    parser.add_argument("override", nargs="*", metavar="KEY=VALUE", help="changes every run")
    arguments = parser.parse_args()
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / "recipes.json"
    curves = [Curve(c["recipe"], c["seed"], _pairs(c["rewards"]), _pairs(c["accuracies"])) for c in kept(results)]
    done = {(curve.recipe, curve.seed) for curve in curves}
    chosen = arguments.recipe or [name for name in known if name != DISTILLATION or arguments.teacher]
    if DISTILLATION in chosen and not arguments.teacher:
        parser.error(f"--recipe {DISTILLATION} needs --teacher")
    overrides = list(arguments.override)
    # seed by seed: an interrupted benchmark has something of every recipe
    wanted = [(name, seed) for seed in range(arguments.seeds) for name in chosen if (name, seed) not in done]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        running = [
            pool.submit(
                measure,
                name,
                known[name],
                arguments.model,
                seed,
                [f"grpo.adv_estimator.teacher_model_name={arguments.teacher}", *overrides]
                if name == DISTILLATION
                else overrides,
            )
            for name, seed in wanted
        ]
        gather(running, curves, results, draw, console)
    console.print(table(curves))


def _pairs(values: Iterable[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(step), float(value)) for step, value in values)


def measure(recipe: str, config: Path, model: Path, seed: int, overrides: Sequence[str]) -> Curve:
    section = "ppo" if recipe in ("ppo", "vapo") else "grpo"
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        words = [
            f"run.dir={folder}",
            "run.id=recipe",
            f"policy.model_name={model}",
            f"{section}.seed={seed}",
            "checkpointing.save_period=1000000",
            f"replay.redis_port={free_port()}",
            "replay.port=0",
            f"reward.port={free_port()}",
            *overrides,
        ]
        run([sys.executable, "-m", "headrace.cli", "up", str(config), *words], dict(os.environ))
        journal = (Path(folder) / "recipe" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in journal]
    return Curve(
        recipe,
        seed,
        _pairs((line["step"], line["metrics"]["environment_reward"]) for line in lines if line["kind"] == "train"),
        _pairs((line["step"], line["metrics"]["accuracy"]) for line in lines if line["kind"] == "validation"),
    )


def draw(curves: Sequence[Curve], path: Path) -> None:
    """A panel a recipe: each seed pale, the mean of the seeds strong."""
    names = [name for name in recipes() if any(curve.recipe == name for curve in curves)]
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 3 * rows), dpi=130, layout="constrained")
    panels = figure.subplots(rows, COLUMNS, sharey=True, squeeze=False).ravel()
    for name, axes in zip(names, panels, strict=False):
        panel(axes, name, [curve for curve in curves if curve.recipe == name])
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    panels[0].legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path)


def panel(axes: Axes, name: str, mine: Sequence[Curve]) -> None:
    for curve in mine:
        axes.plot(*zip(*curve.shares(curve.rewards), strict=True), color=REWARD, lw=0.7, alpha=0.3)
        axes.plot(*zip(*curve.shares(curve.accuracies), strict=True), color=ACCURACY, lw=0.7, alpha=0.3)
    rewards = mean([curve.shares(curve.rewards) for curve in mine])
    accuracies = mean([curve.shares(curve.accuracies) for curve in mine])
    axes.plot(*rewards, color=REWARD, lw=1.5, label="training, sampled")
    axes.plot(*accuracies, color=ACCURACY, lw=2, marker="o", ms=3, label="held-out, greedy")
    dress(axes, f"{name.replace('_', ' ')} ({len(mine)} {'seed' if len(mine) == 1 else 'seeds'})")


def mean(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[float]]:
    """Of the steps that every seed has."""
    by_step = [dict(curve) for curve in curves]
    shared = sorted(set(by_step[0]).intersection(*by_step[1:]))
    return shared, [statistics.fmean(curve[step] for curve in by_step) for step in shared]


def table(curves: Sequence[Curve]) -> Table:
    made = Table(
        title="mean reward of greedy answers to 400 held-out sums: mean and range over seeds", title_justify="left"
    )
    for heading in ("recipe", "seeds", "before", "step 10", "step 20", "end", "steps"):
        made.add_column(heading, justify="left" if heading == "recipe" else "right")
    for name in recipes():
        mine = [curve for curve in curves if curve.recipe == name]
        if not mine:
            continue
        at = [dict(curve.shares(curve.accuracies)) for curve in mine]
        last = max(at[0])
        cells = [spread([curve[step] for curve in at if step in curve]) for step in (0, 10, 20, last)]
        made.add_row(name, str(len(mine)), *cells, str(last))
    return made


def spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
