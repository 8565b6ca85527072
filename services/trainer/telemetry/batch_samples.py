"""The samples of a trainer's batches and validations: lines of sample files (`headrace.run.samples`), blocks on a terminal, Markdown for
trackers, and one HTML page without scripts, with a form that picks step, ranking and prompt."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from headrace.base.files import atomic_write
from headrace.base.printable import printable
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, EpisodeTrajectory, Float32
from headrace.records.trajectory import Group as TrajectoryGroup
from headrace.run.samples import (
    Kind,
    MaskReason,
    SampleFiles,
    SampleGroup,
    StoredSample,
    by_group,
    choose_groups,
    failed_groups,
    record,
    round_digits,
    round_values,
    whole_numbers,
)
from headrace.run.token_texts import TokenTexts
from headrace_services.trainer.data import Problem
from headrace_services.trainer.learning.batch import Batch, Float64
from headrace_services.trainer.telemetry.plots import html_page, safe

Order = Literal["stored", "best", "worst"]
Rounding = Callable[[Float32], list[Any]]

OF = "^((train|val)(-(0|[1-9][0-9]{0,9}))?|failed)$"  # `train-12`: what step 12 trained on
SHOWN = 20  # groups per page

# The kinds of samples that are shown by step. Those of `val_failed` have no completion.
_STEPS: Mapping[Kind, str] = {"train": "step", "val": "validation of version"}
_ORDERS: Mapping[Order, str] = {"stored": "in their order", "best": "best first", "worst": "worst first"}
_STYLE = """
nav, form { margin: 0 0 16px } form > * { margin-right: 10px; font: inherit }
main { display: block } section { margin-bottom: 14px } h2 { margin-bottom: 8px }
pre { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
pre { margin: 0 0 8px; max-height: 24em; overflow: auto }
.prompt { color: var(--faint) } .all { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 10px }
.wide { grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)) } .said { max-height: 32em; overflow: auto; margin-bottom: 8px }
.said pre { margin: 0; padding-left: 4ch; text-indent: -2ch; max-height: none } .said pre + .note { margin-top: 6px }
article { border: 1px solid var(--line); border-left: 3px solid #b3261e; border-radius: 6px; padding: 8px 10px }
article.good { border-left-color: #228833 } .failed { color: #b3261e }
"""


def training_record(
    step: int, group: TrajectoryGroup, batch: Batch, i: int, texts: TokenTexts | None = None
) -> dict[str, Any]:
    """Make the line of `train_data_step<N>` for trajectory `i` of the batch. Names are NeMo RL's where it has them. Without values, three
    columns are null, and those that older builds don't write are missing."""

    def column(values: Float32 | Float64 | None, rounded: Rounding = round_values) -> list[Any] | None:
        whole = None if values is None else batch.over_completion(i, values)
        return None if whole is None or np.isnan(whole).all() else rounded(whole)

    newer = {
        "policy_logprobs": column(batch.policy_logprobs),
        "ratios": column(batch.ratios),
        "clipped": column(batch.clipped, whole_numbers),
        "importance_weights": column(batch.importance_weights),
        "raw_importance_weights": column(batch.raw_importance_weights),
        "entropies": column(batch.entropies),
        "token_losses": column(batch.token_losses, round_digits),
        "token_loss_gradients": column(batch.token_loss_gradients, round_digits),
        "values": column(batch.values),
        "returns": column(batch.returns),
        "mask_reasons": None if batch.mask_reasons is None else _mask_reasons(batch, i),
    }
    return {
        "step": step,
        **record(group, batch.trajectories[i], batch.scores[i], texts),
        "total_reward": float(batch.rewards[i]),
        "sample_loss_mask": float(batch.multipliers[i]),
        "token_loss_mask": (batch.over_completion(i, batch.mask) == 1).astype(int).tolist(),
        "advantages": round_values(batch.over_completion(i, batch.advantages)),
        "prev_logprobs": column(batch.old_logprobs),
        "reference_policy_logprobs": column(batch.ref_logprobs),
        "teacher_logprobs": column(batch.teacher_logprobs),
        **{name: values for name, values in newer.items() if values is not None},
    }


def _mask_reasons(batch: Batch, i: int) -> list[int]:
    trajectory, reasons = batch.trajectories[i], batch.over_completion(i, batch.mask_reasons)
    others = MaskReason.UNTRAINED_CALL if isinstance(trajectory, EpisodeTrajectory) else MaskReason.ENVIRONMENT
    return np.where(np.isnan(reasons), others, reasons).astype(int).tolist()


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


# -- the page ---------------------------------------------------------------------------------------------------------


def render_samples(files: SampleFiles, title: str, of: str, order: Order, text: str) -> str | None:
    """Return the page, or None if no samples of the step in `of` are kept. `of` matches `OF`; without a step it is the newest. Raises
    `CodecError` for a file that can't be read."""
    number = of.partition("-")[2]
    kind: Kind = "val" if of.startswith("val") else "train"
    kept = {each: files.steps(each) for each in _STEPS}
    if of == "failed":
        what, groups = "failed groups", failed_groups(files.read_failed())
    elif number == "" and not kept[kind]:
        what, groups = f"{_STEPS[kind]}: none yet", []
    else:
        step = int(number) if number else kept[kind][-1]
        if step not in kept[kind]:
            return None
        of, what = f"{kind}-{step}", f"{_STEPS[kind]} {step}"
        groups = by_group(files.samples(kind, step))
    found = choose_groups(groups, None if order == "stored" else order, text, len(groups))
    count = f"{len(found)} groups" + (f", {SHOWN} of them shown" if len(found) > SHOWN else "")
    choices = [
        (f"{each}-{step}", f"{_STEPS[each]} {step}") for each in kept for step in sorted(kept[each], reverse=True)
    ]
    form = (
        '<nav><a href="/">curves</a> · samples</nav><form action="/samples" method="get">'
        + _select("of", [*choices, ("failed", "failed groups")], of)
        + _select("order", _ORDERS.items(), order)
        + f'<input name="text" value="{safe(text)}" placeholder="text in the prompt"><button>show</button></form>'
    )
    main = f"<p>{what}: {count}</p><main>{''.join(map(_section, found[:SHOWN]))}</main>"
    return html_page(f"{title}, samples", form + main, style=_STYLE, heading=title)


def write_groups(path: Path, title: str, facts: Sequence[str], groups: Iterable[SampleGroup]) -> None:
    """Write one HTML file with these groups, below lines of `facts` about them."""
    head = "".join(f"<p>{safe(fact)}</p>" for fact in facts)
    page = html_page(title, f"{head}<main>{''.join(map(_section, groups))}</main>", style=_STYLE)
    with atomic_write(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


def _select(name: str, choices: Iterable[tuple[str, str]], chosen: str) -> str:
    options = (
        f'<option value="{safe(value)}"{" selected" if value == chosen else ""}>{safe(label)}</option>'
        for value, label in choices
    )
    return f'<select name="{name}">{"".join(options)}</select>'


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
