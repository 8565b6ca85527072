"""`code`: does the completion's program pass its tests? The program runs separately from the code that judges it: see `code_worker`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.errors import ServiceError
from headrace.config.data import DataSourceConfig
from headrace.config.environments import CodeConfig
from headrace.env.environment import Sample
from headrace.records.score import Score

from ..code_worker import PYTHON, ProgramResult, Run
from ..frames import read_frame, write_frame
from ..sandbox import NAMESPACE_SETTINGS
from ..spares import Spares
from .base import (
    Observation,
    SandboxedEnvironment,
    Wait,
    extract_answer,
    shorten_answer,
)

# Reads the function to call and its arguments from standard input, and writes the result to standard output. The program's own prints
# don't reach that output.
_CALL = """\
import json, os, sys
call = json.load(sys.stdin)
answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
names = {"__name__": "program"}
exec(compile(open(sys.argv[1], encoding="utf-8").read(), "program", "exec"), names)
function = names.get(call["function"]) or getattr(names["Solution"](), call["function"])
answer.write(json.dumps(function(*call["arguments"])))
answer.close()
"""
_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_TRIAL_S = 10.0


class Tests(msgspec.Struct):
    """The tests of a problem: the input of each (text, or the arguments of `fn_name`) and its expected output."""

    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None


class Code(SandboxedEnvironment[CodeConfig]):
    """Runs the tests of a problem on the program in a completion.

    `extra_env_info` is `{"inputs": […], "outputs": […]}`: each test's standard input and expected standard output. With `"fn_name"` they
    are the arguments of a Python function and its expected result. The reward is 1 if all tests pass, else 0; with `partial_credit` it is
    the share of tests that pass.

    A program that fails, or runs out of time or memory, fails that test: the fault is its own. The code worker never sees `outputs`, so
    there is nothing for a program to find.
    """

    def __init__(self, name: str, env: CodeConfig) -> None:
        python = f"Python {sys.version.split()[0]}"
        super().__init__(name, env, python if env.runs_with is None else env.runs_with[0])
        self.description = "tests of a program, or of a Python function"
        self._spawner: socket.socket | None = None  # forks a code worker for each socket that it is sent
        # a scoring worker runs one program in its place, and others only while it waits for programs that sleep
        self._spares = Spares(_CodeWorker.close)
        self._outcomes: list[ProgramResult] = []

    def prepare(self, sources: Sequence[DataSourceConfig]) -> None:
        """Start the process that forks code workers, and the first of them. Raises `ServiceError`, with the remedy, if it can't run
        programs."""
        self._spawner, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace_services.reward.code_worker"], stdin=theirs.fileno()
            )
        try:
            worker = self._start()
            for processes in (1, 2):
                _try(worker, Run(PYTHON, "", b"", 10, _TRIAL_S, _TRIAL_S, 1 << 30, processes))
        except (OSError, SystemExit) as error:
            raise ServiceError(refusal(self.name, str(error))) from error
        if self.env.runs_with is not None:
            try:
                _try(worker, self._test("", b"", None, _TRIAL_S))
            except OSError as error:
                raise ServiceError(
                    f"env.{self.name}.runs_with can't be started ({error}); programs see only /usr, /bin and /lib of the system, so "
                    "install it there"
                ) from error
        self._spares.put(worker)

    def observe(self, sample: Sample, deadline: float) -> Observation:
        """Run the program on each test's input. Stop at the first failure if that decides the reward."""
        problem = _problem(sample.extra_env_info, self.env)
        if problem is not None:
            return Score("INVALID", message=problem)
        tests = msgspec.convert(sample.extra_env_info, Tests)
        program = extract_program(sample.completion, self.env)
        if program is None:
            return Score("SCORED", reward=0.0, metadata={"rule": f"extract: {self.env.extract} finds no program"})
        worker = self._spares.take() or self._start()
        try:
            decided = yield from self._run(worker, program, tests, deadline)
        except BaseException:  # among others `GeneratorExit`: nobody waits for the result any more
            worker.close()
            raise
        self._spares.put(worker)
        return decided

    def end_unused(self) -> float | None:
        return self._spares.end_unused()

    def _run(self, worker: _CodeWorker, program: str, tests: Tests, deadline: float) -> Observation:
        outcomes: list[ProgramResult] = []
        asleep = False
        for given in tests.inputs:
            left = deadline - time.monotonic()
            if left < self.env.wall_s:
                break
            run = self._test(program, _input(tests.fn_name, given), tests.fn_name, left)
            worker.send(msgspec.structs.replace(run, behind=asleep))
            yield Wait(worker.fileno(), asleep)
            while not (answer := worker.receive()):  # empty: the program fell asleep
                asleep = True
                yield Wait(worker.fileno(), asleep)
            outcome = msgspec.msgpack.decode(answer, type=ProgramResult)
            if outcome.problem:
                raise ServiceError(f"a program could not be run: {outcome.problem}")
            if outcome.unfinished:
                break
            outcomes.append(outcome)
            if outcome.failure and not self.env.partial_credit:
                self._outcomes = outcomes
                return None  # the child reads the output
        self._outcomes = outcomes
        return None if len(outcomes) == len(tests.inputs) else self._out_of_time(tests, outcomes)

    def judge(self, sample: Sample) -> float | Score:
        tests = msgspec.convert(sample.extra_env_info, Tests)
        passed = [
            passes(outcome, expected, tests.fn_name)
            for outcome, expected in zip(self._outcomes, tests.outputs, strict=False)
        ]
        share = sum(passed) / len(tests.outputs)
        metadata: dict[str, Any] = {"passed": sum(passed), "tests": len(tests.outputs)}
        if share < 1 and not all(passed):
            place = passed.index(False)
            outcome = self._outcomes[place]
            metadata["first_failure"] = {
                "test": place,
                "why": outcome.failure or "it answered otherwise",
                "error": shorten_answer(outcome.error[-300:]),
            }
        return Score("SCORED", reward=share if self.env.partial_credit else float(share == 1), metadata=metadata)

    def _out_of_time(self, tests: Tests, outcomes: Sequence[ProgramResult]) -> Score | None:
        """Handle tests for which no time is left. If an earlier test ran out of its own time, the program is at fault and the rest count as
        failed. Otherwise the program is not to blame, and the result is TIMED_OUT."""
        if any(outcome.late for outcome in outcomes):
            return None
        return Score(
            "TIMED_OUT",
            message=f"{len(outcomes)} of {len(tests.inputs)} tests left less of env.{self.name}.timeout_s {self.env.timeout_s:g} "
            f"than the wall_s {self.env.wall_s:g} of one more, though no test ran out of time; raise timeout_s, or give fewer tests",
        )

    def _test(self, program: str, given: bytes, function: str | None, longest_s: float) -> Run:
        env = self.env
        command = env.runs_with or ([*PYTHON, "-c", _CALL] if function else PYTHON)
        return Run(command, program, given, env.cpu_s, env.wall_s, longest_s, env.memory_mb * 1024**2, env.processes)

    def _start(self) -> _CodeWorker:
        """Return a new code worker. Raises `OSError` with what the machine denies it."""
        assert self._spawner is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._spawner, [b"x"], [theirs.fileno()])
        worker = _CodeWorker(ours)
        if denied := worker.receive():
            worker.close()
            raise OSError(denied.decode())
        return worker


