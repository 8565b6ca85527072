"""The supervisor on real processes: restarts, last words, and nothing left behind, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.base.errors import StoppedByAlarm
from headrace.launch.supervisor import Child, RestartPolicy, ServiceFailed, Supervisor, child_environ
from headrace.net.service import reserve
from tests.support.processes import descendants, gone
from tests.support.waiting import wait_until

QUICK = RestartPolicy(limit=2, first_delay_s=0.01)


@pytest_asyncio.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(os.environ, lambda line: None, QUICK, grace_s=1.0)
    yield supervisor
    supervisor.kill()
    supervisor.close()


def child(tmp_path: Path, code: str, *, ends_run: bool = False) -> Child:
    return Child("service", [sys.executable, "-c", code, str(tmp_path)], tmp_path / "service.log", ends_run)


async def pid_in(path: Path) -> int:
    return int(str(await asyncio.to_thread(wait_until, lambda: path.exists() and path.read_text())))


async def test_a_killed_service_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
lives = Path(sys.argv[1]) / "lives"
lives.open("a").write("x")
if len(lives.read_text()) < 3:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    service = child(tmp_path, code, ends_run=True)
    await supervisor.supervise(service)
    assert (tmp_path / "lives").read_text() == "xxx"
    assert (service.state, service.restarts) == ("finished", 2)


async def test_a_reserved_port_stays_so_after_its_service_is_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    code = """
import os, signal
from headrace.base.parent import admit, reservations
from headrace.net.service import bind
port = int(os.environ["THE_PORT"])
with bind("127.0.0.1", port, "port"):
    assert len(reservations()) == 1
admit(True, port)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with reserve("127.0.0.1", "port") as reserved, socket.socket() as thief:
        port = reserved.getsockname()[1]
        service = child(tmp_path, code)
        service.environ, service.reserved = {**os.environ, "THE_PORT": str(port)}, [reserved]
        assert await supervisor.run(service) == -signal.SIGKILL
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", port))


async def test_restarts_are_bounded_and_the_last_words_are_shown(supervisor: Supervisor, tmp_path: Path) -> None:
    code = "import sys; print('first words'); print('last words', file=sys.stderr); sys.exit(70)"
    with pytest.raises(ServiceFailed) as failure:
        await supervisor.supervise(child(tmp_path, code))
    message = str(failure.value)
    assert "exit code 70, after 2 restarts" in message
    assert message.endswith("  first words\n  last words")
    assert str(tmp_path / "service.log") in message


SERVICE = """
import sys
from pathlib import Path
lives = Path(sys.argv[1]) / "lives"
lives.open("a").write("x")
from headrace.base.files import keep_newest
from headrace.net.service import ending_recorded
try:
    with ending_recorded():
        {work}
except Exception:
    sys.exit(70)
"""


async def test_an_exception_that_comes_back_at_once_ends_the_service(supervisor: Supervisor, tmp_path: Path) -> None:
    service = child(tmp_path, SERVICE.format(work="keep_newest(None, '*', len(lives.read_text()))"))
    with pytest.raises(ServiceFailed, match=r"twice.*AttributeError.*headrace\.base\.files:\d+.*'NoneType'"):
        await supervisor.supervise(service)
    assert (tmp_path / "lives").read_text() == "xx"
    assert service.take_ending() is None


async def test_other_exceptions_are_restarted_up_to_the_limit(supervisor: Supervisor, tmp_path: Path) -> None:
    varying = "raise {1: KeyError, 2: ValueError, 3: TypeError}[len(lives.read_text())]('life')"
    with pytest.raises(ServiceFailed, match=r"TypeError at .*: life, after 2 restarts"):
        await supervisor.supervise(child(tmp_path, SERVICE.format(work=varying)))
    (tmp_path / "lives").unlink()
    once = "len(lives.read_text()) < 2 and keep_newest(None, '*', 1)"
    service = child(tmp_path, SERVICE.format(work=once), ends_run=True)
    await supervisor.supervise(service)
    assert (service.state, service.restarts) == ("finished", 1)


