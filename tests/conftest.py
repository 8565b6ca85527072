from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import importlib.metadata
import inspect
import os
import secrets
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from headrace.net.service import importing
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from tests.support import forks, requirements
from tests.support.buffer import LIMITS
from tests.support.fork_server import FORK_HANDLERS, TESTS, folder_of_sockets
from tests.support.redis_servers import buffer_server

# before torch is imported: a second thread on a busy core makes both slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
# pydantic looks for plugins in all packages that are installed, in each process that a test starts; there are none
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

SEED = "HEADRACE_TEST_SEED"
UNIT = Path(__file__).parent / "unit"  # these need Python packages only
WARM_UP_BATCH = 64
# Their own process imports it, for which it takes seconds of a core.
IMPORT_VLLM = {
    "tests/integration/rollout/test_chat_format.py",
    "tests/integration/rollout/test_generate.py",
    "tests/integration/rollout/test_start.py",
    "tests/integration/weights/test_failure_kinds.py",
    "tests/integration/weights/test_worker_group.py",
    "tests/unit/rollout/test_engine_arguments.py",
}


@dataclasses.dataclass(frozen=True)
class Size:
    """How many random cases there are, of which each day has others. `examples` of a property; `calls` of the buffer that
    tests/properties makes; `messages` that tests/fuzz sends to each function, method and route."""

    examples: int
    calls: int
    messages: int


def _fork_beside_grpc() -> None:
    """Have gRPC leave forks of this process alone."""
    os.environ[FORK_HANDLERS] = "0"
    import grpc  # noqa: F401 - it reads the variable now

    del os.environ[FORK_HANDLERS]  # the processes that tests start have the defaults


_fork_beside_grpc()  # before the conftest of a folder, which may import it

# At night a file of these takes five minutes of a core at most. `--calls` gives a single file hours.
DAY, NIGHT = Size(15, 1_500, 60), Size(400, 40_000, 2_000)

