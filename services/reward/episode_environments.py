"""Environments of episodes, as the hub calls them: a program that owns its loop and, if the run names one, the grader of what it did."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

from headrace.config.environments import EpisodicConfig
from headrace.v1 import episode_pb2, trajectory_pb2

from .answers import make_outcome, make_result
from .backend import (
    Described,
    EnvironmentBackend,
    Results,
    RunsEpisodes,
    Trajectories,
    score_as,
)


class ProgramBackend(EnvironmentBackend, RunsEpisodes, Protocol):
    """The backend that runs a program."""


class EpisodeBackend:
    """An environment whose program runs its episodes. Its grader scores the resulting trajectories, under the grader's own name."""

    awaited = True

    def __init__(
        self, name: str, env: EpisodicConfig, programs: ProgramBackend, environments: Mapping[str, EnvironmentBackend]
    ) -> None:
        """`environments` are all environments of the run."""
        self._name = name
        self._env = env
        self._programs = programs
        self._environments = environments
        self.kind = programs.kind

    async def score(self, trajectories: Trajectories, timeout_s: float | None) -> Results:
        grader = self._env.grader
        if grader is None:
            key = f"env.{self._name}"
            message = (
                f"{key} runs episodes, and their program returns the reward; to have them graded, set {key}.grader"
            )
            return [make_result(trajectory_pb2.STATUS_INVALID, message, self._name)] * len(trajectories)
        return await score_as(grader, self._environments[grader], trajectories, timeout_s)

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome:
        """Run the episode, like `RunsEpisodes.run_episode`. If a grader gives the reward, the outcome has a result only for a failure."""
        outcome = await self._programs.run_episode(episode, timeout_s)
        if self._env.grader is None and not outcome.HasField("result"):
            message = f"the program returned no reward; return one, or name the environment that gives it (env.{self._name}.grader)"
            return make_outcome(trajectory_pb2.STATUS_FAILED, message, self._name)
        if self._env.grader is not None and outcome.result.status == trajectory_pb2.STATUS_SCORED:
            outcome.ClearField("result")
        return outcome

    async def describe(self) -> Described:
        """Return the program's description, like `EnvironmentBackend.describe`, with the grader's capacity for trajectories."""
        described, problem = await self._programs.describe()
        if described is None:
            return None, problem
        description = copy.deepcopy(described)
        if problem is None and not description.episodes:
            problem = f"{description.name or 'the process'} runs no episodes; define `episode`, or leave episodes out of env.{self._name}"
        description.capacity = description.calls = 0
        if self._env.grader is not None:
            graders, unable = await self._environments[self._env.grader].describe()
            problem = problem or unable
            if graders is not None:
                description.capacity, description.calls = graders.capacity, graders.calls
                description.whole_groups = graders.whole_groups
        return description, problem
