"""What a user's shell hands to every process of a run: variables, limits, the umask and open descriptors.

Most of it applies as everywhere else (docs/operations.md). Refused here, before anything starts, is what would end a run later, in a
library whose error names neither the variable nor the remedy.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from headrace.base.errors import ConfigError

# gRPC aborts the process for any other
_POLLERS = ("all", "epoll1", "poll", "none")
# Libraries make these folders, and write to them, while they are imported or when they first compile something.
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
# The least that the limits must allow: room for the smallest runs.
_ADDRESS_SPACE, _FILES, _FILE_BYTES = 8 * 2**30, 256, 2**30


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError`, with a line for each problem, if the shell makes a run impossible."""
    if problems := [*_of_python(), *_of_interfaces(environ), *_of_libraries(environ), *_of_limits()]:
        raise ConfigError("\n".join(problems))


def _of_python() -> Iterator[str]:
    if sys.flags.optimize > 1:
        yield "PYTHONOPTIMIZE=2 removes the docstrings that transformers reads; unset PYTHONOPTIMIZE, or set it to 1"
    if sys.flags.inspect:
        yield "PYTHONINSPECT keeps the processes of a run from ending with their exit codes; unset PYTHONINSPECT"
    if errors := [option for option in sys.warnoptions if option.startswith("error")]:
        yield f"PYTHONWARNINGS={','.join(errors)} turns the warnings of libraries into errors; unset PYTHONWARNINGS"


def _of_interfaces(environ: Mapping[str, str]) -> Iterator[str]:
    known = [name for _, name in socket.if_nameindex()]
    for variable, is_known in (("GLOO_SOCKET_IFNAME", _gloo_knows), ("NCCL_SOCKET_IFNAME", _nccl_knows)):
        value = environ.get(variable)
        if value and not is_known(value, known):
            yield (
                f"{variable}={value} names no network interface of this machine; unset {variable}, or set it to one of "
                f"{', '.join(known)}"
            )


def _gloo_knows(value: str, known: Sequence[str]) -> bool:
    return all(name in known for name in value.split(","))


def _nccl_knows(value: str, known: Sequence[str]) -> bool:
    """NCCL takes names as the beginnings of names, unless `=` is before them, and all others after `^`."""
    if value.startswith("^"):
        return True
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    return any(each == name if value.startswith("=") else each.startswith(name) for each in known for name in names)


def _of_libraries(environ: Mapping[str, str]) -> Iterator[str]:
    pollers = environ.get("GRPC_POLL_STRATEGY", "all")
    if not any(poller in _POLLERS for poller in pollers.split(",")):
        yield f"GRPC_POLL_STRATEGY={pollers} is none of {', '.join(_POLLERS)}, and gRPC would abort; unset GRPC_POLL_STRATEGY"
    for variable in _CACHES:
        if environ.get(variable) and (error := _unwritable(Path(environ[variable]))):
            yield f"{variable}={environ[variable]} can't be written ({error.strerror}); unset {variable}, or set it to a folder that can"


def _unwritable(folder: Path) -> OSError | None:
    """Return why there can be no new file in `folder`, which is made if it doesn't exist; None if there can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


def _of_limits() -> Iterator[str]:
    for limit, option, least, divisor, why in (
        (resource.RLIMIT_AS, "-v", _ADDRESS_SPACE, 1024, "torch and vLLM map more than that when they start"),
        (resource.RLIMIT_FSIZE, "-f", _FILE_BYTES, 1024, "checkpoints and the buffer's append-only file become larger"),
        (resource.RLIMIT_NOFILE, "-n", _FILES, 1, "a service opens more files and connections than that"),
    ):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY and allowed < least:
            yield f"ulimit {option} is {allowed // divisor}, and {why}; set it to at least {least // divisor}"
    umask = os.umask(0o077)
    os.umask(umask)
    if umask & 0o700:
        yield f"umask {umask:04o} takes new files from the user who writes them; set it to 022 or 077 (`umask 077`)"


def open_standard_streams() -> None:
    """Open what the shell has closed of standard input, output and error (`>&-`): the next file would get its number, and with it what
    libraries and child processes print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
