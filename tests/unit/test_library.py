"""How the buffer's files of Lua are joined: each says which shared files it uses, and what it says is checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_services.replay import library as module
from headrace_services.replay.library import Library, LibraryError, built_in

ROOT = Path(__file__).resolve().parents[2]
# a luacheck that objects to a line of a shared file and to one of a transition
FUSSY = """#!/bin/sh
sed -n "/function load_run(/{=}; /^register('push'/{=}" | sed "s/.*/stdin:&:9: (W431) shadowing upvalue 'x' on line 7/"
exit 1
"""
ARGS = """-- _args: arguments.

local function name(value) return value end
local MOST, LEAST = 2, 1
"""
RUN = """-- _run: the run.
-- uses: _args

local function load_run(keys) return name(keys[1]) end
"""
PUSH = """-- push: a call. It does not use what a comment names: load_other.
-- ARGV     none
-- uses: _args, _run

-- MOST is not taken from anywhere in a comment, nor in 'load_run' or a field's name: {name = 1}, run.name
register('push', function(keys) return load_run(keys), MOST end)
"""


@pytest.fixture
def library(tmp_path: Path) -> Callable[..., Library]:
    def made(**texts: str) -> Library:
        for file, text in {"_args": ARGS, "_run": RUN, "push": PUSH, **texts}.items():
            (tmp_path / f"{file}.lua").write_text(text)
        return Library(tmp_path)

    return made


def test_shared_files_come_before_their_users_and_transitions_last(library: Callable[..., Library]) -> None:
    source = library(
        _aaa="-- uses: _run\nlocal function early() return load_run({}) end\n", zip="-- uses: _aaa\nearly()\n"
    )
    text = source.source()
    order = [text.index(part) for part in ("-- _args: ", "-- _run: ", "function early", PUSH, "-- uses: _aaa\nearly()")]
    assert order == sorted(order)
    assert text.startswith(f"#!lua name=headrace_{source.build}\nlocal BUILD = '{source.build}'\n")
    assert source.transitions == ["push", "zip"]


def test_a_shared_file_keeps_the_names_that_no_other_takes_to_itself(library: Callable[..., Library]) -> None:
    text = library(_args=ARGS + "local own = 3\n").source()
    assert re.search(r"^local MOST, name\b.*\ndo\b", text, re.MULTILINE)
    assert "\nfunction name(value)" in text
    assert "\nlocal LEAST MOST, LEAST = 2, 1\n" in text
    assert "\nlocal own = 3\n" in text


@pytest.mark.parametrize(
    ("push", "same"),
    [
        (PUSH.replace("-- push: a call.", "-- push: one call."), True),
        (PUSH.replace("MOST end)", "MOST end)  -- the most"), True),
        (PUSH.replace("\n\n", "\n\n\n"), True),
        (PUSH.replace("MOST end)", "MOST + 0 end)"), False),
        (PUSH.replace("'push'", "'push--'"), False),
    ],
)
def test_a_build_is_of_the_code_and_not_of_its_comments(library: Callable[..., Library], push: str, same: bool) -> None:
    before = library().build
    assert push != PUSH
    assert (library(push=push).build == before) == same


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"push": PUSH.replace("_args, _run", "_args, _run, _runs")}, "push.lua:3: uses _runs"),
        ({"push": PUSH.replace("_args, _run", "_args, _run, push")}, "push.lua:3: uses push"),
        ({"push": PUSH.replace("_args, _run", "_args")}, "push.lua:6: takes 'load_run' from _run"),
        ({"push": PUSH.replace("-- uses: _args, _run\n", "")}, "push.lua:5: takes 'load_run' from _run"),
        ({"_run": RUN.replace("-- uses: _args\n", "")}, "_run.lua:3: takes 'name' from _args"),
        ({"push": PUSH.replace(", MOST", "")}, "push.lua:3: uses _args"),
        ({"_run": RUN + "local LOADED = early\n", "_aaa": "-- uses: _run\nlocal early = load_run\n"}, "takes 'early' from _aaa"),
        (
            {"_run": RUN.replace("_args", "_args, _aaa") + "local LOADED = early\n", "_aaa": "-- uses: _run\nlocal early = load_run\n"},
            "_run.lua:2: a circle",
        ),
        ({"_aaa": "local early = 1\n"}, "_aaa.lua:1: no file uses _aaa"),
        ({"_aaa": "-- uses: _args\n\nlocal LEAST = 1\n"}, "_aaa.lua:3: 'LEAST' is defined in _args too"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_with_its_line(
    library: Callable[..., Library], texts: dict[str, str], said: str
) -> None:
    with pytest.raises(LibraryError) as refused:
        library(**texts)
    assert said in str(refused.value)


def test_a_file_that_changes_makes_another_build(library: Callable[..., Library]) -> None:
    builds = {
        library().build,
        library(push=PUSH + "local more = 1\n").build,
        library(_args=ARGS.replace("2", "3")).build,
    }
    assert len(builds) == 3
    assert library().build in builds


def test_clients_call_the_build_of_these_files(monkeypatch: pytest.MonkeyPatch) -> None:
    module.source()  # which says what to run, if it doesn't
    monkeypatch.setattr(module, "BUILD", "0a1b2c3d")
    with pytest.raises(LibraryError, match=rf"build 0a1b2c3d.*{built_in().build}.*`make build`"):
        module.source()


def test_the_buffers_own_files_fit() -> None:
    assert {"push", "lease", "reserve", "score"} <= set(built_in().transitions)


def checked(path: Path) -> subprocess.CompletedProcess[str]:
    script, environment = ROOT / "scripts" / "check_lua.py", {**os.environ, "PATH": str(path)}
    return subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)


def test_what_luacheck_finds_is_printed_with_its_files_line(tmp_path: Path) -> None:
    (tmp_path / "luacheck").write_text(FUSSY)
    (tmp_path / "luacheck").chmod(0o755)
    (tmp_path / "sed").symlink_to(shutil.which("sed") or "")
    found = checked(tmp_path)
    assert found.returncode == 1
    folder = Path("services/replay/functions")
    for line, (file, start) in zip(
        found.stdout.splitlines(),
        [("_run.lua", "local function load_run("), ("push.lua", "register('push'")],
        strict=True,
    ):
        number = next(
            n for n, text in enumerate((ROOT / folder / file).read_text().splitlines(), 1) if text.startswith(start)
        )
        assert line == f"{folder / file}:{number}:9: (W431) shadowing upvalue 'x'"


def test_a_machine_without_luacheck_is_told_its_package(tmp_path: Path) -> None:
    found = checked(tmp_path)
    assert found.returncode == 1
    assert "apt-get install lua-check" in found.stderr
