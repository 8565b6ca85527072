"""`headrace samples`: show prompts, what the policy wrote, and its rewards."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from headrace.base.errors import ConfigError, HeadraceError, ReplayUnavailable, ServiceError
from headrace.base.printable import printable
from headrace.cli.common import RunArgument
from headrace.config import Config
from headrace.launch import runs
from headrace.launch.buffer import open_buffer
from headrace.launch.entry_points import load_entry_point
from headrace.run.sample_files import Kind, SampleFiles
from headrace.run.samples import (
    Clipped,
    Ranking,
    SampleGroup,
    StoredSample,
    by_group,
    choose_groups,
    failed_groups,
    make_group,
)
from headrace.run.token_texts import TokenTexts

# The columns that a completion, and a conversation or a table of tokens, needs to stand beside others.
NARROWEST, NARROWEST_WIDE = 38, 56
CLIPPED = {Clipped.LOW: "low", Clipped.HIGH: "high", Clipped.DUAL: "dual"}

# Returns the texts of token ids.
Texts = Callable[[Sequence[int]], Sequence[str]]


def samples(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="The step; by default the newest.")] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Show a validation; the step is the version that it evaluated.")
    ] = False,
    best: Annotated[bool, typer.Option("--best", help="Groups with the highest mean reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Groups with the lowest mean reward first.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Groups that failed, newest first, and why.")] = False,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Only groups with this text in their prompt.")] = "",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show each token with its log-probability, ratio and loss.")
    ] = False,
    count: Annotated[int, typer.Option("-n", min=1, help="Number of groups.")] = 3,
) -> None:
    """Show prompts and their completions, the expected answer, rewards, and which completions were truncated or failed."""
    if best + worst + failed > 1:
        raise ConfigError("--best, --worst, --failed: give one of them")
    if failed and (step is not None or validation):
        raise ConfigError("--failed shows groups that belong to no step; leave out --step and --validation")
    config = runs.find(run)
    files = SampleFiles.of(config)
    if failed:
        title, found = "failed", asyncio.run(_read_failed(config, files, prompt, count))
    else:
        kind: Kind = "val" if validation else "train"
        step = choose_step(files, kind, step)
        title = f"validation of version {step}" if validation else f"step {step}"
        ranking: Ranking | None = "best" if best else "worst" if worst else None
        found = choose_groups(by_group(files.samples(kind, step)), ranking, prompt, count)
    if not found:
        where = "no group failed" if failed else f"no samples in {title}"
        raise HeadraceError(where + (f" with {prompt!r} in the prompt" if prompt else ""))
    texts = token_texts(config) if tokens else None
    console = Console()
    for group in found:
        console.print(draw_group(group, title, console.width, texts))


def choose_step(files: SampleFiles, kind: Kind, step: int | None) -> int:
    """Return `step`, or the newest step of the kind. Raises `HeadraceError` naming the steps whose samples are kept."""
    kept = files.steps(kind)
    if kept and (step is None or step in kept):
        return kept[-1] if step is None else step
    what = "validation of version" if kind == "val" else "step"
    if kind == "train" and kept and step is not None and 0 <= step < max(kept):
        there = files.say_removed(kind)
    else:
        there = ", ".join(map(str, sorted(kept)))
        there = f"it has those of {there}" if kept else "none were written so far, or they were not copied with the run"
        there += f" (logger.keep_step_data {files.keep})"
    raise HeadraceError(
        f"no samples of {'a ' if step is None else ''}{what}{'' if step is None else f' {step}'} in {files.folder}: {there}"
    )


async def _read_failed(config: Config, files: SampleFiles, text: str, most: int) -> list[SampleGroup]:
    """Return the newest groups that failed: those in the buffer, then older ones of which a completion was kept. If the buffer can't be
    reached, only the kept ones are returned, or its error is raised if none were kept."""
    kept = {group.id: group for group in failed_groups(await asyncio.to_thread(files.read_failed))}
    try:
        async with open_buffer(config) as replay:
            letters = [group_id async for group_id, _ in replay.groups(["failed"])]
            found: list[SampleGroup] = []
            while letters and len(found) < most:
                letter = await replay.read_held(letters.pop())
                if letter is not None:
                    known = kept.pop(letter.group.id, None)
                    mine = known.samples if known is not None and known.reason == letter.reason else ()
                    found += choose_groups([make_group(letter.group, mine, letter.reason)], None, text, 1)
    except (ReplayUnavailable, ServiceError) as error:
        if not kept:
            raise
        typer.echo(f"failed groups without a completion are not shown: {printable(str(error))}", err=True)
        found = []
    return [*found, *choose_groups(kept.values(), None, text, most - len(found))]


def token_texts(config: Config) -> Texts:
    """Return the texts of tokens by the run's tokenizer, which the first call loads: most samples have their own. That raises
    `HeadraceError` if the tokenizer can't be loaded."""

    @functools.cache
    def load() -> TokenTexts:
        tokenizer: Any = load_entry_point("headrace.tools", "tokenizer", extra="trainer")
        return TokenTexts(tokenizer(config))

    return lambda ids: load()(ids)


