"""What a trainer puts into the store for replicas that pull, and when the buffer names it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import ServiceError, WrongTimeline
from headrace.config import Config
from headrace.replay import BufferRetry, Replica
from headrace.run.object_store import OFFERS, RunStore, StoreStatus, list_problems, write_status
from headrace.run.weight_store import PulledWeights
from headrace_services.refit.checksum import checksum
from headrace_services.refit.manifest import Manifest
from headrace_services.refit.probe import Differences
from headrace_services.refit.rendezvous import Offer
from headrace_services.refit.transfer import copy, read
from headrace_services.trainer.control import offers
from headrace_services.trainer.control.offers import Offers
from tests.support.waiting import eventually

PROBE = np.array([1, 2], np.int32), np.array([-1.0], np.float32), Differences(1e-3, 1e-4)


class Source:
    """Two layers, and a tensor of another type, which replicas get in bfloat16."""

    def __init__(self) -> None:
        self.tensors = {
            "layers.0.w": torch.randn(3, 5),
            "layers.0.count": torch.arange(3, dtype=torch.int32),
            "layers.1.w": torch.randn(7),
        }

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def manifest(self) -> Manifest:
        rows = [(name, "bfloat16" if dtype == "float32" else dtype, shape) for name, dtype, shape in self.metadata()]
        return Manifest.of(rows, 20)


class Buffer:
    def __init__(self) -> None:
        self.offered: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    async def offer(self, *arguments: Any) -> None:
        if self.error is not None:
            raise self.error
        self.offered.append(arguments)


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.buffer, self.source = Buffer(), Source()
        self.store = RunStore(f"file://{folder}/r")
        grpo = {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 1}}
        buffer: Any = self.buffer
        run, checkpointing = {"id": "r", "dir": str(folder / "runs")}, {"store": f"file://{folder}"}
        self.config = Config.model_validate({"grpo": grpo, "run": run, "checkpointing": checkpointing})
        self.config.checkpoint_folder.mkdir(parents=True)
        self.replay = buffer
        self.offers = Offers(self.config, self.store, buffer, BufferRetry(5.0), "t1")

    async def offer(self, version: int) -> None:
        async def at_once(work: Callable[[], Any]) -> Any:
            return work()

        await self.offers.offer(version, self.source, self.source.manifest(), PROBE, at_once)
        await eventually(lambda: not self.offers._is_busy)

    def is_due(self, newest: int, **changes: Any) -> bool:
        fields = {
            "id": "a",
            "state": "STALE",
            "version": -1,
            "timeline": "",
            "info": {},
            "leases": 0,
            "seen_s_ago": 0.0,
        }
        return self.offers.is_due([Replica(**{**fields, "pulls": True, **changes})], newest)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.offers.close()


async def test_a_version_is_offered_once_and_only_if_somebody_pulls(trainer: Trainer) -> None:
    assert trainer.is_due(0)
    assert trainer.is_due(0, state="HEALTHY", version=3)
    assert not trainer.is_due(0, pulls=False)
    assert not trainer.is_due(0, state="DEAD")
    await trainer.offer(0)
    assert not trainer.is_due(0)
    assert trainer.is_due(1)


async def test_what_is_offered_is_in_the_store_with_all_that_proves_it(trainer: Trainer, tmp_path: Path) -> None:
    await trainer.offer(3)
    ((name, version, timeline, terms, logprobs, *tolerance),) = trainer.buffer.offered
    assert (version, timeline, logprobs, tolerance) == (3, "t1", [-1.0], [1e-3, 1e-4])
    assert name
    offer = Offer.decode(terms)
    assert offer.probe_token_ids.tolist() == [1, 2]
    pulled = PulledWeights(RunStore(trainer.store.url, writes=False), tmp_path / "weights")
    listed = pulled.read_list("t1", 3, offer.digest)
    pulled.fetch(listed)
    manifest = Manifest.decode(listed.layout)
    found = [one for bucket in read(str(pulled.file), manifest, listed.checksums) for one in bucket]
    assert [one.name for one in found] == [*trainer.source.tensors]
    for one in found:
        expected = trainer.source.tensors[one.name]
        assert torch.equal(one.tensor, expected.to(one.tensor.dtype))
        assert (one.tensor.dtype is torch.bfloat16) == expected.is_floating_point()


async def test_what_was_rewritten_since_is_not_loaded(trainer: Trainer, tmp_path: Path) -> None:
    flats, tensors = copy(trainer.source.manifest(), trainer.source)
    checksums = [int(checksum(tensor)) for tensor in tensors]
    (tmp_path / "weights").write_bytes(b"".join(flat.numpy().tobytes() for flat in flats))
    whole = bytearray((tmp_path / "weights").read_bytes())
    assert list(read(str(tmp_path / "weights"), trainer.source.manifest(), checksums))
    whole[-1] ^= 1
    (tmp_path / "weights").write_bytes(whole)
    with pytest.raises(Exception, match=r"1 tensors arrived .* layers\.1\.w"):
        list(read(str(tmp_path / "weights"), trainer.source.manifest(), checksums))
    (tmp_path / "weights").write_bytes(whole[:-1])
    with pytest.raises(Exception, match="ends within the weights"):
        list(read(str(tmp_path / "weights"), trainer.source.manifest(), checksums))


async def test_law_2_what_work_may_still_begin_with_stays_in_the_store(trainer: Trainer) -> None:
    for version in range(4):
        trainer.source.tensors["layers.1.w"] += 1
        await trainer.offer(version)
    lists = [name for name in trainer.store.list_objects("weights") if "/offers/" in name]
    assert sorted(lists) == [f"weights/t1/offers/{version}.json" for version in (2, 3)]
    blocks = [name for name in trainer.store.list_objects("weights") if "/blocks/" in name]
    assert len(blocks) == 3 + 1


async def test_a_store_that_fails_is_tried_again(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ServiceError("the store is gone")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.store, "write", fail)
        await trainer.offer(0)
    assert trainer.buffer.offered == []
    assert not trainer.is_due(0)  # there is a pause
    folder = trainer.config.checkpoint_folder
    (line,) = list_problems(folder)
    assert "version 0 of the weights" in line
    assert "the store is gone" in line
    assert [trainer.offers.take_metrics()["offer_failures"] for _ in range(2)] == [1.0, 0.0]
    monkeypatch.setattr(trainer.offers, "_not_before", 0.0)
    assert trainer.is_due(0)
    await trainer.offer(0)
    assert [version for _, version, *_ in trainer.buffer.offered] == [0]
    trainer.offers.poll()
    assert list_problems(folder) == []


async def test_what_an_earlier_trainer_could_not_send_is_no_more_said(trainer: Trainer) -> None:
    folder = trainer.config.checkpoint_folder
    write_status(folder, StoreStatus(trainer.store.url, 3, "version 4 of the weights can't be pulled"), OFFERS)
    assert list_problems(folder) != []
    Offers.of(trainer.config, trainer.replay, BufferRetry(5.0), "t1")
    assert list_problems(folder) == []


async def test_law_4_a_trainer_that_was_replaced_removes_nothing_and_ends(trainer: Trainer) -> None:
    await trainer.offer(0)
    trainer.buffer.error = WrongTimeline("another")
    for version in (1, 2):
        trainer.source.tensors["layers.1.w"] += 1
        await trainer.offer(version)
    assert "weights/t1/offers/0.json" in trainer.store.list_objects("weights")
    with pytest.raises(WrongTimeline):
        trainer.offers.poll()


@pytest.mark.parametrize("replaced", [True, False])
async def test_law_4_only_the_newest_trainer_removes_the_weights_of_others(trainer: Trainer, replaced: bool) -> None:
    trainer.store.write("weights/t2/blocks/0", b"of a successor, or of one before")
    trainer.buffer.error = WrongTimeline("another") if replaced else None
    await trainer.offer(0)
    assert bool(trainer.store.list_objects("weights/t2")) == replaced


async def test_nothing_else_is_due_while_a_version_is_sent(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, goes_on = asyncio.Event(), asyncio.Event()
    events = asyncio.get_running_loop()

    async def offer(*_: Any) -> None:
        reached.set()
        await goes_on.wait()

    monkeypatch.setattr(trainer.buffer, "offer", offer)
    sending = asyncio.create_task(trainer.offer(0))
    await reached.wait()
    assert not trainer.is_due(1)
    goes_on.set()
    await sending
    assert trainer.is_due(1)
    assert events.is_running()


def test_a_run_without_a_store_offers_nothing(tmp_path: Path) -> None:
    nothing: Any = None
    config = Config.model_validate({"run": {"id": "r", "dir": str(tmp_path)}})
    assert offers.Offers.of(config, nothing, nothing, "t1") is None
