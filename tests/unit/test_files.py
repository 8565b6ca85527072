"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.base.files import atomic_write, is_gone


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
