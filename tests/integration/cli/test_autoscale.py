"""Further replicas of a run that is up: as many as it wants, as processes or as jobs, and none of them left behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError, ReplayUnavailable, ServiceError
from headrace.cli.app import app
from headrace.cli.autoscale import choose
from headrace.config import Config
from headrace.launch.autoscaler import Jobs, Processes, autoscale
from headrace.launch.supervisor import RestartPolicy, ServiceFailed, Supervisor
from headrace.run.history import RECORD
from tests.support.past_run import past_run
from tests.support.waiting import eventually

# Two prompts a step and an age bound of one.
STATS: dict[str, Any] = {
    "counts": {"train": {"queued": 9, "open": 2}, "validation": {}},
    "replicas": [{"state": "HEALTHY", "version": 0}],
    "prompts_per_step": 2,
    "next_step": 1,
    "line": 2,
    "closed": False,
}
WAITED = {"timing/train/total_step_time": 10.0, "timing/train/wait_for_generation": 5.0}


class Buffer:
    """A buffer whose trainer waits for half of each of the steps that it has told so far."""

    def __init__(self) -> None:
        self.steps, self.changes, self.reachable, self.looks = 0, dict[str, Any](), True, 0

    async def stats(self) -> Mapping[str, Any]:
        self.looks += 1
        if not self.reachable:
            raise ReplayUnavailable("gone")
        return STATS | self.changes

    async def newest_metrics(self, count: int) -> list[tuple[str, str, int, dict[str, float]]]:
        return (await self.metrics("0"))[::-1][:count]

    async def metrics(self, after: str) -> list[tuple[str, str, int, dict[str, float]]]:
        return [(str(step + 1), "train", step, WAITED) for step in range(int(after), self.steps)]


class Counted:
    def __init__(self) -> None:
        self.there, self.most = 0, 0

    def __len__(self) -> int:
        return self.there

    async def add(self) -> None:
        self.there += 1
        self.most = max(self.most, self.there)

    async def remove(self) -> None:
        self.there -= 1

    def check(self) -> None: ...


def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"id": "scaled", "dir": str(tmp_path)},
            "grpo": {"num_prompts_per_step": 2, "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1}},
        }
    )


async def test_replicas_follow_what_is_wanted_until_the_run_is_over(tmp_path: Path) -> None:
    buffer, further, said = Buffer(), Counted(), list[str]()
    run = config(tmp_path)
    arguments = run, buffer, further, 4, asyncio.Event(), said.append, 0.01
    loop = asyncio.create_task(autoscale(*arguments))  # type: ignore[arg-type]

    async def looked() -> bool:
        return buffer.looks >= 2

    await eventually(looked)
    assert further.there == 0
    buffer.steps = 4

    async def added() -> bool:
        return further.there == 1

    await eventually(added)
    assert "2 replicas are wanted" in said[-1]
    buffer.reachable = False
    looks = buffer.looks

    async def looked_again() -> bool:
        return buffer.looks > looks + 2

    await eventually(looked_again)
    assert further.there == 1
    run.run_folder.mkdir()
    (run.run_folder / RECORD).write_text('{"started": 1.0, "state": "finished", "since": 2.0, "reason": ""}')
    await loop
    assert (further.there, further.most) == (0, 1)


async def test_a_buffer_that_is_gone_for_good_ends_it(tmp_path: Path) -> None:
    buffer, further = Buffer(), Counted()
    further.there, buffer.reachable = 2, False
    await autoscale(config(tmp_path), buffer, further, 4, asyncio.Event(), lambda _: None, 0.001)  # type: ignore[arg-type]
    assert further.there == 0


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    one = Supervisor({"PATH": "/usr/bin:/bin"}, lambda _: None, RestartPolicy(limit=0), grace_s=20.0)
    yield one
    one.kill()
    one.close()


def program(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "replica.py"
    file.write_text(text)
    return [sys.executable, "-S", str(file), str(tmp_path)]


STOPPABLE = """
import os, signal, sys
out = sys.argv[1] + "/" + os.environ["CUDA_VISIBLE_DEVICES"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(open(out + ".ended", "w").close()))
open(out + ".begun", "w").close()
while True:
    signal.pause()
"""


async def test_a_process_gets_its_devices_and_is_ended_by_sigterm(tmp_path: Path, supervisor: Supervisor) -> None:
    further = Processes(supervisor, program(tmp_path, STOPPABLE), tmp_path, ["4,5", "6,7"])

    def begun(devices: str) -> Any:
        async def there() -> bool:
            return (tmp_path / f"{devices}.begun").exists()

        return there

    await further.add()
    await further.add()
    await eventually(begun("4,5"))
    await eventually(begun("6,7"))
    await further.remove()
    assert (tmp_path / "6,7.ended").exists()
    assert not (tmp_path / "4,5.ended").exists()
    further.check()
    await further.remove()
    assert (tmp_path / "4,5.ended").exists()


async def test_a_process_that_can_not_continue_is_told(tmp_path: Path, supervisor: Supervisor) -> None:
    further = Processes(supervisor, program(tmp_path, "raise SystemExit(1)"), tmp_path)
    await further.add()

    async def told() -> bool:
        try:
            further.check()
        except ServiceFailed:
            return True
        return False

    await eventually(told)
    await further.remove()


async def test_jobs_are_submitted_and_cancelled_by_their_ids(tmp_path: Path) -> None:
    count, ended = tmp_path / "count", tmp_path / "ended"
    further = Jobs(f"echo x >> {count}; echo Submitted job $(wc -l < {count})", f"echo {{id}} >> {ended}")
    await further.add()
    await further.add()
    await further.remove()
    assert (len(further), ended.read_text()) == (1, "2\n")
    await further.remove()
    assert ended.read_text() == "2\n1\n"


async def test_commands_take_precedence_over_this_machine(tmp_path: Path, supervisor: Supervisor) -> None:
    assert isinstance(choose(config(tmp_path), supervisor, 4, None, "sbatch replica.sh", "scancel {id}"), Jobs)
    assert isinstance(choose(config(tmp_path), supervisor, 4, "1,2,3", None, None), Processes)


@pytest.mark.parametrize(("command", "said"), [("true", "no id"), ("echo 7; echo no queue >&2; false", "no queue")])
async def test_a_command_that_submits_nothing_is_an_error(command: str, said: str) -> None:
    with pytest.raises(ServiceError, match=said):
        await Jobs(command, "echo {id}").add()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max", "4"], "is not up"),
        (["--max", "1"], "--max 1"),
        (["--max", "4", "--submit", "sbatch replica.sh"], "--cancel"),
        (["--max", "4", "--submit", "sbatch replica.sh", "--cancel", "scancel"], "{id}"),
        (["--max", "4", "--devices", "1,2"], "3 different GPUs"),
        (["--max", "3", "--devices", "1,1"], "2 different GPUs"),
    ],
)
def test_what_can_not_be_scaled_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    run = past_run(tmp_path, "adder", 2)
    if said != "is not up":
        (run / RECORD).write_text('{"started": 1.0, "state": "running", "since": 2.0, "reason": ""}')
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, ["autoscale", str(run), *options], catch_exceptions=False)
    assert said in str(refused.value)
