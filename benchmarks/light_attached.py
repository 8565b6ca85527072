"""Attached processes without scorer and threads: one process is any number of them, and the hub is what is measured.

    python -m benchmarks.light_attached HUB NAME STREAMS

Each has a connection of its own, and gives each trajectory the reward 1 as it comes.
"""

from __future__ import annotations

import asyncio
import sys

import grpc

from headrace.v1 import environment_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc

_CAPACITY = 256


async def main(hub: str, name: str, streams: int) -> None:
    await asyncio.gather(*(_attached(hub, name, str(place)) for place in range(streams)))


async def _attached(hub: str, name: str, process_id: str) -> None:
    """Until the hub ends the stream."""
    environment = environment_pb2.DescribeResponse(name="Light", capacity=_CAPACITY)
    offer = pb.Offer(environment=environment, capacity=_CAPACITY, name=name, kind=pb.WORK_KIND_SCORE)
    async with grpc.aio.insecure_channel(hub, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stream = pb_grpc.RewardServiceStub(channel).Attach(wait_for_ready=True)
        await stream.write(pb.AttachRequest(register=pb.Register(process_id=process_id, offers=[offer])))
        await stream.read()  # registered
        await stream.write(_credit(name, _CAPACITY))
        while (event := await stream.read()) is not grpc.aio.EOF:
            answer = pb.Answer(work_id=event.work.work_id)
            for _ in event.work.score.trajectories:
                answer.score.results.add(status=trajectory_pb2.STATUS_SCORED, reward=1)
            await stream.write(pb.AttachRequest(answer=answer))
            await stream.write(_credit(name, len(answer.score.results)))


def _credit(name: str, amount: int) -> pb.AttachRequest:
    return pb.AttachRequest(credit=pb.Credit(name=name, kind=pb.WORK_KIND_SCORE, amount=amount))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
