"""The rollout service as a process: real engine, real buffer, real weight channel.

The tests follow one fleet through its life. Those of the night bring it to where they start, so that they run without those before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from headrace.net.replica_client import ReplicaClient, ReplicaFenced, Sampled, SampleRequest
from headrace.net.service import EXIT_INTERNAL_ERROR
from tests.support.buffer import tighten
from tests.support.mutation import Mutator
from tests.support.paced_engine import DRAINED, LONG
from tests.support.rollout_fleet import IN_FLIGHT, LIMITS, PROMPT, Fleet, Process, running_fleet
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(redis_url: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    settings = {"rollout": {"max_concurrent_groups": 4, "save_partial_tokens": 64}}
    async with running_fleet(tmp_path_factory.mktemp("rollout"), redis_url, tiny_model, settings) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(fleet: Fleet) -> Process:
    """A replica that drains before a refit."""
    return await fleet.start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def second(fleet: Fleet) -> Process:
    """One that joins the running fleet later, and is refitted in flight. The tests of the night have it alone."""
    return await fleet.start(**IN_FLIGHT)


async def test_without_verified_weights_it_is_not_ready_and_leases_nothing(fleet: Fleet, first: Process) -> None:
    group = await fleet.enqueue()
    page = await first.http.get("/readyz")
    assert page.status_code == 503
    assert "waiting for the trainer" in page.json()["reason"]
    weights = (await first.http.get("/weights")).json()
    assert (weights["state"], weights["version"], weights["difference"], weights["tolerance"]) == (
        "STALE",
        -1,
        None,
        None,
    )
    assert (await fleet.replay.group(group))["state"] == "queued"


async def test_its_log_names_what_the_engine_computes_with(first: Process) -> None:
    log = first.log.read_text()
    assert re.search(
        r"weights are in float32, its KV cache in auto .*, [1-9]\d* blocks of it; attention by CPU_ATTN; ", log
    )
    assert "products of float32 are in ieee (TRITON_F32_DEFAULT)" in log  # as the worker's process has it
    assert "vLLM's model runner is V1 " in log


async def test_completions_as_openai_clients_ask_for_them(first: Process, fleet: Fleet) -> None:
    name = fleet.settings["policy"]["model_name"]
    assert [model["id"] for model in (await first.http.get("/v1/models")).json()["data"]] == [name]
    body = {"model": name, "prompt": "<user>12+34<asst>", "max_tokens": 5, "temperature": 0}
    said = (await first.http.post("/v1/completions", json=body)).json()
    assert said["choices"][0]["finish_reason"] in ("stop", "length")
    assert said["usage"]["completion_tokens"] <= 5
    ids = await first.http.post("/v1/completions", json={**body, "prompt": list(range(3, 9))})
    assert ids.json()["usage"]["prompt_tokens"] == 6


async def test_chat_completions_whole_and_streamed(first: Process, fleet: Fleet) -> None:
    body = {
        "model": fleet.settings["policy"]["model_name"],
        "messages": [{"role": "user", "content": "12+34"}],
        "max_tokens": 6,
        "temperature": 0,
    }
    message = (await first.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert message["role"] == "assistant"
    pieces, last = [], ""
    async with first.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    pieces.append(json.loads(last)["choices"][0]["delta"].get("content") or "")
    assert last == "[DONE]"
    assert "".join(pieces) == message["content"]


@pytest.mark.parametrize(
    ("path", "change", "status"),
    [
        ("completions", {"model": "another"}, 404),
        ("completions", {"temperature": -1}, 400),
        ("completions", {"max_tokens": "many"}, 400),
        ("completions", {"prompt": [3] * 5000}, 400),
        ("completions", {"prompt": [3, 10_000_000]}, 400),
        ("completions", {"prompt": None}, 400),
        ("chat/completions", {"messages": "hello"}, 400),
        ("chat/completions", {"messages": None}, 400),
    ],
)
async def test_bad_requests_are_refused_by_name(first: Process, path: str, change: dict[str, Any], status: int) -> None:
    body: dict[str, Any] = {"max_tokens": 4}
    body |= {"prompt": [3, 4]} if path == "completions" else {"messages": [{"role": "user", "content": "1"}]}
    answer = await first.http.post(f"/v1/{path}", json=body | change)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
async def test_what_is_no_json_object_is_refused(first: Process, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = await first.http.post("/v1/completions", content=content, headers=headers)
    assert 400 <= answer.status_code < 500
    assert (await first.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_malformed_requests_get_a_documented_status(first: Process, session_seed: int, path: str) -> None:
    mutator = Mutator(Random(f"{session_seed} {path}"))
    documented = (await first.http.get("/openapi.json")).json()["paths"][path]["post"]["responses"]
    assert {"200", "400", "401", "403", "404", "415", "503"} <= documented.keys()
    good: dict[str, Any] = {"max_tokens": 4, "temperature": 0.5, "stop": ["a"], "seed": 1, "stream": False}
    good |= {"prompt": [3, 4]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "1"}]}
    for _ in range(50):
        body = mutator.structure(good)
        answer = await first.http.post(
            path, content=json.dumps(body, default=repr), headers={"content-type": "application/json"}
        )
        said = f"{body!r:.1000} answered {answer.status_code} {answer.text:.500}"
        assert str(answer.status_code) in documented, said
        assert answer.status_code < 500, said
        assert answer.status_code == 200 or answer.json()["error"]["message"], said
    assert (await first.http.post(path, json=good)).status_code == 200


async def test_after_a_verified_refit_it_generates_and_pushes(fleet: Fleet, first: Process) -> None:
    report = await fleet.refit(0)
    assert report.verified == (first.replica,)
    trajectories = await fleet.pushed("e0-train-0")
    assert [it.index for it in trajectories] == [0, 1]
    for it in trajectories:
        assert fleet.policy.difference(it, 0) < 1e-4
        assert [(span.version, span.start) for span in it.spans] == [(0, 0)]
        assert it.replica == first.replica
    assert (await first.http.get("/readyz")).status_code == 200
    weights = (await first.http.get("/weights")).json()
    assert (weights["state"], weights["version"], weights["timeline"]) == ("HEALTHY", 0, "timeline-0")
    assert 0 <= weights["difference"] <= weights["tolerance"] == 1e-4
    assert 0 <= weights["mean_difference"] <= weights["mean_tolerance"] == 1e-4
    assert await first.metric("headrace_rollout_tokens_total") == sum(it.logprobs.size for it in trajectories)
    assert await first.metric('headrace_rollout_refits_total{outcome="verified"}') == 1


async def test_a_prompt_that_fills_the_context_ends_its_group(fleet: Fleet, first: Process) -> None:
    group = await fleet.group(await fleet.enqueue(prompt=(3,) * 2048), "failed", "scoring")
    assert group["state"] == "failed"
    assert "max_total_sequence_length 2048" in group["reason"]


async def test_what_vllm_refuses_ends_its_group_with_the_reason(fleet: Fleet, first: Process) -> None:
    group = await fleet.group(await fleet.enqueue(prompt=(3, 10_000)), "failed", "scoring")
    assert group["state"] == "failed"
    assert "out of vocabulary" in group["reason"]


async def running_group(fleet: Fleet, is_running: Callable[[str], Awaitable[bool]], tokens: int = LONG) -> str:
    """A group that was seen to be generated. One that was complete before a look fell on it is replaced by another."""
    while True:
        group = await fleet.enqueue(tokens=tokens)
        while (await fleet.group(group, "queued", "open", "scoring"))["state"] != "scoring":
            if await is_running(group):
                return group
            await asyncio.sleep(0.02)


async def test_running_generations_are_drained_before_a_refit(fleet: Fleet, first: Process) -> None:
    group = await running_group(fleet, lambda _: first.generating(), DRAINED)
    fleet.policy.train()
    report = await fleet.refit(1)
    assert report.verified == (first.replica,)
    for it in await fleet.pushed(group):
        assert [span.version for span in it.spans] == [0]
        assert it.completion_token_ids.size > DRAINED // 2
        assert fleet.policy.difference(it, 0) < 1e-4
    assert (await first.http.get("/weights")).json()["version"] == 1


async def begun(replica: Process, client: ReplicaClient, asked: SampleRequest) -> asyncio.Task[Sampled]:
    """The call, once it was seen to run: one that came before the replica knew that it is HEALTHY, or was over, is made again."""
    while True:
        call = asyncio.create_task(client.sample(asked))
        while not call.done():
            if await replica.generating():
                return call
            await asyncio.sleep(0.02)
        with contextlib.suppress(ReplicaFenced):
            call.result()


async def test_running_calls_are_drained_before_a_refit(fleet: Fleet, first: Process) -> None:
    client = ReplicaClient(str(first.http.base_url))
    asked = SampleRequest(PROMPT, DRAINED, fleet.timeline, 1, temperature=0.0)
    call = await begun(first, client, asked)
    fleet.policy.train()
    refit = asyncio.create_task(fleet.refit(2))

    async def withheld() -> bool:
        try:
            await client.sample(msgspec.structs.replace(asked, max_new_tokens=1))
        except ReplicaFenced as fenced:
            return fenced.reason == "refit"
        return False

    await eventually(withheld)
    assert (await refit).verified == (first.replica,)
    it = await call
    assert (it.spans, it.version) == (((1, 0, DRAINED),), 1)
    ids = np.array([*PROMPT, *it.token_ids])
    assert abs(fleet.policy.logprobs_of(ids, 1)[len(PROMPT) - 1 :] - it.logprobs).max() < 1e-4
    await client.aclose()


async def test_a_rewind_to_its_weights_interrupts_nothing(fleet: Fleet, first: Process) -> None:
    # the buffer takes tokens of no weights that are newer than its next step: a replica whose saved tokens it refuses leaves the fleet
    assert (await fleet.refit(0)).verified == (first.replica,)
    group = await running_group(fleet, lambda group: _saved(fleet, group))
    fleet.timeline = "timeline-1"
    await fleet.replay.rewind(0, fleet.timeline)
    assert (await fleet.refit(0)).verified == (first.replica,)  # it drains for it
    for it in await fleet.pushed(group):
        assert (it.attempt, [span.version for span in it.spans]) == (1, [0])
        assert fleet.policy.difference(it, 0) < 1e-4
    assert await first.metric('headrace_rollout_groups_total{outcome="lost"}') == 0


async def test_lost_leases_are_aborted(fleet: Fleet, first: Process) -> None:
    group = await running_group(fleet, lambda group: _saved(fleet, group))
    await fleet.replay.open_epoch("of-another", 1, fleet.timeline, {})
    await fleet.replay.begin_epoch("of-another", {}, [-1.0], 1e-3)  # its weights are not known any more
    fleet.timeline = "timeline-2"
    await fleet.replay.rewind(0, fleet.timeline)

    async def idle() -> bool:
        return not await first.generating()

    await eventually(idle)
    assert await first.metric('headrace_rollout_groups_total{outcome="lost"}') == 1
    assert (await first.http.get("/readyz")).status_code == 503
    report = await fleet.refit(0)
    assert report.verified == (first.replica,)
    assert len(await fleet.pushed(group)) == 2


async def test_law_6_an_engine_may_be_slow_and_must_not_stand_still(fleet: Fleet, first: Process) -> None:
    """It computes for moments only, and each is progress; then not at all, while its replica's heartbeats go on."""
    n = 8
    group = await fleet.enqueue(tokens=LONG, n=n)  # which takes several times as long as the moments below
    await eventually(lambda: _saved(fleet, group))
    engine = first.engine()

    async def is_silent_for(least: float, most: float = math.inf) -> bool:
        return least <= ((await fleet.replay.group(group)) or {}).get("silent_s", 0.0) <= most

    async def is_charged() -> bool:
        return (await fleet.replay.group(group))["failures"] > 0  # it was alone

    try:
        for deadline_s in (LIMITS.group_deadline_s, 4.0):
            os.kill(engine, signal.SIGSTOP)
            await eventually(lambda: is_silent_for(2.0))
            await tighten(fleet.replay, LIMITS, group_deadline_s=deadline_s)  # once it has progressed
            os.kill(engine, signal.SIGCONT)
            await eventually(lambda: is_silent_for(0.0, 1.0))
        os.kill(engine, signal.SIGSTOP)
        await eventually(is_charged)
    finally:
        await fleet.replay.open_run(LIMITS)
        os.kill(engine, signal.SIGCONT)
    for it in await fleet.pushed(group, n):
        (_, start, cut), (_, begin, _) = it.writers
        assert (it.attempt, start) == (1, 0)
        assert cut == begin >= 64


