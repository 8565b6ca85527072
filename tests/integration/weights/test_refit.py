"""Whole refits: a trainer's weights, the real buffer, and real vLLM replicas in processes of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import Config
from headrace.replay import Limits, ReplayClient
from headrace.weights.probe import choose_token_ids
from headrace.weights.rendezvous import Rendezvous
from services.trainer.control.weight_sender import RefitReport, WeightSender

HERE = Path(__file__).parent
PATIENCE_S = 240.0  # for an engine to start on a busy machine
TIMELINE = "timeline-1"
# what float32 on two implementations differs by is about 3e-6; a refit that went wrong differs by 1e-2 and more
TOLERANCE = 1e-4
STALE_HEAD = {
    "worker_extension_cls": "tests.integration.weights.faults.StaleHeadExtension",
    "weight_transfer_config": {"backend": "stale-head"},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Policy:
    """What the trainer holds: a model, its weights by version, and the source of a refit."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.tied = self.model.config.tie_word_embeddings
        self.generator = torch.Generator().manual_seed(3)
        self.probe_ids = choose_token_ids(self.model.config.vocab_size)
        self.during: dict[int, Any] = {}  # called before the tensor of that index is given

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, p.detach()) for n, p in self.model.named_parameters() if n != "lm_head.weight" or not self.tied]

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, "float32", tuple(tensor.shape)) for name, tensor in self._named()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(self._named()):
            if action := self.during.pop(index, None):
                action()
            yield item

    def train(self) -> dict[str, torch.Tensor]:
        """A step away from here; returns the weights after it."""
        for _, tensor in self._named():
            tensor.add_(torch.randn(tensor.shape, generator=self.generator) * 0.02)
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._named()}

    def logprobs(self, ids: np.ndarray | list[int], weights: dict[str, torch.Tensor] | None = None) -> np.ndarray:
        """[len - 1] log-probabilities of tokens 1.. by transformers."""
        tokens = torch.as_tensor(np.asarray(ids), dtype=torch.long)[None]
        with torch.no_grad():
            logits = torch.func.functional_call(self.model, weights or dict(self._named()), (tokens,)).logits[0]
        return logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()


class Replica:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    async def expect(self, event: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"{self.name} ended with {await self.process.wait()}"
                if line.startswith(b"{") and (said := json.loads(line))["event"] == event:
                    return said

    async def ask(self, ids: list[int], max_tokens: int) -> None:
        self.process.stdin.write(json.dumps({"ids": ids, "max_tokens": max_tokens}).encode() + b"\n")
        await self.process.stdin.drain()

    async def generate(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        await self.ask(ids, max_tokens)
        return await self.expect("generated")

    def signal(self, signum: signal.Signals) -> None:
        """To the replica and the processes of its engine, as a machine that is lost or frozen."""
        pids = [self.process.pid]
        for pid in pids:
            pids += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for pid in pids:
            os.kill(pid, signum)

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.stdin.close()
            try:
                async with asyncio.timeout(20):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


class Run:
    """A run in the buffer, its sender, and the replicas that were started."""

    def __init__(self, redis_url: str, replay: ReplayClient, policy: Policy, model: Path) -> None:
        self.redis_url, self.replay, self.policy = redis_url, replay, policy
        self.settings = {
            "policy": {
                "model_name": str(model),
                "precision": "float32",
                "max_total_sequence_length": 1024,
                "generation": {"max_new_tokens": 900, "vllm_cfg": {"kv_cache_memory_bytes": 64 * 2**20}},
            },
            "grpo": {
                "async_grpo": {
                    "enabled": True,
                    "in_flight_weight_updates": True,
                    "recompute_kv_cache_after_weight_updates": True,
                }
            },
            "weight_channel": {"timeout_s": 20.0, "bucket_bytes": 128 * 1024, "verify_tolerance": TOLERANCE},
        }
        self.sender = WeightSender(Config.model_validate(self.settings), replay)
        self.replicas: list[Replica] = []

    async def start(self, name: str, **arguments: Any) -> Replica:
        spec = {
            "config": self.settings,
            "redis_url": self.redis_url,
            "run_id": self.replay.run_id,
            "replica": name,
            "arguments": arguments,
        }
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "replica.py"),
            json.dumps(spec),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            limit=2**24,
        )
        replica = Replica(name, process)
        self.replicas.append(replica)
        return replica

    async def refit(self, version: int) -> RefitReport:
        probe = self.policy.probe_ids
        return await self.sender.refit(version, TIMELINE, self.policy, probe, self.policy.logprobs(probe))

    async def states(self) -> dict[str, tuple[str, int]]:
        return {replica.id: (replica.state, replica.version) for replica in await self.replay.replicas()}

    async def stop(self) -> None:
        await self.sender.aclose()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return dataclasses.replace(limits, replica_dead_s=3.0)


@pytest.fixture(params=["tied"])
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    if request.param == "tied":
        return tiny_model
    config = AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings = False
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    return tmp_path


