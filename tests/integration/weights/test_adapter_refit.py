"""Refits of an adapter alone (`policy.lora_cfg.refit: adapter`): what travels, and that engines compute with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.config import Config
from headrace.replay import BufferRetry, Epoch, Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace.run.object_store import RunStore
from headrace.run.weight_store import PulledWeights
from headrace_services.refit.manifest import ADAPTER, Manifest
from headrace_services.refit.probe import Differences, choose_token_ids
from headrace_services.refit.rendezvous import Offer
from headrace_services.refit.sender import RefitReport, WeightSender
from headrace_services.refit.transfer import read
from headrace_services.trainer.control.offers import Offers
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import config, random_batch
from tests.support.engines import TIMELINE, TOLERANCE, Engines, settings
from tests.support.learner_source import LearnerSource
from tests.support.small_replica import SmallReplica, running
from tests.support.waiting import eventually

# the rank has no slot of its own in vLLM, and the names are of two of its fused layers and of one that is not
LORA = {"enabled": True, "dim": 5, "refit": "adapter", "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio]


class Run:
    """A run in the buffer, its learner and its sender."""

    def __init__(self, replay: ReplayClient, model: Path, *, timeout_s: float = 60.0) -> None:
        self.replay, self.model = replay, model
        self.learner = Learner(config(model, policy={"lora_cfg": LORA}))
        values = settings(model)
        values["weight_channel"]["timeout_s"] = timeout_s
        self.config = Config.model_validate(values)
        self.sender = WeightSender(self.config, replay)
        self.probe = choose_token_ids(self.learner.policy.vocab_size)

    def bytes_of(self, *, adapter_alone: bool) -> int:
        return sum(4 * tensor.numel() for _, tensor in LearnerSource(self.learner, adapter_alone=adapter_alone))

    async def refit(self, version: int) -> RefitReport:
        adapter = LearnerSource(self.learner, adapter_alone=True)
        expected = self.learner.probe(self.probe)
        return await self.sender.refit(
            version, TIMELINE, LearnerSource(self.learner), self.probe, expected, adapter=adapter
        )

    async def restart_trainer(self) -> None:
        await self.sender.aclose()
        self.sender = WeightSender(self.config, self.replay)


@pytest.fixture
async def run(redis_url: str, run_id: str, limits: Limits, tiny_model: Path) -> AsyncIterator[Run]:
    replay = ReplayClient(open_redis(redis_url), run_id)
    await replay.open_run(limits)
    await replay.rewind(0, TIMELINE)
    run = Run(replay, tiny_model)
    yield run
    await run.sender.aclose()
    await replay.aclose()


class AdapterReplica(SmallReplica):
    """Merges what comes into the model that came with the first of it."""

    kept: dict[str, torch.Tensor]

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        own = {name: tensor for name, tensor in weights.items() if not name.startswith(ADAPTER)}
        self.kept = own or self.kept
        merged = dict(self.kept)
        for name, a in weights.items():
            layer, found, _ = name.removeprefix(ADAPTER).partition(".lora_A.")
            if found:
                merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + weights[f"{ADAPTER}{layer}.lora_B.weight"] @ a
        super().load(merged)


@contextlib.asynccontextmanager
async def small_replica(run: Run) -> AsyncIterator[str]:
    small = AdapterReplica(run.replay, run.model)
    async with running(small.run()):
        while small.id not in {replica.id for replica in await run.replay.replicas()}:
            await run.replay.wait_epoch(0.1)
        yield small.id


async def test_the_model_travels_once_and_then_the_adapter_alone(run: Run) -> None:
    whole, alone = (run.bytes_of(adapter_alone=adapter_alone) for adapter_alone in (False, True))
    assert alone < whole / 10

    async def sent(version: int, replicas: set[str]) -> int:
        report = await run.refit(version)
        assert (set(report.verified), report.refused) == (replicas, {})
        return report.nbytes

    async with small_replica(run) as first:
        assert await sent(0, {first}) == whole
        for version in (1, 2):
            train_step(run.learner, random_batch(8, version))
            assert await sent(version, {first}) == alone
        async with small_replica(run) as second:
            assert await sent(2, {second}) == whole, "it has no model yet; the first has this version"
            train_step(run.learner, random_batch(8, 3))
            assert await sent(3, {first, second}) == alone
            await run.restart_trainer()
            train_step(run.learner, random_batch(8, 4))
            assert await sent(4, {first, second}) == whole, "this sender has proved nothing yet"


async def test_who_pulls_fetches_the_adapter_alone_once_it_has_the_model(run: Run, tmp_path: Path) -> None:
    store = RunStore(f"file://{tmp_path}/runs/r")
    values = {"run": {"id": "r", "dir": str(tmp_path)}, "checkpointing": {"store": f"file://{tmp_path}/runs"}}
    run_config = Config.model_validate(values)
    offers = Offers(run_config, store, run.replay, BufferRetry(60.0), TIMELINE)
    pulled = PulledWeights(RunStore(store.url, writes=False), tmp_path / "weights")
    source = LearnerSource(run.learner)
    manifest = Manifest.of(source.metadata(), 64 * 1024)
    run_config.checkpoint_folder.mkdir(parents=True)

    async def at_once(work: Callable[[], Any]) -> Any:
        return work()

    async def fetch(version: int) -> int:
        probe = run.probe, run.learner.probe(run.probe), Differences(1e-4, 1e-4)
        await offers.offer(version, source, manifest, probe, at_once)

        async def look() -> Epoch | None:
            offers.poll()
            found = await run.replay.offered("")
            return found if found is not None and found.version == version else None

        offer = await eventually(look)
        listed = pulled.read_list(TIMELINE, version, Offer.decode(offer.rendezvous).digest)
        pulled.fetch(listed)
        found = [one for bucket in read(str(pulled.file), manifest, listed.checksums) for one in bucket]
        wanted = dict(source)
        assert [one.name for one in found] == [*wanted]
        assert all(torch.equal(one.tensor, wanted[one.name].to(one.tensor.dtype)) for one in found)
        return pulled.fetched_bytes

    try:
        whole = await fetch(0)
        assert whole == manifest.nbytes
        train_step(run.learner, random_batch(8, 1))
        of_adapter = [each for each in manifest.buckets() if any(one.name.startswith(ADAPTER) for one in each.tensors)]
        assert 0 < await fetch(1) <= sum(bucket.nbytes for bucket in of_adapter) < whole / 2
    finally:
        offers.close()


@pytest.mark.nightly  # an engine of its own; the sender and the proof have tests without one
async def test_an_engine_computes_with_the_adapters_it_keeps_alone(run: Run, redis_url: str, tmp_path: Path) -> None:
    alone = run.bytes_of(adapter_alone=True)
    engines = Engines(redis_url, run.model, run.model)
    try:
        replica = await engines.get("adapter", policy={"lora_cfg": LORA})
        await replica.join(run.replay.run_id, "a")
        prompt = np.random.default_rng(1).choice(run.learner.policy.vocab_size, 100).tolist()

        def train(version: int) -> None:
            train_step(run.learner, random_batch(8, version))
            run.learner.snapshot()(tmp_path / str(version))

        def expected(version: int, ids: list[int]) -> np.ndarray:
            """By transformers alone, with what a checkpoint has merged."""
            model = AutoModelForCausalLM.from_pretrained(tmp_path / str(version) / "policy", dtype=torch.float32)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
            return logits[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()

        for version in (1, 2):
            (tmp_path / str(version)).mkdir()
        report = await run.refit(0)
        assert (report.verified, report.refused) == (("a",), {})

        train(1)
        report = await run.refit(1)
        assert (report.verified, report.refused, report.nbytes) == (("a",), {}, alone)
        train(2)
        await replica.ask(prompt, 800)  # goes on under the next adapter
        await replica.expect("generating")
        assert (await run.refit(2)).verified == ("a",)
        done = await replica.expect("generated")
        assert [version for version, _, _ in done["spans"]] == ["1", "2"]
        for version, begin, end in done["spans"]:
            wanted = expected(int(version), done["ids"])[begin:end]
            assert np.abs(wanted - np.array(done["logprobs"])[begin:end]).max() < TOLERANCE
        assert np.abs(expected(1, done["ids"]) - expected(2, done["ids"])).max() > 100 * TOLERANCE

        train_step(run.learner, random_batch(8, 3))
        await replica.inject("adapter")
        report = await run.refit(3)
        assert report.verified == ()
        assert "adapter differs" in report.refused["a"]
        assert "model.layers.0.mlp.down_proj.lora_B.weight" in report.refused["a"]
        await replica.inject(None)
        report = await run.refit(3)
        assert (report.verified, report.nbytes) == (("a",), alone), "the model has been there all the time"
    finally:
        await engines.stop()
