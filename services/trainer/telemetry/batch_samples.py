"""The samples of a trainer's batches and validations: lines of sample files (`headrace.run.samples`), blocks on a terminal, Markdown for
trackers, and HTML without scripts for one file of groups."""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from headrace.base.files import atomic_write
from headrace.base.printable import printable
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, EpisodeTrajectory
from headrace.records.trajectory import Group as TrajectoryGroup
from headrace.run.samples import (
    MaskReason,
    SampleGroup,
    StoredSample,
    record,
    round_digits,
    round_values,
    whole_numbers,
)
from headrace.run.token_texts import TokenTexts

from ..data.sources import Problem
from .plots import html_page, safe

if TYPE_CHECKING:
    from ..learning.batch import Batch

# Tokens of a batch whose columns are made into lists together.
_TOKENS = 1 << 16
# The lists of a training sample: their names there, the batch's, and how they are rounded.
_COLUMNS: Sequence[tuple[str, str, Callable[[Any], list[Any]]]] = (
    ("advantages", "advantages", round_values),
    ("prev_logprobs", "old_logprobs", round_values),
    ("policy_logprobs", "policy_logprobs", round_values),
    ("reference_policy_logprobs", "ref_logprobs", round_values),
    ("teacher_logprobs", "teacher_logprobs", round_values),
    ("ratios", "ratios", round_values),
    ("clipped", "clipped", whole_numbers),
    ("importance_weights", "importance_weights", round_values),
    ("raw_importance_weights", "raw_importance_weights", round_values),
    ("entropies", "entropies", round_values),
    ("token_losses", "token_losses", round_digits),
    ("token_loss_gradients", "token_loss_gradients", round_digits),
    ("token_value_losses", "token_value_losses", round_digits),
    ("values", "values", round_values),
    ("returns", "returns", round_values),
)

_STYLE = """
main { display: block } section { margin-bottom: 14px } h2 { margin-bottom: 8px }
pre { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
pre { margin: 0 0 8px; max-height: 24em; overflow: auto }
.prompt { color: var(--faint) } .all { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 10px }
.wide { grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)) } .said { max-height: 32em; overflow: auto; margin-bottom: 8px }
.said pre { margin: 0; padding-left: 4ch; text-indent: -2ch; max-height: none } .said pre + .note { margin-top: 6px }
article { border: 1px solid var(--line); border-left: 3px solid #b3261e; border-radius: 6px; padding: 8px 10px }
article.good { border-left-color: #228833 } .failed { color: #b3261e }
"""


