"""Each command of docs/watching.md, run as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import samples
from headrace.cli.app import app
from headrace.replay import Limits, ReplayClient
from headrace.run.group_files import FOLDER as GROUPS
from headrace.run.lineage import FOLDER
from headrace_services.trainer.control.lineage_writer import LineageWriter
from tests.support.buffer import lease_one, make_group
from tests.support.group_events import events, life
from tests.support.group_events import write as write_events
from tests.support.kept_run import kept_run
from tests.support.past_run import past_run
from tests.support.stored_samples import sample, write

PAGE = Path(__file__).parents[3] / "docs" / "watching.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
# `headrace page` serves until it is stopped: test_page.py
COMMANDS = [
    line
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("headrace ") and not line.startswith("headrace page")
]


async def fill(replay: ReplayClient) -> None:
    """A group that failed."""
    lease = await lease_one(replay)
    await replay.reject(lease, "its prompt is too long")


def test_every_command_runs_as_it_stands(tmp_path: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # the run has no model, whose tokenizer takes seconds to load
    monkeypatch.setattr(samples, "token_texts", lambda config: lambda ids: [str(token) for token in ids])
    past_run(tmp_path / "runs", "wider", 3)
    with kept_run(tmp_path / "runs", "adder", limits, fill) as (folder, _):
        made = past_run(tmp_path / "like", "adder", 5)
        for name in ("metrics.jsonl", "run.json"):
            (made / name).rename(folder / name)
        group = make_group(17)
        LineageWriter(folder / "checkpoints" / FOLDER, "t1").write(3, [group], {group.id: []})
        write_events(folder / GROUPS, events(*life(group.id, 17)))
        prompt = ({"role": "user", "content": "47+85"},)
        write(folder / "logs", "train", 3, [sample(group.id, i, i / 2, messages=prompt) for i in range(2)])
        write(folder / "logs", "val", 4, [sample("held-out")])
        assert len(COMMANDS) == 15
        for command in COMMANDS:
            program, *words = shlex.split(command, comments=True)
            done = CliRunner().invoke(app, words)
            assert (program, done.exception) == ("headrace", None), command
            assert done.stdout, command
    assert (tmp_path / "both.html").exists()
