"""Scratch folders: nothing is left of them, whatever becomes of the process that made them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base import scratch
from headrace.base.scratch import folder_for_sockets, remove_abandoned, scratch_folder

ROOT = Path(__file__).parents[2]
OWNER = """
import pathlib, sys
from headrace.base.scratch import scratch_folder
with scratch_folder(sys.argv[1], pathlib.Path(sys.argv[2])) as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def owner(prefix: str, parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a scratch folder."""
    command = [sys.executable, "-c", OWNER, prefix, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, Path(process.stdout.readline().strip())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_scratch_folder_is_this_users_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    def fail() -> None:
        with scratch_folder("a-", tmp_path) as folder, socket.socket(socket.AF_UNIX) as sock:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert folder.name.startswith("a-")
            sock.bind(str(folder / "socket"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == []


def test_folders_of_killed_processes_alone_are_removed_by_the_next(tmp_path: Path) -> None:
    with owner("a-", tmp_path) as (killed, left), owner("a-", tmp_path) as (living, held):
        with scratch_folder("a-", tmp_path) as own:
            assert {*tmp_path.iterdir()} == {left, held, own}
        killed.kill()
        killed.wait()
        with scratch_folder("b-", tmp_path):
            assert left.exists()  # not its own kind
        with scratch_folder("a-", tmp_path) as own:
            assert {*tmp_path.iterdir()} == {held, own}
        assert (held / "deep" / "file").exists()
        living.communicate("")
    assert names(tmp_path) == []


def test_noted_shared_memory_ends_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, parent = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    parent.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", shared)
    for name in ("own-tp:0-[0-1]", "own-tp:0-[0-1]_1", "killed-[0]", "living-x", "owner-x", "psm_12"):
        (shared / name).write_text("x")
    with owner("a-", parent) as (killed, left), owner("a-", parent) as (_, held):
        scratch.note_shared_memory(left, "killed")
        scratch.note_shared_memory(held, "living")
        killed.kill()
        killed.wait()
        with scratch_folder("a-", parent) as own:
            scratch.note_shared_memory(own, "own")
            assert names(shared) == ["living-x", "own-tp:0-[0-1]", "own-tp:0-[0-1]_1", "owner-x", "psm_12"]
        assert names(shared) == ["living-x", "owner-x", "psm_12"]


def test_only_our_dead_folders_of_every_kind_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "folder_for_sockets", lambda: tmp_path)
    (tmp_path / "headrace-runs" / "mine").mkdir(parents=True)
    (tmp_path / "headrace-file").write_text("")
    for prefix in ("headrace-a-", "headrace-b-", "other-"):
        with owner(prefix, tmp_path) as (process, _):
            process.kill()
    remove_abandoned()
    assert [name.rpartition("-")[0] for name in names(tmp_path)] == ["headrace", "headrace", "other"]
    # of another user
    with owner("headrace-a-", tmp_path) as (process, _):
        process.kill()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        remove_abandoned()
    assert len(names(tmp_path)) == 4
    remove_abandoned()
    assert len(names(tmp_path)) == 3


def test_without_locks_nothing_that_may_be_in_use_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with scratch_folder("a-", tmp_path) as folder:
        remove_abandoned("a-", tmp_path)
        assert folder.exists()
    assert names(tmp_path) == []


def test_the_prefix_is_no_pattern(tmp_path: Path) -> None:
    with owner("ab-", tmp_path) as (process, left):
        process.kill()
    remove_abandoned("[a]*", tmp_path)
    assert left.exists()


def test_no_module_makes_a_temporary_folder_otherwise() -> None:
    used = {
        (file.name, made)
        for top in ("headrace", "services")
        for file in (ROOT / top).rglob("*.py")
        for made in re.findall(r"\btempfile\.(\w+)", file.read_text(encoding="utf-8"))
    }
    without_a_name = {("host_check.py", "TemporaryFile"), ("shell.py", "TemporaryFile")}
    looked_up = {("host_check.py", "gettempdir"), ("scratch.py", "gettempdir")}
    assert used == {("scratch.py", "mkdtemp")} | without_a_name | looked_up


@pytest.mark.parametrize("name", ["t", "with a space", "x" * 200])
def test_a_socket_fits_below_its_folder_wherever_tmpdir_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/var/{name}")
    assert len(os.fsencode(folder_for_sockets() / "headrace-engine-12345678" / ("u" * 36))) < 108
    assert (folder_for_sockets() == Path("/tmp")) == (name == "x" * 200)
