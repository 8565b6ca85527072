"""Whole refits: a trainer's weights, the real buffer, and real vLLM replicas in processes of their own.

An engine takes three CPU seconds to start, and one of two workers more. So the tests share four by day and a fifth at night, each test in a
run of its own: every run begins with a refit, which makes nothing of what an engine computed with before. Where a second replica only has
to be there, it is a small one.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import Config
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.probe import differences, repeat_text, tolerance
from headrace_services.refit.rendezvous import Rendezvous
from headrace_services.refit.sender import RefitReport, WeightSender
from headrace_services.trainer.learning.learner import Learner
from tests.integration.trainer.learner_cases import config as learner_config
from tests.support.buffer import tighten
from tests.support.engines import TIMELINE, TOLERANCE, Engines, Replica, settings
from tests.support.learner_source import LearnerSource
from tests.support.paced_engine import LONG
from tests.support.small_replica import SmallReplica, installed, running
from tests.support.source_model import SourceModel
from tests.support.waiting import STALL_S

FAULTS = {
    "tensor": "1 parameters of the engine differ from what was received, the first is model.layers.1.self_attn.qkv_proj.bias",
    "copy": "a packed copy of model.layers.0.mlp.down_proj.weight",
    "head": "a packed copy of lm_head.weight",
    "load": "injected",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


class Run:
    """A run in the buffer, and its sender."""

    def __init__(self, engines: Engines, replay: ReplayClient, model: str, precision: str, workers: int) -> None:
        self.replay = replay
        self.model = engines.models[model]
        self.source = SourceModel(self.model)
        config = settings(self.model, precision=precision, workers=workers)
        self.sender = WeightSender(Config.model_validate(config), replay)
        self._engines = engines

    async def join(self, engine: str, name: str | None = None) -> Replica:
        """The engine's replica, in this run under that name, by default the engine's."""
        replica = await self._engines.get(engine)
        await replica.join(self.replay.run_id, name or engine)
        return replica

    @contextlib.asynccontextmanager
    async def with_small_replica(self) -> AsyncIterator[SmallReplica]:
        """One that has joined this run."""
        small = SmallReplica(self.replay, self.model)
        async with running(small.run()):
            while small.id not in await self.states():
                await self.replay.wait_epoch(0.1)
            yield small

    async def refit(self, version: int) -> RefitReport:
        probe = self.source.probe_ids
        return await self.sender.refit(version, TIMELINE, self.source, probe, self.source.logprobs(probe))

    async def states(self) -> dict[str, tuple[str, int]]:
        return {replica.id: (replica.state, replica.version) for replica in await self.replay.replicas()}


@pytest.fixture(scope="module")
def untied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings = False
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(redis_url: str, tiny_model: Path, untied_model: Path) -> AsyncIterator[Engines]:
    engines = Engines(redis_url, tiny_model, untied_model)
    yield engines
    await engines.stop()


@pytest.fixture
def model() -> str:
    """Which of the models the run trains."""
    return "tied"


@pytest.fixture
def precision() -> str:
    """In which the run's replicas compute."""
    return "float32"


@pytest.fixture
def workers() -> int:
    """Of each of the run's replicas."""
    return 1


@pytest_asyncio.fixture(loop_scope="module")
async def run(
    redis_url: str, run_id: str, limits: Limits, engines: Engines, model: str, precision: str, workers: int
) -> AsyncIterator[Run]:
    replay = ReplayClient(open_redis(redis_url), run_id)
    await replay.open_run(limits)
    await replay.rewind(0, TIMELINE)
    run = Run(engines, replay, model, precision, workers)
    yield run
    await run.sender.aclose()
    await replay.aclose()


# one prompt again and again, longer than a block of the KV cache: entries of a prefix cache that outlived a refit would show. Those of the
# untied one do outlive it, since it keeps the KV cache of running requests
@pytest.mark.parametrize(
    "model",
    ["untied", pytest.param("tied", marks=pytest.mark.nightly)],  # rollout/test_service.py has a tied one by day
)
async def test_log_probabilities_equal_transformers_after_every_refit(run: Run, model: str) -> None:
    replica = await run.join(model, "a")
    prompt = np.random.default_rng(1).choice(run.source.model.config.vocab_size, 400).tolist()
    groups = set()
    for version in range(6):
        if version:
            run.source.train()
        report = await run.refit(version)
        assert (report.members, report.verified, report.attempts) == (("a",), ("a",), 1)
        assert report.refused == {}
        assert await run.states() == {"a": ("HEALTHY", version)}
        # the group that the first refit formed carries all that follow
        epoch = await run.replay.epoch()
        groups.add(Rendezvous.decode(epoch.rendezvous).derive_group(epoch.members))
        assert len(groups) == 1
        done = await replica.generate(prompt, 32)
        assert done["spans"] == [[str(version), 0, 32]]
        expected = run.source.logprobs(prompt + done["ids"])[len(prompt) - 1 :]
        assert np.abs(expected - np.array(done["logprobs"])).max() < TOLERANCE
        assert done["cached"] == 0
        again = await replica.generate(prompt, 32)
        assert again["cached"] > 200
        expected = run.source.logprobs(prompt + again["ids"])[len(prompt) - 1 :]
        assert np.abs(expected - np.array(again["logprobs"])).max() < TOLERANCE


