"""`combine`: one reward from several environments. Each of them scores, fails and is metered as if it were called alone."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from headrace.base.errors import CodecError
from headrace.config.environments import CombineConfig
from headrace.env.wire import score_from_wire, score_to_wire
from headrace.records.score import Score, Status
from headrace.v1 import environment_pb2
from headrace.v1 import reward_pb2 as pb

from .backend import (
    Described,
    EnvironmentBackend,
    Results,
    Trajectories,
    does_not_apply,
    score_as,
)
from .environment_build import compute_build

# If parts fail in several ways, the completion fails in the first of these: final failures before those that may be retried, and failures
# that cost an attempt before those that don't.
WORST: tuple[Status, ...] = ("INVALID", "FAILED", "TIMED_OUT", "INTERRUPTED", "NOT_STARTED")


class CombineBackend:
    """Combines the rewards of parts. They score concurrently, except for a gate, which scores first. Law 7: if a part fails there is no
    reward, and its failure is the result."""

    kind = pb.EnvironmentStatus.KIND_BUILT_IN
    awaited = True

    def __init__(self, name: str, env: CombineConfig, environments: Mapping[str, EnvironmentBackend]) -> None:
        """`environments` are all environments of the run."""
        self._name = name
        self._env = env
        self._parts = {part: environments[part] for part in env.parts}
        # from each part's last score, or from its description before the first score
        self._builds = dict.fromkeys(env.parts, "")

    async def score(self, trajectories: Trajectories, timeout_s: float | None) -> Results:
        deadline = time.monotonic() + min(self._env.timeout_s, timeout_s or math.inf)
        scores: list[dict[str, Score]] = [{} for _ in trajectories]
        gate = self._env.gate
        if gate is not None:
            await self._ask(gate, trajectories, scores, range(len(trajectories)), deadline)
        passed = [
            place
            for place, found in enumerate(scores)
            if gate is None or (found[gate].reward or 0.0) > 0 or does_not_apply(found[gate])
        ]
        others = [part for part in self._parts if part != gate]
        await asyncio.gather(*(self._ask(part, trajectories, scores, passed, deadline) for part in others))
        return [score_to_wire(self._whole(found)) for found in scores]

    async def describe(self) -> Described:
        """Describe the environment, like `EnvironmentBackend.describe`. Its capacity is the smallest of its parts'. A part that can't score
        reports this under its own name."""
        answers = await asyncio.gather(*(backend.describe() for backend in self._parts.values()))
        capacities = [description.capacity for description, _ in answers if description is not None]
        if not capacities:
            return None, None
        for part, (description, _) in zip(self._parts, answers, strict=True):
            if description is not None:
                self._builds[part] = self._builds[part] or description.build
        parts = ", ".join(f"{part} {weight:g}" for part, weight in self._env.parts.items())
        return environment_pb2.DescribeResponse(
            name=self._name,
            build=self._build({}),
            description=f"{self._env.combine} of {parts}",
            capacity=min(capacities),
            whole_groups=any(description.whole_groups for description, _ in answers if description is not None),
        ), None

    async def _ask(
        self,
        part: str,
        trajectories: Trajectories,
        scores: Sequence[dict[str, Score]],
        places: Sequence[int],
        deadline: float,
    ) -> None:
        """Store the scores of `part` for the trajectories at `places` under its name."""
        if not places:
            return
        asked = [trajectories[place] for place in places]
        results = await score_as(part, self._parts[part], asked, max(0.0, deadline - time.monotonic()))
        for place, result in zip(places, results, strict=True):
            score = scores[place][part] = score_from_wire(result)
            if score.status == "SCORED":
                self._builds[part] = score.build

    def _build(self, scores: Mapping[str, Score]) -> str:
        """Return the build. Law 3: one build scores a group, so it must not depend on whether the gate was open. A part that was not asked
        counts with its last build."""
        builds = {part: scores[part].build if part in scores else build for part, build in self._builds.items()}
        return compute_build(self._env, *(f"{part} ({builds[part]})" for part in sorted(builds)))

    def _whole(self, scores: Mapping[str, Score]) -> Score:
        """Return the score of one completion from those of its parts. Parts are missing only behind a closed gate, and count as 0. A part
        that does not apply to the completion is left out, unless none applies."""
        not_applicable = {part for part, score in scores.items() if does_not_apply(score)}
        if not_applicable == set(scores):
            not_applicable = set()
        failures = {
            part: score for part, score in scores.items() if score.status != "SCORED" and part not in not_applicable
        }
        if failures:
            part, worst = min(failures.items(), key=lambda item: WORST.index(item[1].status))
            return Score(
                worst.status,
                message=f"{part}: {worst.message}",
                traceback=worst.traceback,
                metadata=worst.metadata,
                environment=self._name,
            )
        components = {
            part: scores[part].reward or 0.0 if part in scores else 0.0
            for part in self._parts
            if part not in not_applicable
        }
        weighted = [weight * components[part] for part, weight in self._env.parts.items() if part in components]
        closed = self._env.gate in components and not components[self._env.gate] > 0
        reward = 0.0 if closed else math.prod(weighted) if self._env.combine == "product" else math.fsum(weighted)
        try:
            return Score(
                "SCORED",
                reward=reward,
                components=components,
                metadata={part: score.metadata for part, score in scores.items() if score.metadata},
                environment=self._name,
                build=self._build(scores),
                timings={"environment": sum(score.timings.get("environment", 0.0) for score in scores.values())},
            )
        except CodecError as error:  # the sum of finite rewards may not be finite
            return Score("FAILED", message=str(error), environment=self._name)
