"""The worker process of built-in environments: `python -m headrace_services.reward.scoring_worker`.

It loads the scorers, enters a sandbox, and forks a child for each trajectory: what a trajectory does, its child's end undoes.
Requests and replies are frames (`frames`) on standard input and output. The first frame in is a `Specification` as
JSON, the answer to it `Started` as JSON. After that every frame in is 8 bytes of seconds (a big-endian double) and a
`headrace.v1.Trajectory`; every frame out its `headrace.v1.Result`.
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

_LEAST_S = 1.0  # for a judge, whatever came before it


class Specification(msgspec.Struct):
    """What a worker scores: `env` sections by name, and the run's `data` sources, for what can be loaded beforehand. `levels` are
    the sandboxes that it may score in."""

    environments: dict[str, dict[str, object]]
    sources: list[dict[str, object]]
    levels: list[Level]


class Started(msgspec.Struct):
    """The builds of the environments by name and the sandbox that the worker scores in; or `problem`, why it can't score.
    `denials` are what the machine denied a sandbox."""

    problem: str = ""
    level: Level = Level.NONE
    denials: list[str] = []
    builds: dict[str, str] = {}


class ScoreRequest(msgspec.Struct, array_like=True):
    """Trajectories that are to be scored, each in at most `timeout_s`; of several, only those that can be told at sight. The answer has
    a result for each, or None."""

    trajectories: list[bytes]
    timeout_s: float


def main(make: Callable[[str, EnvConfig], BuiltInEnvironment] = make) -> None:
    die_with_parent(signal.SIGKILL)
    # Ctrl-C reaches the whole terminal, and the hub stops its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up between frames
    if (first := read_frame(requests)) is None:
        return
    specification = msgspec.json.decode(first, type=Specification)
    try:
        environments = _load(specification, make)
        _check_threads()
        gc.collect()
        gc.freeze()  # a child that collects garbage would copy all that the scorers have loaded
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
            raise ServiceError(refusal(name, f"it may be {' or '.join(specification.levels)}"))
        environments[name] = make(name, env)
        environments[name].prepare([source for source in sources if source.env_name == name])
    return environments


def _check_threads() -> None:
    """Raises `ServiceError` unless this process, which forks, has one thread."""
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and (threads := len(os.listdir(tasks))) > 1:
        raise ServiceError(
            f"the scorers' libraries started {threads - 1} threads, and a process that forks must have none"
        )


def _quick_result(environments: Mapping[str, BuiltInEnvironment], trajectory: bytes) -> bytes | None:
    """The result, if it can be told at sight; of an error too its own turn has to say so."""
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
    """The result as a child gave it, which the hub checks, or the reason why there is none; without a child where the score can be told
    at sight."""
    deadline = time.monotonic() + timeout_s
    wire = pb.Trajectory.FromString(trajectory)
    environment, sample = environments[wire.environment], sample_from_wire(wire)
    try:
        found = environment.quick_score(sample) or environment.observe(sample, deadline)
    except Exception as error:  # noqa: BLE001  # as in `score_one`
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
    except Exception as error:  # noqa: BLE001  # whatever a scorer raised reaches the caller as FAILED
        return failed(environment, error)


if __name__ == "__main__":
    main()
