"""A verifiers environment as a program: its tasks, and its episodes, played in the Python in which it is installed
(`env.<name>.python`).

verifiers requires other versions of packages that Headrace uses. Only `verifiers_worker` runs in that Python, and it imports nothing of
Headrace. The expected answers are in the tasks, and stay there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError
from headrace.config.environments import VerifiersConfig
from headrace.env.environment import Environment
from headrace.env.episode import Episode
from headrace.env.source_build import digest_texts
from headrace.env.verifiers.verifiers_worker import MOST_BYTES
from headrace.records.score import Score

# Loading a task set may download it.
LOAD_S = 600.0
_WORKER = Path(__file__).with_name("verifiers_worker.py")
_STOP_S = 5.0


def check(name: str, env: VerifiersConfig) -> None:
    """Raise `ConfigError` if `env.<name>` can't be loaded."""
    _ask("check", name, env)


def tasks(name: str, env: VerifiersConfig, select: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Return a row for each task that `select` (verifiers' own section of that name) selects, or for the first `size` tasks of an endless
    task set. A row has the `task`, and the `messages` that it begins with. Raises `ConfigError`."""
    return _ask("tasks", name, env, select=dict(select), size=size)


def _ask(mode: str, name: str, env: VerifiersConfig, **arguments: Any) -> list[dict[str, Any]]:
    python = _python(name, env)
    asked = json.dumps({"verifiers": env.verifiers, **arguments}) + "\n"
    argv = [python, "-P", str(_WORKER), mode]
    try:
        done = subprocess.run(argv, input=asked, capture_output=True, text=True, timeout=LOAD_S, env=_environ(python))
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"env.{name}.verifiers: loading it takes more than {LOAD_S:g} s") from error
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if rows and "problem" in rows[-1]:
        raise ConfigError(f"env.{name}.verifiers: {rows[-1]['problem']}")
    if done.returncode:
        raise ConfigError(f"env.{name}.verifiers: {python} ended with status {done.returncode}\n{done.stderr.rstrip()}")
    return rows


def _python(name: str, env: VerifiersConfig) -> str:
    """Return the path of the Python with its links unresolved, because by them it finds its installed packages."""
    found = shutil.which(env.python)
    if found is None:
        raise ConfigError(
            f"env.{name}.python {env.python!r} is not a program; give the path of the Python in which verifiers is installed, relative to "
            "the folder where the run is started"
        )
    return os.path.abspath(found)


def _environ(python: str) -> dict[str, str]:
    """Return the user's own environment variables, without those for services. Programs beside the Python (uv) are found, and found
    first."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return {**own, "PATH": f"{os.path.dirname(python)}{os.pathsep}{own.get('PATH', os.defpath)}"}


class VerifiersProgram(Environment):
    """The program of `env.<name>`, while `playing` runs its process. Each episode is a connection to the process, which ends with the
    episode."""

    def __init__(self, name: str, env: VerifiersConfig, address: str, software: list[str]) -> None:
        self.name = name
        self.episodes = env.concurrency
        options = json.dumps(env.verifiers, sort_keys=True)
        self.build = ", ".join((software[0], digest_texts([*software, options])))
        self._address = address

    async def episode(self, e: Episode) -> Score:
        asked = {"task": e.public.get("task"), "base_url": e.base_url, "api_key": e.api_key}
        try:
            reader, writer = await asyncio.open_unix_connection(self._address, limit=MOST_BYTES)
        except OSError as error:
            return Score("NOT_STARTED", message=f"{self._process} can't be reached ({error})")
        try:
            writer.write(json.dumps(asked).encode() + b"\n")
            await writer.drain()
            answer = await reader.readline()
        except OSError:
            answer = b""
        finally:
            writer.close()
        if not answer.endswith(b"\n"):
            return Score("INTERRUPTED", message=f"{self._process} has ended")
        return read_score(json.loads(answer))

    @property
    def _process(self) -> str:
        return f"the verifiers process of env.{self.name}"


def read_score(outcome: dict[str, Any]) -> Score:
    """Return the score of an outcome. Raises `CodecError` for a reward, or a component, that is not a finite number."""
    if outcome["status"] != "SCORED":
        return Score(outcome["status"], message=outcome["message"], traceback=outcome.get("traceback", ""))
    return Score("SCORED", outcome["reward"], outcome["components"], outcome["metadata"])


@contextlib.asynccontextmanager
async def playing(
    name: str, env: VerifiersConfig, address: str
) -> AsyncIterator[tuple[VerifiersProgram, asyncio.subprocess.Process]]:
    """Yield the program and its process, which listens on the socket `address` and plays episodes. Raises `ConfigError` if it can't."""
    python = _python(name, env)
    process = await asyncio.create_subprocess_exec(
        python, "-P", str(_WORKER), "serve", stdin=PIPE, stdout=PIPE, env=_environ(python), limit=MOST_BYTES
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({"verifiers": env.verifiers, "address": address}).encode() + b"\n")
        answer = json.loads(await process.stdout.readline() or b"{}")
        if "software" not in answer:
            raise ConfigError(
                f"env.{name}.verifiers: {answer.get('problem', 'its process ended; the log has its error')}"
            )
        yield VerifiersProgram(name, env, address, answer["software"]), process
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
