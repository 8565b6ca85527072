"""The built-in environments that score in sandboxed workers."""

from __future__ import annotations

import asyncio

from headrace.config.environments import CodeConfig, SandboxedConfig
from headrace.v1 import environment_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb

from .backend import Described, Results, Trajectories
from .pool import WorkerPool

# Trajectories of a built-in environment per worker, including the one that it is scoring.
_AHEAD_OF_A_WORKER = 16


class SandboxedBackend:
    """A built-in environment, scored by the hub's worker processes. Each trajectory gets `timeout_s` of a worker's time.

    Its capacity counts the trajectories that workers are scoring, and those that wait for them here, so that no worker is idle between two
    calls. A trajectory's time does not run while it waits. If no worker gets to it by the caller's deadline, it is NOT_STARTED.

    Programs that sleep come on top: they need no worker. Since any program may sleep, each has a call of its own, so that no other waits
    for its result.
    """

    kind = pb.EnvironmentStatus.KIND_BUILT_IN
    awaited = False

    def __init__(self, name: str, env: SandboxedConfig, pool: WorkerPool, workers: int) -> None:
        self._name = name
        self._env = env
        self._pool = pool
        self._capacity = workers * _AHEAD_OF_A_WORKER

    async def score(self, trajectories: Trajectories, timeout_s: float | None) -> Results:
        pending = self._pool.submit(trajectories, self._env.timeout_s)
        try:
            await asyncio.wait(pending, timeout=timeout_s)
            late = trajectory_pb2.Result(
                status=trajectory_pb2.STATUS_NOT_STARTED,
                message=f"no worker had finished it by the caller's deadline ({timeout_s or 0:.1f} s)",
                environment=self._name,
            )
            results = [future.result() if future.done() else late for future in pending]
        finally:
            for future in pending:
                future.cancel()
        for result in results:
            result.environment = result.environment or self._name
        return results

    async def describe(self) -> Described:
        capacity = self._capacity + self._pool.asleep
        description = environment_pb2.DescribeResponse(
            name=self._name,
            build=self._pool.builds.get(self._name, ""),
            description=f"built-in {self._env.type}",
            capacity=capacity,
            calls=capacity if isinstance(self._env, CodeConfig) else 0,
            sandbox=self._pool.level,
        )
        return description, self._pool.problem()
