"""A replica that pulls: the rollout service as a process, a real engine, and what the trainer puts into a store.

The tests follow one replica through its life.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.base.errors import WrongTimeline
from headrace.config import Config
from headrace.records.score import Score
from headrace.replay import BufferRetry, Replica, Reservation
from headrace.run.object_store import RunStore
from headrace_services.refit.probe import Differences
from headrace_services.trainer.control.offers import Offers
from tests.support.rollout_fleet import IN_FLIGHT, Fleet, Process, running_fleet
from tests.support.s3_server import S3Server, s3_server
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

URL = "s3://bucket/runs"


class Run:
    """A fleet, what its trainer puts into the store, and the one replica that pulls it."""

    def __init__(self, fleet: Fleet, store: str) -> None:
        self.fleet, self.replay = fleet, fleet.replay
        self.config = Config.model_validate(fleet.settings)
        self.url = store
        self.offers = self.make_offers()
        self.first: Process | None = None

    def make_offers(self) -> Offers:
        assert self.config.run_store is not None
        return Offers(self.config, RunStore(self.config.run_store), self.replay, BufferRetry(60.0), self.fleet.timeline)

    async def offer(self, version: int, wrong_by: float = 0.0) -> None:
        """As the trainer does, until the buffer names it to replicas."""
        policy = self.fleet.policy
        policy.keep(version)
        probe = (policy.probe_ids, policy.logprobs(policy.probe_ids) - wrong_by, Differences(1e-4, 1e-4))

        async def at_once(work: Callable[[], Any]) -> Any:
            return work()

        await self.offers.offer(version, policy, self.fleet.sender.manifest(policy), probe, at_once)

        async def look() -> bool:
            self.offers.poll()
            offer = await self.replay.offered("")
            return offer is not None and offer.version == version

        await eventually(look)

    async def step(self) -> None:
        """Reserve the next step, so that the buffer takes tokens of the version after it."""
        step = (await self.replay.state()).next_step
        while not isinstance(await self.replay.reserve(step, self.fleet.timeline), Reservation):
            await self.fleet.pushed(await self.fleet.enqueue())
            for job in await self.replay.take_scoring({"math": 64}):
                await self.replay.score(job, Score("SCORED", 1.0))

    async def replica(self, state: str, version: int) -> Replica:
        """The one that pulls, once it is in this state."""

        async def look() -> Replica | None:
            fleet = [one for one in await self.replay.replicas() if one.pulls]
            return next((one for one in fleet if (one.state, one.version) == (state, version)), None)

        return await eventually(look)


@pytest.fixture(scope="module")
def s3() -> AsyncIterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(
    redis_url: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, s3: S3Server
) -> AsyncIterator[Run]:
    settings = {
        "rollout": {"max_concurrent_groups": 4},
        "grpo": IN_FLIGHT,
        "checkpointing": {"store": URL},
        "weight_channel": {"bucket_bytes": 128 * 1024},
    }
    async with running_fleet(tmp_path_factory.mktemp("pulling"), redis_url, tiny_model, settings) as fleet:
        run = Run(fleet, URL)
        yield run
        run.offers.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(run: Run) -> Process:
    run.fleet.settings["rollout"]["weights_from"] = "store"
    return await run.fleet.start()


async def test_without_an_offer_it_waits_and_no_epoch_is_for_it(run: Run, first: Process) -> None:
    report = await run.fleet.refit(0)
    assert (report.members, report.refused) == ((), {})
    assert (await run.replica("STALE", -1)).pulls
    assert (await first.http.get("/readyz")).status_code == 503


async def test_what_it_pulled_and_proved_it_generates_with(run: Run, first: Process, s3: S3Server) -> None:
    await run.offer(0)
    replica = await run.replica("HEALTHY", 0)
    for it in await run.fleet.pushed(await run.fleet.enqueue()):
        assert run.fleet.policy.difference(it, 0) < 1e-4
        assert it.replica == replica.id
    assert (await first.http.get("/readyz")).status_code == 200


async def test_in_flight_it_fetches_what_has_changed_and_takes_it(run: Run, first: Process, s3: S3Server) -> None:
    tensor = run.fleet.policy.model.get_parameter("model.layers.0.mlp.down_proj.weight")
    tensor.data += 0.01
    await run.step()
    before = len(s3.requests)
    await run.offer(1)
    await run.replica("HEALTHY", 1)
    blocks = [request for request in s3.requests[before:] if "/blocks/" in request]
    sent = {request.split()[1] for request in blocks if request.startswith("PUT")}
    fetched = {request.split()[1] for request in blocks if request.startswith("GET")}
    assert sent == fetched
    assert 1 <= len(sent) <= 2  # the bucket that has the tensor
    for it in await run.fleet.pushed(await run.fleet.enqueue()):
        assert run.fleet.policy.difference(it, 1) < 1e-4


async def test_a_broken_version_is_refused_and_the_old_one_serves(run: Run, first: Process, s3: S3Server) -> None:
    broken: list[str] = []

    def spoil(method: str, name: str) -> int | None:
        if method == "GET" and "/blocks/" in name and name not in broken:
            broken.append(name)
            s3.objects[name].data = bytes(len(s3.objects[name].data))
        return None

    await run.step()
    await run.step()
    run.fleet.policy.train()
    s3.spoil = spoil
    try:
        await run.offer(2)
        await eventually(lambda: _is_logged(first, "SHA-256 is another"))
        replica = await run.replica("HEALTHY", 1)
        for it in await run.fleet.pushed(await run.fleet.enqueue()):
            assert run.fleet.policy.difference(it, 1) < 1e-4
            assert it.replica == replica.id
    finally:
        s3.spoil = lambda method, name: None
    # the next is whole
    run.fleet.policy.train()
    await run.offer(3)
    await run.replica("HEALTHY", 3)


async def test_weights_that_compute_otherwise_never_serve(run: Run, first: Process) -> None:
    before = await run.replica("HEALTHY", 3)
    await run.step()
    await run.step()
    await run.offer(4, wrong_by=0.01)
    await eventually(lambda: _is_logged(first, "version 4 is not verified"))
    after = await run.replica("STALE", -1)
    assert after.id != before.id  # under another name it may try again
    group = await run.fleet.enqueue()
    await run.offer(5)
    await run.replica("HEALTHY", 5)
    for it in await run.fleet.pushed(group):
        assert run.fleet.policy.difference(it, 5) < 1e-4


async def test_no_epoch_of_others_ends_its_work(run: Run, first: Process) -> None:
    await run.replay.open_epoch("of-others", 4, run.fleet.timeline, {})
    await run.replay.begin_epoch("of-others", {}, [-1.0], 1e-3)
    await run.replica("HEALTHY", 5)
    for it in await run.fleet.pushed(await run.fleet.enqueue()):
        assert [span.version for span in it.spans] == [5]


async def test_law_4_a_rewound_version_never_serves(run: Run, first: Process) -> None:
    late, run.fleet.timeline = run.offers, "timeline-1"
    await run.replay.rewind(0, run.fleet.timeline)
    await run.replica("STALE", -1)
    run.fleet.policy.train()
    with contextlib.suppress(WrongTimeline):  # of a trainer that does not know yet
        run.offers = late
        await run.offer(7)
        pytest.fail("a trainer of another timeline was heard")
    run.offers = run.make_offers()
    assert await run.replay.offered("") is None
    run.fleet.policy.train()
    await run.offer(0)
    replica = await run.replica("HEALTHY", 0)
    assert replica.timeline == "timeline-1"
    for it in await run.fleet.pushed(await run.fleet.enqueue()):
        assert run.fleet.policy.difference(it, 0) < 1e-4
    late.close()


async def test_it_leaves_while_it_pulls(run: Run, first: Process, s3: S3Server) -> None:
    run.fleet.policy.train()
    s3.seconds = 0.5
    try:
        await run.offer(1)
        await eventually(lambda: _is_asked(s3, "GET runs"))
        first.popen.terminate()
        assert await first.ended() == 0
        assert [one.pulls for one in await run.replay.replicas()] == []
    finally:
        s3.seconds = 0.0


async def _is_logged(process: Process, words: str) -> bool:
    return words in process.log.read_text()


async def _is_asked(s3: S3Server, words: str) -> bool:
    return any(request.startswith(words) and "/blocks/" in request for request in s3.requests[-20:])
