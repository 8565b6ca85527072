"""A built-in environment, scored by the hub's own worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.config.data import Env
from headrace.v1 import environment_pb2 as pb
from headrace.v1 import reward_pb2, trajectory_pb2
from services.reward.pool import WorkerPool


class BuiltInEnvironment:
    """Each trajectory has `timeout_s` of a worker's time."""

    kind = reward_pb2.EnvironmentStatus.KIND_BUILT_IN

    def __init__(self, name: str, env: Env, pool: WorkerPool) -> None:
        self._name = name
        self._env = env
        self._pool = pool

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]:
        pending = [self._pool.submit(trajectory, self._env.timeout_s) for trajectory in trajectories]
        try:
            await asyncio.wait(pending, timeout=timeout_s)
            late = trajectory_pb2.Result(
                status=trajectory_pb2.STATUS_TIMED_OUT,
                message=f"no worker had scored it when the caller's deadline came ({timeout_s or 0:.1f} s)",
                environment=self._name,
            )
            results = [future.result() if future.done() else late for future in pending]
        finally:
            for future in pending:
                future.cancel()
        for result in results:
            result.environment = result.environment or self._name
        return results

    async def describe(self) -> tuple[pb.DescribeResponse | None, str | None]:
        name = self._env.type or self._name
        return pb.DescribeResponse(name=self._name, description=f"built-in {name}"), self._pool.trouble()

    async def aclose(self) -> None:
        """Nothing of its own: the pool is the hub's."""
