"""The `headrace` command, in this process, or in one of its own where it starts others."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from headrace.cli import main


def headrace(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What it does here, without the second that its imports take."""
    command, code = ["headrace", *map(str, arguments)], 0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.object(sys, "argv", command):
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def said(*arguments: object, columns: int = 80) -> str:
    """Its standard output, on a terminal of so many columns; it must succeed."""
    with mock.patch.dict(os.environ, COLUMNS=str(columns)):
        done = headrace(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*arguments: object) -> str:
    """What it says as it refuses."""
    return error_of(headrace(*arguments))


def headrace_process(
    *arguments: object, timeout_s: float = 120, cwd: Path | None = None, environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, env=environ)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """Of a command that must be refused: what it said."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    return done.stderr
