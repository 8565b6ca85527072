"""The limits of `benchmarks.attached`: bidirectional streams of gRPC and nothing else, answered by a process of its own.

    python -m benchmarks.bare_stream PORT

`BYTES` answers each message with as many bytes as the results of a batch have. A message of `RECORDS` is a batch to score: it makes samples
of the trajectories, and results of their scores.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc

from headrace.env.wire import sample_from_wire, score_to_wire
from headrace.net import rpc
from headrace.records.trajectory import Score
from headrace.v1 import reward_pb2 as pb

BYTES, RECORDS = "/bare/Bytes", "/bare/Records"
BATCH = 64


def main(port: int) -> None:
    answer = _results([0.0] * BATCH)
    asyncio.run(_serve(port, {BYTES: lambda _: answer, RECORDS: _scored}))


async def _serve(port: int, answers: Mapping[str, Callable[[bytes], bytes]]) -> None:
    server = rpc.server()
    server.add_generic_rpc_handlers([_Streams(answers)])
    rpc.listen(server, "127.0.0.1", port, "PORT")
    await server.start()
    await server.wait_for_termination()


def _scored(batch: bytes) -> bytes:
    samples = [sample_from_wire(trajectory) for trajectory in pb.ScoreRequest.FromString(batch).trajectories]
    return _results([float(len(sample.completion)) for sample in samples])


def _results(rewards: Sequence[float]) -> bytes:
    scores = [Score("SCORED", reward, environment="Length", timings={"environment": 0.001}) for reward in rewards]
    return pb.ScoreResponse(results=[score_to_wire(score) for score in scores]).SerializeToString()


class _Streams(grpc.GenericRpcHandler):
    def __init__(self, answers: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self._answers = answers

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        answer = self._answers[details.method]

        async def stream(requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            async for request in requests:
                yield answer(request)

        return grpc.stream_stream_rpc_method_handler(stream)


if __name__ == "__main__":
    main(int(sys.argv[1]))
