"""Have samples scored outside a run, retrying those that the environment had no room for, as a run does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from headrace.base.errors import CodecError
from headrace.env.environment import Sample
from headrace.env.wire import score_from_wire
from headrace.records.score import Score
from headrace.v1 import trajectory_pb2

_PAUSE_S = 0.05

# Sends samples in one call. The number is the call's timeout in seconds.
Send = Callable[[Sequence[Sample], float], Awaitable[Sequence[trajectory_pb2.Result]]]


async def ask(send: Send, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
    """Return the scores of `samples`, in order. Samples that the environment did not start are sent again after a pause. After `timeout_s`
    they stay NOT_STARTED.

    Raises `CodecError` for too few or too many results, and whatever `send` raises.
    """
    until = time.monotonic() + timeout_s
    scores: dict[int, Score] = {}
    left = list(range(len(samples)))
    while left:
        remaining_s = max(until - time.monotonic(), 0.001)
        try:
            results = await send([samples[place] for place in left], remaining_s)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and len(scores) == len(samples):
                break  # an earlier call was answered, and too little time was left for this one
            raise
        if len(results) != len(left):
            raise CodecError(f"{len(results)} results for {len(left)} trajectories")
        scores |= dict(zip(left, map(score_from_wire, results), strict=True))
        left = [place for place in left if scores[place].status == "NOT_STARTED"]
        if until - time.monotonic() <= _PAUSE_S:
            break
        await asyncio.sleep(_PAUSE_S if left else 0)
    return [scores[place] for place in range(len(samples))]
