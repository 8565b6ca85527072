"""What a shell may not do to a run: it is refused at once, by the name of the variable or limit, with the remedy."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.launch import shell

CHECK = "from headrace.launch import shell; shell.check()"


def limited(limit: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(limit, (value, value))


def complaint(before: Callable[[], object] | None = None, **variables: str) -> str:
    """The last line of a process of such a shell."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, preexec_fn=before,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if "ConfigError" in line]
    return lines[-1] if lines else done.stderr


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GRPC_POLL_STRATEGY"])
def test_a_name_that_a_library_would_not_find_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=nonsense .*; unset {name}"):
        shell.check({name: "nonsense"})


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"])
def test_a_cache_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{name}={tmp_path}/file/cache.*unset {name}"):
        shell.check({name: f"{tmp_path}/file/cache"})
    shell.check({name: f"{tmp_path}/cache"})


def test_names_that_libraries_find_are_left_alone() -> None:
    shell.check({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "GRPC_POLL_STRATEGY": "epoll1,poll"})
    shell.check({"NCCL_SOCKET_IFNAME": "l,ib"})
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=lo,ib9 "):
        shell.check({"GLOO_SOCKET_IFNAME": "lo,ib9"})
    with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME==l "):
        shell.check({"NCCL_SOCKET_IFNAME": "=l"})
    shell.check({"NCCL_SOCKET_IFNAME": "^docker0"})


@pytest.mark.parametrize(
    ("name", "value"), [("PYTHONOPTIMIZE", "2"), ("PYTHONINSPECT", "1"), ("PYTHONWARNINGS", "default,error")]
)
def test_what_python_does_to_every_process_is_refused(name: str, value: str) -> None:
    said = complaint(**{name: value})
    assert name in said
    assert f"unset {name}" in said


def test_what_python_may_do_is_left_to_the_user() -> None:
    assert complaint(PYTHONOPTIMIZE="1", PYTHONWARNINGS="default", PYTHONHASHSEED="0", PYTHONDEVMODE="1") == ""


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (limited(resource.RLIMIT_AS, 2**31), "ulimit -v is 2097152, "),
        (limited(resource.RLIMIT_FSIZE, 100 * 2**20), "ulimit -f is 102400, "),
        (limited(resource.RLIMIT_NOFILE, 64), "ulimit -n is 64, "),
        (lambda: os.umask(0o777), "umask 0777 "),
    ],
)
def test_a_limit_that_no_run_keeps_is_refused(before: Callable[[], object], words: str) -> None:
    said = complaint(before)
    assert words in said
    assert "; set it to " in said


OPENED = """
import os, sys
from headrace.launch.shell import open_standard_streams
open_standard_streams()
print(os.open("/", os.O_RDONLY), file=open(f"/dev/fd/{sys.argv[1]}", "w"))
"""


def test_a_closed_stream_is_opened_before_its_number_is_taken() -> None:
    reader, writer = os.pipe()
    argv = [sys.executable, "-c", OPENED, str(writer)]
    subprocess.run(argv, preexec_fn=lambda: os.closerange(0, 3), pass_fds=[writer], timeout=60, check=True)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert int(told.read()) > 2
