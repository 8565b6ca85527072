"""An attached process, by hand: what it sends to the hub is what the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from headrace.v1 import environment_pb2, reward_pb2, trajectory_pb2
from tests.support.reward_hub import WAIT_S

SCORE = reward_pb2.WORK_KIND_SCORE


class Peer:
    """One end of the stream, by hand."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, **event: Any) -> None:
        await self._call.write(reward_pb2.AttachRequest(**event))

    async def read(self) -> reward_pb2.AttachResponse:
        response: reward_pb2.AttachResponse = await asyncio.wait_for(self._call.read(), WAIT_S)
        return response

    async def register(self, capacity: int, process_id: str = "p", **more: Any) -> None:
        environment = more.pop("environment", environment_pb2.DescribeResponse(name="mine"))
        age_ms = more.pop("age_ms", 0)
        offer = reward_pb2.Offer(environment=environment, capacity=capacity, name="odd", kind=SCORE, age_ms=age_ms)
        await self.send(register=reward_pb2.Register(process_id=process_id, offers=[offer], **more))
        assert (await self.read()).WhichOneof("event") == "registered"

    async def grant(self, amount: int) -> None:
        await self.send(credit=reward_pb2.Credit(name="odd", kind=SCORE, amount=amount))

    async def work(self) -> reward_pb2.Work:
        response = await self.read()
        assert response.WhichOneof("event") == "work"
        return response.work

    async def answer(self, work_id: str, *rewards: float) -> None:
        results = [trajectory_pb2.Result(status=trajectory_pb2.STATUS_SCORED, reward=reward) for reward in rewards]
        score = environment_pb2.EnvironmentServiceScoreResponse(results=results)
        await self.send(answer=reward_pb2.Answer(work_id=work_id, score=score))

    async def ends(self) -> tuple[grpc.StatusCode, str]:
        return await asyncio.wait_for(self._call.code(), WAIT_S), str(await self._call.details())

    async def done(self) -> None:
        await self._call.done_writing()
