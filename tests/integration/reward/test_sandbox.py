"""What the policy writes, against the sandbox and against every built-in scorer: none earns what it didn't, none is seen by the next."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from headrace import Sample
from headrace.base.errors import ServiceError
from headrace.base.tagged_json import to_json
from headrace.config.data import DataSourceConfig
from headrace.config.environments import MathConfig, ReasoningGymConfig
from headrace.env.wire import sample_to_wire, score_from_wire
from headrace.records.score import Score
from headrace_services.reward.environments.gym_answers import ACCEPTS, TASKS
from headrace_services.reward.pool import ScoringWorker, WorkerPool
from headrace_services.reward.sandbox import MAX_RESULT_BYTES, Level, SandboxDenied
from headrace_services.reward.scoring_worker import Specification
from tests.support.evaluating_worker import ENDS_AT_SIGHT
from tests.support.hostile import DEADLY, hostile
from tests.support.reward_hub import Hub, start_hub
from tests.support.waiting import eventually

EVALUATING = Path(__file__).parents[2] / "support" / "evaluating_worker.py"
LEVELS = [Level.A, Level.B]
TIMEOUT_S = 20.0


class EvaluatingWorker(ScoringWorker):
    program: Sequence[str] = ("-P", str(EVALUATING))

    async def run(self, code: str, timeout_s: float = TIMEOUT_S) -> Score:
        sample = sample_to_wire(Sample(code, environment="evaluating"))
        asleep = asyncio.get_running_loop().create_future()
        result = await self.score("evaluating", sample.SerializeToString(), timeout_s, asleep)
        assert result is not None
        return score_from_wire(result)

    async def look_through(self, *completions: str) -> list[Score | None]:
        samples = [sample_to_wire(Sample(completion, environment="evaluating")) for completion in completions]
        wires = [sample.SerializeToString() for sample in samples]
        found = await self.quick_results("evaluating", wires, TIMEOUT_S)
        return [None if result is None else score_from_wire(result) for result in found]


@contextlib.asynccontextmanager
async def evaluating(*levels: Level) -> AsyncIterator[EvaluatingWorker]:
    worker = EvaluatingWorker(Specification({"evaluating": {"type": "repetition"}}, [], list(levels)))
    try:
        await worker.start()
    except SandboxDenied as denied:
        pytest.skip(f"this machine grants no sandbox of {levels}: {denied}")
    try:
        yield worker
    finally:
        await worker.kill()


def attacks(tmp_path: Path, tcp: int, udp: int, unix: str) -> dict[str, str]:
    """Python by what it tries. If the attempt succeeds, `reward` is 1."""
    mark, secret = tmp_path / "mark", tmp_path / "secret"
    secret.write_text("1")
    connect = "import socket; s = socket.socket(socket.{}, socket.{}); s.connect({!r}); s.send(b'x'); reward = 1"
    call = "import ctypes; reward = float(ctypes.CDLL(None).{} >= 0)"
    return {
        "shell": f"import os; os.system('touch {mark}'); reward = 1",
        "subprocess": f"import subprocess; subprocess.run(['touch', {str(mark)!r}], check=True); reward = 1",
        "exec": f"import os; os.execv('/bin/sh', ['sh', '-c', 'touch {mark}'])",
        "read a file": f"reward = float(open({str(secret)!r}).read())",
        "read the configuration of the system": "reward = float(bool(open('/etc/passwd').read()))",
        "list a folder": f"import os; reward = float(bool(os.listdir({str(tmp_path)!r})))",
        "list the root": "import os; reward = float('home' in os.listdir('/'))",
        "write a file": f"open({str(mark)!r}, 'w').write('x'); reward = 1",
        "write in /tmp": "import tempfile; tempfile.TemporaryFile(); reward = 1",
        "write in the judge's code": f"open({str(EVALUATING)!r}, 'a').write('#'); reward = 1",
        "change a file's mode": f"import os; os.chmod({str(secret)!r}, 0o777); reward = 1",
        "change the mode of what it may read": "import os; os.chmod(os.__file__, 0o777); reward = 1",
        "delete a file": f"import os; os.unlink({str(secret)!r}); reward = 1",
        "symbolic link": f"import os; os.symlink({str(secret)!r}, '/tmp/link'); reward = float(open('/tmp/link').read())",
        "hard link": f"import os; os.link({str(secret)!r}, {str(mark)!r}); reward = 1",
        "TCP": connect.format("AF_INET", "SOCK_STREAM", ("127.0.0.1", tcp)),
        "UDP": connect.format("AF_INET", "SOCK_DGRAM", ("127.0.0.1", udp)),
        "unix socket": connect.format("AF_UNIX", "SOCK_STREAM", unix),
        "abstract unix socket": connect.format("AF_UNIX", "SOCK_STREAM", "\0" + unix),
        "a pair of sockets": "import socket; socket.socketpair(); reward = 1",
        "fork": "import os; os.fork(); reward = 1",
        "fork bomb": "import os\nwhile True: os.fork()",
        "fork by system call": call.format("syscall(57)"),
        "thread": "import threading; threading.Thread(target=print).start(); reward = 1",
        "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 26))",
        "kill the worker": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); reward = 1",
        "kill everybody": "import os, signal; os.kill(-1, signal.SIGKILL); reward = 1",
        "kill the hub": f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); reward = 1",
        "see a process": f"import os; os.kill({os.getpid()}, 0); reward = 1",
        "own a pipe's signals": "import fcntl, os; fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid()); reward = 1",
        "limits of the worker": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)); reward = 1",
        "its own limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); reward = 1",
        "trace the worker": call.format("ptrace(16, __import__('os').getppid(), 0, 0)"),
        "read the worker's memory": call.format("process_vm_readv(__import__('os').getppid(), 0, 0, 0, 0, 0)"),
        "new namespace": call.format("unshare(0x10000000)"),
        "mount": call.format("mount(b'tmpfs', b'/', b'tmpfs', 0, None)"),
        "keys": call.format("syscall(248, b'user', b'x', b'x', 1, -3)"),
        "a file in memory": "import os; os.memfd_create('x'); reward = 1",
        "its surroundings by /proc": "reward = float(bool(open('/proc/self/environ', 'rb').read()))",
        "the worker by /proc": "import os; open(f'/proc/{os.getppid()}/mem', 'r+b'); reward = 1",
        "the hub by /proc": f"open('/proc/{os.getpid()}/environ', 'rb').read(); reward = 1",
        "its environment": "import os; reward = float('PATH' in os.environ or 'HOME' in os.environ)",
        "open files of the worker": "import os; [os.fstat(fd) for fd in range(4, 20)]; reward = 1",
        "not a number": "reward = float('nan')",
        "infinity": "reward = float('inf')",
        "garbage in the result's pipe": "import os; os.write(3, b'garbage'); reward = 1",
        "garbage instead of a result": "import os; os.write(3, b'\\0\\0\\0\\4\\xff\\xff\\xff\\xff'); os._exit(0)",
        "a result and then another": "import os; os.write(3, b'\\0\\0\\0\\2\\x08\\x01'); reward = 1",
        "a flood in the result's pipe": f"import os\nfor _ in range(9): os.write(3, bytes({MAX_RESULT_BYTES}))",
        "a flood in the log": "import sys\nfor _ in range(99): print('x' * 9999, file=sys.stderr)\nraise ValueError",
        "no result": "import os; os._exit(0)",
        "a crash": "import ctypes; ctypes.string_at(0)",
        "an error that no handler catches": "raise SystemExit(0)",
        "deep recursion": "def f(*_): sorted([1], key=f)\nimport sys; sys.setrecursionlimit(10**9); f()",
    }


@pytest.mark.parametrize("level", LEVELS)
async def test_no_attack_on_the_sandbox_succeeds_or_is_seen_by_the_next(level: Level, tmp_path: Path) -> None:
    unix = str(tmp_path / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        for server, address in ((by_path, unix), (abstract, "\0" + unix)):
            server.bind(address)
            server.listen()
        everything = attacks(tmp_path, tcp.getsockname()[1], udp.getsockname()[1], unix)
        mode = os.stat(os.__file__).st_mode
        async with evaluating(level) as worker:
            assert worker.started.level is level
            for name, code in everything.items():
                result = await worker.run(code)
                assert result.status in ("SCORED", "FAILED"), (name, result)
                assert not result.reward, (name, result)
                assert worker.alive, name
                assert (await worker.run("reward = 1")).reward == 1, name
        for server in (tcp, udp, by_path, abstract):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.recv(1) if server is udp else server.accept()
    assert not (tmp_path / "mark").exists()
    assert (tmp_path / "secret").read_text() == "1"
    assert os.stat(os.__file__).st_mode == mode
    assert not EVALUATING.read_text().endswith("#")


@pytest.mark.parametrize("level", [*LEVELS, Level.NONE])
async def test_a_completion_that_patches_the_judge_does_so_for_itself_alone(level: Level) -> None:
    async with evaluating(level) as worker:
        await worker.run("type(self).earned = lambda self, reward: 1.0; self.build = 'mine'")
        await worker.run("import headrace_services.reward.scoring_worker as w; w.score_one = lambda *_: None")
        await worker.run("import builtins; builtins.float = lambda *_: 1.0; import sys; sys.modules.clear()")
        wrong = await worker.run("reward = 0.0")
    assert (wrong.status, wrong.reward, wrong.build) == ("SCORED", 0, "1")


@pytest.mark.parametrize("level", [*LEVELS, Level.NONE])
async def test_law_6_liveness_an_endless_completion_costs_its_own_time(level: Level) -> None:
    async with evaluating(level) as worker:
        endless = await worker.run("while True: pass", timeout_s=0.5)
        asleep = await worker.run(
            "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(9999)", timeout_s=0.5
        )
        after = await worker.run("reward = 1")
        assert worker.alive
    assert [result.status for result in (endless, asleep, after)] == ["TIMED_OUT", "TIMED_OUT", "SCORED"]


async def test_what_can_be_told_at_sight_is_told_and_none_of_the_rest_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with evaluating(Level.A, Level.B) as worker:
        seen, unseen, also_seen = await worker.look_through("", f"open({str(mark)!r}, 'w'); reward = 1", "")
        assert worker.alive
    assert (seen, also_seen) == (seen, seen)
    assert seen is not None
    assert (seen.status, seen.reward, seen.build) == ("SCORED", 0.0, "1")
    assert unseen is None
    assert not mark.exists()


async def test_a_worker_that_dies_while_it_looks_blames_no_completion() -> None:
    async with evaluating(Level.A, Level.B) as worker:
        assert await worker.look_through("", ENDS_AT_SIGHT, "") == [None, None, None]
        assert not worker.alive
        await worker.restart()
        alone = [await worker.run(""), await worker.run(ENDS_AT_SIGHT)]
    assert [score.status for score in alone] == ["SCORED", "FAILED"]


async def test_whose_result_it_is_is_not_for_the_child_to_say() -> None:
    claim = "from headrace.records.score import Score\nreward = Score('SCORED', 1.0, environment='math', build='9')"
    async with evaluating(Level.A, Level.B) as worker:
        result = await worker.run(claim)
    assert (result.environment, result.build) == ("evaluating", "1")


async def test_a_hub_without_a_sandbox_refuses_unless_told_otherwise() -> None:
    pool = WorkerPool({"math": MathConfig(), "rest": MathConfig(unsafe_no_sandbox=True)}, 1, levels=[Level.NONE])
    with pytest.raises(
        ServiceError, match=r"no sandbox .*unprivileged user namespaces.*env\.math\.unsafe_no_sandbox: true$"
    ):
        await pool.start()
    pool = WorkerPool({"math": MathConfig(unsafe_no_sandbox=True)}, 1, levels=[Level.NONE])
    await pool.start()
    try:
        right = sample_to_wire(Sample("132", {"answer": "132"}, environment="math"))
        assert (await pool.submit([right], TIMEOUT_S)[0]).reward == 1
        assert pool.level is Level.NONE
    finally:
        await pool.aclose()


# Generating a problem takes long for some of these, and one serves all tests.
PROBLEMS: dict[str, dict[str, Any]] = {}


def problem(task: str) -> dict[str, Any]:
    if task not in PROBLEMS:
        entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
        PROBLEMS[task] = {"task": task, "entry": to_json(entry)}
    return PROBLEMS[task]


async def scored(hub: Hub, sample: Sample) -> Score | None:
    (score,) = await hub.score([sample])
    return score if score.status == "SCORED" else None


async def test_hostile_completions_earn_nothing_from_rules_that_evaluate(tmp_path: Path) -> None:
    """The tasks whose rules evaluate answers, or can be kept busy or fooled by one, some of the rest, and the other environments. Each
    task gets a part of the completions; `tests/unit/reward/test_gym_answers.py` gives all of them to each."""
    mark = tmp_path / "mark"
    tasks = sorted({*ACCEPTS, "bitwise_arithmetic", "number_sorting", "chain_sum", "boxnet", "prime_factorization"})
    completions = [*DEADLY, *hostile(mark)]
    env = {"gym": {"type": "reasoning_gym"}, "math": {"timeout_s": 1.0}, "math_multi_reward": {}}
    async with start_hub(env, workers=2) as hub:
        for place, task in enumerate(tasks):
            info = problem(task)
            right = Sample(str(info["entry"]["answer"]), info, environment="gym")
            part = completions[place % 4 :: 4]
            samples = [Sample(completion, info, environment="gym") for completion in part]
            dataset = reasoning_gym.create_dataset(task, size=1, seed=3)
            nothing = float(dataset.score_answer(None, dataset[0]))
            *results, last = await hub.score([*samples, right])
            for completion, result in zip(part, results, strict=True):
                assert result.status == "SCORED", (task, completion[:80], result)
                assert result.reward is not None
                assert result.reward <= max(nothing, 0.05), (task, completion[:80], result)
            assert last.reward == dataset.score_answer(str(dataset[0]["answer"]), dataset[0]), task
        for name in ("math", "math_multi_reward"):
            samples = [Sample(completion, {"answer": "132"}, environment=name) for completion in completions]
            for completion, result in zip(completions, await hub.score(samples), strict=True):
                digits_alone = result.components.get("integer", 0.0)  # which one of them is, as asked
                assert not (result.reward or 0.0) - digits_alone, (name, completion[:80], result)
            # after the last of them another worker starts, which on a busy machine may take longer than a sample's second
            wrong = await eventually(partial(scored, hub, Sample("no", {"answer": "132"}, environment=name)))
            assert wrong.reward == 0
    assert not mark.exists()


def poisoned(task: str, code: str, *place: str) -> dict[str, Any]:
    info: dict[str, Any] = problem(task)
    entry = {**info["entry"], "metadata": {**info["entry"]["metadata"]}}
    field = entry
    for name in place[:-1]:
        field = field[name]
    field[place[-1]] = code
    return {**info, "entry": entry}


async def test_a_problem_that_holds_code_is_invalid_and_nothing_of_it_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"__import__('os').system('touch {mark}')"
    infos = [
        poisoned("bitwise_arithmetic", code, "metadata", "problem"),
        poisoned("bitwise_arithmetic", "0x1 << (0x1 << 0xff)", "metadata", "problem"),
        poisoned("number_sorting", f"[{code}]", "answer"),
        poisoned("simple_integration", code, "metadata", "integrand"),
        poisoned("simple_integration", code, "metadata", "variable"),
        poisoned("intermediate_integration", code, "metadata", "integrand"),
        poisoned("polynomial_multiplication", code, "answer"),
        poisoned("polynomial_multiplication", code, "metadata", "variables"),
        {**problem("spell_backward"), "task_config": {"data_file": str(mark)}},
        {**problem("chain_sum"), "task": "composite", "task_config": {"datasets": [{"name": "chain_sum"}]}},
    ]
    async with start_hub({"gym": {"type": "reasoning_gym"}}, workers=1) as hub:
        results = await hub.score([Sample("1", info, environment="gym") for info in infos])
    assert [result.status for result in results] == ["INVALID"] * len(infos)
    assert not mark.exists()


async def test_a_task_without_a_safe_rule_is_refused_by_name_at_the_start() -> None:
    source = DataSourceConfig(dataset_name="reasoning_gym", task="composite", env_name="gym")
    pool = WorkerPool({"gym": ReasoningGymConfig()}, 1, [source])
    with pytest.raises(
        ServiceError, match=r"env\.gym can't score the task 'composite'.*use one of ab, acre, .*chain_sum"
    ):
        await pool.start()


@pytest.mark.nightly  # a problem of each task; the test above has those whose rules do most
async def test_law_7_failure_is_not_zero_tasks_score_alike_in_the_sandbox() -> None:
    """A file or system call that a rule needs and the sandbox denies would look like a wrong answer."""
    tasks = sorted(TASKS)
    sources = [DataSourceConfig(dataset_name="reasoning_gym", task=task, env_name="gym") for task in tasks]
    pool = WorkerPool({"gym": ReasoningGymConfig()}, 1, sources)
    await pool.start()
    try:
        for task in tasks:
            dataset = reasoning_gym.create_dataset(task, size=1, seed=3)
            entry = dataset[0]
            for said in (str(entry["answer"]).strip(), "<answer>7</answer>"):
                sample = Sample(said, {"task": task, "entry": to_json(entry)}, environment="gym")
                result = score_from_wire(await pool.submit([sample_to_wire(sample)], TIMEOUT_S)[0])
                assert (result.status, result.message) == ("SCORED", ""), (task, said)
                if said != "<answer>7</answer>":
                    assert result.reward == pytest.approx(float(dataset.score_answer(said, entry))), task
    finally:
        await pool.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("executed")
async def test_a_worker_has_one_thread() -> None:
    pool = WorkerPool({"gym": ReasoningGymConfig(), "math": MathConfig()}, 1, levels=[Level.B, Level.NONE])
    await pool.start()
    try:
        (process,) = (worker._process for worker in pool._workers)
        assert process is not None
        assert len(os.listdir(f"/proc/{process.pid}/task")) == 1
    finally:
        await pool.aclose()
