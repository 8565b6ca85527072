"""What a model, an environment or a replica wrote does nothing to the terminal that shows it."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console
from rich.live import Live

from headrace.base.errors import HeadraceError
from headrace.cli import groups
from headrace.cli.common import print_error
from headrace.cli.display import LineDisplay, LiveDisplay
from headrace.cli.samples import Texts, draw_group
from headrace.cli.status import show as show_status
from headrace.config import Config
from headrace.launch.summary import RunSummary, ServiceLine
from headrace.records.origin import GroupLineage
from headrace.replay import Replica, Runner, RunState
from headrace.replay.bias import read_meters
from headrace.run.samples import StoredCall, by_group
from headrace_services.trainer.telemetry.batch_samples import show as show_samples
from tests.support.stored_samples import hostile_episode, hostile_sample, sample

HOSTILE = "\x1b]0;mine\x07\x1b[2J[bold]x[/bold]\x9b1m"
SHOWN = r"\x1b]0;mine\x07\x1b[2J[bold]x[/bold]\x9b1m"

HOSTILE_SAMPLE = hostile_sample(HOSTILE)


def harmless(text: str) -> bool:
    return SHOWN in text and not any(character in text for character in ("\x1b", "\x07", "\x9b"))


def test_groups_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = GroupLineage("id", "failed", "task", HOSTILE, 0, None, None, (), HOSTILE)
    monkeypatch.setattr(groups, "_find", lambda config, group: (found, None))
    monkeypatch.setattr(groups, "_texts", lambda *_: by_group([HOSTILE_SAMPLE, hostile_episode(HOSTILE)])[0])
    monkeypatch.setattr(groups.runs, "find", lambda run: Config())
    monkeypatch.setenv("COLUMNS", "300")
    groups.show("id", "run", text=True, as_json=False)
    out = capsys.readouterr().out
    assert harmless(out)
    assert "artifacts: {" in out


def test_status() -> None:
    out = io.StringIO()
    state = RunState("run", "t", "i", 0, -1, -1, False)
    replica = Replica(
        id=HOSTILE,
        state="QUARANTINED",
        version=1,
        timeline="t",
        leases=0,
        seen_s_ago=0.0,
        info={"url": HOSTILE},
        reason="its refit failed",
        logprob_error=1.25,
        pulls=True,
        unreached=f"https://10.0.0.1:1: {HOSTILE}",
    )
    runner = Runner(id=HOSTILE, alive=True, leases=0, seen_s_ago=0.0, info={"url": HOSTILE})
    show_status(out, state, [replica], [runner], read_meters({}), None)
    assert harmless(out.getvalue())
    assert f"quarantined   {SHOWN}: its refit failed\n" in out.getvalue()
    assert f"not reached   {SHOWN}, by others that pull: https://10.0.0.1:1: {SHOWN}\n" in out.getvalue()
    assert "QUARANTINED, pulls" in out.getvalue()
    assert " 1.25 " in out.getvalue()


@pytest.mark.parametrize("live", [False, True])
def test_the_display_of_a_run(live: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=300, force_terminal=False)
    run = RunSummary("run", 1, services=[ServiceLine(HOSTILE, "ready", 0, HOSTILE)], buffer=HOSTILE)
    if live:
        with Live(console=console, auto_refresh=False) as drawn:
            LiveDisplay(drawn).update(run)
    else:
        LineDisplay(console).print(HOSTILE)
    assert harmless(out.getvalue())


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(HeadraceError(HOSTILE))
    assert harmless(capsys.readouterr().err)


def test_samples() -> None:
    out = io.StringIO()
    show_samples(Console(file=out, width=300), "step 1", [HOSTILE_SAMPLE])
    assert harmless(out.getvalue())


def test_nothing_said_in_an_episode_passes_for_the_head_of_a_call() -> None:
    said = "\n".join([*["call 9 (tokens 0-1)"] * 20, "@" * 200])
    asked = ({"role": "user", "content": said}, {"role": "call 9", "content": said})
    answer = {"role": "assistant", "content": said, "reasoning": said}
    calls = [
        StoredCall(
            parent=-1, tokens=(0, 2), trained=True, finish_reason="stop", replica="r", messages=asked, answer=answer
        )
    ] * 2
    (group,) = by_group([sample("g", calls=tuple(calls))])
    out = io.StringIO()
    Console(file=out, width=50).print(draw_group(group, "step 1", 50))
    lines = [line.removeprefix("│ ") for line in out.getvalue().splitlines()]
    assert [line.split("(")[0] for line in lines if line.startswith("call")] == ["call 0 ", "call 1 "]
    assert out.getvalue().count("@") == 200 * 2 * 4


@pytest.mark.parametrize("texts", [None, lambda ids: [HOSTILE] * len(ids)])
def test_groups_of_samples(texts: Texts | None) -> None:
    out = io.StringIO()
    (group,) = by_group([HOSTILE_SAMPLE])
    Console(file=out, width=300).print(draw_group(dataclasses.replace(group, reason=HOSTILE), "step 1", 300, texts))
    assert out.getvalue().count(SHOWN) == 10 + (texts is not None)
    assert harmless(out.getvalue())
