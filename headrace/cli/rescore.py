"""`headrace rescore`: score the trajectories that a run keeps with another environment, or another build of one."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headrace.base.addresses import LOOPBACK, target_is_local, with_port
from headrace.base.errors import ConfigError, HeadraceError, ServiceError
from headrace.cli.common import RunArgument, cell, plain_table, say
from headrace.config import Config
from headrace.config.environments import AttachedConfig, CommandConfig, EnvConfig, TargetConfig
from headrace.env import environment_file
from headrace.env.asking import ask
from headrace.env.environment import Sample
from headrace.env.kit.rescoring import Comparison, Rescored, compare
from headrace.env.wire import sample_to_wire, scoring_sample
from headrace.launch import runs
from headrace.launch.buffer import open_buffer
from headrace.launch.entry_points import load_entry_point
from headrace.launch.served_file import environment_at
from headrace.net import rpc
from headrace.net.credentials import make_token_source
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Group
from headrace.replay import HeldGroup
from headrace.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from headrace.v1.environment_pb2 import DescribeResponse

# States of groups that may have scores.
_STATES = ("open", "scoring", "ready", "reserved", "trained", "evaluated")
_PAUSE_S = 0.1
# The hub's time beyond the environment's timeout.
_MARGIN_S = 5.0
_START_S = 10.0

Scored = tuple[Group, AnyTrajectory, float]


def rescore(
    run: RunArgument,
    env: Annotated[
        str,
        typer.Option(
            "--env",
            metavar="NAME|FILE.py[:CLASS]|HOST:PORT",
            help="The environment that scores: one of the run's configuration, as it is now; a file; or a process that serves one.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="key=value",
            help="Override a key of the run's configuration, for example env.NAME.threshold; may be repeated.",
        ),
    ] = None,
    of: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only groups that environment env.NAME scored.")
    ] = None,
    count: Annotated[
        int, typer.Option("-n", min=0, help="Show this many of the completions whose rewards differ most.")
    ] = 10,
) -> None:
    """Score the groups that a run keeps (replay.retain_steps) with another reward, and show what differs. The run is not changed."""
    config = runs.find(run, overrides or ())
    name, environment = _environment(config, env)
    rescored = asyncio.run(_rescore(config, name, environment, of))
    found = compare(rescored)
    console = Console()
    say(console, f"{found.trajectories} trajectories, scored again by {env}: {found.differing} rewards differ")
    if found.before is not None:
        console.print(table(found))
    for reason, times in found.failures.items():
        say(console, f"{times} got no reward, and are left out together with their groups: {reason}")
    most = sorted((each for each in rescored if each.differs), key=lambda each: -abs(each.change))[:count]
    if most:
        console.print(differing(most))
    if found.before is None:
        raise ServiceError(f"{env} scored no group completely")


def table(found: Comparison) -> Table:
    """Return a table of the rewards before and after, over the groups that were scored completely."""
    made = plain_table(
        f"{found.groups} groups", "mean reward", "deviation", "spread in a group", "groups that teach nothing"
    )
    for name, rewards in (("as stored", found.before), ("now", found.after)):
        assert rewards is not None
        made.add_row(
            name,
            *(f"{value:.3f}" for value in (rewards.mean, rewards.deviation, rewards.spread)),
            f"{rewards.flat:.0%}",
        )
    return made


def differing(rescored: Sequence[Rescored]) -> Table:
    made = plain_table("group", "index", "stored", "now")
    made.add_column("completion", overflow="ellipsis", no_wrap=True)
    for each in rescored:
        numbers = str(each.trajectory.index), f"{each.before:g}", f"{each.after.reward:g}"
        made.add_row(cell(each.group.id), *numbers, cell(each.trajectory.text[:200]))
    return made


def _environment(config: Config, env: str) -> tuple[str, EnvConfig]:
    """Return the environment that `--env` names, and its name. Raises `ConfigError`."""
    if env in config.env:
        name, found = env, config.env[env]
    elif environment_file.is_file(env) or ":" in env:
        name, found = "rescored", environment_at(env)
    else:
        known = ", ".join(config.env) or "none"
        raise ConfigError(f"--env {env} is neither an environment of the run ({known}) nor FILE.py nor HOST:PORT")
    if isinstance(found, AttachedConfig | CommandConfig):
        raise ConfigError(
            f"--env {env}: only the run itself can reach env.{env}; give its file, or the address of a process that serves it"
        )
    security = config.security
    is_far = isinstance(found, TargetConfig) and not (found.is_started or target_is_local(found.target))
    if is_far and security.tls and security.tls_ca is None:
        # the hub of this process has no certificate, and without an authority too it would dial in plain text
        raise ConfigError(
            f"--env {env}: {found.address} is on another machine; give the authority of its certificate with --set security.tls_ca=FILE"
        )
    return name, found


async def _rescore(config: Config, name: str, environment: EnvConfig, of: str | None) -> list[Rescored]:
    stored = [each for each in await _read_scored(config) if of in (None, each[0].env_name)]
    if not stored:
        which = "" if of is None else f" of environment {of}"
        raise HeadraceError(
            f"the buffer of {config.run_folder} holds no scored trajectory{which}; replay.retain_steps=N keeps those of the newest N "
            f"trained steps (it is {config.replay.retain_steps})"
        )
    async with _hub(config, name, environment) as (stub, description):
        return await _score(stub, name, environment, stored, description)


async def _read_scored(config: Config) -> list[Scored]:
    """Return the trajectories in the buffer that have a reward."""
    async with open_buffer(config) as replay:
        groups = [group_id async for group_id, _ in replay.groups(_STATES)]
        held = [await replay.read_held(group_id) for group_id in dict.fromkeys(groups)]
    return [scored for group in held if group is not None for scored in _select_scored(group)]


def _select_scored(held: HeldGroup) -> list[Scored]:
    return [
        (held.group, trajectory, score.reward)
        for trajectory, score in held.trajectories
        if score is not None and score.reward is not None
    ]


@contextlib.asynccontextmanager
async def _hub(config: Config, name: str, environment: EnvConfig) -> AsyncIterator[tuple[Any, DescribeResponse]]:
    """Run a reward hub in this process with that environment alone. Yields its stub, and how the environment describes itself."""
    running = load_entry_point("headrace.tools", "hub", extra="reward")
    async with contextlib.AsyncExitStack() as stack:
        if environment.is_started:
            environment = environment.model_copy(update={"port": 0})  # this hub starts its own process
        scorers = [scorer for own in environment.scorers for scorer in config.list_scorers(own)]
        alone = config.change(
            run={"id": None},
            reward={"host": LOOPBACK, "port": 0, "http_port": 0, "address": None},
            security={"tls_cert": None, "tls_key": None},  # a hub for this process alone needs no certificate
        ).model_copy(update={"env": {name: environment, **{scorer: config.env[scorer] for scorer in scorers}}})
        hub = await stack.enter_async_context(running(alone))
        token = make_token_source(alone, "scorer")
        channel = rpc.channel(with_port(LOOPBACK, hub.port), config.reward.max_message_bytes, token=token)
        stub = reward_pb2_grpc.RewardServiceStub(await stack.enter_async_context(channel))
        yield stub, await _describe(stub, name)


async def _describe(stub: Any, name: str) -> DescribeResponse:
    """Return the description of the environment. Raises `ServiceError` if it can't score."""
    until = time.monotonic() + _START_S
    while True:
        listed = await stub.ListEnvironments(reward_pb2.ListEnvironmentsRequest(), timeout=_MARGIN_S)
        (status,) = (each for each in listed.environments if each.name == name)
        if status.ready:
            description: DescribeResponse = status.description
            return description
        if time.monotonic() > until:
            raise ServiceError(status.message)
        await asyncio.sleep(_PAUSE_S)


