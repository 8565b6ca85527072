"""What data of a known age does to learning, and what each correction does about it: held-out accuracy, in one picture.

    python -m benchmarks.staleness --model models/tiny [--seeds 3] [--age A …] [--correction NAME …] [--jobs 1] [--out FOLDER]

The job is that of `examples/arithmetic_tiny.yaml` at ten times its learning rate (1e-3), where age does harm: 32 sums x 16 completions a
step, one optimizer step each, 40 steps. Here data has exactly the age asked for, which a pipeline never gives: step t trains the
pipeline's own learner on what weights t - age answered (the initial ones before that), drawn by transformers in the same process.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from headrace.config import Config, load
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.support.sampling import Sampler, batch_of, held_out, problems

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic_tiny.yaml"
STEPS, VALIDATE = 40, 5
AGES = (0, 1, 2, 4)
RECOMPUTE = "loss_fn.prev_logprobs_source=recompute"
WEIGHED = "loss_fn.use_importance_sampling_correction=true"

# by name: what it changes in the example
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": (RECOMPUTE,),
    "clip against the generator": (),
    "truncated importance sampling": (
        RECOMPUTE,
        WEIGHED,
        "loss_fn.truncated_importance_sampling_type=tis",
        "loss_fn.truncated_importance_sampling_ratio=2",
    ),
    "icepop": (
        RECOMPUTE,
        WEIGHED,
        "loss_fn.truncated_importance_sampling_type=icepop",
        "loss_fn.truncated_importance_sampling_ratio=2",
        "loss_fn.truncated_importance_sampling_ratio_min=0.5",
    ),
    "sequence mask": (
        RECOMPUTE,
        WEIGHED,
        "loss_fn.truncated_importance_sampling_type=seq-mask-tis",
        "loss_fn.truncated_importance_sampling_ratio=1.2",
        "loss_fn.truncated_importance_sampling_ratio_min=0.8",
    ),
    "decoupled PPO, interpolated": (RECOMPUTE, "loss_fn.proximal=interpolate"),
    "probability difference mask": (
        "loss_fn.probability_difference_mask=0.2",
        "loss_fn.ratio_clip_min=1",
        "loss_fn.ratio_clip_max=1e6",
    ),
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run: (version, greedy accuracy on the held-out sums)."""

    age: int
    correction: str
    seed: int
    accuracies: tuple[tuple[int, float], ...]

    def line(self) -> str:
        return f"age {self.age}, {self.correction}, seed {self.seed}: {self.accuracies[-1][1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, required=True, help="what `headrace model tiny` wrote")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--age", type=int, action="append", help=f"in steps; by default {AGES}")
    parser.add_argument("--correction", action="append", choices=list(CORRECTIONS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs") / "staleness")
    arguments = parser.parse_args()
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / "staleness.json"  # what was measured survives an interruption
    kept = json.loads(results.read_text()) if results.exists() else []
    curves = [Curve(c["age"], c["correction"], c["seed"], tuple(map(tuple, c["accuracies"]))) for c in kept]
    done = {(curve.age, curve.correction, curve.seed) for curve in curves}
    ages, corrections = arguments.age or AGES, arguments.correction or list(CORRECTIONS)
    wanted = [(age, name, seed) for seed in range(arguments.seeds) for age in ages for name in corrections]
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(measure, arguments.model, *job) for job in wanted if job not in done]
        for measured in concurrent.futures.as_completed(running):
            curves.append(measured.result())
            console.print(curves[-1].line())
            results.write_text(json.dumps([dataclasses.asdict(each) for each in curves]))
    draw(curves, arguments.out / "staleness.png")
    console.print(table(curves))
    console.print(f"picture: {arguments.out / 'staleness.png'}")


def model_folder(text: str) -> Path:
    """An argument of the command line: a folder with a model."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"no model in {text}; make one with `headrace model tiny {text}`")
    return Path(text)


def configuration(model: Path, age: int, correction: str) -> Config:
    return load(
        EXAMPLE,
        [
            f"policy.model_name={model}",
            "policy.optimizer.kwargs.lr=1e-3",
            f"grpo.async_grpo.max_trajectory_age_steps={age}",
            *CORRECTIONS[correction],
        ],
        {},
    )


def measure(model: Path, age: int, correction: str, seed: int) -> Curve:
    config = configuration(model, age, correction)
    algorithm = config.algorithm
    learner = Learner(config)
    sampler = Sampler(model, config.policy.generation.max_new_tokens)
    versions = collections.deque([sampler.weights()], maxlen=age + 1)  # the first is what generates
    questions, asked = problems(seed, algorithm.num_prompts_per_step), held_out()
    accuracies = [(0, sampler.accuracy(asked))]
    for step in range(STEPS):
        sampler.load(versions[0])
        drawn = sampler.draw(next(questions), algorithm.num_generations_per_prompt, seed * STEPS + step)
        train_step(learner, batch_of(drawn, algorithm.num_generations_per_prompt, age=min(age, step)))
        versions.append({name: weight.clone() for name, weight in learner.policy.weights()})
        if (step + 1) % VALIDATE == 0:
            sampler.load(versions[-1])
            accuracies.append((step + 1, sampler.accuracy(asked)))
    return Curve(age, correction, seed, tuple(accuracies))


def draw(curves: Sequence[Curve], path: Path) -> None:
    """A panel an age; each correction's mean over seeds, and the range of the seeds as a band."""
    ages = sorted({curve.age for curve in curves})
    figure = Figure(figsize=(4 * len(ages), 4.2), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(ages), sharey=True, squeeze=False)[0]
    colours = dict(zip(CORRECTIONS, matplotlib.colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    for age, axes in zip(ages, panels, strict=True):
        for name, colour in colours.items():
            mine = [dict(c.accuracies) for c in curves if (c.age, c.correction) == (age, name)]
            if not mine:
                continue
            steps = sorted(mine[0])
            at = [[curve[step] for curve in mine] for step in steps]
            axes.plot(steps, [statistics.fmean(values) for values in at], color=colour, lw=1.8, label=name)
            axes.fill_between(steps, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.12, lw=0)
        axes.set_title(f"age {age}", loc="left", fontsize=11)
        axes.set_xlabel("step", fontsize=10)
        axes.set_ylim(0, 1.05)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", lw=0.8)
    panels[0].set_ylabel("held-out accuracy", fontsize=11)
    figure.legend(
        *panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=10
    )
    figure.savefig(path)


def table(curves: Iterable[Curve]) -> Table:
    curves = list(curves)
    ages = sorted({curve.age for curve in curves})
    made = Table(title=f"accuracy after {STEPS} steps: range over seeds", title_justify="left")
    made.add_column("correction")
    for age in ages:
        made.add_column(f"age {age}", justify="right")
    for name in CORRECTIONS:
        cells = []
        for age in ages:
            last = [c.accuracies[-1][1] for c in curves if (c.age, c.correction) == (age, name)]
            cells.append(f"{min(last):.2f}-{max(last):.2f}" if last else "-")
        made.add_row(name, *cells)
    return made


if __name__ == "__main__":
    main()
