"""The worker process of built-in environments: `python -m headrace_services.reward.scoring_worker`.

It loads the scorers, enters a sandbox, and forks a child for each trajectory, whose effects end with the child. It is specified by a
`Specification` (`frames`). Every frame in is a `ScoreRequest`, and every frame out an `Answer`, both in msgpack.

Whoever asks sends the next request once the last one is answered, or asleep. So a worker does one thing at a time, and besides waits for
what sleeps.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError, ServiceError
from headrace.config.data import DataSourceConfig
from headrace.config.environments import CodeConfig, SandboxedConfig, read_environment
from headrace.env.environment import Environment, Sample, check_score, make_failed
from headrace.env.wire import sample_from_wire, score_to_wire
from headrace.net.service import importing
from headrace.records.score import Score
from headrace.v1 import trajectory_pb2 as pb

from .environments import make
from .environments.base import Observation, SandboxedEnvironment, Wait
from .environments.code import refusal
from .frames import HubPipes, Started, read_frame, write_frame
from .sandbox import ChildFailed, Level, Sandbox, SandboxDenied

Make = Callable[[str, SandboxedConfig], SandboxedEnvironment[Any]]
_LEAST_S = 1.0  # a judge's minimum time, however long `observe` took


class Specification(msgspec.Struct):
    """The task of a worker: the `env` sections to score, by name, and the run's `data` sources, from which it can load things beforehand.
    `levels` are the sandboxes that it may use."""

    environments: dict[str, dict[str, object]]
    sources: list[dict[str, object]]
    levels: list[Level]


class ScoreRequest(msgspec.Struct, array_like=True):
    """Trajectories to score, each within `timeout_s`. Of several, only those that take no more than a comparison are scored. None withdraw
    the request of that number, and have no answer."""

    number: int
    trajectories: list[bytes]
    timeout_s: float


class Answer(msgspec.Struct, array_like=True):
    """The answer to the request of that number: a `headrace.v1.Result` or None for each trajectory. Without any: its trajectory is asleep,
    and its answer follows later."""

    number: int
    results: list[bytes | None]


def main(make: Make = make) -> None:
    hub = HubPipes()
    specification = hub.specification(Specification)
    try:
        with importing():  # what is frozen, a garbage collection in a child does not copy
            environments = _load(specification, make)
        _check_threads()
        sandbox = Sandbox({*specification.levels})
    except ImportError as error:
        hub.say(Started(problem=f"{error}; pip install 'headrace[reward]'"))
        return
    except SandboxDenied as error:
        hub.say(Started(denials=[str(error)]))
        return
    except HeadraceError as error:
        hub.say(Started(problem=str(error)))
        return
    builds = {name: environment.build for name, environment in environments.items()}
    hub.say(Started(level=sandbox.level, denials=sandbox.denials, builds=builds))
    _Worker(sandbox, environments, hub).serve()


def _load(specification: Specification, make: Make) -> dict[str, SandboxedEnvironment[Any]]:
    sources = [DataSourceConfig.model_validate(source) for source in specification.sources]
    environments = {}
    for name, values in specification.environments.items():
        env = read_environment(values)
        assert isinstance(env, SandboxedConfig)
        if isinstance(env, CodeConfig) and Level.A not in specification.levels:
            raise ServiceError(refusal(name, f"allowed levels: {', '.join(specification.levels)}"))
        environments[name] = make(name, env)
        environments[name].prepare([source for source in sources if source.env_name == name])
    return environments


def _check_threads() -> None:
    """Raise `ServiceError` unless this process, which forks, has a single thread."""
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and (threads := len(os.listdir(tasks))) > 1:
        raise ServiceError(
            f"the scorers' libraries started {threads - 1} threads, but a process that forks must not have any"
        )


def _quick_result(environments: Mapping[str, SandboxedEnvironment[Any]], trajectory: bytes) -> bytes | None:
    """Return the result if it takes no more than a comparison, else None. An error is left to the trajectory's own turn."""
    wire = pb.Trajectory.FromString(trajectory)
    environment = environments[wire.environment]
    try:
        found = environment.quick_score(sample_from_wire(wire))
    except Exception:  # noqa: BLE001
        return None
    return None if found is None else score_to_wire(check_score(environment, found)).SerializeToString()