@pytest.mark.parametrize(
    "engine",
    ["async", pytest.param("tied", marks=pytest.mark.nightly)],  # rollout/test_calls.py has such a one by day
)
async def test_in_flight_each_span_is_of_the_weights_it_names(run: Run, engine: str) -> None:
    replica = await run.join(engine, "a")
    assert await replica.asynchronous() == (engine == "async")
    weights = {0: run.source.weights()}
    await run.refit(0)
    prompt = run.source.probe_ids[:10].tolist()
    await replica.ask(prompt, LONG)
    await replica.expect("generating")
    weights[1] = run.source.train()
    assert (await run.refit(1)).verified == ("a",)
    done = await replica.expect("generated")
    assert [span[0] for span in done["spans"]] == ["0", "1"]
    for version, start, end in done["spans"]:
        computed = run.source.logprobs(prompt + done["ids"], weights[int(version)])[len(prompt) - 1 :]
        assert np.abs(computed - np.array(done["logprobs"]))[start:end].max() < TOLERANCE


IN_BFLOAT16 = pytest.mark.parametrize("precision", ["bfloat16"])


@IN_BFLOAT16
async def test_one_stale_tensor_is_refused_though_no_probability_shows_it(run: Run) -> None:
    replica = await run.join("faulty", "a")
    assert (await run.refit(0)).verified == ("a",)
    for version, (fault, reason) in enumerate(FAULTS.items(), start=1):
        await replica.inject(fault)
        run.source.train(1e-4)
        report = await run.refit(version)
        assert list(report.refused) == ["a"], fault
        assert reason in report.refused["a"], fault
        assert report.attempts == 1
        assert await run.states() == {"a": ("STALE", -1)}
        said = await replica.expect("refit")
        while said["version"] != version:
            said = await replica.expect("refit")
        assert not said["healthy"]
        assert said["paused"]
    await replica.inject(None)
    assert (await run.refit(len(FAULTS) + 1)).verified == ("a",)


@IN_BFLOAT16
async def test_who_fails_the_probe_twice_names_the_first_layer_that_differs(run: Run) -> None:
    replica = await run.join("faulty", "a")
    learner = Learner(learner_config(run.model, policy={"precision": "bfloat16"}))
    probe = repeat_text([run.source.probe_ids.tolist()], 32)
    rounded = learner.probe_rounded(probe)
    assert rounded is not None
    allowed = tolerance(learner.config, differences(learner.probe(probe), rounded))

    async def refit(version: int) -> RefitReport:
        source, logprobs, states = LearnerSource(learner), learner.probe(probe), learner.probe_states(probe)
        return await run.sender.refit(
            version, TIMELINE, source, probe, logprobs, tolerance=allowed, states=states if version else None
        )

    for version, (fault, named) in enumerate([(None, None), ("layer", "model.layers.1 "), ("logits", "lm_head")]):
        await replica.inject(fault)
        report = await refit(version)
        if named is None:
            assert report.verified == ("a",), report.refused
            continue
        assert "log-probabilities of the probe differ" in report.refused["a"]
        assert "layer" not in report.refused["a"] or version > 1  # it had not failed before
        assert named in (await refit(version)).refused["a"]
    await replica.inject(None)
    assert (await refit(4)).verified == ("a",)


@pytest.mark.parametrize("workers", [2])
async def test_a_tensor_parallel_replica_takes_the_epoch_after_a_failed_one(run: Run) -> None:
    replica = await run.join("parallel", "a")
    assert (await run.refit(0)).verified == ("a",)
    await replica.inject(
        "load"
    )  # into one of the workers: the answer of the other must not be taken for that of a later call
    run.source.train()
    report = await run.refit(1)
    assert "injected" in report.refused["a"]
    assert report.attempts <= 2  # if it leaves while the rest is being sent, a second attempt finds nobody to ask
    await replica.inject(None)
    run.source.during[len(run.source.metadata()) // 2] = run.sender._channels.close
    report = await run.refit(2)
    assert (report.verified, report.attempts) == (("a",), 2)
    prompt = run.source.probe_ids[:20].tolist()
    done = await replica.generate(prompt, 32)
    expected = run.source.logprobs(prompt + done["ids"])[len(prompt) - 1 :]
    assert np.abs(expected - np.array(done["logprobs"])).max() < TOLERANCE


@IN_BFLOAT16
async def test_a_replica_that_hangs_midway_is_left_out(run: Run, limits: Limits) -> None:
    await tighten(run.replay, limits, replica_dead_s=STALL_S)
    victim = await run.join("faulty", "b")
    async with run.with_small_replica() as other:
        run.source.during[3] = lambda: victim.signal(signal.SIGSTOP)
        try:
            report = await run.refit(0)
            assert (report.members, report.verified, report.attempts) == ((other.id,), (other.id,), 2)
            assert (await run.states())[other.id] == ("HEALTHY", 0)
        finally:
            victim.signal(signal.SIGCONT)
        said = await victim.expect("refit")
    assert not said["healthy"]
    assert said["paused"]


async def test_with_no_live_replica_the_report_has_no_members(run: Run) -> None:
    report = await run.refit(0)
    assert (report.members, report.verified, report.refused, report.attempts) == ((), (), {}, 1)


@IN_BFLOAT16
async def test_a_replica_killed_midway_costs_one_retry(run: Run, limits: Limits) -> None:
    await tighten(run.replay, limits, replica_dead_s=STALL_S)
    victim = await run.join("faulty", "b")  # no test comes after this one
    async with run.with_small_replica() as other:
        assert set((await run.refit(0)).verified) == {other.id, "b"}
        run.source.train()
        middle = len(run.source.metadata()) // 2
        run.source.during[middle] = lambda: victim.signal(signal.SIGKILL)
        report = await run.refit(1)
        assert (report.members, report.verified, report.attempts) == ((other.id,), (other.id,), 2)
        states = await run.states()
        assert states[other.id] == ("HEALTHY", 1)
        assert states.get("b", ("DEAD", 0))[0] == "DEAD"

        async with run.with_small_replica() as late:
            assert (await run.states())[late.id][0] == "STALE"
            report = await run.refit(1)
            assert report.verified == (late.id,), "the other has this version"
            await installed(late, 1)
