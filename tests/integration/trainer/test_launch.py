"""The ranks' launcher: its exit code is that of the rank that failed, and ranks that are stopped have time to save."""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path

import pytest

from headrace.net.service import EXIT_INTERNAL_ERROR, EXIT_STOPPED
from headrace_services.trainer import launch
from tests.support.forks import Forked, fork
from tests.support.ports import free_port
from tests.support.waiting import wait_until


def launch_ranks(*arguments: str) -> None:
    """`python -m headrace_services.trainer.launch`, as the life of a process."""
    sys.argv[1:] = arguments
    runpy.run_module("headrace_services.trainer.launch", run_name="__main__")


def launched(ranks: int, script: Path, *options: str, **environ: str) -> Forked:
    return fork(launch_ranks, str(ranks), *options, str(script), environ=environ)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        # a code that is passed on as it is; the other one is made of a signal
        pytest.param(f"sys.exit({EXIT_INTERNAL_ERROR})", EXIT_INTERNAL_ERROR, marks=pytest.mark.nightly),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        pytest.param("sys.exit(0)", 0, marks=pytest.mark.nightly),  # every run of two ranks ends so
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path: Path, end: str, code: int) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    {end}\nelif {code}:\n    time.sleep(600)\n"
    )
    assert launched(2, script).wait(240) == code


SAVING = """
import os, pathlib, signal, sys, time
from headrace.base.parent import die_with_parent
die_with_parent()
folder = pathlib.Path(sys.argv[0]).parent
def save(*_):
    (folder / "told").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / f"up-{os.environ['RANK']}").touch()
while True:
    signal.pause()
"""


def test_ranks_that_are_stopped_have_time_to_save(tmp_path: Path) -> None:
    """By SIGUSR1, which Slurm's srun hands on. The variable says how long torchrun would wait by itself."""
    script = tmp_path / "rank.py"
    script.write_text(SAVING)
    launcher = launched(1, script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="0")
    wait_until((tmp_path / "up-0").exists)
    launcher.send_signal(signal.SIGUSR1)
    wait_until((tmp_path / "told").exists)
    (tmp_path / "go").touch()
    assert launcher.wait(60) == EXIT_STOPPED
    assert (tmp_path / "saved").exists()


def test_a_launcher_that_loses_its_peers_may_be_started_again(tmp_path: Path) -> None:
    """Its exit code is no error that you must fix."""
    script = tmp_path / "rank.py"
    script.write_text(SAVING)
    (tmp_path / "go").touch()
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    first, second = (
        launched(1, script, *meeting, "--rdzv-conf", f"is_host={host},read_timeout=20", "--local-addr", "127.0.0.1")
        for host in ("true", "false")
    )
    wait_until(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    first.kill()
    assert second.wait(120) == EXIT_INTERNAL_ERROR
    first.wait()


def test_ranks_of_several_machines_meet_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(launch, "torchrun", seen.append)
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500"]
    assert launch.main(["6", *meeting, "-m", "headrace.cli", "trainer"]) == 0
    assert launch.main(["6", "-m", "headrace.cli", "trainer"]) == 0
    assert seen[0][-len(meeting) - 3 :] == [*meeting, "-m", "headrace.cli", "trainer"]
    assert ["--standalone" in options for options in seen] == [False, True]
