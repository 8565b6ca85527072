"""Processes of the tests, forked from one that has torch and transformers imported, which is most of what they take to start."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from headrace.service import die_with_parent

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["headrace_services.trainer.main", "transformers.models.qwen2.modeling_qwen2"])


def fork(
    target: Callable[..., None], *arguments: Any, log: Path, environ: Mapping[str, str] | None = None
) -> BaseProcess:
    """A process that runs `target(*arguments)`, with `environ` beside its environment; what it says goes to `log`."""
    process = _FORKSERVER.Process(target=_run, args=(target, arguments, str(log), dict(environ or {})), daemon=True)
    process.start()
    return process


@contextmanager
def fork_ranks(count: int, target: Callable[..., None], *arguments: Any, log: Path) -> Iterator[list[BaseProcess]]:
    """So many processes with the environment that torchrun gives its ranks. Those that still run at the end are killed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks: list[BaseProcess] = []
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(fork(target, *arguments, log=log, environ={**environ, **own}))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run(target: Callable[..., None], arguments: tuple[Any, ...], log: str, environ: dict[str, str]) -> None:
    die_with_parent(signal.SIGKILL)
    os.environ.update(environ)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target(*arguments)
