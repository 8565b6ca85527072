"""Replicas that pull fetch from each other: the store sends few copies, and no peer costs more than a little time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from headrace.base.errors import ReplayUnavailable
from headrace.config import Config
from headrace.net.credentials import Credentials
from headrace.net.http_access import HttpAccess
from headrace.run import object_store
from headrace.run.weight_store import NotBegun, StillFetching
from headrace_services.rollout import peers
from headrace_services.rollout.peers import Peers, own_url
from tests.support.pullers import FAN_OUT, Buffer, Replica, Trainer, running
from tests.support.s3_server import S3Server, s3_server
from tests.support.waiting import eventually

URL = "s3://bucket/runs/r"
BLOCK, BLOCKS = 4096, 24
SIZE = BLOCK * BLOCKS
REPLICAS = 8
GRPO = {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2}}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(object_store, "_PATIENCE", {"max_retries": 2})
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def config() -> Config:
    return Config.model_validate({"grpo": GRPO, "replay": {"redis_url": "redis://127.0.0.1:6379/0"}})


@dataclasses.dataclass
class Run:
    trainer: Trainer
    buffer: Buffer
    s3: S3Server
    replicas: list[Replica]
    random: np.random.Generator
    weights: np.ndarray[Any, Any]

    def offer(self, version: int) -> None:
        """All weights are new in version 1; later a few numbers are, everywhere."""
        if version > 1:
            self.weights = self.weights.copy()
            self.weights[self.random.random(len(self.weights)) < 0.03] += 1
        self.trainer.offer(version, self.weights)
        self.s3.sent_bytes = 0

    async def install(self, *places: int) -> None:
        await asyncio.gather(*(self.replicas[place].install() for place in places or range(REPLICAS)))
        for place in places or range(REPLICAS):
            assert self.replicas[place].file.read_bytes() == self.weights.tobytes()

    def fetched(self, place: int, source: str) -> int:
        return self.replicas[place].puller.fetched_from[source]


@pytest_asyncio.fixture
async def run(s3: S3Server, tmp_path: Path, config: Config) -> AsyncIterator[Run]:
    buffer, random = Buffer(), np.random.default_rng(0)
    trainer = Trainer(URL, buffer, block_bytes=BLOCK)
    async with running(REPLICAS, URL, buffer, tmp_path, config) as replicas:
        weights = random.integers(0, 1 << 16, SIZE // 2, np.uint16)
        yield Run(trainer, buffer, s3, replicas, random, weights)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WAIT_S", 0.05)
    monkeypatch.setattr(peers, "SEND_S", 1.0)
    monkeypatch.setattr(peers, "_PATIENCE_S", dict.fromkeys(peers._PATIENCE_S, 0.2))


def serve(replica: Replica, answer: Any) -> None:
    """Have it answer in another way."""
    replica.puller.served._serve = answer


async def test_the_store_sends_few_copies_however_many_pull(run: Run) -> None:
    run.offer(1)
    await run.install()
    first = run.s3.sent_bytes
    assert FAN_OUT * SIZE <= first < FAN_OUT * (SIZE + 10_000)  # with the list
    for version in (2, 3):
        run.offer(version)
        await run.install()
        assert run.s3.sent_bytes < FAN_OUT * (0.12 * SIZE + 20_000)
    assert [run.fetched(place, "replicas") for place in range(FAN_OUT)] == [0] * FAN_OUT
    assert all(run.fetched(place, "store") == 0 for place in range(FAN_OUT, REPLICAS))
    assert run.replicas[0].puller.served.served_bytes > 2 * SIZE


async def test_a_buffer_that_does_not_answer_leaves_the_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(replica: str) -> Any:
        raise ReplayUnavailable("no route")

    monkeypatch.setattr(run.buffer, "parents", fail)
    run.offer(1)
    await run.install(0, 2)
    assert run.fetched(2, "replicas") == 0


async def test_who_comes_late_gets_all_from_the_others(run: Run) -> None:
    run.offer(1)
    await run.install(0, 1)
    before = run.s3.sent_bytes
    await run.install(4, 2)
    run.offer(2)
    await run.install(0, 1)
    before, run.s3.sent_bytes = run.s3.sent_bytes, 0
    await run.install(5)  # which has nothing yet, and whose parent has fetched patches
    assert (before > 0, run.s3.sent_bytes, run.fetched(5, "store")) == (True, 0, 0)


async def test_a_dead_parent_is_passed_over_and_the_buffer_told(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    await run.replicas[2].stop_serving()
    run.offer(1)
    with caplog.at_level(logging.WARNING):
        await run.install(0, 1, 6, 7)  # below 2, which is below 0
    assert run.s3.sent_bytes < FAN_OUT * (SIZE + 10_000)
    told = run.buffer.unreached_replicas
    assert {name for name, _ in told} == {"r2"}
    assert run.replicas[2].url in told[0][1]
    said = [record for record in caplog.records if "r2" in record.getMessage()]
    assert len(said) == len(told) == 2  # by 6 and by 7, once each
    run.offer(2)
    await run.install(0, 6)
    assert len(run.buffer.unreached_replicas) == 2  # it is left alone for a while


async def test_without_any_other_the_store_serves(run: Run) -> None:
    for replica in run.replicas:
        await replica.stop_serving()
    run.offer(1)
    await run.install()
    assert run.s3.sent_bytes >= REPLICAS * SIZE


@pytest.mark.parametrize("what", ["blocks/", "patches/", "offers/"])
async def test_a_parent_that_lies_is_found_out(run: Run, what: str, caplog: pytest.LogCaptureFixture) -> None:
    liar = run.replicas[0]
    told = liar.puller._serve
    asked: list[str] = []

    def lie(timeline: str, version: int, name: str, wait_s: float) -> bytes | None:
        data = told(timeline, version, name, wait_s)
        if name.startswith(what) and data is not None:
            asked.append(name)
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    if what == "patches/":
        run.offer(1)
        await run.install(0, 2, 6)
    serve(liar, lie)
    run.offer(2)
    await run.install(0)
    await run.install(2, 6)
    assert 1 <= len(asked) <= 2 * 8  # those that were under way, of each that asks it
    assert any("not what the trainer has sent" in record.getMessage() for record in caplog.records)
    assert run.buffer.unreached_replicas == []


async def test_a_parent_that_is_too_slow_is_asked_no_more(run: Run, impatient: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(peers, "SEND_S", 0.1)
    ended, asked = threading.Event(), []

    def wait(timeline: str, version: int, name: str, wait_s: float) -> bytes | None:
        asked.append(name)
        ended.wait(20)
        return None

    serve(run.replicas[0], wait)
    run.offer(1)
    try:
        await run.install(2)
        assert asked == ["offers/1.json"]
    finally:
        ended.set()


@pytest.mark.parametrize("state", [StillFetching, NotBegun])
async def test_a_parent_that_gets_no_further_is_asked_no_more(run: Run, impatient: None, state: Any) -> None:
    def wait(timeline: str, version: int, name: str, wait_s: float) -> bytes | None:
        raise state

    serve(run.replicas[0], wait)
    run.offer(1)
    await run.install(2)
    assert run.fetched(2, "store") >= SIZE


async def test_a_parent_that_begins_later_is_waited_for(run: Run) -> None:
    run.offer(1)
    await run.replicas[2].begin()
    await run.replicas[6].begin()
    await asyncio.sleep(0.2)
    assert run.s3.sent_bytes == 0
    await run.install(0, 2, 6)
    assert run.fetched(2, "store") == run.fetched(6, "store") == 0


async def test_what_a_parent_will_not_have_is_not_waited_for(run: Run, impatient: None) -> None:
    run.offer(1)
    await run.install(0, 2)
    run.offer(2)
    await run.install(0)
    run.offer(3)
    await run.install(0, 2)  # who has no base of the patches, so it fetches blocks
    assert run.fetched(2, "store") == 0
    run.offer(4)
    await run.install(2)
    run.offer(5)
    await run.install(2)  # its parent is at version 3 still, and so behind
    assert run.fetched(2, "store") > 0


async def test_a_parent_without_one_thing_is_asked_for_the_next(run: Run) -> None:
    run.offer(1)
    await run.install(2)
    run.weights = run.weights.copy()
    run.weights[::50] += 1
    run.weights[SIZE // 4 :] += 1
    run.trainer.offer(2, run.weights)  # half of the blocks have a patch
    await run.install(0)  # which lacks version 1, so it fetches blocks alone
    before = run.fetched(2, "store"), run.fetched(2, "replicas")
    await run.install(2)
    assert 0 < run.fetched(2, "store") - before[0] < SIZE // 4
    assert run.fetched(2, "replicas") - before[1] >= SIZE // 2


async def test_a_parent_has_not_more_to_do_than_it_can(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.offer(1)
    await run.install(0)
    monkeypatch.setattr(peers, "MOST_SERVED", 0)
    await run.install(2)
    assert run.fetched(2, "replicas") == 0
    assert run.replicas[0].puller.served.served_bytes == 0


async def test_peers_with_which_a_version_was_superseded_are_left_alone(run: Run) -> None:
    begun = threading.Event()

    def wait(timeline: str, version: int, name: str, wait_s: float) -> bytes | None:
        begun.set()
        time.sleep(wait_s)
        raise StillFetching

    serve(run.replicas[0], wait)
    child = run.replicas[2]
    run.offer(1)
    await child.begin()
    await asyncio.to_thread(begun.wait)
    run.offer(4)  # too new for version 1
    await eventually(child.settle)
    await run.install(2)
    assert child.held == ("t1", 4)
    assert run.fetched(2, "replicas") == 0


async def test_a_token_is_needed(run: Run, s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "credentials"
    file.write_text("operator o\nreader r\nagents a\nrollout w\n")
    file.chmod(0o600)
    access = HttpAccess(
        Credentials(file), frozenset(), posts={"agents": frozenset({"/sample"}), peers.ROLE: frozenset({peers.PATH})}
    )
    for tokens, refused in (("reader r\nrollout w\n", False), ("reader r\n", True), ("reader r\nrollout x\n", True)):
        own = tmp_path / f"own-{len(tokens)}-{refused}"
        own.write_text(tokens)
        own.chmod(0o600)
        security = {"credentials": str(own)}
        config = Config.model_validate({"grpo": GRPO, "security": security, "replay": {"redis_url": "unix:///x"}})
        buffer = Buffer()
        trainer = Trainer(f"{URL}{len(tokens)}", buffer, block_bytes=BLOCK)
        trainer.offer(1, run.weights)
        async with running(3, trainer.url, buffer, tmp_path / own.name.replace("own", "run"), config, access) as all_:
            await all_[0].install()
            await all_[2].install()
            assert (all_[2].puller.fetched_from["replicas"] == 0) is refused
            assert any("401" in record.getMessage() for record in caplog.records) is refused
            caplog.clear()


@pytest.mark.parametrize(
    ("host", "buffer", "own"),
    [
        ("127.0.0.1", "redis://127.0.0.1:1/0", "http://advertised:80"),
        ("127.0.0.1", "unix:///x", "http://advertised:80"),
        ("127.0.0.1", "rediss://10.0.0.1:1/0", None),
        ("10.0.0.7", "rediss://10.0.0.1:1/0", "http://advertised:80"),
        ("0.0.0.0", "redis://localhost:1/0", "http://advertised:80"),
        ("0.0.0.0", "rediss://no.such.host.invalid:1/0", None),
        ("0.0.0.0", "rediss://10.0.0.1:1/0", "http://192.168.0.3:80"),
        ("::", "rediss://10.0.0.1:1/0", "http://192.168.0.3:80"),
    ],
)
def test_where_others_reach_a_replica(host: str, buffer: str, own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def lead(to: str) -> str:
        if to == "10.0.0.1":
            return "192.168.0.3"
        raise socket.gaierror

    monkeypatch.setattr(peers, "own_address", lead)
    config = Config.model_validate({"rollout": {"host": host}, "replay": {"redis_url": buffer}})
    assert own_url(config, "http://advertised:80") == own


@pytest.mark.parametrize(
    ("url", "buffer", "insecure", "asked"),
    [
        ("https://10.0.0.1:1", "rediss://10.0.0.9:1/0", False, True),
        ("http://10.0.0.1:1", "rediss://10.0.0.9:1/0", False, False),
        ("http://10.0.0.1:1", "rediss://10.0.0.9:1/0", True, True),
        ("http://127.0.0.1:1", "rediss://10.0.0.9:1/0", True, False),  # it is another machine's
        ("https://127.0.0.1:1", "rediss://10.0.0.9:1/0", False, False),
        ("http://127.0.0.1:1", "redis://127.0.0.1:1/0", False, True),
        (None, "redis://127.0.0.1:1/0", False, False),
        (7, "redis://127.0.0.1:1/0", False, False),
        ("http://[", "redis://127.0.0.1:1/0", False, False),
    ],
)
def test_who_is_given_the_token(url: Any, buffer: str, insecure: bool, asked: bool) -> None:
    config = Config.model_validate({"security": {"insecure": insecure}, "replay": {"redis_url": buffer}})
    found = [("r", {} if url is None else {"serves": url, "url": "https://r.internal:1"})]
    assert [peer.replica for peer in Peers(config).of(found, lambda: False)] == (["r"] if asked else [])


def test_authorities_that_cannot_be_read_cost_no_version(tmp_path: Path) -> None:
    security = {"tls_ca": str(tmp_path / "none.pem")}
    config = Config.model_validate({"security": security, "replay": {"redis_url": "rediss://10.0.0.9:1/0"}})
    url = "https://10.0.0.1:1"
    (peer,) = Peers(config).of([("r", {"serves": url, "url": url})], lambda: False)
    assert peer.read("t1", 1, "offers/1.json") is None
    assert "none.pem" in str(peer.problem)