async def test_a_replica_that_joins_late_gets_the_weights_before_it_leases(
    fleet: Fleet, first: Process, second: Process
) -> None:
    assert (await second.http.get("/readyz")).status_code == 503
    assert second.replica in (await fleet.refit(0)).verified
    states = {replica.id: (replica.state, replica.version) for replica in await fleet.replay.replicas()}
    assert states == {first.replica: ("HEALTHY", 0), second.replica: ("HEALTHY", 0)}

    async def ready() -> bool:
        return {(await process.http.get("/readyz")).status_code for process in (first, second)} == {200}

    await eventually(ready)  # the server knows of a proof before its replica does


async def test_a_killed_replica_leaves_no_orphan_and_its_groups_to_others(
    fleet: Fleet, first: Process, second: Process
) -> None:
    await tighten(fleet.replay, LIMITS, lease_s=5.0, replica_dead_s=5.0)
    os.kill(second.popen.pid, signal.SIGSTOP)  # so that the first takes the group
    group = await running_group(fleet, lambda group: _saved(fleet, group))
    assert (await fleet.replay.group(group))["replica"] == first.replica
    engine = [os.pidfd_open(pid) for pid in first.children()]
    assert engine
    first.popen.kill()
    os.kill(second.popen.pid, signal.SIGCONT)
    assert await first.ended() == -signal.SIGKILL
    for descriptor in engine:
        await asyncio.to_thread(_ended, descriptor)
    # the second may have been counted as dead meanwhile; then it needs the weights again
    await fleet.refit(0)
    trajectories = await fleet.pushed(group)
    await fleet.replay.open_run(LIMITS)
    assert len(trajectories) == 2
    for it in trajectories:
        # the second went on where the first had saved it
        (one, start, cut), (other, begin, end) = it.writers
        assert (it.attempt, one, start) == (1, first.replica, 0)
        assert cut == begin >= 64
        assert (other, end) == (it.replica, it.completion_token_ids.size)
        assert other != first.replica
        assert fleet.policy.difference(it, 0) < 1e-4
    assert await second.metric("headrace_rollout_tokens_taken_over_total") == sum(
        it.writers[0][2] for it in trajectories
    )


