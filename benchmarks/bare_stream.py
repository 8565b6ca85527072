"""The limit of `benchmarks.attached`: a bidirectional stream of gRPC and nothing else, answered by a process of its own.

    python -m benchmarks.bare_stream PORT

A message is a batch to score: it makes samples of the trajectories, and results of their scores.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc

from headrace.env.wire import sample_from_wire, score_to_wire
from headrace.net import rpc
from headrace.records.score import Score
from headrace.v1 import reward_pb2 as pb

SERVICE, METHOD = "bare", "Score"


async def _scored(
    batches: AsyncIterator[pb.ScoreRequest], _: grpc.aio.ServicerContext
) -> AsyncIterator[pb.ScoreResponse]:
    async for batch in batches:
        samples = [sample_from_wire(trajectory) for trajectory in batch.trajectories]
        scores = [Score("SCORED", float(len(sample.completion)), environment="Length") for sample in samples]
        yield pb.ScoreResponse(results=[score_to_wire(score) for score in scores])


async def main(port: int) -> None:
    server = rpc.server()
    handler = grpc.stream_stream_rpc_method_handler(
        _scored, pb.ScoreRequest.FromString, pb.ScoreResponse.SerializeToString
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})])
    rpc.listen(server, "127.0.0.1", port, "PORT")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