def training_records(
    step: int, groups: Sequence[TrajectoryGroup], batch: Batch, texts: TokenTexts | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the lines of `train_data_step<N>`, one for each trajectory of the batch. Names are NeMo RL's where it has them. Three of the
    lists are null if they would have no number, the others then missing."""
    for part in _parts(batch):
        columns = _list_columns(part)
        for i, trajectory in enumerate(part.trajectories):
            yield {
                "step": step,
                **record(groups[part.groups[i]], trajectory, part.scores[i], texts),
                "total_reward": float(part.rewards[i]),
                "sample_loss_mask": float(part.multipliers[i]),
                **dict.fromkeys(("prev_logprobs", "reference_policy_logprobs", "teacher_logprobs")),
                **{name: column.over_completion(i, trajectory) for name, column in columns.items() if column.has[i]},
            }


def _parts(batch: Batch) -> Iterator[Batch]:
    """Yield the trajectories of the batch a few at a time: as lists, the columns of all of them would take gigabytes."""
    part, tokens = [], 0
    for i, length in enumerate(batch.lengths.tolist()):
        part.append(i)
        tokens += length
        if tokens >= _TOKENS or i == len(batch) - 1:
            yield batch.take(part)
            part, tokens = [], 0


@dataclasses.dataclass(frozen=True)
class _ListColumn:
    """A column [N] of a batch as lists, one for each trajectory, and whether it has a number. Tokens that the policy did not write get
    `fill`, or `untrained` in an episode."""

    values: list[list[Any]]
    has: list[bool]
    fill: float | None = math.nan
    untrained: float | None = math.nan

    def over_completion(self, i: int, trajectory: AnyTrajectory) -> list[Any]:
        """As `Batch.over_completion`."""
        own, is_episode = self.values[i], isinstance(trajectory, EpisodeTrajectory)
        size = trajectory.flat().loss_mask.size
        if len(own) == size and not is_episode:
            return own
        whole = [self.untrained if is_episode else self.fill] * size
        for place, value in zip(trajectory.places.tolist(), own, strict=True):
            whole[place] = value
        return whole


def _list_columns(batch: Batch) -> dict[str, _ListColumn]:
    """Return the lists of sample files that the batch has, by their names in these."""
    edges = [0, *np.cumsum(batch.lengths).tolist()]

    def split(values: list[Any]) -> list[list[Any]]:
        return [values[first:last] for first, last in itertools.pairwise(edges)]

    columns = {}
    for name, of_batch, rounded in _COLUMNS:
        values = getattr(batch, of_batch)
        if values is not None:
            has = (batch.sums(~np.isnan(values)) > 0).tolist()
            columns[name] = _ListColumn(split(rounded(values)), has)
    whole = [True] * len(batch)
    columns["token_loss_mask"] = _ListColumn(split(batch.mask.astype(int).tolist()), whole, 0, 0)
    if batch.mask_reasons is not None:
        others = int(MaskReason.ENVIRONMENT), int(MaskReason.UNTRAINED_CALL)
        columns["mask_reasons"] = _ListColumn(split(batch.mask_reasons.tolist()), whole, *others)
    return columns


def validation_record(
    version: int, group: TrajectoryGroup, trajectory: AnyTrajectory, score: Score, texts: TokenTexts | None = None
) -> dict[str, Any]:
    """Make a line of `val_data_step<N>`."""
    return {
        "step": version,
        **record(group, trajectory, score, texts),
        "token_loss_mask": trajectory.flat().loss_mask.tolist(),
    }


def failure_record(version: int, id_: str, asked: TrajectoryGroup | Problem, reason: str) -> dict[str, Any]:
    """Make a line of `val_failed_data_step<N>`, for the group or problem with this id that has no score."""
    return {
        "step": version,
        "group": id_,
        "task": asked.task_name,
        "environment": asked.env_name,
        "messages": asked.messages,
        "reason": reason,
    }


def choose(samples: Sequence[StoredSample], count: int) -> list[StoredSample]:
    """Return the `count` samples to show, best first: half with the highest rewards, half with the lowest. With an odd count, one is from
    the middle."""
    order = sorted(samples, key=lambda sample: -_reward(sample))
    if len(order) <= count:
        return order
    half, odd = divmod(count, 2)
    middle = [order[len(order) // 2]] if odd else []
    return [*order[:half], *middle, *order[len(order) - half :]]


def show(console: Console, title: str, samples: Sequence[StoredSample]) -> None:
    """Print a block for each sample, in colour on a terminal, as plain text elsewhere."""
    for place, sample in enumerate(samples, start=1):
        colour = "green" if _reward(sample) > 0 else "red"
        reward = Text.assemble((f"reward {_reward(sample):g}", colour), f"  {_note(sample)}")
        prompt, content = (printable(text, keep="\n\t") for text in (sample.prompt, sample.text))
        block = Group(Text(prompt, style="dim"), Text(content, style="bold"), reward)
        heading = f"{title}, {place} of {len(samples)}"
        console.print(Panel(block, title=heading, title_align="left", border_style=colour))


def as_markdown(samples: Sequence[StoredSample]) -> str:
    """Return the samples as Markdown, for a tracker. Texts are indented, so that Markdown in a completion is shown literally."""
    return "\n\n---\n\n".join(
        f"**reward {_reward(sample):g}** ({_note(sample)})\n\n"
        + "\n\n".join(textwrap.indent(text, "    ", lambda _: True) for text in (sample.prompt, sample.text))
        for sample in samples
    )


def _reward(sample: StoredSample) -> float:
    assert sample.reward is not None  # law 7: a group without a reward is never evaluated
    return sample.reward


def _note(sample: StoredSample) -> str:
    end = "cut off" if sample.truncated else "ended"
    return printable(f"{sample.task}, {len(sample.token_ids)} tokens, {end}, {sample.group}")


# -- groups as HTML -------------------------------------------------------------------------------------------------


def write_groups(path: Path, title: str, facts: Sequence[str], groups: Iterable[SampleGroup]) -> None:
    """Write one HTML file with these groups, below lines of `facts` about them."""
    head = "".join(f"<p>{safe(fact)}</p>" for fact in facts)
    page = html_page(title, f"{head}<main>{''.join(map(_section, groups))}</main>", style=_STYLE)
    with atomic_write(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


def _section(group: SampleGroup) -> str:
    mean = group.mean_reward
    note = group.task + ("" if mean is None else f", mean reward {mean:.3g} of {len(group.samples)}")
    note += "" if group.spread is None else f", spread {group.spread:.3g}"
    note += "".join(f", build {build}" for build in group.builds)
    expected = "" if group.expected is None else f"<pre><b>expected:</b> {safe(group.expected)}</pre>"
    reason = f'<pre class="failed"><b>failed:</b> {safe(group.reason)}</pre>' if group.reason else ""
    width = "all wide" if any(sample.calls for sample in group.samples) else "all"
    return (
        f'<section><h2>{safe(group.id)} <span class="note">{safe(note)}</span></h2><pre class="prompt">{safe(group.prompt)}</pre>'
        f'{expected}{reason}<div class="{width}">{"".join(map(_article, group.samples))}</div></section>'
    )


def _article(sample: StoredSample) -> str:
    worth = sample.status.lower() if sample.reward is None else f"reward {sample.reward:g}"
    notes = [f"{name} {value:g}" for name, value in sample.components.items()]
    notes += [f"{len(sample.token_ids)} tokens", *(["truncated"] if sample.truncated else [])]
    messages = "".join(f'<pre class="failed">{safe(part)}</pre>' for part in (sample.message, sample.traceback) if part)
    good = ' class="good"' if sample.reward is not None and sample.reward > 0 else ""
    return (
        f'<article{good}>{_write_text(sample)}<div class="note"><b>{safe(worth)}</b> {safe(", ".join(notes))}</div>'
        f"{messages}</article>"
    )


def _write_text(sample: StoredSample) -> str:
    calls = (
        f'<div class="note">{safe(head)}</div>' + "".join(f"<pre>{safe(part)}</pre>" for part in parts)
        for head, parts in sample.conversation
    )
    written = f'<div class="said">{"".join(calls)}</div>' if sample.calls else f"<pre>{safe(sample.content)}</pre>"
    return written + (f"<pre><b>artifacts:</b> {safe(sample.left)}</pre>" if sample.left else "")