async def _saved(fleet: Fleet, group: str) -> bool:
    """Whether all its trajectories have been saved unfinished."""
    it = await fleet.replay.group(group)
    return it is not None and it.get("saves") == it["n"]


async def _without_lease(fleet: Fleet, group: str) -> dict[str, Any] | None:
    it = await fleet.replay.group(group)
    return it if it is not None and it["state"] == "open" and it["replica"] == "" else None


async def _both_generating(process: Process) -> bool:
    return await process.metric("headrace_rollout_requests_running") == 2


def _ended(descriptor: int) -> None:
    import select

    try:
        assert select.select([descriptor], [], [], 60)[0], "an orphan"
    finally:
        os.close(descriptor)


@pytest.mark.nightly  # test_calls.py has a refit in flight every day, in the same engine loop
async def test_a_refit_in_flight_marks_the_tokens_of_either_version(fleet: Fleet, second: Process) -> None:
    version = await fleet.trained_step()
    group = await running_group(fleet, lambda group: _saved(fleet, group))
    fleet.policy.train()
    report = await fleet.refit(version + 1)
    assert report.verified == (second.replica,)
    for it in await fleet.pushed(group):
        assert [span.version for span in it.spans] == [version, version + 1]
        boundary = it.spans[0].end
        ids = [*it.prompt_token_ids, *it.completion_token_ids]
        start = it.prompt_token_ids.size - 1
        for span in it.spans:
            truth = fleet.policy.logprobs_of(ids, span.version)[start + span.start : start + span.end]
            assert abs(truth - it.logprobs[span.start : span.end]).max() < 1e-4, (span, boundary)


