"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from headrace.base.files import atomic_write, folder_for_sockets, is_gone


def test_a_writer_that_dies_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "curves.html"
    path.write_text("old")

    def die() -> None:
        with atomic_write(path) as unfinished:
            unfinished.write_text("ne")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        die()
    assert path.read_text() == "old"
    assert list(tmp_path.glob("c*")) == [path], "no reader takes the remains for a file"
    with atomic_write(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ETIMEDOUT])
def test_what_a_file_server_cannot_answer_for_now_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    (tmp_path / "here").touch()
    assert not is_gone(tmp_path / "here")
    assert is_gone(tmp_path / "not here")
    assert is_gone(tmp_path / "here" / "below a file")

    def away(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "lstat", away)
    monkeypatch.setattr(os, "stat", away)
    assert not is_gone(tmp_path / "here")


@pytest.mark.parametrize("name", ["t", "with a space", "x" * 200])
def test_a_socket_fits_below_its_folder_wherever_tmpdir_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/var/{name}")
    assert len(os.fsencode(folder_for_sockets() / "headrace-engine-12345678" / ("u" * 36))) < 108
    assert (folder_for_sockets() == Path("/tmp")) == (name == "x" * 200)
