"""Further replicas of a run that is up: as many as it wants, as processes or as jobs, and none of them left behind."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError, HeadraceError, ReplayUnavailable, ServiceError
from headrace.cli.app import app
from headrace.config import Config
from headrace.launch import runs
from headrace.launch.autoscaler import Jobs, Processes, autoscale
from headrace.launch.supervisor import RestartPolicy, ServiceFailed, Supervisor
from headrace.run.history import RECORD, RUN_LOCK
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
SHORTER = {"timing/train/total_step_time": 6.0, "timing/train/wait_for_generation": 3.0}


class Buffer:
    """A buffer whose trainer waits for half of each of the steps that it has told so far. From the fifth on they are shorter."""

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
        return [
            (str(step + 1), "train", step, WAITED if step < 4 else SHORTER) for step in range(int(after), self.steps)
        ]


class Counted:
    def __init__(self) -> None:
        self.there, self.most, self.stepped = 0, 0, False
        self.broken = False

    def __len__(self) -> int:
        return self.there

    async def add(self) -> None:
        if self.broken:
            raise ServiceError("no slot")
        self.there += 1
        self.most = max(self.most, self.there)

    async def remove(self) -> None:
        self.there -= 1

    async def close(self) -> None:
        self.there = 0

    def check(self, stepped: bool) -> None:
        self.stepped = self.stepped or stepped


async def looks(buffer: Buffer, count: int) -> bool:
    return buffer.looks >= count


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

    await eventually(lambda: looks(buffer, 2))
    assert further.there == 0
    buffer.steps = 4

    async def added() -> bool:
        return further.there == 1

    await eventually(added)
    assert "2 replicas are wanted" in said[-1]
    buffer.reachable = False
    seen = buffer.looks
    await eventually(lambda: looks(buffer, seen + 3))
    assert (further.there, further.stepped) == (1, True)
    assert sum("gone" in line for line in said) == 1
    run.run_folder.mkdir()
    (run.run_folder / RECORD).write_text('{"started": 1.0, "state": "finished", "since": 2.0, "reason": ""}')
    await loop
    assert (further.there, further.most) == (0, 1)


async def test_a_buffer_that_is_gone_for_good_ends_it(tmp_path: Path) -> None:
    buffer, further = Buffer(), Counted()
    further.there, buffer.reachable = 2, False
    await autoscale(config(tmp_path), buffer, further, 4, asyncio.Event(), lambda _: None, 0.001)  # type: ignore[arg-type]
    assert further.there == 0


async def test_a_batch_system_that_is_away_for_a_moment_costs_no_replica(tmp_path: Path) -> None:
    """One that has never taken a job is an error."""
    buffer, further, stop, said = Buffer(), Counted(), asyncio.Event(), list[str]()
    arguments = config(tmp_path), buffer, further, 4, stop, said.append, 0.01

    async def holds(count: int) -> bool:
        return further.there == count

    loop = asyncio.create_task(autoscale(*arguments))  # type: ignore[arg-type]
    await eventually(lambda: looks(buffer, 2))
    buffer.steps = 4
    await eventually(lambda: holds(1))
    further.broken = True
    buffer.changes["replicas"] = [{"state": "HEALTHY", "version": 0}] * 2
    seen = buffer.looks
    await eventually(lambda: looks(buffer, seen + 2))
    buffer.steps = 9
    await eventually(lambda: looks(buffer, seen + 6))
    assert (further.there, sum("no slot" in line for line in said)) == (1, 1)
    further.broken = False
    await eventually(lambda: holds(3))
    stop.set()
    await loop
    assert further.there == 0


async def test_a_batch_system_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    buffer, further = Buffer(), Counted()
    further.broken = True
    loop = asyncio.create_task(autoscale(config(tmp_path), buffer, further, 4, asyncio.Event(), lambda _: None, 0.01))  # type: ignore[arg-type]
    await eventually(lambda: looks(buffer, 2))
    buffer.steps = 4
    with pytest.raises(ServiceError, match="no slot"):
        await loop


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
    further.check(stepped=False)
    await further.remove()
    assert (tmp_path / "4,5.ended").exists()


async def test_a_process_that_can_not_continue_is_told(tmp_path: Path, supervisor: Supervisor) -> None:
    further = Processes(supervisor, program(tmp_path, "raise SystemExit(1)"), tmp_path)
    await further.add()

    async def told() -> bool:
        try:
            further.check(stepped=False)
        except ServiceFailed:
            return True
        return False

    await eventually(told)
    await further.remove()


CRASHES_TWICE = """
import os, sys, time
deaths = sys.argv[1] + "/deaths"
with open(deaths, "a") as file:
    file.write("x")
