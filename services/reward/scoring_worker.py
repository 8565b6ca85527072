"""The worker process of built-in environments: `python -m headrace_services.reward.scoring_worker`.

It loads the scorers, enters a sandbox, and forks a child for each trajectory, whose effects end with the child. Requests and replies are
frames (`frames`) on standard input and output. The first frame in is a `Specification` as JSON, and the answer is `Started` as JSON. After
that, every frame in is a `ScoreRequest` in msgpack, and every frame out a list with a `headrace.v1.Result` or None for each of its
trajectories.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from headrace.config.data import DataSourceConfig, EnvConfig
from headrace.environment import Environment, checked, failed
from headrace.errors import HeadraceError, ServiceError
from headrace.service import die_with_parent
from headrace.trajectory import Score
from headrace.v1 import trajectory_pb2 as pb
from headrace.wire import sample_from_wire, score_to_wire
from headrace_services.reward.environments import make
from headrace_services.reward.environments.base import BuiltInEnvironment
from headrace_services.reward.environments.code import refusal
from headrace_services.reward.frames import read_frame, write_frame
from headrace_services.reward.sandbox import ChildFailed, Level, Sandbox, SandboxDenied

_LEAST_S = 1.0  # a judge's minimum time, however long `observe` took


class Specification(msgspec.Struct):
    """The task of a worker: the `env` sections to score, by name, and the run's `data` sources, from which it can load things beforehand.
    `levels` are the sandboxes that it may use."""

    environments: dict[str, dict[str, object]]
    sources: list[dict[str, object]]
    levels: list[Level]


class Started(msgspec.Struct):
    """The builds of the environments by name, and the level of the worker's sandbox; or `problem`, why it can't score. `denials` list what
    the machine denied to the sandbox."""

    problem: str = ""
    level: Level = Level.NONE
    denials: list[str] = []
    builds: dict[str, str] = {}


class ScoreRequest(msgspec.Struct, array_like=True):
    """Trajectories to score, each within `timeout_s`. Of several, only those that take no more than a comparison are scored. The answer has
    a result for each, or None."""

    trajectories: list[bytes]
    timeout_s: float


def main(make: Callable[[str, EnvConfig], BuiltInEnvironment] = make) -> None:
    die_with_parent(signal.SIGKILL)
    # Ctrl-C reaches every process of the terminal, but the hub stops its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's prints must not end up between frames
    if (first := read_frame(requests)) is None:
        return
    specification = msgspec.json.decode(first, type=Specification)
    try:
        environments = _load(specification, make)
        _check_threads()
        gc.collect()
        gc.freeze()  # a garbage collection in a child would copy everything that the scorers have loaded
        sandbox = Sandbox({*specification.levels})
    except ImportError as error:
        write_frame(replies, msgspec.json.encode(Started(problem=f"{error}; pip install 'headrace[reward]'")))
        return
    except SandboxDenied as error:
        write_frame(replies, msgspec.json.encode(Started(denials=[str(error)])))
        return
    except HeadraceError as error:
        write_frame(replies, msgspec.json.encode(Started(problem=str(error))))
        return
    builds = {name: environment.build for name, environment in environments.items()}
    write_frame(replies, msgspec.json.encode(Started(level=sandbox.level, denials=sandbox.denials, builds=builds)))
    decoder = msgspec.msgpack.Decoder(ScoreRequest)
    while (request := read_frame(requests)) is not None:
        asked = decoder.decode(request)
        results: list[bytes | None]
        match asked.trajectories:
            case [one]:
                results = [_result(sandbox, environments, one, asked.timeout_s)]
            case several:
                results = [_quick_result(environments, each) for each in several]
        write_frame(replies, msgspec.msgpack.encode(results))


def _load(
    specification: Specification, make: Callable[[str, EnvConfig], BuiltInEnvironment]
) -> dict[str, BuiltInEnvironment]:
    sources = [DataSourceConfig.model_validate(source) for source in specification.sources]
    environments = {}
    for name, values in specification.environments.items():
        env = EnvConfig.model_validate(values)
        if env.kind(name) == "code" and Level.A not in specification.levels:
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


def _quick_result(environments: Mapping[str, BuiltInEnvironment], trajectory: bytes) -> bytes | None:
    """Return the result if it takes no more than a comparison, else None. An error is left to the trajectory's own turn."""
    wire = pb.Trajectory.FromString(trajectory)
    environment = environments[wire.environment]
    try:
        found = environment.quick_score(sample_from_wire(wire))
    except Exception:  # noqa: BLE001
        return None
    return None if found is None else score_to_wire(checked(environment, found)).SerializeToString()


def _result(
    sandbox: Sandbox, environments: Mapping[str, BuiltInEnvironment], trajectory: bytes, timeout_s: float
) -> bytes:
    """Return the result of a child, which the hub checks, or the reason why there is none. A score that takes no more than a comparison
    needs no child."""
    deadline = time.monotonic() + timeout_s
    wire = pb.Trajectory.FromString(trajectory)
    environment, sample = environments[wire.environment], sample_from_wire(wire)
    try:
        found = environment.quick_score(sample) or environment.observe(sample, deadline)
    except Exception as error:  # noqa: BLE001  # like `score_one`
        return score_to_wire(failed(environment, error)).SerializeToString()
    if found is not None:
        return score_to_wire(checked(environment, found)).SerializeToString()

    def work() -> bytes:
        return score_to_wire(score_one(environment, wire)).SerializeToString()

    try:
        return sandbox.run(work, max(_LEAST_S, deadline - time.monotonic()))
    except TimeoutError:
        late = f"not scored within {timeout_s:g} s; its process was killed"
        return pb.Result(status=pb.STATUS_TIMED_OUT, message=late).SerializeToString()
    except ChildFailed as error:
        return pb.Result(status=pb.STATUS_FAILED, message=str(error)).SerializeToString()


def score_one(environment: Environment, trajectory: pb.Trajectory) -> Score:
    try:
        return checked(environment, environment.score(sample_from_wire(trajectory)))
    except BaseException as error:  # noqa: BLE001  # any error of a scorer reaches the caller as FAILED
        return failed(environment, error)


if __name__ == "__main__":
    main()
