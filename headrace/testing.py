"""Test an environment without a run: samples, and a server that scores them as in a run.

    from headrace.testing import sample

    def test_the_right_answer_earns_one(serve_environment):
        exact = serve_environment(Exact())
        assert exact.reward(sample("4", {"answer": "4"})) == 1

    def test_a_program_that_guesses_right_earns_one(serve_environment):
        guess = serve_environment(Guess())
        assert guess.episode(["3", "7"], public={"secret": 7}).reward == 1

`serve_environment` is a fixture that pytest finds automatically. Elsewhere `with headrace.testing.served(Exact()) as exact:` does the
same.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from headrace.base.addresses import LOOPBACK
from headrace.env.asking import ask
from headrace.env.environment import Environment, Sample
from headrace.env.episode import Episode, EpisodeOutcome
from headrace.env.kit import conformance
from headrace.env.kit.conformance import Finding
from headrace.env.kit.example_samples import ODD_COMPLETIONS, GoldenSample, as_messages, read_samples, sample
from headrace.env.kit.scripted_policy import Answers, PolicyCall, ScriptedPolicy
from headrace.env.server import serving
from headrace.env.wire import episode_to_wire, outcome_from_wire, sample_to_wire
from headrace.net import rpc
from headrace.records.score import Score
from headrace.records.trajectory import Message
from headrace.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2

T = TypeVar("T")

TIMEOUT_S = 60.0

__all__ = [
    "ODD_COMPLETIONS",
    "GoldenSample",
    "Played",
    "PolicyCall",
    "ScriptedPolicy",
    "Served",
    "read_samples",
    "sample",
    "served",
]


@dataclasses.dataclass(frozen=True)
class Played:
    """An episode that has ended: its outcome, and its program's calls of the policy."""

    outcome: EpisodeOutcome
    calls: list[PolicyCall]

    @property
    def reward(self) -> float:
        """The reward. Raises `AssertionError`, with the program's message and traceback, if it returned none."""
        assert self.outcome.score is not None, "the program returned no reward, and leaves it to a grader"
        return _require_reward(self.outcome.score)


def _require_reward(score: Score) -> float:
    assert score.reward is not None, f"{score.status}: {score.message}\n{score.traceback}"
    return score.reward


class Served:
    """A served environment, as the hub sees it. `target` is its host:port."""

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self._loop = loop

    def score(self, *samples: Sample, timeout_s: float = TIMEOUT_S) -> list[Score]:
        """Return the scores of these samples, in order. A failure is a score too: its `status` and `message` describe it."""
        return self._run(self._score(samples, timeout_s))

    def reward(self, sample: Sample, timeout_s: float = TIMEOUT_S) -> float:
        """Return the reward of a sample. Raises `AssertionError`, with the environment's message and traceback, if it has none."""
        (score,) = self.score(sample, timeout_s=timeout_s)
        return _require_reward(score)

    def episode(
        self,
        answers: Answers,
        *,
        prompt: str | Sequence[Message] = "",
        public: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        **fields: Any,
    ) -> Played:
        """Run the environment's program, whose calls get these answers: texts or whole messages in turn, or the results of a function of a
        call's messages. Once they are used up, a call is refused as beyond a limit of the run. `prompt` is the user's message, or all
        messages; `fields` are other fields of `headrace.Episode`."""
        with ScriptedPolicy() as policy:
            session = policy.session(answers)
            given = {"group_id": f"test-{secrets.token_hex(8)}", **fields}
            episode = Episode(
                session.base_url,
                session.api_key,
                as_messages(prompt),
                dict(public or {}),
                deadline=time.monotonic() + timeout_s,
                **given,
            )
            return Played(self._run(self._episode(episode, timeout_s)), session.calls)

    def faults(self, samples: Sequence[GoldenSample] = (), timeout_s: float = conformance.TIMEOUT_S) -> list[Finding]:
        """Return the faults that `headrace env check` finds."""
        return [finding for finding in self._run(self._check(samples, timeout_s)) if finding.verdict == "wrong"]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _score(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        async with rpc.channel(self.target) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)

            async def send(some: Sequence[Sample], within_s: float) -> Sequence[trajectory_pb2.Result]:
                request = environment_pb2.EnvironmentServiceScoreRequest(trajectories=map(sample_to_wire, some))
                results: Sequence[trajectory_pb2.Result] = (await stub.Score(request, timeout=within_s)).results
                return results

            return await ask(send, samples, timeout_s)

    async def _episode(self, episode: Episode, timeout_s: float) -> EpisodeOutcome:
        async with rpc.channel(self.target) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            request = environment_pb2.EnvironmentServiceRunEpisodeRequest(episode=episode_to_wire(episode))
            return outcome_from_wire((await stub.RunEpisode(request, timeout=timeout_s)).outcome)

    async def _check(self, samples: Sequence[GoldenSample], timeout_s: float) -> list[Finding]:
        async with rpc.channel(self.target) as channel:
            return await conformance.examine(channel, samples, timeout_s)


@contextlib.contextmanager
def served(environment: Environment) -> Iterator[Served]:
    """Serve `environment` on a free port of this machine, from its own thread, while the context is open."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="headrace-testing")
    thread.start()
    server = serving(environment, LOOPBACK)
    try:
        port = asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        try:
            yield Served(f"{LOOPBACK}:{port}", loop)
        finally:
            asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
