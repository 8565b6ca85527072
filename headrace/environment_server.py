"""Serves one environment over gRPC (`EnvironmentService`, health, reflection)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from headrace import rpc
from headrace.credentials import Credentials
from headrace.environment import Environment, Sample, checked, failed
from headrace.service import stop_on_signals
from headrace.tls import CertificateFiles
from headrace.trajectory import Score
from headrace.v1 import environment_pb2 as pb
from headrace.v1 import environment_pb2_grpc as pb_grpc
from headrace.wire import sample_from_wire, score_to_wire

_log = logging.getLogger("headrace.environment")
_GRACE_S = 2.0


def run(
    environment: Environment,
    host: str,
    port: int,
    credentials: Credentials | None = None,
    certificate: CertificateFiles | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (`headrace.serve`)."""

    async def serve() -> None:
        stop = stop_on_signals()
        async with serving(environment, host, port, credentials, certificate) as bound:
            _log.info("environment %s listens on %s:%d", environment.label, host, bound)
            await stop.wait()

    asyncio.run(serve())


@contextlib.asynccontextmanager
async def serving(
    environment: Environment,
    host: str = "127.0.0.1",
    port: int = 0,
    credentials: Credentials | None = None,
    certificate: CertificateFiles | None = None,
) -> AsyncIterator[int]:
    """Serve while the context is open; yields the port. On exit, running calls get two seconds to finish.

    With `credentials`, to callers that present an environment's token alone.
    """
    service = pb.DESCRIPTOR.services_by_name["EnvironmentService"]
    methods = [f"/{service.full_name}/{method.name}" for method in service.methods]
    roles = dict.fromkeys([*methods, rpc.REFLECTION], ("environment",))
    server = rpc.server(access=None if credentials is None else rpc.RpcAccess(credentials, roles))
    pb_grpc.add_EnvironmentServiceServicer_to_server(_Servicer(environment), server)
    bound = rpc.listen(server, host, port, "port", certificate)
    health = await rpc.add_health_and_reflection(server, [service.full_name])
    await server.start()
    try:
        yield bound
    finally:
        await health.enter_graceful_shutdown()
        await asyncio.shield(server.stop(_GRACE_S))


class _Servicer(pb_grpc.EnvironmentServiceServicer):
    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._scorer = BatchScorer(environment)

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            name=self._environment.label, build=self._environment.build, description=self._environment.description
        )

    async def Score(
        self, request: pb.EnvironmentServiceScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.EnvironmentServiceScoreResponse:
        samples = [sample_from_wire(trajectory) for trajectory in request.trajectories]
        scores = await self._scorer.score(samples, rpc.time_to_answer(context))
        return pb.EnvironmentServiceScoreResponse(results=[score_to_wire(score) for score in scores])

    async def Step(
        self, request: pb.EnvironmentServiceStepRequest, context: grpc.aio.ServicerContext
    ) -> pb.EnvironmentServiceStepResponse:
        return await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "Step (multi-turn) is not in this release; the environment answers Score"
        )


class BatchScorer:
    """Scores whole batches with one environment, within its `concurrency` and the caller's deadline."""

    def __init__(self, environment: Environment) -> None:
        if environment.concurrency < 1:
            raise ValueError(f"{environment.label}.concurrency is {environment.concurrency}; it must be at least 1")
        self.environment = environment
        self._slots = asyncio.Semaphore(environment.concurrency)
        self._batched = type(environment).score_batch is not Environment.score_batch

    async def score(self, samples: Sequence[Sample], timeout_s: float | None) -> list[Score]:
        """One `Score` per sample, in order, within `timeout_s`: samples scored by then keep their reward, the rest are TIMED_OUT."""
        if not samples:
            return []
        if self._batched:
            tasks = [asyncio.create_task(self._batch(samples))]
        else:
            tasks = [asyncio.create_task(self._one(sample)) for sample in samples]
        try:
            await asyncio.wait(tasks, timeout=timeout_s)
            message = f"no answer from {self.environment.label} within {timeout_s or 0:.1f} s"
            late = [Score("TIMED_OUT", message=message, environment=self.environment.label)]
            late = late * (len(samples) if self._batched else 1)
            return [score for task in tasks for score in (task.result() if task.done() else late)]
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, sample: Sample) -> list[Score]:
        try:
            return [checked(self.environment, await self._call(self.environment.score, sample))]
        except Exception as error:  # noqa: BLE001  # whatever the user's code raised reaches the caller as FAILED
            return [failed(self.environment, error)]

    async def _batch(self, samples: Sequence[Sample]) -> list[Score]:
        try:
            values = list(await self._call(self.environment.score_batch, samples))
            if len(values) != len(samples):
                raise ValueError(f"score_batch returned {len(values)} results for {len(samples)} samples")
            return [checked(self.environment, value) for value in values]
        except Exception as error:  # noqa: BLE001  # as above
            return [failed(self.environment, error)] * len(samples)

    async def _call(self, method: Callable[..., Any], argument: object) -> Any:
        await self._slots.acquire()
        if inspect.iscoroutinefunction(method):
            try:
                return await method(argument)
            finally:
                self._slots.release()
        # A thread can't be stopped: it keeps its slot until it ends, even if the caller has given up.
        running = _in_thread(method, argument)
        running.add_done_callback(lambda _: self._slots.release())
        result = await asyncio.shield(running)
        return await result if inspect.isawaitable(result) else result


def _in_thread(function: Callable[[Any], Any], argument: object) -> asyncio.Future[Any]:
    """Run in a daemon thread: unlike a pool's thread, one that hangs does not keep the process from exiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(argument)
        except BaseException as raised:  # noqa: BLE001  # handed to the caller, SystemExit included
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="headrace-score").start()
    return future