# -- drawing a group


def draw_group(group: SampleGroup, title: str, width: int, texts: Texts | None = None) -> RenderableType:
    """Draw a group: its prompt, and its completions side by side, or below each other where `width` is small. With `texts` each token of a
    completion has its own line."""
    mean = group.mean_reward
    heading = [printable(group.id), printable(group.task), title]
    if mean is not None:
        heading.append(f"mean reward {mean:.3g} of {len(group.samples)}")
    if group.spread is not None:
        heading.append(f"spread {group.spread:.3g}")
    heading += [f"build {printable(build)}" for build in group.builds]
    parts: list[RenderableType] = [Rule(Text(", ".join(heading)), align="left"), _text(group.prompt, "dim")]
    if group.expected is not None:
        parts.append(Text.assemble(("expected: ", "bold"), _text(group.expected)))
    if group.reason:
        parts.append(Text.assemble(("failed: ", "bold red"), _text(group.reason)))
    if not group.samples:
        parts.append(Text("no completion to show", style="dim"))
    panels = [_panel(sample, texts) for sample in group.samples]
    is_wide = texts is not None or any(sample.calls for sample in group.samples)
    narrowest = NARROWEST_WIDE if is_wide else NARROWEST
    side_by_side = max(1, min(len(panels), width // narrowest))
    table = Table.grid(expand=True)
    for _ in range(side_by_side):
        table.add_column(ratio=1)
    for first in range(0, len(panels), side_by_side):
        table.add_row(*panels[first : first + side_by_side])
    return Group(*parts, table, Text())


def _panel(sample: StoredSample, texts: Texts | None) -> Panel:
    if sample.reward is None:
        colour, worth = "yellow" if sample.status == "NOT_STARTED" else "red", sample.status.lower().replace("_", " ")
    else:
        colour, worth = "green" if sample.reward > 0 else "red", f"reward {sample.reward:g}"
    if sample.components:
        worth += f" ({', '.join(f'{printable(name)} {value:g}' for name, value in sample.components.items())})"
    note = [f"{len(sample.token_ids)} tokens", *(["truncated"] if sample.truncated else []), sample.weights()]
    parts: list[RenderableType] = [
        *(_draw_text(sample) if texts is None else [_tokens(sample, texts)]),
        *([Text.assemble(("artifacts: ", "bold"), _text(sample.left))] if sample.left else []),
        Text.assemble((worth, colour), ("  " + ", ".join(note), "dim")),
    ]
    parts += [_text(text, "red") for text in (sample.message, sample.traceback) if text]
    return Panel(Group(*parts), title=Text(f"{sample.index}"), title_align="left", border_style=colour)


def _draw_text(sample: StoredSample) -> Iterator[RenderableType]:
    """Yield the text of a sample. The messages of a call are indented, broken lines too, so that nothing in them looks like the head of a
    call."""
    if not sample.calls:
        yield _text(sample.content)
    for head, parts in sample.conversation:
        yield _text(head, "dim")
        yield Padding(Group(*map(_text, parts)), (0, 0, 0, 2))


def _tokens(sample: StoredSample, texts: Texts) -> Table:
    """Draw a line for each token: its log-probability, what the loss made of it as far as the file says so, its id, and its text. Tokens
    that the environment wrote have no log-probability."""
    columns: dict[str, tuple[Sequence[Any] | None, Callable[[Any], str]]] = {
        "log p": (sample.generation_logprobs, "{:.3f}".format),
        "ratio": (sample.ratios, "{:.3f}".format),
        "clip": (sample.clipped, lambda bound: CLIPPED.get(bound, "")),
        "loss": (sample.token_losses, "{:.1e}".format),
        "id": (sample.token_ids, str),
    }
    cells: list[list[Text]] = []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, (values, write) in columns.items():
        if values is not None:
            table.add_column(name, justify="right", no_wrap=True)
            cells.append([Text("" if value is None else write(value)) for value in values])
    table.add_column("token")
    names = texts(sample.token_ids) if sample.token_texts is None else sample.token_texts
    for *row, name in zip(*cells, names, strict=True):
        table.add_row(*row, _text(name, keep=""))
    return table


def _text(text: str, style: str = "", keep: str = "\n\t") -> Text:
    """Return text from outside for display: without markup and control characters, and not cut off."""
    return Text(printable(text, keep=keep), style=style, overflow="fold")
