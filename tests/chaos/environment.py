"""The environment of a chaos run, as a user would serve one: its reward is a pure function of question and answer, so that an
auditor can work it out again; it behaves as a file says, which paces the run and makes it misbehave; some problems are made to fail.

    python -m tests.chaos.environment PORT HOST FILE

In a run of episodes it is a program, too, whose reward is that of its last answer; or the grader of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import sys
import zlib
from collections.abc import Awaitable
from pathlib import Path

import grpc

import headrace
from headrace.env.programs import Programs
from headrace.env.server import BatchScorer
from headrace.env.wire import episode_from_wire, outcome_to_wire, sample_from_wire, score_to_wire
from headrace.net import rpc
from headrace.net.service import stop_on_signals
from headrace.v1 import environment_pb2 as pb
from headrace.v1 import environment_pb2_grpc as pb_grpc
from headrace.v1 import episode_pb2, trajectory_pb2
from tests.chaos.conduct import Conduct

# Of a score while the environment is slow: more than `env.paced.timeout_s`.
SLOW_S = 15.0
# Of an episode.
CALLS = 5


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words for it")


# Exceptions that asyncio, a generator or the interpreter treats specially, and one that can't be shown.
ODD = (StopIteration, asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit, TimeoutError, Unspeakable)


class Paced(headrace.Environment):
    name = "paced"
    build = "chaos-1"
    concurrency = 64  # no more than the run keeps busy: slots that aren't given back are missed
    episodes = 256

    def __init__(self, conduct: Conduct) -> None:
        self._conduct = conduct
        self._seen: set[str] = set()
        self._odd = itertools.cycle(ODD)

    def score(self, sample: headrace.Sample) -> Awaitable[float]:
        """In a thread, and from there in the event loop: it can raise in either."""
        if self._conduct.heard()[1] == "raises":
            raise next(self._odd)
        return self._score(sample)

    async def _score(self, sample: headrace.Sample) -> float:
        pace, mood = self._conduct.heard()
        await asyncio.sleep(SLOW_S if mood == "slow" else pace)
        problem = sample.extra_env_info["mood"]
        if problem == "poison":
            raise RuntimeError("this problem can't be scored")
        if problem == "flaky" and sample.group_id not in self._seen:
            self._seen.add(sample.group_id)
            raise RuntimeError("not at the first time")
        if problem == "flat":
            return 0.5
        return _reward(sample.messages[-1]["content"], sample.completion)

    async def episode(self, e: headrace.Episode) -> float:
        """Every question but the first has the number of the turn, and a mark that no other instance of this program has."""
        pace, mood = self._conduct.heard()
        problem, is_first = e.public["mood"], e.attempt == 0
        if problem == "poison" or (problem == "flaky" and is_first):
            raise RuntimeError("this problem can't be played, or not at the first time")
        if mood == "slow" and is_first:
            await asyncio.Event().wait()
        messages, mark = list(e.messages), secrets.randbelow(10**9)
        for turn in range(1, CALLS + 1):
            answer = await e.chat(messages)
            messages += [answer, {"role": "user", "content": f"{turn}-{mark}"}]
            if is_first and turn == 1 + e.index % CALLS:
                if mood == "bad_answers":
                    raise RuntimeError("everything is wrong today")
                if mood == "raises":
                    raise next(self._odd)
        await asyncio.sleep(pace)
        return 0.5 if problem == "flat" else _reward(e.messages[-1]["content"], answer["content"])


def _reward(question: str, answer: str) -> float:
    return zlib.crc32(f"{question}|{answer}".encode()) % 1000 / 1000


class Servicer(pb_grpc.EnvironmentServiceServicer):
    """As `headrace.serve` serves it, and in its bad hours what the library would not let out."""

    def __init__(self, environment: Paced, conduct: Conduct) -> None:
        self._environment = environment
        self._conduct = conduct
        self._scorer = BatchScorer(environment)
        self._programs = Programs(environment)
        self._turn = itertools.count()

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            name=self._environment.label,
            build=self._environment.build,
            capacity=self._environment.capacity,
            episodes=self._environment.episodes,
        )

    async def Score(
        self, request: pb.EnvironmentServiceScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.EnvironmentServiceScoreResponse:
        _, mood = self._conduct.heard()
        if mood == "overloaded":
            return await self._overloaded(len(request.trajectories), context)
        if mood == "bad_answers":
            return await self._bad_answer(len(request.trajectories), context)
        samples = [sample_from_wire(trajectory) for trajectory in request.trajectories]
        scores = await self._scorer.score(samples, rpc.time_to_answer(context))
        return pb.EnvironmentServiceScoreResponse(results=[score_to_wire(score) for score in scores])

    async def RunEpisode(
        self, request: pb.EnvironmentServiceRunEpisodeRequest, context: grpc.aio.ServicerContext
    ) -> pb.EnvironmentServiceRunEpisodeResponse:
        _, mood = self._conduct.heard()
        if mood == "overloaded" and next(self._turn) % 2:
            return await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        if mood == "overloaded":
            refused = trajectory_pb2.Result(status=trajectory_pb2.STATUS_NOT_STARTED, message="no room")
            return pb.EnvironmentServiceRunEpisodeResponse(outcome=episode_pb2.EpisodeOutcome(result=refused))
        outcome = outcome_to_wire(
            await self._programs.run(episode_from_wire(request.episode, rpc.time_to_answer(context)))
        )
        if mood == "bad_answers" and request.episode.attempt == 0:
            outcome.result.reward = float("nan")
        return pb.EnvironmentServiceRunEpisodeResponse(outcome=outcome)

    async def _overloaded(self, asked: int, context: grpc.aio.ServicerContext) -> pb.EnvironmentServiceScoreResponse:
        if next(self._turn) % 2:
            return await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        refused = trajectory_pb2.Result(status=trajectory_pb2.STATUS_NOT_STARTED, message="no room")
        return pb.EnvironmentServiceScoreResponse(results=[refused] * asked)

    async def _bad_answer(self, asked: int, context: grpc.aio.ServicerContext) -> pb.EnvironmentServiceScoreResponse:
        def scored(reward: float) -> trajectory_pb2.Result:
            return trajectory_pb2.Result(status=trajectory_pb2.STATUS_SCORED, reward=reward)

        match next(self._turn) % 4:
            case 0:
                return pb.EnvironmentServiceScoreResponse(results=[scored(1.0)] * (asked + 1))
            case 1:
                return pb.EnvironmentServiceScoreResponse(results=[scored(float("nan"))] * asked)
            case 2:
                refused = trajectory_pb2.Result(status=trajectory_pb2.STATUS_INVALID, message="there is no such field")
                return pb.EnvironmentServiceScoreResponse(results=[refused] * asked)
        raise RuntimeError("everything is wrong today")


async def serve(environment: Paced, conduct: Conduct, host: str, port: int) -> None:
    """Until SIGTERM."""
    server = rpc.server(keep_alive=True)
    pb_grpc.add_EnvironmentServiceServicer_to_server(Servicer(environment, conduct), server)
    rpc.listen(server, host, port, "port")
    await server.start()
    with contextlib.suppress(asyncio.CancelledError):
        await stop_on_signals().wait()
    await server.stop(0.5)


if __name__ == "__main__":
    conduct = Conduct(Path(sys.argv[3]))
    asyncio.run(serve(Paced(conduct), conduct, sys.argv[2], int(sys.argv[1])))
