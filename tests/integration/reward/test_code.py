"""`code`: programs and functions against their tests, and programs that try to do anything else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import headrace_services.reward.pool
from headrace import Sample
from headrace.base.errors import ServiceError
from headrace.config.environments import CodeConfig
from headrace.env.wire import sample_to_wire
from headrace.v1.trajectory_pb2 import STATUS_SCORED, Result
from headrace_services.reward import code_worker
from headrace_services.reward.environments.code import Code, refusal
from headrace_services.reward.pool import ScoringWorker, WorkerPool
from headrace_services.reward.sandbox import Level
from tests.support.reward_hub import WAIT_S, start_hub
from tests.support.waiting import eventually, wait_until

pytestmark = pytest.mark.usefixtures("executed")

ENV = {"cpu_s": 2, "wall_s": 5.0, "memory_mb": 256, "timeout_s": 120.0}  # a busy machine gives no core for so long
SECRET = "8423107"  # the expected output of what attacks
SUMS = {"inputs": ["1 2\n", "40 2\n", "-1 1\n"], "outputs": ["3\n", "42\n", "0\n"]}
SUM = "a, b = map(int, input().split())\nprint(a + b)"
FUNCTION = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
# a program that may start others can do what one alone can
ALONE_AND_MANY = [pytest.param(1, marks=pytest.mark.nightly), 8]
UNREADABLE = {"fn_name": "f", "inputs": [[]], "outputs": [1]}


def sample(program: str, info: dict[str, Any], environment: str = "code", **more: Any) -> Sample:
    return Sample(program, info, environment=environment, **more)


def fenced(program: str) -> str:
    return f"First I thought of this:\n```python\nprint('no')\n```\nThen:\n```python\n{program}\n```\nThat is it."


async def test_programs_and_functions_earn_what_their_tests_say() -> None:
    wrong = "a, b = map(int, input().split())\nprint(a - b if a > 2 else a + b)"
    env = {"code": ENV, "shares": {"type": "code", "partial_credit": True, **ENV}}
    cases = [
        (sample(SUM, SUMS), 1, None),
        (sample(fenced(SUM), SUMS), 1, None),
        (sample(SUM.replace("print(a + b)", "print(a + b, ' ')\nprint()"), SUMS), 1, None),
        (sample(wrong, SUMS), 0, (1, "it answered otherwise")),
        (sample(wrong, SUMS, "shares"), 2 / 3, (1, "it answered otherwise")),
        (sample("print(", SUMS), 0, (0, "it ended with status 1")),
        (sample("", SUMS), 0, (0, "it answered otherwise")),
        (sample("def add(a, b):\n    print('so')\n    return a + b", FUNCTION), 1, None),
        (sample("class Solution:\n    def add(self, a, b): return a + b", FUNCTION), 1, None),
        (sample("def add(a, b): return 3", FUNCTION, "shares"), 0.5, (1, "it answered otherwise")),
        (sample("def sub(a, b): return 3", FUNCTION), 0, (0, "it ended with status 1")),
        (sample("def f(): return True", UNREADABLE), 0, (0, "it answered otherwise")),
        (sample("def f(): return 1.0 + 1e-12", UNREADABLE), 1, None),
        (sample("def f(): return {1}", UNREADABLE), 0, (0, "it ended with status 1")),
        (sample("import os\ndef f(): os._exit(0)", UNREADABLE), 0, (0, "it answered otherwise")),
    ]
    async with start_hub(env, workers=1) as hub:
        scores = await hub.score([case for case, _, _ in cases])
    for (case, reward, failure), score in zip(cases, scores, strict=True):
        assert score.reward == pytest.approx(reward), (case.completion, score)
        found = score.metadata.get("first_failure")
        assert (found and (found["test"], found["why"])) == failure, (case.completion, score)
    assert scores[0].metadata == {"passed": 3, "tests": 3}
    assert "SyntaxError" in scores[5].metadata["first_failure"]["error"]


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "holds no tests"),
        ({"inputs": [], "outputs": []}, "has 0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "has 1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "that are not text"),
        ({"inputs": ["1"], "outputs": [1]}, "that are not text"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "inputs that are not lists"),
    ],
)
async def test_a_problem_without_tests_is_invalid(info: dict[str, Any], said: str) -> None:
    with pytest.raises(StopIteration) as decided:
        next(Code("code", CodeConfig()).observe(sample("x", info), 0.0))
    score = decided.value.value
    assert (score.status, score.reward) == ("INVALID", None)
    assert said in score.message


def attacks(tmp_path: Path, port: int) -> dict[str, str]:
    """Programs by what they try; each would print the expected output, or leave a mark, if it could."""
    mark, secret = tmp_path / "mark", tmp_path / "secret"
    secret.write_text(SECRET)
    answer = f"print({SECRET[:-1]!r} + {SECRET[-1]!r})"  # after what must not work
    denied = "\nexcept OSError: raise SystemExit(1)\n"
    return {
        "shell": f"import os\nif os.system('touch {mark}') == 0: {answer}",
        "subprocess": f"import subprocess; subprocess.run(['touch', {str(mark)!r}], check=True); {answer}",
        "read a file": f"print(open({str(secret)!r}).read())",
        "password file": f"open('/etc/passwd').read(); {answer}",
        "list the folder of another": f"import os; os.listdir({str(tmp_path)!r}); {answer}",
        "write a file": f"open({str(mark)!r}, 'w').write('x'); {answer}",
        "write in the library": f"import os; open(os.__file__, 'a').write('#'); {answer}",
        "symbolic link": f"import os; os.symlink({str(secret)!r}, 'link'); print(open('link').read())",
        "hard link": f"import os; os.link({str(secret)!r}, 'link'); print(open('link').read())",
        "TCP": f"import socket; socket.create_connection(('127.0.0.1', {port})); {answer}",
        "a socket of any kind": f"import socket; socket.socket(socket.AF_UNIX); {answer}",
        "fork": f"import os; os.fork(); {answer}",
        "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "thread bomb": f"import threading, time\nfor _ in range(9999): threading.Thread(target=time.sleep, args=(9,)).start()\n{answer}",
        "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 24))",
        "file bomb": f"import os\nfor n in range(9999): open(str(n), 'wb').write(bytes(1 << 20))\n{answer}",
        "a flood of output": "while True: print('x' * 9999)",
        "a flood of errors": "import sys\nwhile True: print('x' * 9999, file=sys.stderr)",
        "kill the runner": f"import os, signal; os.kill(1, signal.SIGKILL); {answer}",
        "stop everybody": f"import os, signal; os.kill(-1, signal.SIGSTOP); {answer}",
        "kill the hub": f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); {answer}",
        "limits of the runner": f"import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)); {answer}",
        "its own limits": f"import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); {answer}",
        "priority of the runner": f"import os; os.setpriority(os.PRIO_PROCESS, 1, 19); {answer}",
        "trace the runner": f"import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0: {answer}",
        "memory of the runner": f"import ctypes\nif ctypes.CDLL(None).process_vm_readv(1, 0, 0, 0, 0, 0) >= 0: {answer}",
        "new namespace": f"import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: {answer}",
        "mount": f"import ctypes\nif ctypes.CDLL(None).mount(b't', b'/tmp', b'tmpfs', 0, None) == 0: {answer}",
        "keys": f"import ctypes\nif ctypes.CDLL(None).syscall(248, b'user', b'x', b'x', 1, -3) >= 0: {answer}",
        "/proc": f"open('/proc/self/environ').read(); {answer}",
        "the runner by /proc": f"open('/proc/1/mem', 'rb').read(1); {answer}",
        "other open files": f"import os\ntry: [os.fstat(fd) for fd in range(3, 64)]{denied}{answer}",
        "what it was started with": f"import os, sys\nif 'output' in str(os.environ) + str(sys.argv): {answer}",
        "the expected output in memory": (
            "import gc, sys\n"
            f"found = [o for o in gc.get_objects() if {SECRET[:-1]!r} + {SECRET[-1]!r} in repr(o)[:999] and o is not globals()]\n"
            "sys.exit(1)"
        ),
        "the expected output in a file": (
            "import os\nfor folder, _, names in os.walk('/tmp'):\n    for name in names:\n"
            "        text = open(os.path.join(folder, name), errors='replace').read()\n"
            f"        if 'import os' not in text and {SECRET[:-1]!r} in text: print(text)"
        ),
        "endless": "while True: pass",
        "asleep": "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(9999)",
        "deaf to the end of its time": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "a crash": "import ctypes; ctypes.string_at(0)",
        "exits well with nothing": "raise SystemExit(0)",
    }


async def test_no_attack_of_a_program_succeeds_or_is_seen_by_the_next(tmp_path: Path) -> None:
    info = {"inputs": [""], "outputs": [SECRET]}
    with socket.create_server(("127.0.0.1", 0)) as server:
        programs = attacks(tmp_path, server.getsockname()[1])
        size = os.stat(os.__file__).st_size
        async with start_hub({"code": ENV | {"cpu_s": 1, "wall_s": 2.0}}, workers=1) as hub:
            for name, program in programs.items():
                bad, good = await hub.score([sample(program, info), sample(f"print({SECRET})", info)])
                assert (bad.status, bad.reward) == ("SCORED", 0), (name, bad)
                assert good.reward == 1, (name, good)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not (tmp_path / "mark").exists()
    assert (tmp_path / "secret").read_text() == SECRET
    assert os.stat(os.__file__).st_size == size


def holds(process: psutil.Process, text: bytes) -> bool:
    """Whether `text` is anywhere in the memory of a process."""
    with open(f"/proc/{process.pid}/maps", encoding="utf-8") as maps, open(f"/proc/{process.pid}/mem", "rb") as memory:
        for line in maps:
            place, rights, *_ = line.split()
            start, end = (int(each, 16) for each in place.split("-"))
            if "rw" in rights and not line.rstrip().endswith("[vvar]"):
                memory.seek(start)
                if text in memory.read(end - start):
                    return True
    return False


def command_of(process: psutil.Process) -> str:
    """Its last word; none of a process that is gone."""
    try:
        return " ".join(process.cmdline()[-1:])
    except psutil.NoSuchProcess:
        return ""


async def test_what_is_expected_is_in_no_process_a_program_can_see() -> None:
    expected = secrets.token_hex(20)
    info = {"inputs": [""], "outputs": [expected]}
    async with start_hub({"code": ENV}, workers=1) as hub:
        scoring = asyncio.create_task(hub.score([sample("while True: pass", info)]))
        processes: dict[str, list[psutil.Process]] = {"scoring_worker": [], "code_worker": [], "/tmp/program": []}
        while not processes["/tmp/program"]:
            await asyncio.sleep(0.01)
            children = psutil.Process().children(recursive=True)
            processes = {what: [each for each in children if what in command_of(each)] for what in processes}
        found = {what: any(holds(each, expected.encode()) for each in those) for what, those in processes.items()}
        assert (await scoring)[0].reward == 0
    assert not psutil.wait_procs(processes["code_worker"], timeout=60)[1]  # they end with the worker
    assert found == {"scoring_worker": True, "code_worker": False, "/tmp/program": False}


async def test_law_7_failure_is_not_zero_a_dead_runner_fails_and_restarts() -> None:
    info = {"inputs": [""], "outputs": ["1"]}
    async with start_hub({"code": ENV}, workers=1) as hub:
        for process in psutil.Process().children(recursive=True):
            if "code_worker" in command_of(process):
                process.kill()
        (failed,) = await hub.score([sample("print(1)", info)])
        (again,) = await hub.score([sample("print(1)", info)])
    assert (failed.status, failed.reward) == ("FAILED", None)
    assert "the worker died while scoring it" in failed.message
    assert again.reward == 1


async def test_nothing_of_a_program_is_left_for_the_next() -> None:
    """Not a file, not a process, not what it was."""
    leave = "open('left', 'w').write('x')\nimport threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\nprint(1)"
    look = "import os\nprint(sorted(os.listdir('.')) == ['.input', 'program'])"
    async with start_hub({"code": ENV | {"wall_s": 1.0}}, workers=1) as hub:
        first, second = await hub.score(
            [sample(leave, {"inputs": [""], "outputs": ["1"]}), sample(look, {"inputs": [""], "outputs": ["True"]})]
        )
    assert first.metadata["first_failure"]["why"].startswith("it ran out of time")
    assert second.reward == 1


ORDINARY = {
    "modules": (
        "import collections, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, math, os, random, re\n"
        "import secrets, statistics, string, time, typing, uuid, zlib\ntime.sleep(0.01); os.urandom(9); uuid.uuid4(); time.localtime()\n"
        "assert re.match(r'(a+)+b', 'aab') and json.loads(json.dumps({'a': [1]})) and random.random() < 1 and datetime.datetime.now()"
    ),
    "files": (
        "import os, pathlib, shutil, tempfile\nfolder = pathlib.Path(tempfile.mkdtemp())\n(folder / 'a').write_text('x')\n"
        "shutil.copy2(folder / 'a', folder / 'b')\nos.rename(folder / 'b', folder / 'c')\nos.symlink('c', folder / 'd')\n"
        "assert sorted(os.listdir(folder)) == ['a', 'c', 'd'] and (folder / 'd').read_text() == 'x'\n"
        "os.utime(folder / 'a'); os.chmod(folder / 'a', 0o600); os.truncate(folder / 'a', 0); shutil.rmtree(folder)\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x'); file.flush(); os.fsync(file.fileno())"
    ),
    "database": (
        "import sqlite3\nfor _ in range(2):\n    with sqlite3.connect('a.db') as base:\n"
        "        base.execute('create table if not exists t (a)'); base.execute('insert into t values (1)')\n"
        "    base.close()\nassert sqlite3.connect('a.db').execute('select count(*) from t').fetchone() == (2,)"
    ),
    "threads": (
        "import queue, threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "assert list(ThreadPoolExecutor(4).map(abs, [-1, -2])) == [1, 2]\nq = queue.Queue()\n"
        "threading.Thread(target=q.put, args=(1,)).start(); assert q.get() == 1"
    ),
    "asyncio": "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 3\nassert asyncio.run(f()) == 3",
    "sockets": "import socket\na, b = socket.socketpair()\na.settimeout(1); a.send(b'x'); assert b.recv(1) == b'x'",
    "signals": (
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()\n"
        "got = []\nsignal.signal(signal.SIGUSR1, lambda *_: got.append(1)); os.kill(os.getpid(), signal.SIGUSR1); assert got"
    ),
    "memory map": (
        "import mmap\nwith open('a', 'w+b') as file:\n    file.write(bytes(4096)); file.flush()\n"
        "    with mmap.mmap(file.fileno(), 4096) as m: m[:1] = b'x'\nassert open('a', 'rb').read(1) == b'x'"
    ),
    "ctypes": "import ctypes\nassert ctypes.CDLL(None).abs(-3) == 3",
}
WITH_PROCESSES = {
    "subprocess": (
        "import subprocess\nassert subprocess.check_output('echo a b | sort', shell=True, text=True) == 'a b\\n'\n"
        "assert subprocess.run(['false']).returncode == 1"
    ),
    "fork": "import os\nr, w = os.pipe()\nif os.fork() == 0:\n    os.write(w, b'x'); os._exit(0)\nassert os.read(r, 1) == b'x'; os.wait()",
    "asyncio": (
        "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', 'x', stdout=-1)\n"
        "    return await p.communicate()\nassert asyncio.run(f())[0] == b'x\\n'"
    ),
    "multiprocessing": (
        "import multiprocessing as m\ndef f(c): c.send(3)\nif __name__ == '__main__':\n    a, b = m.Pipe()\n"
        "    p = m.get_context('fork').Process(target=f, args=(b,)); p.start(); assert a.recv() == 3; p.join()"
    ),
}


async def test_ordinary_programs_run() -> None:
    done = {"inputs": [""], "outputs": ["done"]}
    async with start_hub({"code": ENV, "many": ENV | {"type": "code", "processes": 16}}, workers=1) as hub:
        for environment, programs in (("code", ORDINARY), ("many", ORDINARY | WITH_PROCESSES)):
            scores = await hub.score(
                [sample(f"{program}\nprint('done')", done, environment) for program in programs.values()]
            )
            for name, score in zip(programs, scores, strict=True):
                assert score.reward == 1, (environment, name, score)


LIBC = "import ctypes, os, time\nc = ctypes.CDLL(None, use_errno=True)\n"
SHARED_FILE = "import fcntl, os\nf = os.open(os.__file__, os.O_RDONLY)\n"
DAEMON = (
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
    "    if os.fork() == 0:\n        {}\n        time.sleep(999)\n    os._exit(0)\n"
)
# What one program does, and what the next one does, to be told "1": each prints 1 if the message arrived.
CHANNELS = {
    "a file": ("open('/tmp/left', 'w').write('1')", "print(open('/tmp/left').read())"),
    "a file elsewhere": ("open('/dev/shm/left', 'w').write('1')", "print(open('/dev/shm/left').read())"),
    "shared memory": (LIBC + "c.shmget(77, 4096, 0o1666)", LIBC + "print(int(c.shmget(77, 4096, 0o666) >= 0))"),
    "semaphores": (LIBC + "c.semget(77, 1, 0o1666)", LIBC + "print(int(c.semget(77, 1, 0o666) >= 0))"),
    "message queue": (LIBC + "c.msgget(77, 0o1666)", LIBC + "print(int(c.msgget(77, 0o666) >= 0))"),
    "POSIX queue": (LIBC + "c.mq_open(b'/left', 0o102, 0o666, None)", LIBC + "print(int(c.mq_open(b'/left', 0) >= 0))"),
    "POSIX shared memory": (
        LIBC + "c.shm_open(b'/left', 0o102, 0o666)",
        LIBC + "print(int(c.shm_open(b'/left', 0, 0) >= 0))",
    ),
    "keys": (
        LIBC + "c.syscall(248, b'user', b'left', b'1', 1, -4)",
        LIBC + "print(int(c.syscall(250, 10, -4, b'user', b'left', 0) >= 0))",
    ),
    "a process": (DAEMON.format("pass"), "import os\nos.kill(-1, 0); print(1)"),
    "an abstract socket": (
        DAEMON.format("import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0left'); s.listen()"),
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('\\0left'); print(1)",
    ),
    "the number of the next process": (
        "import threading\nfor _ in range(99): t = threading.Thread(target=id, args=(1,)); t.start(); t.join()",
        "import os\nprint(int(os.getpid() > 50))",
    ),
    "a lock": (
        DAEMON.format(SHARED_FILE.replace("\n", "; ") + "fcntl.flock(f, fcntl.LOCK_EX)"),
        SHARED_FILE + "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept BlockingIOError: print(1)",
    ),
    "times of a shared file": (
        "import os; os.utime(os.__file__, (1, 1))",
        "import os; print(int(os.stat(os.__file__).st_mtime == 1))",
    ),
    "when a shared file was read": (
        "import os; open(os.__file__).read()",
        "import os, time; print(int(time.time() - os.stat(os.__file__).st_atime < 2))",
    ),
    "a setting of the kernel": (
        "open('/proc/sys/kernel/domainname', 'w').write('left')",
        "print(int('left' in open('/proc/sys/kernel/domainname').read()))",
    ),
    "the machine's name": (LIBC + "c.sethostname(b'left', 4)", "import os; print(int(os.uname().nodename == 'left'))"),
    "a mount": (
        LIBC + "c.mount(b't', b'/tmp', b'tmpfs', 0, None)",
        "import os; print(int(not os.path.exists('/tmp/program')))",
    ),
    "the standard input": ("import os; os.write(0, b'1')", "print(input())"),
}


@pytest.mark.parametrize("processes", ALONE_AND_MANY)
async def test_nothing_that_a_program_leaves_reaches_the_next(processes: int) -> None:
    """Two completions that work together: one leaves a message, the next looks for it."""
    told = {"inputs": [""], "outputs": ["1"]}
    async with start_hub({"code": ENV | {"processes": processes}}, workers=1) as hub:
        for name, (leave, look) in CHANNELS.items():
            await hub.score([sample(leave, told)])
            (score,) = await hub.score([sample(look, told)])
            assert (score.status, score.reward) == ("SCORED", 0), (name, score)


TOOLS = "import os, signal, socket, sys, threading, time\n"
# What one program does, and what one that runs at the same time does, to be told "1".
CHANNELS_AT_ONCE = CHANNELS | {
    "a socket that listens": (
        TOOLS + "s = socket.socket(socket.AF_UNIX); s.bind('\\0told'); s.listen(); time.sleep(1)",
        TOOLS + "s = socket.socket(socket.AF_UNIX); s.connect('\\0told'); print(1)",
    ),
    "a port": (
        TOOLS + "s = socket.create_server(('127.0.0.1', 7777)); time.sleep(1)",
        TOOLS + "socket.create_connection(('127.0.0.1', 7777), 1); print(1)",
    ),
    "a signal": (TOOLS + "os.kill(-1, signal.SIGUSR1)", TOOLS + "signal.signal(signal.SIGUSR1, lambda *_: print(1))"),
    "a signal to the group": (
        TOOLS + "signal.signal(signal.SIGUSR1, signal.SIG_IGN); os.kill(0, signal.SIGUSR1)",
        TOOLS + "signal.signal(signal.SIGUSR1, lambda *_: print(1))",
    ),
    "the number of threads": (
        TOOLS + "for _ in range(99): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        TOOLS + "t = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range(5)]\n"
        "try: [x.start() for x in t]\nexcept RuntimeError: print(1)\n[x.join() for x in t]",
    ),
    "the space of the folder": (
        "open('/tmp/big', 'wb').write(bytes(60 << 20))",
        "f = open('/tmp/mine', 'wb')\ntry: f.write(bytes(20 << 20)); f.flush()\nexcept OSError: print(1)\nf.truncate(0)",
    ),
    "who opens a shared file": (
        TOOLS + "open(os.__file__).read()",
        LIBC + "import os, time; f = c.inotify_init1(0o4000); c.inotify_add_watch(f, os.__file__.encode(), 0x20)\n"
        "time.sleep(0.3); os.read(f, 4096); print(1)",
    ),
    "priorities": (
        TOOLS + "os.setpriority(os.PRIO_USER, 0, 17)",
        TOOLS + "print(int(os.getpriority(os.PRIO_USER, 0) == 17))",
    ),
}
AGAIN_AND_AGAIN = """\
import os, time
def tell(said):
    if str(said).strip() == "1":
        os.write(1, b"1")
        os._exit(0)