class _CodeWorker:
    """A code worker, as the scoring worker sees it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._answers = os.fdopen(end.fileno(), "rb", buffering=0, closefd=False)
        self._runs = os.fdopen(end.fileno(), "wb", closefd=False)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, run: Run) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` tells
            write_frame(self._runs, msgspec.msgpack.encode(run))

    def receive(self) -> bytes:
        """Return the next frame. Without one, this process ends too, and is restarted with new code workers."""
        try:
            answer = read_frame(self._answers)
        except ConnectionResetError:
            answer = None
        if answer is None:
            raise SystemExit("a code worker ended")
        return answer

    def close(self) -> None:
        """End the code worker, with its program. (Closing would not, because the process outside the sandbox has the socket too.)"""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def _try(worker: _CodeWorker, run: Run) -> None:
    """Run a program to see whether it can be run. Raises `OSError`."""
    worker.send(run)
    while not (answer := worker.receive()):
        pass
    if problem := msgspec.msgpack.decode(answer, type=ProgramResult).problem:
        raise OSError(problem)


def refusal(name: str, denied: str) -> str:
    return (
        f"env.{name} runs programs that the policy writes, which needs a sandbox of level A, but the machine grants none ({denied}); allow "
        f"unprivileged user namespaces ({NAMESPACE_SETTINGS}; in Docker, a seccomp profile for this container that allows unshare, clone "
        f"and mount), or score with your own environment in a container without network (env.{name}.target)"
    )


def extract_program(completion: str, env: CodeConfig) -> str | None:
    """Return the program: the last fenced block of what `extract` takes from the completion, or all of it if there is no fenced block."""
    answer = extract_answer(completion, env.extract)
    if answer is None:
        return None
    blocks: list[str] = _FENCED.findall(answer)
    return blocks[-1] if blocks else answer


def passes(outcome: ProgramResult, expected: Any, function: str | None) -> bool:
    """Return whether a test's program ended normally with the expected output: equal text, ignoring blanks at the ends of lines, or an
    equal JSON value."""
    if outcome.failure:
        return False
    output = outcome.output.decode(errors="replace")
    if function is None:
        return _lines(output) == _lines(expected)
    try:
        return _equal(json.loads(output), expected)
    except (ValueError, RecursionError):  # the program itself wrote to the answer
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _equal(found: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal. Numbers are equal to within rounding, and true is not 1."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        exact = isinstance(found, int) and isinstance(expected, int)
        return found == expected if exact else math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_equal(found[key], expected[key]) for key in found)
    return type(found) is type(expected) and bool(found == expected)


def _input(function: str | None, given: Any) -> bytes:
    return str(given).encode() if function is None else json.dumps({"function": function, "arguments": given}).encode()


def _problem(info: dict[str, Any], env: CodeConfig) -> str | None:
    """Return why the tests of a problem can't be run, or None if they can."""
    try:
        tests = msgspec.convert(info, Tests)
    except msgspec.ValidationError as error:
        return f"extra_env_info holds no tests ({error}); code needs the lists inputs and outputs, and fn_name for a function"
    if not tests.inputs or len(tests.inputs) != len(tests.outputs):
        return f"extra_env_info has {len(tests.inputs)} inputs and {len(tests.outputs)} outputs; give at least one, and as many of each"
    if tests.fn_name is None and not all(isinstance(text, str) for text in (*tests.inputs, *tests.outputs)):
        return "extra_env_info has inputs or outputs that are not text; give text, or fn_name, the function that takes and returns values"
    if tests.fn_name is not None and not all(isinstance(arguments, list) for arguments in tests.inputs):
        return f"extra_env_info has inputs that are not lists; give a list of the arguments of {tests.fn_name!r:.80} for each test"
    if tests.fn_name is not None and env.runs_with is not None:
        return f"extra_env_info.fn_name is {tests.fn_name!r:.80}, but runs_with {env.runs_with} runs whole programs; give text to read"
    return None
