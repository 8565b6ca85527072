"""What a model, an environment or a replica wrote does nothing to the terminal that shows it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.live import Live

from headrace.cli import groups
from headrace.cli.common import print_error
from headrace.cli.display import Display, LiveDisplay, RunSummary, ServiceLine
from headrace.cli.status import show as show_status
from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.lineage import GroupLineage
from headrace.replay import Replica, RunState
from headrace.replay.bias import meters_of
from headrace_services.trainer.telemetry.samples import show as show_samples

HOSTILE = "\x1b]0;mine\x07\x1b[2J[bold]x[/bold]\x9b1m"
SHOWN = r"\x1b]0;mine\x07\x1b[2J[bold]x[/bold]\x9b1m"


def harmless(text: str) -> bool:
    return SHOWN in text and not any(character in text for character in ("\x1b", "\x07", "\x9b"))


def test_groups_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = GroupLineage("id", "failed", "task", HOSTILE, 0, None, None, (), HOSTILE)
    monkeypatch.setattr(groups, "_find", lambda config, group: found)
    monkeypatch.setattr(groups.runs, "find", lambda run: Config())
    groups.show("id", "run", as_json=False)
    assert harmless(capsys.readouterr().out)


def test_status() -> None:
    out = io.StringIO()
    state = RunState("run", "t", "i", 0, -1, -1, False)
    replica = Replica(
        id=HOSTILE, state="HEALTHY", version=1, timeline="t", leases=0, seen_s_ago=0.0, info={"url": HOSTILE}
    )
    show_status(out, state, [replica], meters_of({}), None)
    assert harmless(out.getvalue())


@pytest.mark.parametrize("live", [False, True])
def test_the_display_of_a_run(live: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=300, force_terminal=False)
    run = RunSummary("run", 1, services=[ServiceLine(HOSTILE, "ready", 0, HOSTILE)], buffer=HOSTILE)
    if live:
        with Live(console=console, auto_refresh=False) as drawn:
            LiveDisplay(drawn).update(run)
    else:
        Display(console).print(HOSTILE)
    assert harmless(out.getvalue())


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(HeadraceError(HOSTILE))
    assert harmless(capsys.readouterr().err)


def test_samples() -> None:
    out = io.StringIO()
    record = {
        "rewards": 1.0,
        "content": HOSTILE,
        "messages": [{"role": "user", "content": "1+1"}],
        "finish_reason": "stop",
        "task": "sums",
        "token_ids": [1],
        "group": "g",
    }
    show_samples(Console(file=out, width=300), "step 1", [record])
    assert harmless(out.getvalue())
