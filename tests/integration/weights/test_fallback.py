"""A trainer and a replica whose groups of NCCL don't form: the weights arrive by the next backend, within the same refit. Groups of NCCL
are stand-ins, those of gloo are real."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from headrace.base.errors import ServiceError
from headrace.config.services import WeightChannelConfig
from headrace.replay import Limits, ReplayClient
from headrace_services.refit.backends import MOST_LOST
from headrace_services.refit.rendezvous import Rendezvous
from tests.support.buffer import tighten
from tests.support.nccl_stand_in import GpuTrainer, Nccl, OnGpu, keep_up
from tests.support.small_replica import installed, running
from tests.support.waiting import STALL_S

TIMELINE = "timeline-1"
CPU = torch.device("cpu")

pytestmark = pytest.mark.timeout(120)


class Run(GpuTrainer):
    def __init__(self, replay: ReplayClient, model: Path, backend: str) -> None:
        super().__init__(replay, model, TIMELINE, backend=backend)
        self.replica = OnGpu(replay, model)

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        await self.replay.rewind(0, TIMELINE)
        async with running(self.replica.run()):
            await self.see(1)
            yield
        await self.sender.aclose()


@pytest.fixture
def backend() -> str:
    return "auto"


@pytest.fixture
async def run(replay: ReplayClient, tiny_model: Path, backend: str, nccl: Nccl) -> AsyncIterator[Run]:
    run = Run(replay, tiny_model, backend)
    async with run.started():
        yield run
        nccl.over.set()


async def test_where_nccl_connects_it_carries_the_weights(run: Run, nccl: Nccl) -> None:
    for version in (0, 1):
        report = await run.refit(version)
        assert (report.verified, report.attempts, report.given_up) == ((run.replica.id,), 1, ())
    assert nccl.tried == ["nccl"]


@pytest.mark.parametrize("at_trainer", [True, False])
async def test_a_group_that_starts_only_with_blocking_calls_is_formed(
    run: Run, nccl: Nccl, at_trainer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever it is that NCCL refuses; the other one waits."""
    nccl.fails = {("nccl", at_trainer): nccl.refuse, ("nccl", not at_trainer): nccl.hang}
    report = await run.refit(0)
    assert (report.verified, report.attempts, report.given_up) == ((run.replica.id,), 2, ("nccl",))
    assert nccl.tried == ["nccl", "nccl-blocking"]
    said = [
        record.getMessage() for record in caplog.records if "weights travel by nccl-blocking" in record.getMessage()
    ]
    assert len(said) == 1
    assert "NCCL Error 7" in said[0]
    assert "NCCL_SOCKET_IFNAME" in said[0]


async def test_where_nccl_hangs_gloo_carries_the_weights_from_then_on(
    run: Run, nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightChannelConfig, "connect_s", 1.0)
    nccl.fails = {
        (backend, at_trainer): nccl.hang for backend in ("nccl", "nccl-blocking") for at_trainer in (True, False)
    }
    report = await run.refit(0)
    assert (report.verified, report.attempts, report.failed) == ((run.replica.id,), 3, frozenset())
    assert report.given_up == ("nccl", "nccl-blocking")
    run.source.train()
    report = await run.refit(1)
    assert (report.verified, report.attempts) == ((run.replica.id,), 1)
    await installed(run.replica, 1)
    assert run.replica.installed == [0, 1]  # each version once
    assert nccl.tried == ["nccl", "nccl-blocking", "gloo"]
    epoch = await run.replay.epoch()
    assert epoch is not None
    assert Rendezvous.decode(epoch.rendezvous).backend == "gloo"


async def test_devices_that_rule_out_nccl_are_named_and_no_failure(
    run: Run, nccl: Nccl, caplog: pytest.LogCaptureFixture
) -> None:
    nccl.fails = {("nccl", at_trainer): nccl.refuse for at_trainer in (True, False)}
    assert (await run.refit(0)).given_up == ("nccl",)
    caplog.set_level(logging.INFO)
    run.sender._uuids = ["GPU-b"]  # the replica's
    run.sender._channels.close()
    await run.refit(1)
    assert nccl.tried == ["nccl", "nccl-blocking", "gloo"]
    (said,) = [record for record in caplog.records if "weights travel by gloo" in record.getMessage()]
    assert "share GPU-b" in said.getMessage()
    assert "NCCL Error 7" not in said.getMessage()


@pytest.mark.parametrize("backend", ["nccl"])
async def test_who_names_nccl_gets_an_error(run: Run, nccl: Nccl) -> None:
    nccl.fails = {
        (backend, at_trainer): nccl.refuse for backend in ("nccl", "nccl-blocking") for at_trainer in (True, False)
    }
    with pytest.raises(ServiceError, match=r"weight_channel\.backend: nccl, .*NCCL_P2P_DISABLE"):
        await run.refit(0)
    assert nccl.tried == ["nccl", "nccl-blocking"]


async def test_a_replica_that_nccl_kills_each_time_gets_the_weights_by_gloo(
    replay: ReplayClient, redis_url: str, limits: Limits, tiny_model: Path, nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # one way of NCCL is enough
    await tighten(replay, limits, replica_dead_s=STALL_S)
    await replay.rewind(0, TIMELINE)
    nccl.fails = {("nccl-blocking", True): nccl.hang}
    run = Run(replay, tiny_model, "auto")
    deaths: list[int] = []
    async with running(keep_up(redis_url, replay.run_id, tiny_model, deaths)):
        report = await run.refit(0)
        while not report.verified:
            assert len(nccl.tried) <= MOST_LOST
            await replay.wait_epoch(0.2)
            if any(replica.takes_part for replica in await replay.replicas()):
                report = await run.refit(0)
    nccl.over.set()
    await run.sender.aclose()
    assert (report.given_up, nccl.tried) == (("nccl-blocking",), ["nccl-blocking"] * MOST_LOST + ["gloo"])
    assert deaths[:MOST_LOST] == [-signal.SIGKILL] * MOST_LOST