async def test_law_6_waits_are_no_crashes(supervisor: Supervisor, tmp_path: Path) -> None:
    """A file is away at five starts, more than there may be crashes; what follows is the first crash."""
    lives = """match len(lives.read_text()):
            case 1 | 7: sys.exit(70)
            case 8: sys.exit(0)
            case _: Path('/away').read_bytes()"""
    service = child(tmp_path, SERVICE.format(work=lives), ends_run=True)
    service.was_ready = service.was_let_in = True
    await supervisor.supervise(service)
    assert (tmp_path / "lives").read_text() == "x" * 8
    assert (service.waited, service.fruitless, service.restarts) == (5, 2, 7)
    assert "/away" in service.waits_why


@pytest.mark.parametrize("code", [70, 3])
async def test_a_service_that_crashes_or_fails_waits_no_longer(
    supervisor: Supervisor, tmp_path: Path, code: int
) -> None:
    """A file is away at its first start, and it has crashed, or can't continue, since."""
    lives = f"""match len(lives.read_text()):
            case 1: Path('/away').read_bytes()
            case 2: sys.exit({code})
            case _: sys.exit(0)"""
    service = child(tmp_path, SERVICE.format(work=lives), ends_run=True)
    service.was_ready = service.was_let_in = True
    with contextlib.suppress(ServiceFailed):
        await supervisor.supervise(service)
    assert (service.waited, service.waits_for) == (1, "")
    assert service.state == ("finished" if code == 70 else "failed")


async def test_law_6_a_service_whose_log_can_not_be_opened_waits(tmp_path: Path) -> None:
    """The folder of logs is a file when it is to be started a second time."""
    logs, lines = tmp_path / "logs", []

    def report(line: str) -> None:
        lines.append(line)
        if str(logs) in line:
            logs.unlink()

    code = """
import sys
from pathlib import Path
logs = Path(sys.argv[1]) / "logs"
if logs.with_name("died").exists():
    sys.exit(0)
logs.rename(logs.with_name("died"))
logs.touch()
sys.exit(70)
"""
    supervisor = Supervisor(os.environ, report, QUICK, grace_s=1.0)
    service = Child("service", [sys.executable, "-c", code, str(tmp_path)], logs / "service.log", ends_run=True)
    service.was_ready = service.was_let_in = True
    try:
        await supervisor.supervise(service)
    finally:
        supervisor.close()
    assert (service.state, service.waited, service.fruitless) == ("finished", 1, 1)
    assert any(str(logs) in line for line in lines)