@pytest.fixture
async def run(redis_url: str, replay: ReplayClient, model: Path) -> AsyncIterator[Run]:
    await replay.rewind(0, TIMELINE)
    run = Run(redis_url, replay, Policy(model), model)
    yield run
    await run.stop()


# one prompt again and again, longer than a block of the KV cache: a prefix cache that outlived a refit would show
@pytest.mark.parametrize(("model", "recompute"), [("tied", True), ("untied", False)], indirect=["model"])
async def test_log_probabilities_are_those_of_transformers_after_every_refit(run: Run, recompute: bool) -> None:
    run.settings["grpo"]["async_grpo"]["recompute_kv_cache_after_weight_updates"] = recompute
    replica = await run.start("a")
    await replica.expect("ready")
    prompt = choose_token_ids(run.policy.model.config.vocab_size, 400, seed=1).tolist()
    groups = set()
    for version in range(6):
        if version:
            run.policy.train()
        report = await run.refit(version)
        assert (report.members, report.verified, report.attempts) == (("a",), ("a",), 1)
        assert report.refused == {}
        assert await run.states() == {"a": ("HEALTHY", version)}
        # the group that the first refit formed carries all that follow
        epoch = await run.replay.epoch()
        groups.add(Rendezvous.decode(epoch.rendezvous).group_of(epoch.members))
        assert len(groups) == 1
        done = await replica.generate(prompt, 32)
        assert done["spans"] == [[str(version), 0, 32]]
        expected = run.policy.logprobs(prompt + done["ids"])[len(prompt) - 1 :]
        assert np.abs(expected - np.array(done["logprobs"])).max() < TOLERANCE


async def test_in_flight_each_span_is_of_the_weights_it_names(run: Run) -> None:
    replica = await run.start("a")
    await replica.expect("ready")
    weights = {0: run.policy.weights()}
    await run.refit(0)
    prompt = run.policy.probe_ids[:10].tolist()
    await replica.ask(prompt, 900)
    await replica.expect("generating")
    weights[1] = run.policy.train()
    assert (await run.refit(1)).verified == ("a",)
    done = await replica.expect("generated")
    assert [span[0] for span in done["spans"]] == ["0", "1"]
    for version, start, end in done["spans"]:
        computed = run.policy.logprobs(prompt + done["ids"], weights[int(version)])[len(prompt) - 1 :]
        assert np.abs(computed - np.array(done["logprobs"]))[start:end].max() < TOLERANCE


async def test_a_stale_packed_head_is_refused_though_names_and_weights_agree(run: Run) -> None:
    good, stale = await run.start("good"), await run.start("stale", **STALE_HEAD)
    await asyncio.gather(good.expect("ready"), stale.expect("ready"))
    assert set((await run.refit(0)).verified) == {"good", "stale"}  # nothing changed, so the old copy is right
    run.policy.train()
    report = await run.refit(1)
    assert report.verified == ("good",)
    assert list(report.refused) == ["stale"]
    assert await run.states() == {"good": ("HEALTHY", 1), "stale": ("STALE", -1)}
    assert (await stale.expect("refit"))["healthy"]
    assert (await stale.expect("refit"))["paused"]


async def test_a_replica_killed_in_the_middle_costs_one_retry_and_a_late_one_gets_the_current_weights(run: Run) -> None:
    a, b = await run.start("a"), await run.start("b")
    await asyncio.gather(a.expect("ready"), b.expect("ready"))
    assert set((await run.refit(0)).verified) == {"a", "b"}
    run.policy.train()
    middle = len(run.policy.metadata()) // 2
    run.policy.during[middle] = lambda: b.signal(signal.SIGKILL)
    report = await run.refit(1)
    assert (report.members, report.verified, report.attempts) == (("a",), ("a",), 2)
    states = await run.states()
    assert states["a"] == ("HEALTHY", 1)
    assert states.get("b", ("DEAD", 0))[0] == "DEAD"

    late = await run.start("late")
    await late.expect("ready")
    assert (await run.states())["late"][0] == "STALE"
    report = await run.refit(1)
    assert set(report.verified) == {"a", "late"}
    done = await late.generate(run.policy.probe_ids[:10].tolist(), 8)
    assert done["spans"] == [["1", 0, 8]]


async def test_a_replica_that_hangs_in_the_middle_is_left_out_and_generates_nothing_afterwards(run: Run) -> None:
    a, b = await run.start("a"), await run.start("b")
    await asyncio.gather(a.expect("ready"), b.expect("ready"))
    run.policy.during[3] = lambda: b.signal(signal.SIGSTOP)
    try:
        report = await run.refit(0)
        assert (report.members, report.verified, report.attempts) == (("a",), ("a",), 2)
        assert (await run.states())["a"] == ("HEALTHY", 0)
    finally:
        b.signal(signal.SIGCONT)
    said = await b.expect("refit")
    assert not said["healthy"]
    assert said["paused"]


async def test_with_no_live_replica_the_report_has_no_members(run: Run) -> None:
    report = await run.refit(0)
    assert (report.members, report.verified, report.refused, report.attempts) == ((), (), {}, 1)
