"""The samples of a trainer's batches and validations, as lines of its sample files (`headrace.samples`); a few of them are printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from headrace.printable import printable
from headrace.samples import StoredSample, record, rounded
from headrace.trajectory import AnyTrajectory, Float32, Score
from headrace.trajectory import Group as TrajectoryGroup
from headrace_services.trainer.data import Problem
from headrace_services.trainer.learning.batch import Batch, Float64


def over_completion(batch: Batch, i: int, values: npt.NDArray[Any] | None) -> Float32:
    """Spread a column `values` [N] over the completion of trajectory `i` (of an episode: `EpisodeTrajectory.flat`), [T]: its values at
    policy tokens, NaN elsewhere, all NaN without a column."""
    trajectory = batch.trajectories[i]
    whole = np.full(trajectory.flat().loss_mask.size, np.nan, dtype=np.float32)
    if values is not None:
        whole[trajectory.places] = values[batch.span_of(i)]
    return whole


def training_record(step: int, group: TrajectoryGroup, batch: Batch, i: int) -> dict[str, Any]:
    """A line of `train_data_step<N>`, trajectory `i` of the batch, with NeMo RL's names where it has them."""

    def column(values: Float32 | Float64 | None) -> list[float] | None:
        whole = None if values is None else over_completion(batch, i, values)
        return None if whole is None or np.isnan(whole).all() else rounded(whole)

    return {
        "step": step,
        **record(group, batch.trajectories[i], batch.scores[i]),
        "total_reward": float(batch.rewards[i]),
        "sample_loss_mask": float(batch.multipliers[i]),
        "token_loss_mask": (over_completion(batch, i, batch.mask) == 1).astype(int).tolist(),
        "advantages": rounded(over_completion(batch, i, batch.advantages)),
        "prev_logprobs": column(batch.old_logprobs),
        "reference_policy_logprobs": column(batch.ref_logprobs),
        "teacher_logprobs": column(batch.teacher_logprobs),
    }


def validation_record(version: int, group: TrajectoryGroup, trajectory: AnyTrajectory, score: Score) -> dict[str, Any]:
    """A line of `val_data_step<N>`."""
    return {
        "step": version,
        **record(group, trajectory, score),
        "token_loss_mask": trajectory.flat().loss_mask.tolist(),
    }


def failure_record(version: int, id_: str, asked: TrajectoryGroup | Problem, reason: str) -> dict[str, Any]:
    """A line of `val_failed_data_step<N>`: what was asked under this id has no score."""
    return {
        "step": version,
        "group": id_,
        "task": asked.task_name,
        "environment": asked.env_name,
        "messages": asked.messages,
        "reason": reason,
    }


def choose(samples: Sequence[StoredSample], count: int) -> list[StoredSample]:
    """The `count` samples to show, best first: half have the highest rewards, half the lowest; with an odd count, one is from the
    middle."""
    order = sorted(samples, key=lambda sample: -_reward(sample))
    if len(order) <= count:
        return order
    half, odd = divmod(count, 2)
    middle = [order[len(order) // 2]] if odd else []
    return [*order[:half], *middle, *order[len(order) - half :]]


def show(console: Console, title: str, samples: Sequence[StoredSample]) -> None:
    """Print a coloured block for each sample on a terminal, plain text elsewhere."""
    for place, sample in enumerate(samples, start=1):
        colour = "green" if _reward(sample) > 0 else "red"
        reward = Text.assemble((f"reward {_reward(sample):g}", colour), f"  {_note(sample)}")
        prompt, content = (printable(text, keep="\n\t") for text in (sample.prompt, sample.said))
        block = Group(Text(prompt, style="dim"), Text(content, style="bold"), reward)
        heading = f"{title}, {place} of {len(samples)}"
        console.print(Panel(block, title=heading, title_align="left", border_style=colour))


def as_markdown(samples: Sequence[StoredSample]) -> str:
    """The samples as Markdown, for a tracker. Texts are indented, so that Markdown in a completion is shown literally."""
    return "\n\n---\n\n".join(
        f"**reward {_reward(sample):g}** ({_note(sample)})\n\n"
        + "\n\n".join(textwrap.indent(text, "    ", lambda _: True) for text in (sample.prompt, sample.said))
        for sample in samples
    )


def _reward(sample: StoredSample) -> float:
    assert sample.reward is not None  # law 7: a group without a reward is never evaluated
    return sample.reward


def _note(sample: StoredSample) -> str:
    end = "cut off" if sample.truncated else "ended"
    return printable(f"{sample.task}, {len(sample.token_ids)} tokens, {end}, {sample.group}")