async def test_a_process_that_can_not_be_watched_gets_no_second_one(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the operating system about a process that runs is not one about its start."""

    def open_pidfd(pid: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("headrace.launch.supervisor.os.pidfd_open", open_pidfd)
    service = child(tmp_path, "import signal; signal.pause()")
    service.was_ready = service.was_let_in = True
    with pytest.raises(OSError, match="too many"):
        await asyncio.wait_for(supervisor.supervise(service), 5.0)
    assert service.restarts == 0


async def test_what_must_be_mended_is_not_tried_again(supervisor: Supervisor, tmp_path: Path) -> None:
    service = child(tmp_path, "import sys; sys.exit('error: port 1 is busy')")
    with pytest.raises(ServiceFailed, match="error: port 1 is busy"):
        await supervisor.supervise(service)
    assert service.restarts == 0


async def test_an_alarm_that_ends_the_run_is_told_without_a_log(supervisor: Supervisor, tmp_path: Path) -> None:
    work = "from headrace.base.errors import StoppedByAlarm; raise StoppedByAlarm('the policy collapsed')"
    with pytest.raises(StoppedByAlarm, match=r"^the policy collapsed$"):
        await supervisor.supervise(child(tmp_path, SERVICE.format(work=work).replace("70", "3")))


async def test_only_words_of_the_last_life_are_shown(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "service.log").write_text("from an earlier run\n")
    with pytest.raises(ServiceFailed) as failure:
        await supervisor.supervise(child(tmp_path, "import sys; sys.exit('now')"))
    assert "now" in str(failure.value)
    assert "earlier" not in str(failure.value)


async def test_stop_ends_a_service_and_its_children_even_if_deaf(supervisor: Supervisor, tmp_path: Path) -> None:
    code = """
import signal, subprocess, sys
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
Path(sys.argv[1], "pid.new").write_text(str(grandchild.pid))
Path(sys.argv[1], "pid.new").rename(Path(sys.argv[1], "pid"))
signal.pause()
"""
    service = child(tmp_path, code)
    task = asyncio.create_task(supervisor.supervise(service))
    grandchild = await pid_in(tmp_path / "pid")
    leader = service.pid
    assert leader is not None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await supervisor.stop([service])
    assert gone(leader)
    assert gone(grandchild)
    assert (service.pid, service.state) == (None, "stopped")


async def test_what_a_dead_service_leaves_is_swept_before_it_restarts(supervisor: Supervisor, tmp_path: Path) -> None:
    code = """
import os, signal, subprocess, sys
from pathlib import Path
pid = Path(sys.argv[1], "pid")
if pid.exists():
    sys.exit(0)
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
pid.write_text(str(grandchild.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    await supervisor.supervise(child(tmp_path, code, ends_run=True))
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("hearing", ["hearing", "deaf"])
def test_sigkill_of_the_supervisor_leaves_no_orphan(tmp_path: Path, hearing: str) -> None:
    argv = [sys.executable, "-m", "tests.support.supervised", str(tmp_path), hearing]
    with subprocess.Popen(argv) as supervisor:
        pids = str(wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())).split()
        supervisor.send_signal(signal.SIGKILL)
    assert [gone(int(pid)) for pid in pids] == [True, True]


@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_guard_is_replaced_before_its_supervisor_is_killed(tmp_path: Path, times: int) -> None:
    argv = [sys.executable, "-m", "tests.support.supervised", str(tmp_path), "deaf"]
    with (tmp_path / "said").open("w") as said, subprocess.Popen(argv, stderr=said) as supervisor:
        pids = str(wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())).split()
        for number in range(times):
            guard = next(pid for pid, command in descendants(supervisor.pid).items() if "guard.py" in command)
            os.kill(guard, signal.SIGKILL)
            wait_until(lambda number=number: (tmp_path / "said").read_text().count("there is another") == number + 1)
        supervisor.send_signal(signal.SIGKILL)
    assert [gone(int(pid)) for pid in pids] == [True, True]


def test_services_inherit_all_but_what_the_configuration_resolved() -> None:
    given = {"HF_TOKEN": "secret", "PATH": "/bin", "HEADRACE_GRPO__SEED": "3", "HEADRACE_REPLAY__REDIS_URL": "url"}
    of_a_rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "other", "TORCHELASTIC_RUN_ID": "x"}
    environ = child_environ(given | of_a_rank, {"HEADRACE_REPLAY__REDIS_URL"})
    safe = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    assert environ == {"HF_TOKEN": "secret", "PATH": "/bin", "HEADRACE_REPLAY__REDIS_URL": "url", **safe}


async def test_a_log_stays_small_and_keeps_its_newest_lines(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
for number in range(3000):
    print(f"line {number:90}", flush=True)
Path(sys.argv[1], "written").touch()
import signal; signal.pause()
"""
    supervisor = Supervisor(os.environ, lambda line: None, QUICK, grace_s=1.0, log_bytes=100_000)
    service = child(tmp_path, code)
    running = asyncio.create_task(supervisor.supervise(service))
    try:
        await asyncio.to_thread(wait_until, (tmp_path / "written").exists)
        await asyncio.to_thread(service.keep_log_small, supervisor.log_bytes)
        older = service.log.with_name("service.log.1")
        assert older.read_text().splitlines()[-1].split() == ["line", "2999"]
        assert service.log.stat().st_size == 0
        assert service.log_tail() == ""
    finally:
        running.cancel()
        await supervisor.stop([service])
        supervisor.close()


async def test_a_running_services_log_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.launch.supervisor._LOOK_AT_LOGS_S", 0.01)
    supervisor = Supervisor(os.environ, lambda line: None, QUICK, grace_s=1.0, log_bytes=10_000)
    code = "import time\nwhile True: print('x' * 99, flush=True); time.sleep(0.001)"
    service = child(tmp_path, code)
    running = asyncio.create_task(supervisor.supervise(service))
    try:
        older = service.log.with_name("service.log.1")
        await asyncio.to_thread(wait_until, older.exists)
        before = older.stat().st_mtime_ns
        await asyncio.to_thread(wait_until, lambda: older.stat().st_mtime_ns > before)
        assert service.log.stat().st_size < 1_000_000
    finally:
        running.cancel()
        await supervisor.stop([service])
        supervisor.close()