until = time.monotonic() + 2
while time.monotonic() < until:
    try:
        exec({!r}, {{"print": tell}})
    except BaseException:
        pass
    time.sleep(0.1)
"""


# two workers are two processes, which have less in common than the programs of one
@pytest.mark.parametrize(("size", "processes"), [(1, 8), pytest.param(2, 1, marks=pytest.mark.nightly)])
async def test_programs_that_run_at_the_same_time_tell_each_other_nothing(size: int, processes: int) -> None:
    """Two completions that work together, in one worker or in two."""
    async with started(size, processes=processes) as pool:
        told = [
            submitted(pool, AGAIN_AND_AGAIN.format(part), 1)[0] for parts in CHANNELS_AT_ONCE.values() for part in parts
        ]
        results = await asyncio.wait_for(asyncio.gather(*told), 2 * WAIT_S)
    for name, result in zip(CHANNELS_AT_ONCE, results[1::2], strict=True):
        assert (result.status, result.reward) == (STATUS_SCORED, 0), (name, result)


# Ways to have more than `memory_mb`. Each prints 1 if it had four times as much.
FILL = "import os\nfor _ in range(4):\n    for _ in range(256): os.write(f, bytes(1 << 20))\nprint(1)"
GREEDY = {
    "a file in memory": (
        "import os\nx = bytes(1 << 20)\nfor n in range(20):\n    f = os.memfd_create(str(n))\n"
        "    for _ in range(60): os.write(f, x)\nprint(1)"
    ),
    "a file": "import os\nf = os.open('x', os.O_CREAT | os.O_WRONLY)\n" + FILL,
    "System V": LIBC + "assert all(c.shmget(n, 256 << 20, 0o1600) >= 0 for n in range(1, 5)); print(1)",
    "shared memory, unmapped but for a page": (
        "import mmap\nkept = []\nfor _ in range(10):\n    m = mmap.mmap(-1, 100 << 20)\n    m[::4096] = bytes(len(m) // 4096)\n"
        "    m.resize(4096); kept.append(m)\nprint(1)"
    ),
    "private memory": "x = [bytearray(b'x' * (64 << 20)) for _ in range(16)]; print(1)",
    "processes": (
        "import os, time\nr, w = os.pipe()\nfor _ in range(5):\n    if os.fork() == 0:\n        x = b'x' * (200 << 20)\n"
        "        os.write(w, b'.'); time.sleep(999)\ngot = 0\nwhile got < 5: got += len(os.read(r, 1))\ntime.sleep(3)\nprint(1)"
    ),
}


@pytest.mark.parametrize("processes", ALONE_AND_MANY)
async def test_a_programs_memory_is_that_of_its_processes_and_files(processes: int) -> None:
    had = {"inputs": [""], "outputs": ["1"]}
    async with start_hub({"code": ENV | {"processes": processes, "cpu_s": 10, "wall_s": 20.0}}, workers=1) as hub:
        scores = await hub.score([sample(program, had) for program in GREEDY.values()])
    for name, score in zip(GREEDY, scores, strict=True):
        assert (score.status, score.reward) == ("SCORED", 0), (name, score)
    if processes > 1:
        assert "processes used more than 256 MiB" in scores[-1].metadata["first_failure"]["why"]


async def test_memory_shared_by_processes_is_charged_once() -> None:
    program = (
        "import os, time\nx = b'x' * (120 << 20)\nfor _ in range(5):\n    if os.fork() == 0: time.sleep(0.5); os._exit(0)\n"
        "for _ in range(5): os.wait()\nprint(1)"
    )
    async with start_hub({"code": ENV | {"processes": 8}}, workers=1) as hub:
        (score,) = await hub.score([sample(program, {"inputs": [""], "outputs": ["1"]})])
    assert score.reward == 1, score


async def test_time_used_up_fails_tests_and_time_run_out_is_no_zero() -> None:
    three = {"inputs": ["", "", ""], "outputs": ["1", "1", "1"]}
    env = ENV | {"type": "code", "partial_credit": True, "cpu_s": 9, "wall_s": 2.0, "timeout_s": 5.0}
    slow = "import time; time.sleep(1.2); print(1)"
    endless = "import time; time.sleep(999); print(1)"
    async with start_hub({"code": env}, workers=1) as hub:
        (late,) = await hub.score([sample(endless, three)])
        (unlucky,) = await hub.score([sample(slow, {"inputs": [""] * 9, "outputs": ["1"] * 9})])
    assert (late.status, late.reward) == ("SCORED", 0)
    assert (unlucky.status, unlucky.reward) == ("TIMED_OUT", None)
    assert "no test ran out of time; raise timeout_s, or give fewer tests" in unlucky.message


ONE = {"inputs": [""], "outputs": ["1"]}
PATIENT = ENV | {"type": "code", "wall_s": 120.0, "timeout_s": 240.0}


@contextlib.asynccontextmanager
async def started(size: int, **env: Any) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool({"code": CodeConfig(**PATIENT | env)}, size)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.aclose()
    assert not [each for each in psutil.Process().children(recursive=True) if "worker" in command_of(each)]


def submitted(pool: WorkerPool, program: str, times: int) -> list[asyncio.Future[Result]]:
    return [pool.submit([sample_to_wire(sample(program, ONE))], 240.0)[0] for _ in range(times)]


def code_workers() -> int:
    """Return the number of processes that are only there to run programs, whether or not they run one now."""
    return sum("code_worker" in command_of(each) for each in psutil.Process().children(recursive=True))


def programs_running() -> int:
    return sum(command_of(each) == "/tmp/program" for each in psutil.Process().children(recursive=True))


async def test_programs_that_sleep_do_not_keep_others_waiting() -> None:
    async with started(1) as pool:
        asleep, good = submitted(pool, "import time; time.sleep(999)", 16), submitted(pool, "print(1)", 4)
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(*good)
        assert [result.reward for result in results] == [1] * 4
        assert not any(future.done() for future in asleep)
        (other,) = submitted(pool, "print(1)", 1)  # and so does one that comes later
        assert (await asyncio.wait_for(other, WAIT_S)).reward == 1
        assert pool.asleep == 16
        for future in asleep:
            future.cancel()
        await eventually(lambda: programs_running() == 0)  # nobody waits for them any more


async def test_a_program_that_wakes_is_scored_and_comes_after_the_others() -> None:
    wakes = "import os, time; time.sleep(1); print(os.getpriority(os.PRIO_PROCESS, 0) // 19)"
    async with started(1) as pool:
        (woken,) = submitted(pool, wakes, 1)
        assert (await asyncio.wait_for(woken, WAIT_S)).reward == 1


async def test_programs_that_slept_begin_again_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 40]
    monkeypatch.setattr(headrace_services.reward.pool, "free_memory", lambda: free[0])
    async with started(1) as pool:
        asleep = submitted(pool, "import time; time.sleep(2); print(1)", 3)
        await eventually(lambda: pool.asleep == 3)
        free[0] = 0
        await eventually(lambda: pool.asleep == 0)
        async with asyncio.timeout(WAIT_S):  # now one after the other, as if they did not sleep
            results = await asyncio.gather(*asleep)
    assert [result.reward for result in results] == [1] * 3


@pytest.mark.parametrize("short_of", ["memory", "places"])
async def test_without_room_no_program_starts_beside_sleepers(short_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 40]
    if short_of == "places":
        monkeypatch.setattr(headrace_services.reward.pool, "_MOST_ASLEEP", 1)
    monkeypatch.setattr(headrace_services.reward.pool, "free_memory", lambda: free[0])
    async with started(1) as pool:
        (asleep,) = submitted(pool, "import time; time.sleep(999)", 1)
        await eventually(lambda: pool.asleep == 1)
        if short_of == "memory":
            free[0] = 200 << 20  # less than memory_mb, more than half of it
        (good,) = submitted(pool, "print(1)", 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(good), 0.5)
        asleep.cancel()
        assert (await asyncio.wait_for(good, WAIT_S)).reward == 1


async def test_what_a_burst_made_ends_in_the_quiet_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = "from headrace_services.reward import scoring_worker, spares; spares._QUIET_S = 0.05; scoring_worker.main()"
    monkeypatch.setattr(ScoringWorker, "program", ("-P", "-c", hasty))
    async with started(1) as pool:
        before = code_workers()
        # all processes are looked through for them, which takes time
        burst = submitted(pool, "import time; time.sleep(6); print(1)", 3)
        await eventually(lambda: code_workers() >= 3 * before, pause_s=0.2)
        assert [result.reward for result in await asyncio.wait_for(asyncio.gather(*burst), WAIT_S)] == [1] * 3
        await eventually(lambda: code_workers() == before, pause_s=0.2)
        (other,) = submitted(pool, "print(1)", 1)
        assert (await asyncio.wait_for(other, WAIT_S)).reward == 1


async def test_law_7_failure_is_not_zero_sleepers_of_a_dead_worker_rerun() -> None:
    async with started(1) as pool:
        (asleep,) = submitted(pool, "import time; time.sleep(3); print(1)", 1)
        await eventually(lambda: pool.asleep == 1)
        (worker,) = (each for each in psutil.Process().children() if "scoring_worker" in command_of(each))
        worker.kill()
        result = await asyncio.wait_for(asleep, WAIT_S)
    assert (result.status, result.reward) == (STATUS_SCORED, 1)


def test_law_7_failure_is_not_zero_a_stalled_machine_makes_none_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(code_worker, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    proc = os.open("/proc", os.O_PATH)
    with subprocess.Popen(["sh", "-c", "sleep 999; true"], start_new_session=True) as first:
        try:
            wait_until(lambda: [each.status() for each in psutil.Process(first.pid).children()] == ["sleeping"])
            looks = code_worker._Looks(first.pid, proc, None)
            for clock[0] in (0.05, 0.1, 60.0, 60.05):
                looks.take()
            assert looks.own_s < 1
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            os.close(proc)


async def test_time_in_which_a_program_waits_for_a_core_is_not_its_own() -> None:
    """Four programs of 0.6 s each, on one core: alone, each would end well within `wall_s`."""
    computes = "import time\nwhile time.process_time() < 0.6: pass\nprint(1)"
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the workers inherit it
    try:
        async with started(4, wall_s=1.2) as pool:
            results = await asyncio.wait_for(asyncio.gather(*submitted(pool, computes, 4)), WAIT_S)
    finally:
        os.sched_setaffinity(0, cores)
    assert [result.reward for result in results] == [1] * 4


async def test_another_language_has_its_command_and_a_limit_of_processes() -> None:
    env = ENV | {"cpu_s": 1, "wall_s": 2.0, "runs_with": ["perl"], "processes": 8}
    sums = "my ($a, $b) = split ' ', <STDIN>; print $a + $b, qq{\\n};"
    bomb = "while (1) { fork; } print 3;"
    child = "my $n = fork; if ($n == 0) { exit 0; } wait; print qq{3\\n};"
    three = {"inputs": [""], "outputs": ["3"]}
    async with start_hub({"code": env}, workers=1) as hub:
        right, forked, bombed, after = await hub.score(
            [sample(sums, SUMS), sample(child, three), sample(bomb, three), sample(sums, SUMS)]
        )
        (function,) = await hub.score([sample(sums, FUNCTION)])
    assert [right.reward, forked.reward, bombed.reward, after.reward] == [1, 1, 0, 1]
    assert right.build.startswith("perl, ")
    assert function.status == "INVALID"


async def test_level_b_alone_refuses_to_run_programs_with_the_remedy() -> None:
    for levels in ([Level.B], [Level.B, Level.NONE]):
        pool = WorkerPool({"solve": CodeConfig(unsafe_no_sandbox=True)}, 1, levels=levels)
        with pytest.raises(
            ServiceError, match=r"env\.solve runs programs .*level A.*user namespaces.*env\.solve\.target"
        ):
            await pool.start()
    assert "EPERM" in refusal("solve", "unshare: EPERM")


async def test_a_command_that_is_not_there_is_refused_at_the_start() -> None:
    pool = WorkerPool({"code": CodeConfig(runs_with=["no-such-thing"])}, 1)
    with pytest.raises(
        ServiceError, match=r"env\.code\.runs_with can't be started \(no-such-thing: .*programs see only /usr"
    ):
        await pool.start()