class _Worker:
    """Answers requests. `_waiting` has those that wait, by the file descriptor that they wait for."""

    def __init__(self, sandbox: Sandbox, environments: Mapping[str, SandboxedEnvironment[Any]], hub: HubPipes) -> None:
        self._sandbox = sandbox
        self._environments = environments
        self._requests, self._replies = hub.requests, hub.replies
        self._poll = select.poll()
        self._waiting: dict[int, _Scoring] = {}

    def serve(self) -> None:
        """Serve until the requests end."""
        decoder = msgspec.msgpack.Decoder(ScoreRequest)
        self._poll.register(self._requests, select.POLLIN)
        while True:
            for end, _ in self._poll.poll(self._end_unused()):
                if end != self._requests.fileno():
                    if scoring := self._waiting.pop(end, None):
                        self._poll.unregister(end)
                        self._advance(scoring)
                elif (request := read_frame(self._requests)) is not None:
                    self._take(decoder.decode(request))
                else:
                    return

    def _end_unused(self) -> float | None:
        """End what the environments don't use any more. Return the milliseconds until there may be more."""
        left_s = [left for environment in self._environments.values() if (left := environment.end_unused()) is not None]
        return math.ceil(1000 * min(left_s)) if left_s else None

    def _take(self, request: ScoreRequest) -> None:
        match request.trajectories:
            case []:
                self._withdraw(request.number)
            case [one]:
                wire = pb.Trajectory.FromString(one)
                scoring = _Scoring(request, self._environments[wire.environment], wire)
                self._advance(scoring)
            case several:
                self._answer(request.number, [_quick_result(self._environments, each) for each in several])

    def _withdraw(self, number: int) -> None:
        for end, scoring in [*self._waiting.items()]:
            if scoring.request.number == number:
                self._poll.unregister(end)
                self._waiting.pop(end).steps.close()

    def _advance(self, scoring: _Scoring) -> None:
        """Score until there is a result, or something to wait for."""
        wait = scoring.advance(self._sandbox)
        if not isinstance(wait, Wait):
            self._answer(scoring.request.number, [wait])
            return
        self._waiting[wait.end] = scoring
        self._poll.register(wait.end, select.POLLIN)
        if wait.asleep and not scoring.asleep:
            scoring.asleep = True
            self._answer(scoring.request.number, [])

    def _answer(self, number: int, results: list[bytes | None]) -> None:
        write_frame(self._replies, msgspec.msgpack.encode(Answer(number, results)))


class _Scoring:
    """The scoring of one trajectory. `steps` does what must happen in the worker itself."""

    def __init__(self, request: ScoreRequest, environment: SandboxedEnvironment[Any], wire: pb.Trajectory) -> None:
        self.request = request
        self._environment = environment
        self._wire = wire
        self._deadline = time.monotonic() + request.timeout_s
        self.steps = self._take_steps(sample_from_wire(wire))
        self.asleep = False

    def _take_steps(self, sample: Sample) -> Observation:
        found = self._environment.quick_score(sample)
        return found or (yield from self._environment.observe(sample, self._deadline))

    def advance(self, sandbox: Sandbox) -> Wait | bytes:
        """Return what it waits for; or the result of a child, which the hub checks, or the reason why there is none. A score that takes no
        more than a comparison needs no child."""
        try:
            return next(self.steps)
        except StopIteration as end:
            found = end.value
        except Exception as error:  # noqa: BLE001  # like `score_one`
            return score_to_wire(make_failed(self._environment, error)).SerializeToString()
        if found is not None:
            return score_to_wire(check_score(self._environment, found)).SerializeToString()

        def work() -> bytes:
            return score_to_wire(score_one(self._environment, self._wire)).SerializeToString()

        try:
            return sandbox.run(work, max(_LEAST_S, self._deadline - time.monotonic()))
        except TimeoutError:
            late = f"not scored within {self.request.timeout_s:g} s; its process was killed"
            return pb.Result(status=pb.STATUS_TIMED_OUT, message=late).SerializeToString()
        except ChildFailed as error:
            return pb.Result(status=pb.STATUS_FAILED, message=str(error)).SerializeToString()


def score_one(environment: Environment, trajectory: pb.Trajectory) -> Score:
    try:
        return check_score(environment, environment.score(sample_from_wire(trajectory)))
    except BaseException as error:  # noqa: BLE001  # any error of a scorer reaches the caller as FAILED
        return make_failed(environment, error)


if __name__ == "__main__":
    main()