@pytest.mark.nightly  # test_calls.py has a failed proof every day, in the same engine loop
async def test_weights_that_fail_their_proof_take_what_ran_with_them(fleet: Fleet, second: Process) -> None:
    version = await fleet.trained_step()
    group = await running_group(fleet, lambda group: _saved(fleet, group))
    fleet.policy.train()
    report = await fleet.refit(version + 1, wrong_by=0.5)
    assert report.verified == ()
    returned = await eventually(lambda: _without_lease(fleet, group))
    assert returned["failures"] == 0
    assert not returned["trajectories"]
    # what was saved before that refit stays, and nothing that was sampled after it
    assert (returned["saves"], returned.get("newest")) == (2, None)
    assert (await second.http.get("/readyz")).status_code == 503
    body = {"prompt": [3, 4], "max_tokens": 2}
    assert (await second.http.post("/v1/completions", json=body)).status_code == 503
    report = await fleet.refit(version + 1)
    assert report.verified == (second.replica,)
    for it in await fleet.pushed(group):
        assert [span.version for span in it.spans] == [version, version + 1]
        assert it.spans[0].end == it.writers[0][2]
        assert fleet.policy.difference_by_span(it) < 1e-4
    assert (await second.http.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.nightly  # by day with one that drains
async def test_a_rewind_to_its_weights_pauses_what_runs_in_flight(fleet: Fleet, second: Process) -> None:
    version = 1 + await fleet.trained_step()
    assert (await fleet.refit(version)).verified == (second.replica,)
    group = await running_group(fleet, lambda group: _saved(fleet, group))
    fleet.timeline = "timeline-3"
    await fleet.replay.rewind(version, fleet.timeline)
    assert (await fleet.refit(version)).verified == (second.replica,)
    assert (await fleet.replay.group(group))["state"] == "open"
    for it in await fleet.pushed(group):
        assert (it.attempt, {span.version for span in it.spans}) == (1, {version})
        assert fleet.policy.difference(it, version) < 1e-4


async def test_a_replica_whose_proof_the_server_lost_proves_itself_again(fleet: Fleet, second: Process) -> None:
    """After a failover or a torn append-only file the buffer goes by weights that the replica no longer has."""
    state = await fleet.replay.state()
    version = state.next_step
    await fleet.refit(version)
    before = {replica.id for replica in await fleet.replay.replicas() if replica.state == "HEALTHY"}
    assert before
    for replica in before:
        key = f"hr:{{{fleet.replay.run_id}}}:{state.incarnation}:r:{replica}"
        await fleet.replay.redis.hset(key, "version", version + 1)
    group = await fleet.enqueue()

    async def entered() -> bool:
        fleet_now = {it.id for it in await fleet.replay.replicas() if it.state == "STALE"}
        return len(fleet_now - before) == len(before)

    await eventually(entered)
    assert len((await fleet.refit(version)).verified) == len(before)
    assert {span.version for it in await fleet.pushed(group) for span in it.spans} == {version}
    assert (await fleet.replay.group(group))["failures"] == 0


async def test_sigterm_hands_the_leases_back_without_costing_an_attempt(fleet: Fleet, second: Process) -> None:
    group = await running_group(fleet, lambda _: _both_generating(second))
    # what comes from outside is scheduled behind the run's own: once it has tokens, both trajectories have some
    assert (await second.http.post("/v1/completions", json={"prompt": [3, 4], "max_tokens": 2})).status_code == 200
    replica = (await fleet.replay.group(group))["replica"]
    children = [os.pidfd_open(pid) for pid in second.children()]
    second.popen.terminate()
    assert await second.ended() == 0
    for descriptor in children:
        await asyncio.to_thread(_ended, descriptor)
    returned = await fleet.replay.group(group)
    assert (returned["state"], returned["replica"], returned["failures"]) == ("open", "", 0)
    # what it had begun is there for the next
    heir = "heir"
    await fleet.replay.register(heir, {})
    version = (await fleet.replay.epoch()).version
    await fleet.replay.open_epoch("inheritance", version, fleet.timeline, {})
    await fleet.replay.acknowledge(heir, "inheritance")
    await fleet.replay.begin_epoch("inheritance", {}, [0.0], 1e-3)
    assert (await fleet.replay.verify(heir, "inheritance", [0.0])).verified
    lease = next(it for it in await fleet.replay.lease(heir, 4) if it.group.id == group)
    assert (lease.attempt, lease.missing, sorted(lease.prefixes)) == (1, (0, 1), [0, 1])
    assert {it.written[-1][0] for it in lease.prefixes.values()} == {replica}
    await fleet.replay.deregister(heir)
    assert not [it for it in await fleet.replay.replicas() if it.state != "DEAD"]
    assert "no trajectory" not in second.log.read_text()


@pytest.mark.nightly  # two engines more; chaos kills engines every day
@pytest.mark.parametrize(
    ("signum", "reason"), [(signal.SIGKILL, "the engine died"), (signal.SIGSTOP, "has not answered")]
)
async def test_an_engine_that_dies_or_hangs_ends_its_replica(fleet: Fleet, signum: int, reason: str) -> None:
    fleet.settings["rollout"]["engine_timeout_s"] = 10.0
    replica = await fleet.start()
    epoch = await fleet.replay.epoch()
    await fleet.refit(epoch.version if epoch is not None else 0)
    group = await running_group(fleet, lambda _: replica.generating())
    engine = replica.engine()
    holder = next(it for it in await fleet.replay.replicas() if it.id == replica.replica)
    alone = holder.leases == 1 and (await fleet.replay.group(group)).get("replica") == replica.replica
    os.kill(engine, signum)
    assert await replica.ended() == EXIT_INTERNAL_ERROR
    assert reason in replica.log.read_text()

    async def told() -> bool:
        return all(it.state == "DEAD" for it in await fleet.replay.replicas() if it.id == replica.replica)

    await eventually(told)  # at once, or by its silence where its last call found no answer in time
    # one that was alone with the engine may be what kills it
    assert (await fleet.replay.group(group))["failures"] == int(alone)
