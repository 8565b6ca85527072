"""When an answer to a call leaves the replica: the engine has sampled it already, and what remains is the proof of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.config import Config
from headrace.net.replica_client import RenderRefused, ReplicaFenced, SampleRequest
from headrace.replay import HeartbeatReply
from headrace_services.rollout.decisions import EndCalls
from headrace_services.rollout.worker import RolloutWorker

pytestmark = pytest.mark.slow

CALL = SampleRequest(token_ids=(3, 4), max_new_tokens=2, timeline="t", min_version=1)


class Engine:
    """Its completions are there at once. `asked` is what it was last given to complete."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 20)
    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=3))
    asked: Any = None

    async def generate(self, prompt: Any, *_: Any) -> AsyncIterator[Any]:
        self.asked = prompt
        ids = [5, 6]
        yield SimpleNamespace(
            finished=True,
            num_cached_tokens=1,
            outputs=[
                SimpleNamespace(
                    token_ids=ids,
                    logprobs=SimpleNamespace(token_ids=ids, logprobs=[-0.5, -0.25]),
                    weight_versions=[SimpleNamespace(version="1", start=0)],
                    finish_reason="length",
                    stop_reason=None,
                )
            ],
        )


@pytest.fixture
def worker() -> RolloutWorker:
    return worker_of(Config())


def worker_of(config: Config) -> RolloutWorker:
    """HEALTHY, with verified weights of version 1."""
    it = RolloutWorker(config, Engine(), None, {})  # type: ignore[arg-type]
    it.receiver.weights = ("t", 1)
    it._reply = HeartbeatReply(state="HEALTHY", timeline="t", lost=(), epoch=None)
    return it


async def begun(worker: RolloutWorker) -> asyncio.Task[Any]:
    """A call that waits for nothing but the proof."""
    call = asyncio.create_task(worker.sample(CALL, special_tokens=False))
    for _ in range(20):
        await asyncio.sleep(0)
    return call


async def test_it_leaves_at_once_with_verified_weights(worker: RolloutWorker) -> None:
    answer = await (await begun(worker))
    assert (answer.token_ids, answer.timeline, answer.version, answer.replica) == ([5, 6], "t", 1, worker.replica)
    assert (worker.status.calls, worker.status.call_tokens) == ({"answered": 1}, 2)


async def test_its_salt_is_of_the_weights_where_the_cache_outlives_them() -> None:
    asynchrony = {"enabled": True, "in_flight_weight_updates": True}
    keeps = worker_of(Config.model_validate({"grpo": {"async_grpo": asynchrony}}))
    answer = await (await begun(keeps))
    assert answer.cached_tokens == 1
    assert keeps.receiver.cache_salt is not None
    assert keeps._engine.asked["cache_salt"] == keeps.receiver.cache_salt
    drops = worker_of(Config())
    await (await begun(drops))
    assert "cache_salt" not in drops._engine.asked


async def test_it_waits_for_the_proof_and_names_what_was_proved(worker: RolloutWorker) -> None:
    worker._verified.clear()
    call = await begun(worker)
    assert not call.done()
    assert list(worker._calls.values()) == ["t"]
    worker.receiver.weights = ("t", 2)
    worker._verified.set()
    assert (await call).version == 2
    assert not worker._calls


@pytest.mark.parametrize("held", [None, ("u", 2)])
async def test_law_4_no_answer_leaves_with_unverified_or_foreign_weights(
    worker: RolloutWorker, held: tuple[str, int] | None
) -> None:
    worker._verified.clear()
    call = await begun(worker)
    worker.receiver.weights = held
    worker._verified.set()
    with pytest.raises(ReplicaFenced, match="not verified"):
        await call
    assert worker.status.calls == {"fenced": 1}


async def test_law_4_an_ended_call_is_fenced_though_the_engine_finished(worker: RolloutWorker) -> None:
    worker._verified.clear()
    call = await begun(worker)
    worker._reply = HeartbeatReply(state="HEALTHY", timeline="u", lost=(), epoch=None)
    await worker._act(EndCalls(frozenset({"t"})))
    worker._verified.set()
    with pytest.raises(ReplicaFenced) as fenced:
        await call
    assert fenced.value.reason == "timeline"


async def test_what_no_replica_may_sample_is_refused_in_any_state(worker: RolloutWorker) -> None:
    worker._reply = None
    with pytest.raises(RenderRefused, match=r"token_ids\[1\] is 20"):
        await worker.sample(msgspec.structs.replace(CALL, token_ids=(3, 20)), special_tokens=False)
    assert worker.status.calls == {"refused": 1}


async def test_a_caller_that_is_gone_leaves_nothing_behind(worker: RolloutWorker) -> None:
    worker._verified.clear()
    call = await begun(worker)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not worker._calls
    assert worker._changed.is_set()  # a refit may wait for it
    assert worker.status.calls == {"abandoned": 1}


async def test_a_call_that_waits_across_a_refit_finds_no_older_results() -> None:
    worker = worker_of(Config())
    worker.receiver._clear_cache = False
    async with worker.slots.take(worker.slots.count):
        call = await begun(worker)
        assert not call.done()
        worker.receiver._cache_salt = "new"
    await call
    assert worker._engine.asked["cache_salt"] == "new"
