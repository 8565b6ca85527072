"""What a replica that pulls fetches, and when it may install it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.config import Config
from headrace.replay import Epoch
from headrace.run.object_store import RunStore
from headrace_services.refit.rendezvous import Pulled
from headrace_services.rollout import pulling
from headrace_services.rollout.pulling import Puller
from tests.support.pullers import MANIFEST, Buffer, Trainer
from tests.support.waiting import eventually


class Offering(Trainer):
    """Offers weights that are all the number of their version."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"file://{folder}/r", Buffer())
        self.store = RunStore(self.url)

    def offer(self, version: int, timeline: str = "t1") -> None:  # type: ignore[override]
        super().offer(version, np.full(256, version, np.float32), timeline)


@pytest.fixture
def trainer(tmp_path: Path) -> Offering:
    return Offering(tmp_path / "store")


@pytest.fixture
def puller(trainer: Offering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Puller:
    monkeypatch.setattr(pulling, "FIRST_PAUSE_S", 0.01)
    grpo = {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2}}
    reader: Any = trainer.buffer
    return Puller(Config.model_validate({"grpo": grpo}), reader, trainer.store.url, tmp_path)


async def settle(puller: Puller, held: tuple[str, int] | None = None) -> Epoch | None:
    """What may be installed once nothing is being fetched."""
    await puller.look("me", held)
    while puller._task is not None and not puller._task.done():
        await asyncio.wait([puller._task])
    return await puller.look("me", held)


def version_in(epoch: Epoch | None) -> float:
    """Of the weights in the file."""
    assert epoch is not None
    pulled = epoch.rendezvous
    assert isinstance(pulled, Pulled)
    assert (pulled.manifest, pulled.probe_token_ids.tolist()) == (MANIFEST, [1, 2])
    (value,) = set(np.fromfile(pulled.file, np.float32).tolist())
    return float(value)


async def test_without_an_offer_there_is_nothing_to_install(puller: Puller) -> None:
    assert await settle(puller) is None


async def test_what_is_whole_may_be_installed(puller: Puller, trainer: Offering) -> None:
    trainer.offer(1)
    assert await puller.look("me", None) is None  # it has only begun
    epoch = await settle(puller)
    assert epoch is not None
    assert (epoch.members, epoch.acknowledged, epoch.state) == (("me",), ("me",), "transfer")
    assert version_in(epoch) == 1
    assert await settle(puller, ("t1", 1)) is None
    assert puller._task is None


async def test_the_file_stays_as_it_is_until_it_is_installed(puller: Puller, trainer: Offering) -> None:
    trainer.offer(1)
    await settle(puller)
    trainer.offer(2)
    assert version_in(await settle(puller)) == 1
    assert version_in(await settle(puller, ("t1", 1))) == 2


async def test_law_2_what_no_work_may_begin_with_gives_way_to_the_newest(puller: Puller, trainer: Offering) -> None:
    trainer.offer(1)
    await settle(puller)
    trainer.offer(3)
    assert version_in(await settle(puller)) == 1
    trainer.offer(4)
    assert version_in(await settle(puller)) == 4


@pytest.mark.parametrize("newest", [(4, "t1"), (1, "t2")])
async def test_the_fetch_of_what_is_over_ends(
    puller: Puller, trainer: Offering, monkeypatch: pytest.MonkeyPatch, newest: tuple[int, str]
) -> None:
    trainer.offer(1)
    reached = threading.Event()
    read = RunStore.read

    def slow(store: RunStore, name: str) -> bytes:
        if "/blocks/" in name and not reached.is_set():
            reached.set()
            while not puller._stopped:
                time.sleep(0.001)
        return read(store, name)

    monkeypatch.setattr(RunStore, "read", slow)
    await puller.look("me", None)
    await asyncio.to_thread(reached.wait)
    assert not puller._stopped
    trainer.offer(*newest)
    assert version_in(await eventually(lambda: settle(puller))) == newest[0]
    assert puller.problem is None


async def test_law_4_a_rewound_version_is_not_installed(puller: Puller, trainer: Offering) -> None:
    trainer.offer(2)
    await settle(puller)
    before, trainer.buffer.offer = trainer.buffer.offer, None
    assert await settle(puller) is None  # the new trainer has offered nothing yet
    trainer.buffer.offer = before
    await settle(puller)
    trainer.offer(1, "t2")
    epoch = await settle(puller)
    assert epoch is not None
    assert (epoch.timeline, version_in(epoch)) == ("t2", 1)


async def test_what_is_missing_is_said_and_tried_again_after_a_pause(puller: Puller, trainer: Offering) -> None:
    trainer.offer(1)
    names = [name for name in trainer.store.list_objects("weights") if "/blocks/" in name]
    kept = {name: trainer.store.read(name) for name in names}
    trainer.store.remove(names)
    assert await settle(puller) is None
    assert puller.problem is not None
    assert "is missing" in puller.problem
    for name, data in kept.items():
        trainer.store.write(name, data)
    assert version_in(await eventually(lambda: settle(puller))) == 1
    puller.succeed()
    assert puller.problem is None


async def test_what_is_not_an_offer_is_refused_with_words(puller: Puller, trainer: Offering) -> None:
    trainer.offer(1)
    assert trainer.buffer.offer is not None
    trainer.buffer.offer = msgspec.structs.replace(trainer.buffer.offer, rendezvous=b"\xc1")
    assert await settle(puller) is None
    assert puller.problem is not None
    assert "offer" in puller.problem


async def test_unverified_weights_are_tried_again_from_what_is_here(puller: Puller, trainer: Offering) -> None:
    trainer.offer(1)
    await settle(puller)
    puller.fail("the probe differs")
    assert await puller.look("me", None) is None
    trainer.store.remove([name for name in trainer.store.list_objects("weights") if "/blocks/" in name])
    assert version_in(await eventually(lambda: settle(puller))) == 1
