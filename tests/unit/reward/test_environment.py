"""The environment SDK: what a `score` method may return, what it may not, and what becomes of it then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace import Environment, Sample, Score
from headrace.base.errors import ConfigError
from headrace.base.repeats import Repeats
from headrace.env.attachment import _Stream
from headrace.env.server import BatchScorer, _Servicer
from headrace.v1 import environment_pb2, reward_pb2

WAIT_S = 30.0


def environment(answer: Callable[[Sample], Any], **attributes: Any) -> Environment:
    return type("Mine", (Environment,), {"score": lambda _, sample: answer(sample), **attributes})()


def scorer(mine: Environment, *completions: str, timeout_s: float | None = None) -> list[Score]:
    return asyncio.run(BatchScorer(mine).score([Sample(completion) for completion in completions], timeout_s))


def untimed(score: Score) -> Score:
    return msgspec.structs.replace(score, timings={})


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array(1.0), Score("SCORED", 1.0)])
def test_numbers_and_scores_are_rewards(value: object) -> None:
    (score,) = scorer(environment(lambda _: value, name="mine", build="7"), "x")
    assert score.timings["environment"] >= 0
    assert untimed(score) == Score("SCORED", 1.0, environment="mine", build="7")


def test_components_metadata_and_an_own_build_are_kept() -> None:
    given = Score("SCORED", 0.5, {"format": 1.0}, {"seen": [1]}, build="own")
    (score,) = scorer(environment(lambda _: given, build="7"), "x")
    assert untimed(score) == Score("SCORED", 0.5, {"format": 1.0}, {"seen": [1]}, environment="Mine", build="own")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "not a finite number"),
        (float("-inf"), "not a finite number"),
        (1.7e308, "reward is 1.7e+308"),
        (-1.1e9, "reward is -1.1e+09"),
        (None, "NoneType"),
        ("1.0", "str"),
        ({"reward": 1}, "dict"),
        (np.zeros(2), "TypeError"),
    ],
)
def test_law_7_failure_is_not_zero_what_is_no_reward_is_failed(value: object, words: str) -> None:
    (score,) = scorer(environment(lambda _: value), "x")
    assert (score.status, score.reward, score.environment) == ("FAILED", None, "Mine")
    assert words in score.message


@pytest.mark.parametrize(
    ("reward", "least", "most", "said"),
    [
        (1.5, 0.0, 1.0, "reward 1.5 is not between"),
        (-0.5, 0.0, None, "reward -0.5 is not between"),
        (2.0, None, 1.0, "reward_min (none) and reward_max 1"),
    ],
)
def test_law_7_failure_is_not_zero_a_reward_out_of_range_is_failed(
    reward: float, least: float | None, most: float | None, said: str
) -> None:
    for value in (reward, Score("SCORED", reward, {"part": 1.0})):
        (score,) = scorer(environment(lambda _, value=value: value, reward_min=least, reward_max=most), "x")
        assert (score.status, score.reward, score.components) == ("FAILED", None, {})
        assert said in score.message


def test_the_ends_of_the_range_are_in_it() -> None:
    for value, status in ((0, "SCORED"), (1, "SCORED"), (Score("INVALID", message="no answer"), "INVALID")):
        (score,) = scorer(environment(lambda _, value=value: value, reward_min=0.0, reward_max=1.0), "x")
        assert score.status == status


def test_a_range_that_holds_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward_min is 1.*reward_max 0"):
        BatchScorer(environment(lambda _: 1.0, reward_min=1, reward_max=0))


def test_what_it_promises_is_described() -> None:
    silent = BatchScorer(environment(lambda _: 1.0)).description
    assert (silent.deterministic, silent.HasField("reward_min"), silent.HasField("reward_max")) == (False,) * 3
    bounded = BatchScorer(environment(lambda _: 1.0, deterministic=True, reward_min=0)).description
    assert (bounded.deterministic, bounded.reward_min, bounded.HasField("reward_min")) == (True, 0, True)
    assert not bounded.HasField("reward_max")


def test_law_7_failure_is_not_zero_an_exception_is_failed_alone() -> None:
    def score(sample: Sample) -> float:
        if sample.completion == "exit":
            raise SystemExit(3)
        return 1 / len(sample.completion)

    fine, exception, ended = scorer(environment(score), "ab", "", "exit")
    assert fine.reward == 0.5
    here = f"{__file__}:{score.__code__.co_firstlineno + 3}, in score: return 1 / len(sample.completion)"
    assert (exception.status, exception.message) == ("FAILED", f"ZeroDivisionError: division by zero ({here})")
    assert exception.traceback.endswith("ZeroDivisionError: division by zero\n")
    assert ended.status == "FAILED"
    assert ended.message.startswith("SystemExit: 3")


def test_what_an_exception_says_is_kept_short() -> None:
    def score(sample: Sample) -> float:
        raise ValueError("x" * 100_000)

    (long,) = scorer(environment(score), "x")
    assert f"{__file__}:{score.__code__.co_firstlineno + 1}, in score" in long.message
    assert len(long.message) <= 2000
    assert len(long.traceback) <= 2000


def test_invalid_is_the_environments_own_word() -> None:
    (score,) = scorer(environment(lambda _: Score("INVALID", message="no answer in extra_env_info")), "x")
    assert (score.status, score.message) == ("INVALID", "no answer in extra_env_info")


def test_an_environment_without_a_method_says_so() -> None:
    (score,) = scorer(Environment(), "x")
    assert score.status == "FAILED"
    assert "score_batch" in score.message


async def test_async_scores_run_at_the_same_time() -> None:
    class Meeting(Environment):
        """Scores nothing before all three samples are there."""

        def __init__(self) -> None:
            self.barrier = asyncio.Barrier(3)

        async def score(self, sample: Sample) -> float:
            await self.barrier.wait()
            return float(len(sample.completion))

    scores = await BatchScorer(Meeting()).score([Sample("a"), Sample("bb"), Sample("ccc")], WAIT_S)
    assert [score.reward for score in scores] == [1, 2, 3]


def test_plain_scores_run_at_the_same_time_in_threads() -> None:
    barrier = threading.Barrier(3, timeout=WAIT_S)
    scores = scorer(environment(lambda sample: barrier.wait() * 0 + len(sample.completion)), "a", "bb", "ccc")
    assert [score.reward for score in scores] == [1, 2, 3]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_it_begins_no_more_than_concurrency_and_says_so(concurrency: int) -> None:
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(concurrency)

    def score(_: Sample) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(WAIT_S)
        with lock:
            running -= 1
        return 1.0

    scores = scorer(environment(score, concurrency=concurrency), *"abcdefgh")
    assert [score.status for score in scores] == ["SCORED"] * concurrency + ["NOT_STARTED"] * (8 - concurrency)
    assert most == concurrency
    expected = f"Mine is working on {concurrency} of the {concurrency} calls that its concurrency allows"
    assert scores[-1].message == expected


def test_concurrency_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Mine\.concurrency is 0"):
        BatchScorer(environment(lambda _: 1.0, concurrency=0))


def test_what_is_late_is_timed_out_and_what_is_done_keeps_its_reward() -> None:
    release = threading.Event()
    slow = environment(lambda sample: release.wait(WAIT_S) * 0.0 if sample.completion == "slow" else 1.0)
    try:
        late, done = scorer(slow, "slow", "fast", timeout_s=0.5)
    finally:
        release.set()
    assert (late.status, late.reward) == ("TIMED_OUT", None)
    assert "within 0.5 s" in late.message
    assert done.reward == 1


@pytest.mark.parametrize("is_attached", [False, True])
async def test_law_6_liveness_a_stall_beside_one_that_hangs_loses_none(is_attached: bool) -> None:
    """The answer for all samples leaves more than a stall's time before the call's deadline of a minute."""
    given: list[float] = []

    class Noting(BatchScorer):
        async def score(
            self, samples: Sequence[Sample], timeout_s: float | None, traceparents: Any = ()
        ) -> list[Score]:
            given.append(timeout_s or 0.0)
            return []

    noting = Noting(environment(lambda _: 1.0))
    if is_attached:
        await _Stream(noting, None, "mine", lambda _: None)._score(reward_pb2.Work(deadline_ms=60_000))
    else:
        context: Any = SimpleNamespace(time_remaining=lambda: 60.0)
        await _Servicer(noting, None).Score(environment_pb2.EnvironmentServiceScoreRequest(), context)
    assert 50 < given[0] <= 55


async def test_a_hung_thread_keeps_its_slot_and_no_other() -> None:
    release = threading.Event()
    mine = environment(lambda s: release.wait(WAIT_S) * 0.0 if s.completion == "slow" else 1.0, concurrency=2)

    scorer = BatchScorer(mine)
    assert [score.status for score in await scorer.score([Sample("slow")], 0.1)] == ["TIMED_OUT"]
    beside = await scorer.score([Sample("a"), Sample("b")], WAIT_S)
    assert [score.status for score in beside] == ["SCORED", "NOT_STARTED"]
    await scorer.score([Sample("slow")], 0.1)
    (after,) = await scorer.score([Sample("a")], 0.1)
    assert after.status == "NOT_STARTED"
    release.set()
    while after.status == "NOT_STARTED":  # until the threads have ended
        await asyncio.sleep(0.01)
        (after,) = await scorer.score([Sample("a")], WAIT_S)
    assert after.reward == 1


async def test_what_a_shutdowns_grace_leaves_undone_was_not_started() -> None:
    class Half(Environment):
        async def score(self, sample: Sample) -> float:
            if sample.completion == "slow":
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            return 1.0

    scorer = BatchScorer(Half())
    call = asyncio.create_task(scorer.score([Sample("slow"), Sample("fast")], WAIT_S))
    await asyncio.sleep(0)
    await scorer.drain(0.1)
    (slow, fast), (after,) = await call, await scorer.score([Sample("fast")], WAIT_S)
    assert [slow.status, fast.status, after.status] == ["NOT_STARTED", "SCORED", "NOT_STARTED"]
    assert after.message == "Half is shutting down"


def test_capacity_is_what_can_be_begun_at_a_time() -> None:
    class Batched(Environment):
        concurrency = 2

        def score_batch(self, samples: Sequence[Sample]) -> Sequence[float]:
            return [1.0] * len(samples)

    assert (Environment().capacity, Batched().capacity) == (16, 128)
    statuses = [score.status for score in scorer(Batched(), *"a" * 65)]
    assert statuses == ["SCORED"] * 64 + ["NOT_STARTED"]


def test_a_batch_is_scored_at_once() -> None:
    class Ranked(Environment):
        def score_batch(self, samples: Sequence[Sample]) -> Sequence[float | Score]:
            return [rank / len(samples) for rank, _ in enumerate(samples)]

    assert [score.reward for score in scorer(Ranked(), "a", "b")] == [0, 0.5]


@pytest.mark.parametrize(
    ("values", "words"), [([1.0], "1 results for 2 samples"), (None, "TypeError"), (KeyError("x"), "KeyError")]
)
def test_law_7_failure_is_not_zero_a_bad_batch_is_failed_whole(values: Any, words: str) -> None:
    def score_batch(self: Environment, samples: Sequence[Sample]) -> Any:
        if isinstance(values, Exception):
            raise values
        return values

    scores = scorer(environment(lambda _: 1.0, score_batch=score_batch), "a", "b")
    assert [score.status for score in scores] == ["FAILED", "FAILED"]
    assert words in scores[0].message


def test_an_empty_batch_has_no_scores() -> None:
    assert scorer(environment(lambda _: 1.0)) == []


async def test_a_failure_is_logged_once_with_its_cause_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    def score(sample: Sample) -> float | Score:
        if sample.completion == "refused":
            return Score("INVALID", message=f"no answer in problem {sample.index}")
        return float(sample.extra_env_info["anwser"])

    mine = environment(score, name="mine", concurrency=64)
    hostile = "\x1b[2J\nERROR mine: all is well" + "x" * 5000
    messages = ({"role": "user", "content": "2+\x1b[0m2"},)

    now = 0.0
    scorer = BatchScorer(mine, Repeats(every_s=60, clock=lambda: now))
    for index in range(30):
        sample = Sample(hostile, {"answer": "4"}, messages, index=index)
        await scorer.score([sample, Sample("refused", index=index)], WAIT_S)
    now = 60.0
    await scorer.score([Sample("x")], WAIT_S)
    raised, refused, again = (record.getMessage() for record in caplog.records)
    place = f"{__file__}:{score.__code__.co_firstlineno + 3}, in score"
    assert raised.startswith(f"mine raised KeyError ({place}: ")
    assert r"prompt: user: 2+\x1b[0m2" in raised
    assert r"completion: \x1b[2J\nERROR mine: all is well" in raised
    assert "extra_env_info: {'answer': '4'}" in raised
    assert raised.endswith("KeyError: 'anwser'")
    assert len(raised) < 5000
    assert all(line.startswith("    ") for line in raised.splitlines()[1:]), "no line of it passes for a record"
    assert refused.startswith("mine answered INVALID: no answer in problem 0;")
    assert again.startswith(f"mine raised KeyError ({place}: ")
    assert "31 times" in again


def test_what_was_late_is_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    try:
        scorer(environment(lambda _: release.wait(WAIT_S) * 0.0), "slow", timeout_s=0.1)
    finally:
        release.set()
    assert "TIMED_OUT: no answer from Mine" in caplog.text
    assert "completion: slow" in caplog.text
