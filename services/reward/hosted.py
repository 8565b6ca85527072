"""Built-in environments that can't run in a sandboxed worker: they call other machines, or have a model in its own process."""

from __future__ import annotations

import math

from headrace.config.environments import EnvConfig
from headrace.env.environment import Environment, Sample
from headrace.env.server import BatchScorer
from headrace.env.wire import sample_from_wire, score_to_wire
from headrace.v1 import reward_pb2 as pb

from .backend import Described, Results, Trajectories


class Hosted(Environment):
    """An environment in the hub's event loop. `score` and `score_batch` only wait: the work is done elsewhere."""

    async def start(self) -> None:
        """Return once the environment can score. Raises `ServiceError` with the reason if it never will."""

    def problem(self) -> str | None:
        """Return why the environment can't score now, or None if it can."""
        return None

    def awaited(self, sample: Sample) -> str:
        """Name what the score of `sample` is waiting for; "" if that is nothing but the environment."""
        return ""

    async def aclose(self) -> None:
        """End everything that the environment has started."""


class HostedBackend:
    """The hub's backend for a hosted environment."""

    kind = pb.EnvironmentStatus.KIND_BUILT_IN
    awaited = True

    def __init__(self, env: EnvConfig, environment: Hosted) -> None:
        self._env = env
        self._environment = environment
        self._scorer = BatchScorer(environment, awaited=environment.awaited)

    async def score(self, trajectories: Trajectories, timeout_s: float | None) -> Results:
        samples = [sample_from_wire(trajectory) for trajectory in trajectories]
        traces = [trajectory.traceparent for trajectory in trajectories]
        scores = await self._scorer.score(samples, min(self._env.timeout_s, timeout_s or math.inf), traces)
        return [score_to_wire(score) for score in scores]

    async def describe(self) -> Described:
        return self._scorer.description, self._environment.problem()
