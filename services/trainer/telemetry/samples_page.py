"""The trainer's page of samples: one HTML page without scripts, with a form that picks step, ranking and prompt."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from headrace.files import atomic_write
from headrace.printable import printable
from headrace.samples import Kind, SampleFiles, SampleGroup, StoredSample, by_group, choose_groups, failed_groups
from headrace_services.trainer.telemetry.plots import STYLE

Order = Literal["stored", "best", "worst"]

OF = "^((train|val)(-(0|[1-9][0-9]{0,9}))?|failed)$"  # `train-12`: what step 12 trained on
SHOWN = 20  # groups of a page

# What samples are shown of; those of `val_failed` have no completion.
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


def render_samples(files: SampleFiles, title: str, of: str, order: Order, text: str) -> str | None:
    """The page; None if no samples of a step that `of` names are kept. `of` is as `OF` says; without a step it is the newest. Raises
    `CodecError` for a file that can't be read."""
    number = of.partition("-")[2]
    kind: Kind = "val" if of.startswith("val") else "train"
    kept = {each: files.steps(each) for each in _STEPS}
    if of == "failed":
        what, groups = "failed groups", failed_groups(files.failed())
    elif number == "" and not kept[kind]:
        what, groups = f"{_STEPS[kind]}: none yet", []
    else:
        step = int(number) if number else kept[kind][-1]
        if step not in kept[kind]:
            return None
        of, what = f"{kind}-{step}", f"{_STEPS[kind]} {step}"
        groups = by_group(files.samples(kind, step))
    found = choose_groups(groups, None if order == "stored" else order, text, len(groups))
    said = f"{len(found)} groups" + (f", {SHOWN} of them shown" if len(found) > SHOWN else "")
    choices = [
        (f"{each}-{step}", f"{_STEPS[each]} {step}") for each in kept for step in sorted(kept[each], reverse=True)
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_safe(title)}, samples</title>'
        f"<style>{STYLE}{_STYLE}</style></head><body><h1>{_safe(title)}</h1>"
        '<nav><a href="/">curves</a> · samples</nav><form action="/samples" method="get">'
        + _select("of", [*choices, ("failed", "failed groups")], of)
        + _select("order", _ORDERS.items(), order)
        + f'<input name="text" value="{_safe(text)}" placeholder="text in the prompt"><button>show</button></form>'
        f"<p>{what}: {said}</p><main>{''.join(map(_section, found[:SHOWN]))}</main></body></html>\n"
    )


def write_groups(path: Path, title: str, facts: Sequence[str], groups: Iterable[SampleGroup]) -> None:
    """Write one HTML file with these groups, below lines of what is to be said of them."""
    said = "".join(f"<p>{_safe(fact)}</p>" for fact in facts)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_safe(title)}</title><style>{STYLE}{_STYLE}</style></head>'
        f"<body><h1>{_safe(title)}</h1>{said}<main>{''.join(map(_section, groups))}</main></body></html>\n"
    )
    with atomic_write(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


def _select(name: str, choices: Iterable[tuple[str, str]], chosen: str) -> str:
    options = (
        f'<option value="{_safe(value)}"{" selected" if value == chosen else ""}>{_safe(label)}</option>'
        for value, label in choices
    )
    return f'<select name="{name}">{"".join(options)}</select>'


def _section(group: SampleGroup) -> str:
    mean = group.mean_reward
    note = group.task + ("" if mean is None else f", mean reward {mean:.3g} of {len(group.samples)}")
    note += "" if group.spread is None else f", spread {group.spread:.3g}"
    note += "".join(f", build {build}" for build in group.builds)
    expected = "" if group.expected is None else f"<pre><b>expected:</b> {_safe(group.expected)}</pre>"
    reason = f'<pre class="failed"><b>failed:</b> {_safe(group.reason)}</pre>' if group.reason else ""
    width = "all wide" if any(sample.calls for sample in group.samples) else "all"
    return (
        f'<section><h2>{_safe(group.id)} <span class="note">{_safe(note)}</span></h2><pre class="prompt">{_safe(group.prompt)}</pre>'
        f'{expected}{reason}<div class="{width}">{"".join(map(_article, group.samples))}</div></section>'
    )


def _article(sample: StoredSample) -> str:
    worth = sample.status.lower() if sample.reward is None else f"reward {sample.reward:g}"
    notes = [f"{name} {value:g}" for name, value in sample.components.items()]
    notes += [f"{len(sample.token_ids)} tokens", *(["truncated"] if sample.truncated else [])]
    said = "".join(f'<pre class="failed">{_safe(part)}</pre>' for part in (sample.message, sample.traceback) if part)
    good = ' class="good"' if sample.reward is not None and sample.reward > 0 else ""
    return (
        f'<article{good}>{_said(sample)}<div class="note"><b>{_safe(worth)}</b> {_safe(", ".join(notes))}</div>'
        f"{said}</article>"
    )


def _said(sample: StoredSample) -> str:
    calls = (
        f'<div class="note">{_safe(head)}</div>' + "".join(f"<pre>{_safe(part)}</pre>" for part in parts)
        for head, parts in sample.conversation
    )
    said = f'<div class="said">{"".join(calls)}</div>' if sample.calls else f"<pre>{_safe(sample.content)}</pre>"
    return said + (f"<pre><b>artifacts:</b> {_safe(sample.left)}</pre>" if sample.left else "")


def _safe(text: str) -> str:
    """What others wrote: no markup, and control characters as they are written out in a terminal."""
    return html.escape(printable(text, keep="\n\t"))
