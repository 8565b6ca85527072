"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.files import atomic_write


def test_a_writer_that_dies_leaves_what_was_there_and_the_next_one_replaces_it(tmp_path: Path) -> None:
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
