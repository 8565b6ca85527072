"""The build of an environment that names none."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.base.errors import ConfigError
from headrace.env import environment_file
from headrace.env.environment import Environment

FILE = """
import headrace

class Exact(headrace.Environment):
    def __init__(self, threshold=1.0):
        self.threshold = threshold
        self.client = object()

    def score(self, sample):
        return 1.0
"""


def loaded(folder: Path, text: str) -> Environment:
    folder.mkdir(exist_ok=True)
    (folder / "my_env.py").write_text(text)
    return environment_file.load(f"{folder / 'my_env.py'}:Exact")


def cell(text: str, name: str) -> dict[str, Any]:
    """What a cell defines, run as IPython does it."""
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec(compile(text, name, "exec", dont_inherit=True), namespace)
    return namespace


def test_the_same_source_is_the_same_build_wherever_it_lies(tmp_path: Path) -> None:
    first = loaded(tmp_path / "one", FILE)
    assert len(first.build) == 12
    assert loaded(tmp_path / "two", FILE).build == first.build
    # of the same length, within the same second: no bytecode of the former is taken
    edited = loaded(tmp_path / "one", FILE.replace("return 1.0", "return 2.0"))
    assert (edited.build != first.build, edited.score(headrace.Sample(""))) == (True, 2.0)


def test_the_build_is_of_what_was_loaded_though_the_file_has_changed(tmp_path: Path) -> None:
    first = loaded(tmp_path, FILE)
    (tmp_path / "my_env.py").write_text(FILE.replace("1.0", "2.0"))
    assert first.build == loaded(tmp_path, FILE).build


def test_what_the_constructor_was_given_is_part_of_it(tmp_path: Path) -> None:
    made = type(loaded(tmp_path, FILE))
    assert made().build == made(1.0).build != made(0.5).build  # type: ignore[call-arg]


def test_a_cell_counts_as_it_was_run() -> None:
    first = cell(FILE, "<ipython-input-1>")["Exact"]()
    assert cell(FILE, "<ipython-input-2>")["Exact"]().build == first.build
    assert cell(FILE.replace("1.0", "2.0"), "<ipython-input-3>")["Exact"]().build != first.build


def test_a_class_that_it_is_derived_from_counts_too() -> None:
    def derived(text: str, number: int) -> Environment:
        base = cell(text, f"<ipython-input-base-{number}>")["Exact"]
        namespace = {"__name__": "notebook", "Exact": base}
        name, text = f"<ipython-input-{number}>", "class Mine(Exact):\n    def other(self): pass\n"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        exec(compile(text, name, "exec", dont_inherit=True), namespace)
        made: Environment = namespace["Mine"]()
        return made

    assert derived(FILE, 4).build != derived(FILE.replace("return 1.0", "return 2.0"), 5).build


def test_the_author_may_name_it(tmp_path: Path) -> None:
    named = loaded(tmp_path, FILE.replace("    def __init__", '    build = "1.0"\n    def __init__'))
    assert named.build == "1.0"
    set_later = loaded(tmp_path, FILE.replace("self.client", 'self.build = "2.0"; self.client'))
    assert set_later.build == "2.0"


def test_without_source_it_has_to_be_named() -> None:
    namespace: dict[str, Any] = {"__name__": "nowhere"}
    exec(FILE, namespace)
    with pytest.raises(ConfigError, match=r"^Exact: .*source.*build = \"1\""):
        headrace.attach("127.0.0.1:1", namespace["Exact"](), "exact")