# how long an example takes says how busy the machine is
settings.register_profile("day", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=DAY.examples)
settings.register_profile("night", settings.get_profile("day"), max_examples=NIGHT.examples)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="everything, at nightly size: what `make test-all` runs")
    parser.addoption(
        "--calls",
        type=int,
        help="calls of the buffer that tests/properties makes; messages that tests/fuzz sends to each function, method and route",
    )
    parser.addoption(
        "--no-shrink", action="store_true", help="tests/properties: end at the first failure as it was found"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: only `make test-all` runs it (`--nightly`)")
    config.addinivalue_line("markers", "limits: what is different in the limits of the test's run")
    settings.load_profile("night" if config.getoption("nightly") else "day")
    if hasattr(config, "workerinput"):  # one of the processes that share the tests
        config.option.hypothesis_seed = config.workerinput["hypothesis_seed"]
        return
    config.pluginmanager.register(_Failures(config))
    unit = all(Path(each).resolve().is_relative_to(UNIT) for each in config.args)
    if not unit and (problem := requirements.missing()):
        raise pytest.UsageError(problem)
    # taken out: the configuration refuses every HEADRACE_ variable that it doesn't know
    given = os.environ.pop(SEED, None) or datetime.date.today().strftime("%Y%m%d")
    if not given.isdecimal():
        raise pytest.UsageError(f"{SEED}: {given!r} is not a whole number; give one, or unset it for today's date")
    config.option.hypothesis_seed = config.getoption("hypothesis_seed", None) or given
    os.environ[TESTS] = str(os.getpid())
    shutil.rmtree(folder_of_sockets(), ignore_errors=True)  # of a process that was killed
    folder_of_sockets().mkdir(mode=0o700)


def pytest_unconfigure(config: pytest.Config) -> None:
    if os.environ.get(TESTS) == str(os.getpid()):
        shutil.rmtree(folder_of_sockets())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist starts a process that shares the tests: it draws the same random cases."""
    node.workerinput["hypothesis_seed"] = node.config.option.hypothesis_seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """What the files of the tests import takes longer than to collect the tests, so one process imports it for all that share them, unless
    a PYTHONPATH may put something else in its place."""
    if "PYTHONPATH" not in os.environ:
        for spec in specs:
            spec.python = forks.interpreter()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file goes as a whole to one of the processes that share the tests, and those that import vLLM all to the same one."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "vLLM" if file in IMPORT_VLLM else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_report_header(config: pytest.Config) -> str:
    return f"{SEED}={config.getoption('hypothesis_seed')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(f"{SEED}={config.getoption('hypothesis_seed')} draws the same random cases again")


@pytest.fixture(scope="session")
def session_seed(pytestconfig: pytest.Config) -> int:
    """Of everything that is drawn at random: HEADRACE_TEST_SEED, by default the date, so that each day sees other cases."""
    return int(pytestconfig.getoption("hypothesis_seed"))


def _size(config: pytest.Config) -> Size:
    return NIGHT if config.getoption("nightly") else DAY


@pytest.fixture(scope="session")
def calls(pytestconfig: pytest.Config) -> int:
    """Of the buffer, for the test of its model."""
    return pytestconfig.getoption("calls") or _size(pytestconfig).calls


@pytest.fixture(scope="session")
def messages(pytestconfig: pytest.Config) -> int:
    """Malformed messages to send to each function, method and route."""
    return pytestconfig.getoption("calls") or _size(pytestconfig).messages


def pytest_collectstart(collector: pytest.Collector) -> None:
    """In a checkout without bytecode, one of the processes that share the tests compiles a file, and the others wait for what it wrote."""
    if isinstance(collector, pytest.Module) and "PYTEST_XDIST_WORKER" in os.environ:
        with (
            collector.path.open() as file,
            contextlib.suppress(Exception, pytest.skip.Exception),
        ):  # raised again where it is reported
            fcntl.flock(file, fcntl.LOCK_EX)
            _ = collector.obj


@pytest.hookimpl(specname="pytest_collection_modifyitems", wrapper=True)
def one_parses_for_all() -> Iterator[None]:
    """Hypothesis looks for constants in all of the product's files, and keeps them by file: in a fresh checkout, one process does it."""
    with FileLock(folder_of_sockets() / "constants"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """At night everything runs: a test that lacks a tool fails, and says what to install. What the mark `skipif` leaves out depends on what
    the machine is."""
    report = yield
    reason = call.excinfo.value if call.excinfo else None
    is_machine = item.get_closest_marker("skipif") is not None
    if isinstance(reason, pytest.skip.Exception) and item.config.getoption("nightly") and not is_machine:
        report.outcome, report.longrepr = "failed", f"at nightly size nothing is skipped: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with _one_first(), importing():
        return (yield)


@contextlib.contextmanager
def _one_first() -> Iterator[None]:
    """Of the processes that share the tests, have one collect them before the others: what pytest makes of the assertions of a file, which
    takes longer than to collect it, is then there for all."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with (folder_of_sockets() / "collecting").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


class _Failures:
    """Says a failure at once, in the process that prints: a run that is ended from outside would tell none."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(
                report.longrepr, "reprcrash", None
            )  # pytest has none of a process that ended, and of errors in a fixture
            said = crash.message if crash else report.longreprtext
            self._config.get_terminal_writer().line(f"\n{report.when} failed: {report.nodeid}: {said:.2000}")


def _end_in_time(item: pytest.Function) -> None:
    """Has an async test end a little before its time is over. The alarm of pytest-timeout raises in whatever runs then: in a task beside
    the test it would end that task alone, and the test would wait for ever."""
    test: Callable[..., Any] = item.obj
    mark = item.get_closest_marker("timeout")
    limit_s = 0.9 * float(mark.args[0] if mark else item.config.getini("timeout"))

    @functools.wraps(test)
    async def ended_in_time(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(limit_s or None):
            await test(*args, **kwargs)

    item.obj = ended_in_time


def _turn(item: pytest.Item) -> tuple[int, int]:
    """When a file has its turn, among processes that share the tests. Whole runs come first: they take minutes. Unit tests come last: they
    are short, and compute to the end. The others are mixed, by a digest of their names: side by side in one folder are those that wait, for
    outages and deadlines, and those that compute."""
    file = item.nodeid.partition("::")[0]
    folder = file.split("/")[1]
    return {"e2e": 0, "chaos": 0, "unit": 2}.get(folder, 1), zlib.crc32(file.encode())


@pytest.hookimpl(trylast=True)  # pytest itself puts together what uses the same server
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_turn)
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            _end_in_time(item)
    if config.getoption("nightly"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey of this test session, with the buffer's functions loaded. Tests keep apart by their run ids."""
    with buffer_server(tmp_path_factory.mktemp("replay")) as server:
        yield server.url


@pytest.fixture
def run_id() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def base_limits() -> Limits:
    """Of a small run. A folder may override them for its tests."""
    return LIMITS


@pytest.fixture
def limits(base_limits: Limits, request: pytest.FixtureRequest) -> Limits:
    """What the buffer is opened with: `base_limits` but for what `pytest.mark.limits` changes."""
    mark = request.node.get_closest_marker("limits")
    return base_limits if mark is None else dataclasses.replace(base_limits, **mark.kwargs)


@pytest.fixture
async def replay(redis_url: str, run_id: str, limits: Limits) -> AsyncIterator[ReplayClient]:
    """A client of a fresh run."""
    client = ReplayClient(open_redis(redis_url), run_id)
    await client.open_run(limits)
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-type model of 0.5 M random weights with a character tokenizer and a chat template."""
    return _made_once(tmp_path_factory, "tiny")


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The demo's model as `headrace model tiny` makes it, right some of the time; of half the problems, which makes it no worse. The next
    test run has it from the cache, as long as what makes it is the same."""
    return _made_once(tmp_path_factory, "warm", getattr(pytestconfig, "cache", None))


def _made_once(tmp_path_factory: pytest.TempPathFactory, name: str, cache: pytest.Cache | None = None) -> Path:
    """The model of a whole test run: of the processes that share its tests, one makes it and the others wait."""
    from headrace_services.trainer.demo_models import tiny

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / name
    kept = directory if cache is None else cache.mkdir("models") / _digest(Path(tiny.__file__).parent)
    with FileLock(f"{kept}.lock"):
        with mock.patch.object(tiny, "BATCH", WARM_UP_BATCH):
            tiny.make(kept, warmup=name == "warm")
        if not directory.exists():
            shutil.copytree(kept, directory)
    return directory


def _digest(makers: Path) -> str:
    """Of what makes a model."""
    files = [Path(__file__), makers.parent / "data" / "arithmetic.py", *sorted(makers.glob("*.py"))]
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    return hashlib.sha256(b"".join([*(file.read_bytes() for file in files), *map(str.encode, versions)])).hexdigest()
