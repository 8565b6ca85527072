"""The conformance kit's checks for programs that own their loop: each runs against a scripted policy."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from headrace.env.episode import Episode, EpisodeLimits, EpisodeOutcome
from headrace.env.kit.example_samples import GoldenSample, as_messages
from headrace.env.kit.scripted_policy import Answers, ScriptedPolicy, ScriptedSession
from headrace.env.wire import episode_to_wire, outcome_from_wire
from headrace.records.trajectory import Message
from headrace.v1 import environment_pb2 as pb

REMEDIES = {
    "episodes": "answer RunEpisode when the program has ended, with its reward; if these problems lack fields of yours, give yours: "
    "--samples FILE, whose completions are the policy's answers to every call",
    "episode keys": "call the policy at the episode's own base_url, with its own api_key, and never after the episode has ended",
    "episode deadline": "end by deadline_ms, with TIMED_OUT, whatever the policy does: limit its calls to the remaining time",
    "cancelled episodes": "end the program when its call is cancelled, as its key no longer works; then run others",
}

# The calls that an episode may make here. A program that plays until it wins is refused the next one.
_MOST_CALLS = 20
_SHORT_S = 1.0


class EpisodeExamination:
    """Reports faults with `fault`, and successful checks with `right`."""

    def __init__(
        self,
        stub: Any,
        golden: Sequence[GoldenSample],
        timeout_s: float,
        fault: Callable[[str, str], None],
        right: Callable[[str, str], None],
    ) -> None:
        self._stub = stub
        self._golden = golden
        self._timeout_s = timeout_s
        self._fault = fault
        self._right = right

    async def run(self) -> None:
        with ScriptedPolicy() as policy:
            sessions = await self._one_by_one(policy)
            calls = await self._at_once(policy)
            self._keys(policy, sessions, calls)
            await self._deadline(policy)
            await self._check_cancelled(policy)

    async def _one_by_one(self, policy: ScriptedPolicy) -> list[tuple[ScriptedSession, int]]:
        """Run the episodes one by one. Return their sessions, each with the number of calls made by its end."""
        played, earned = [], []
        for each in self._golden:
            session = policy.session(_always(each.completion))
            outcome = await self._play("episodes", session, each, self._timeout_s)
            played.append((session, len(session.calls)))
            if outcome is None:
                continue
            if outcome.score is None:
                earned.append("the grader's")
            elif outcome.score.status == "FAILED" and len(session.calls) > _MOST_CALLS:
                earned.append("nothing, past its limit")  # the run decides about it
            elif (difference := each.difference(outcome.score)) is not None:
                self._fault("episodes", f"{each.completion[:40]!r} in answer to every call: {difference}")
            else:
                earned.append(f"{outcome.score.reward:g}" if outcome.score.reward is not None else outcome.score.status)
        self._right("episodes", f"{len(earned)} earned {', '.join(earned):.60}")
        return played

    async def _at_once(self, policy: ScriptedPolicy) -> list[tuple[ScriptedSession, int]]:
        """Run two episodes at a time, as in a group."""
        each = self._golden[0]
        sessions = [policy.session(_always(each.completion)) for _ in range(2)]
        await asyncio.gather(*(self._play("episodes", session, each, self._timeout_s) for session in sessions))
        return [(session, len(session.calls)) for session in sessions]

    def _keys(
        self,
        policy: ScriptedPolicy,
        alone: Sequence[tuple[ScriptedSession, int]],
        together: Sequence[tuple[ScriptedSession, int]],
    ) -> None:
        for stray in policy.strays[:1]:
            self._fault(
                "episode keys", f"{len(policy.strays)} calls under no episode's key; the first was {stray:.120}"
            )
        for session, made in (*alone, *together):
            if len(session.calls) > made:
                self._fault("episode keys", f"{len(session.calls) - made} calls under the key of an ended episode")
        if alone[0][1] and not all(made for _, made in together):
            self._fault("episode keys", "one of two concurrent episodes made no call under its own key")
        made = sum(count for _, count in (*alone, *together))
        self._right("episode keys", f"{made} calls, each under the key of its episode" if made else "it makes no calls")

    async def _deadline(self, policy: ScriptedPolicy) -> None:
        hold = threading.Event()
        session = policy.session(_hold(hold, self._golden[0].completion))
        try:
            outcome = await self._play("episode deadline", session, self._golden[0], _SHORT_S)
        finally:
            session.ended = True
            hold.set()
        if outcome is not None:
            status = "ended" if outcome.score is None else outcome.score.status
            self._right("episode deadline", f"with {_SHORT_S:g} s, and a policy that doesn't answer: {status}")

    async def _check_cancelled(self, policy: ScriptedPolicy) -> None:
        each, hold = self._golden[0], threading.Event()
        session = policy.session(_hold(hold, each.completion))
        call = self._stub.RunEpisode(_request(session, each, self._timeout_s), timeout=self._timeout_s)
        try:
            async with asyncio.timeout(_SHORT_S):
                while not session.calls:  # noqa: ASYNC110  # they arrive in another thread
                    await asyncio.sleep(0.01)
        except TimeoutError:  # the program makes no calls
            pass
        call.cancel()
        await asyncio.wait([asyncio.ensure_future(call.code())])
        session.ended = True
        hold.set()
        outcome = await self._play(
            "cancelled episodes", policy.session(_always(each.completion)), each, self._timeout_s
        )
        if outcome is not None and outcome.score is not None and outcome.score.status == "NOT_STARTED":
            self._fault("cancelled episodes", f"after one it runs no others: {outcome.score.message}")
        self._right("cancelled episodes", "the next one runs after one")

    async def _play(
        self, check: str, session: ScriptedSession, each: GoldenSample, within_s: float
    ) -> EpisodeOutcome | None:
        """Run an episode and return its outcome, or None without an answer, which is a fault."""
        try:
            response = await self._stub.RunEpisode(_request(session, each, within_s), timeout=within_s + _SHORT_S)
        except grpc.aio.AioRpcError as error:
            late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            self._fault(
                check, f"no answer within {within_s:g} s" if late else f"{error.code().name}: {error.details()}"
            )
            return None
        return outcome_from_wire(response.outcome)


def _request(session: ScriptedSession, each: GoldenSample, within_s: float) -> pb.EnvironmentServiceRunEpisodeRequest:
    episode = Episode(
        session.base_url,
        session.api_key,
        as_messages(each.prompt),
        each.extra_env_info,
        EpisodeLimits(calls=_MOST_CALLS),
        time.monotonic() + within_s,
        group_id=f"check-{secrets.token_hex(4)}",
        task_name=each.task_name or "check",
    )
    return pb.EnvironmentServiceRunEpisodeRequest(episode=episode_to_wire(episode))


def _always(answer: str) -> Answers:
    return [answer] * _MOST_CALLS


def _hold(until: threading.Event, answer: str) -> Answers:
    def wait(_: Sequence[Message]) -> str:
        until.wait()
        return answer

    return wait