if os.path.getsize(deaths) < 3:
    sys.exit(70)
time.sleep(600)
"""


async def test_steps_give_a_process_that_crashes_new_starts(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.policy = RestartPolicy(limit=1, first_delay_s=0.01)
    further = Processes(supervisor, program(tmp_path, CRASHES_TWICE), tmp_path)
    await further.add()

    async def died(times: int) -> bool:
        further.check(stepped=True)
        return (tmp_path / "deaths").exists() and (tmp_path / "deaths").stat().st_size == times

    await eventually(lambda: died(3))
    await further.close()
    assert len(further) == 0


async def test_jobs_are_submitted_and_cancelled_by_their_ids(tmp_path: Path) -> None:
    count, ended, ledger = tmp_path / "count", tmp_path / "ended", tmp_path / "jobs"
    further = Jobs(f"echo x >> {count}; echo Submitted job $(wc -l < {count})", f"echo {{id}} >> {ended}", ledger)
    await further.add()
    await further.add()
    await further.remove()
    assert (len(further), ended.read_text(), ledger.read_text()) == (1, "2\n", "1")
    await further.close()
    assert ended.read_text() == "2\n1\n"
    assert not ledger.exists()


async def test_a_job_that_can_not_be_cancelled_leaves_no_other(tmp_path: Path) -> None:
    """It may have ended by itself, or it still runs: its id is told."""
    count, ended, ledger = tmp_path / "count", tmp_path / "ended", tmp_path / "jobs"
    submit, cancel = f"echo x >> {count}; wc -l < {count}", f"[ {{id}} != 2 ] && echo {{id}} >> {ended}"
    further = Jobs(submit, cancel, ledger)
    for _ in range(3):
        await further.add()
    with pytest.raises(ServiceError, match="jobs 2,"):
        await further.close()
    assert ended.read_text() == "3\n1\n"
    with pytest.raises(ConfigError, match="jobs 2;"):
        Jobs(submit, cancel, ledger)


@pytest.mark.parametrize(("command", "said"), [("true", "no id"), ("echo 7; echo no queue >&2; false", "no queue")])
async def test_a_command_that_submits_nothing_is_an_error(tmp_path: Path, command: str, said: str) -> None:
    with pytest.raises(ServiceError, match=said):
        await Jobs(command, "echo {id}", tmp_path / "jobs").add()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max", "4"], "is not up"),
        (["--max", "1"], "--max 1"),
        (["--max", "4", "--submit", "sbatch replica.sh"], "--cancel"),
        (["--max", "4", "--submit", "sbatch replica.sh", "--cancel", "scancel"], "{id}"),
        (["--max", "4", "--devices", "1,2"], "3 different GPUs"),
        (["--max", "3", "--devices", "1,1"], "2 different GPUs"),
        (["--max", "3", "--devices", "1,2", "--submit", "a", "--cancel", "b {id}"], "one of the two"),
        (["--max", "3"], "has an autoscaler already"),
    ],
)
def test_what_can_not_be_scaled_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    run = past_run(tmp_path, "adder", 2)
    (run / RECORD).write_text('{"started": 1.0, "state": "running", "since": 2.0, "reason": ""}')
    with contextlib.ExitStack() as others:
        if said != "is not up":  # it was killed
            others.enter_context(runs.held(run / RUN_LOCK, "", ""))
        if said == "has an autoscaler already":
            others.enter_context(runs.held(run / ".autoscale.lock", "", ""))
        with pytest.raises(HeadraceError) as refused:
            CliRunner().invoke(app, ["autoscale", str(run), *options], catch_exceptions=False)
    assert said in str(refused.value)
