"""Each example of docs/lineage.md, run as it stands, on a run like the one that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.records.origin import Origin, TokenRange
from headrace.replay import Limits, ReplayClient
from headrace.run.lineage import FOLDER
from headrace_services.trainer.control.lineage_writer import LineageWriter
from tests.support.buffer import begin, generate, make_group
from tests.support.kept_run import kept_run

PAGE = Path(__file__).parents[3] / "docs" / "lineage.md"
EXAMPLES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
BUILD = "math-verify 0.9.0, sympy 1.14.0, 2157a8bd3ca5"
TIMELINE, ONE, OTHER = "9f2c61d07be4a583", "5b1e07c2d9", "e4407a91fc"
# What was trained at step 13, as the page shows it.
ORIGINS = (
    Origin(0, 1, 6, (TokenRange(0, 6, ONE, 12),), "stop", "math", BUILD, 1.0, 0.866),
    Origin(1, 1, 5, (TokenRange(0, 3, ONE, 12), TokenRange(3, 5, OTHER, 13)), "stop", "math", BUILD, 0.0, -0.866),
)


async def fill(replay: ReplayClient) -> None:
    """Groups that are ready, open and queued."""
    replica = await begin(replay, 4)
    await generate(replay, replica, most=2)
    await replay.lease(replica, 1)


@pytest.fixture
def workplace(tmp_path: Path, limits: Limits) -> Path:
    """The folder that the examples are run in: a run that is down, under `runs/adder`."""
    with kept_run(tmp_path / "runs", "adder", limits, fill) as (run, _):
        lineage = LineageWriter(run / "checkpoints" / FOLDER, TIMELINE)
        # weights 12 and 13 are of this timeline, since it began at step 11
        for step in (11, 12, 13):
            group = msgspec.structs.replace(make_group(404 + step), task_name="arithmetic")
            lineage.write(step, [group], {group.id: ORIGINS})
    return tmp_path


def run(command: str, folder: Path) -> str:
    """What a person who types it sees. The first `headrace` on the path is the one under test."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ["bash", "-e", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_example_of_the_page_does_what_it_says(workplace: Path) -> None:
    """In the order of the page: the Python example reads the file that the shell example before it has written."""
    assert [language for language, _ in EXAMPLES] == ["", "sh", "sh", "python"]
    (_, shown), (_, reads), (_, looks), (_, loads) = EXAMPLES
    command, _, output = shown.removeprefix("$ ").partition("\n")
    assert run(command, workplace) == output

    assert [float(reward) for reward in run(reads, workplace).split()] == [1.0, 0.0]
    said = run(looks, workplace)
    assert "open      e0-train-2" in said
    assert "4 trajectories in ready.jsonl" in said
    printed = run(f"{sys.executable} - <<'END'\n{loads}END", workplace).splitlines()
    assert len(printed) == 4
    assert printed[0].split()[:2] == ["e0-train-0", "0"]
    assert float(printed[0].split()[2]) == np.float32(-2.0)