async def _score(
    stub: Any, name: str, environment: EnvConfig, stored: Sequence[Scored], description: DescribeResponse
) -> list[Rescored]:
    """Return the scores in the order of `stored`, requested as many at a time as the environment works on. Raises `ServiceError` if it
    starts none of them within its timeout."""

    async def send(samples: Sequence[Sample], within_s: float) -> Sequence[trajectory_pb2.Result]:
        request = reward_pb2.ScoreRequest(trajectories=map(sample_to_wire, samples))
        results: Sequence[trajectory_pb2.Result] = (await stub.Score(request, timeout=within_s)).results
        return results

    # its own keys: an environment may remember its answers to the run
    scope = f"rescore-{secrets.token_hex(8)}"
    completions = collections.defaultdict[str, dict[int, str]](dict)
    if description.whole_groups:
        for group, trajectory, _ in stored:
            completions[group.id][trajectory.index] = trajectory.text
    samples = [
        dataclasses.replace(scoring_sample(group, trajectory, scope, completions[group.id]), environment=name)
        for group, trajectory, _ in stored
    ]
    scores: dict[int, Score] = {}
    left = list(range(len(stored)))
    while left:
        part = left[: description.capacity]
        answered = await ask(send, [samples[place] for place in part], environment.timeout_s + _MARGIN_S)
        begun = {place: score for place, score in zip(part, answered, strict=True) if score.status != "NOT_STARTED"}
        if not begun:
            raise ServiceError(f"{name} stopped scoring: {answered[0].message}")
        scores |= begun
        left = [place for place in left if place not in scores]
    return [Rescored(*each, scores[place]) for place, each in enumerate(stored)]
