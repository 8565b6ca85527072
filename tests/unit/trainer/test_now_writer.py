"""`now.json`: what is known of a run that is up, and what becomes of it when the buffer or the disk is away."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from headrace.base.errors import CodecError, ReplayUnavailable
from headrace.config import Config
from headrace.replay import End, ReplayClient, Waiting
from headrace.run import now
from headrace.run.now import NOW, EnvironmentNow
from headrace.v1 import environment_pb2, reward_pb2
from headrace_services.trainer.control.decisions import Action, Decision, LoopState, waits_for
from headrace_services.trainer.telemetry import now_writer
from headrace_services.trainer.telemetry.now_writer import Load, NowWriter, assemble, merge_reports, read_load

STATS: dict[str, Any] = {
    "next_step": 4,
    "committed": 2,
    "closed": False,
    "bytes": 10,
    "max_bytes": 100,
    "full": 0,
    "counts": {"train": {"open": 3, "ready": 1}, "validation": {"queued": 2}},
    "replicas": [
        {
            "id": "r1", "state": "HEALTHY", "version": 4, "leases": 3, "seen_s_ago": 0.5, "reason": "", "logprob_error": None,
            "validates": False, "info": {"url": "http://there:1", "device": "cpu"},
        }
    ],
    "runners": [{"id": "a1", "alive": True, "leases": 2, "seen_s_ago": 0.1, "info": {}}],
    "environments": [{"name": "judge", "waiting": 5, "taken": 4, "broken": True, "kind": "NOT_STARTED", "message": "it is away"}],
}  # fmt: skip
PAGE = """# HELP headrace_rollout_engine_generated_tokens_total Tokens that the engine sampled
headrace_rollout_engine_generated_tokens_total 1234.0
headrace_rollout_preemptions_total 2.0
headrace_rollout_prefix_cache_queries_total 40.0
headrace_rollout_prefix_cache_hits_total 10.0
headrace_rollout_requests_running 7.0
headrace_rollout_kv_cache_use 0.5
headrace_rollout_engine_running 4.0
headrace_rollout_engine_waiting 3.0
headrace_rollout_groups_total{outcome="done"} 3.0
"""


class Buffer:
    """A buffer that answers with its statistics, or is away."""

    def __init__(self) -> None:
        self.stats_: dict[str, Any] | Exception = STATS

    async def stats(self) -> dict[str, Any]:
        if isinstance(self.stats_, Exception):
            raise self.stats_
        return self.stats_


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


@pytest.fixture
def writer(tmp_path: Path, buffer: Buffer) -> NowWriter:
    config = Config.model_validate({"run": {"id": "run", "dir": str(tmp_path)}})
    config.run_folder.mkdir()
    return NowWriter(config, cast(ReplayClient, buffer), clock=lambda: 100.0)


async def test_what_is_written_is_read_again(writer: NowWriter, tmp_path: Path) -> None:
    assert now.read(tmp_path / "run") is None
    writer.waits = "generation"
    await writer.write()
    state = now.read(tmp_path / "run")
    assert state is not None
    assert (state.time, state.next_step, state.committed, state.closed) == (100.0, 4, 2, False)
    assert state.counts == {"open": 3, "ready": 1}
    assert state.validation == {"queued": 2}
    assert [(each.id, each.holding, each.address) for each in state.replicas] == [("r1", 3, "http://there:1")]
    assert [(each.id, each.alive, each.holding) for each in state.runners] == [("a1", True, 2)]
    assert [(each.name, each.waiting, each.in_hand, each.broken) for each in state.environments] == [
        ("judge", 5, 4, True)
    ]
    assert state.waits[0] == "generation"
    assert "unavailable: it is away" in state.waits[1]
    assert state.environments[0].trouble == "unavailable"
    # what nobody knows is not there
    assert b"capacity" not in (tmp_path / "run" / NOW).read_bytes()
    (tmp_path / "run" / NOW).write_text("{")
    with pytest.raises(CodecError, match=NOW):
        now.read(tmp_path / "run")


async def test_while_the_buffer_is_away_the_state_is_the_last_known(
    writer: NowWriter, buffer: Buffer, tmp_path: Path
) -> None:
    buffer.stats_ = ReplayUnavailable("no route")
    await writer.write()
    assert now.read(tmp_path / "run") is None
    buffer.stats_ = STATS
    await writer.write()
    known = now.read(tmp_path / "run")
    writer._clock = lambda: 200.0
    buffer.stats_ = ReplayUnavailable("no route")
    await writer.write()
    state = now.read(tmp_path / "run")
    assert known is not None
    assert state is not None
    assert (state.time, state.counts) == (100.0, known.counts)
    assert "no route" in state.waits[-1]


async def test_a_folder_that_is_gone_is_logged_once_and_ends_nothing(
    writer: NowWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").rmdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await writer.write()
        assert len(caplog.records) == 1
        assert NOW in caplog.text
        (tmp_path / "run").mkdir()
        await writer.write()
        assert now.read(tmp_path / "run") is not None
        (tmp_path / "run" / NOW).unlink()
        (tmp_path / "run").rmdir()
        await writer.write()
        assert len(caplog.records) == 2  # it is another failure


async def test_it_is_written_until_the_trainer_ends(
    writer: NowWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(now_writer, "PERIOD_S", 0.0)
    monkeypatch.setattr(now_writer, "ASK_PERIOD_S", 0.0)
    monkeypatch.setattr(now_writer, "ASK_S", 0.2)
    write, written = writer.write, asyncio.Event()

    async def and_tell() -> None:
        await write()
        written.set()

    monkeypatch.setattr(writer, "write", and_tell)
    task = asyncio.create_task(writer.run())
    await written.wait()
    assert now.read(tmp_path / "run") is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def broken() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(writer, "write", broken)
    await writer.run()  # ends without an error
    assert "a bug" in caplog.text


async def test_a_replicas_rate_is_the_difference_of_two_pages(writer: NowWriter, buffer: Buffer) -> None:
    asked = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.headers.get("authorization"))
        return web.Response(text=PAGE)

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    away = "http://127.0.0.1:1"
    writer._addresses = (address, away)
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            await writer._ask_replicas(session)
    await runner.cleanup()
    before, load = writer._loads[address]
    assert before is not None
    assert load.values["engine_generated_tokens"] == 1234.0
    assert away not in writer._loads
    assert asked == [None, None]


def load(at: float, *, tokens: float = 0, preempted: float = 0, looked_up: float = 0, hits: float = 0) -> Load:
    """What `PAGE` says, and so much more."""
    read = read_load(PAGE, at)
    assert read is not None
    more = {
        "engine_generated_tokens": tokens,
        "preemptions": preempted,
        "prefix_cache_queries": looked_up,
        "prefix_cache_hits": hits,
    }
    return Load(at, {name: value + more.get(name, 0) for name, value in read.values.items()})


def test_the_state_has_what_pages_and_hubs_say() -> None:
    loads = {"http://there:1": (load(10.0), load(12.0, tokens=300, preempted=4, looked_up=20, hits=5))}
    reports = {"judge": EnvironmentNow("judge", 0, 3, broken=False, capacity=4, p50_s=2.0, build="b1")}
    state = assemble(STATS, loads, reports, [], 0.0)
    (replica,), (environment,) = state.replicas, state.environments
    assert (replica.tokens_per_s, replica.queue, replica.kv_use) == (150.0, 7, 0.5)
    assert (replica.running, replica.waiting) == (4, 3)
    assert (replica.preemptions_per_s, replica.prefix_hits) == (2.0, 0.25)
    assert (environment.waiting, environment.in_hand, environment.capacity, environment.build) == (5, 4, 4, "b1")
    # a replica that was started again counts from 0
    again = {"http://there:1": (load(10.0, tokens=7), load(12.0))}
    (replica,) = assemble(STATS, again, {}, [], 0.0).replicas
    assert (replica.tokens_per_s, replica.queue, replica.reason) == (None, 7, None)
    validating = STATS | {"replicas": [STATS["replicas"][0] | {"validates": True}]}
    (replica,) = assemble(validating, {}, {}, [], 0.0).replicas
    assert replica.reason == "validates beside training"


@pytest.mark.parametrize(("changes", "token"), [({"bytes": 100}, "replay.max_bytes"), ({"full": 7}, "maxmemory")])
def test_a_run_without_memory_waits_for_it(changes: dict[str, int], token: str) -> None:
    whole = STATS | {"environments": []}
    assert assemble(whole, {}, {}, [], 0.0).waits == []
    (said,) = assemble(whole | changes, {}, {}, [], 0.0).waits
    assert token in said


def test_a_page_without_the_load_says_nothing() -> None:
    assert read_load("", 1.0) is None
    assert read_load(PAGE.replace("1234.0", "many"), 1.0) is None


def test_hubs_share_the_work_of_an_environment() -> None:
    def hub(in_hand: int, p50_ms: float) -> reward_pb2.ListEnvironmentsResponse:
        recent = reward_pb2.Recent(window_ms=2000, scored=4, p50_ms=p50_ms, p99_ms=2 * p50_ms)
        described = environment_pb2.DescribeResponse(capacity=4, build="b1")
        status = reward_pb2.EnvironmentStatus(
            name="judge", in_hand=in_hand, recent=recent, description=described, ready=True
        )
        idle = reward_pb2.EnvironmentStatus(name="idle", message="it starts")
        return reward_pb2.ListEnvironmentsResponse(environments=[status, idle])

    found = merge_reports([hub(1, 100.0), hub(3, 50.0)])
    judge, idle = found["judge"], found["idle"]
    assert (judge.in_hand, judge.capacity, judge.scored_per_s, judge.p50_s, judge.p99_s) == (4, 8, 4.0, 0.1, 0.2)
    assert (idle.capacity, idle.p50_s, idle.build, idle.message) == (None, None, None, "it starts")


@pytest.mark.parametrize(
    ("action", "changes", "token"),
    [
        (Action.TRAIN, {}, ""),
        (Action.AWAIT_VALIDATION, {"validating": 2}, "version 2"),
        (Action.WAIT, {"healthy": 0}, "verified"),
        (Action.WAIT, {"episodes": 3}, "runner"),
        (Action.WAIT, {"counts": {"scoring": 3, "open": 1}}, "scores: 1 of the 2 groups of step 3"),
        (Action.WAIT, {"counts": {"open": 4}, "reply": End(0)}, "generation"),
    ],
)
def test_the_loop_tells_what_it_waits_for(action: Action, changes: dict[str, Any], token: str) -> None:
    usual: dict[str, Any] = {
        "now": 0.0, "stop": False, "version": 3, "saved": False, "refitted": True, "validated": False, "validating": None,
        "awaited_since": None, "members": 2, "healthy": 2, "healthy_at": 0.0, "refit_due": False, "reply": Waiting(1, 2),
    }  # fmt: skip
    said = waits_for(Decision(action), LoopState(**(usual | changes)))
    assert token in said
    assert bool(said) == bool(token)
