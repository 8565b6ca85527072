"""A mixture of experts: trained with frozen routers, and refitted into a real engine, which holds a layer's experts in one tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.config import Config
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.probe import choose_token_ids
from headrace_services.refit.sender import WeightSender
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import config, random_batch
from tests.support.engines import TIMELINE, TOLERANCE, Engines, settings
from tests.support.learner_source import LearnerSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    made = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(made).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.nightly  # an engine of its own
async def test_experts_are_trained_and_refitted(redis_url: str, run_id: str, limits: Limits, model: Path) -> None:
    learner = Learner(config(model, policy={"freeze_moe_router": True}))
    before = {name: tensor.clone() for name, tensor in learner.policy.weights()}
    engines = Engines(redis_url, model, model)
    replay = ReplayClient(open_redis(redis_url), run_id)
    await replay.open_run(limits)
    await replay.rewind(0, TIMELINE)
    sender = WeightSender(Config.model_validate(settings(model)), replay)
    try:
        replica = await engines.get("tied")
        await replica.join(run_id, "a")
        probe = choose_token_ids(learner.policy.vocab_size)
        prompt = np.random.default_rng(1).choice(learner.policy.vocab_size, 100).tolist()
        for version in (0, 1):
            if version:
                train_step(learner, random_batch(8))
            report = await sender.refit(version, TIMELINE, LearnerSource(learner), probe, learner.probe(probe))
            assert (report.verified, report.refused) == (("a",), {})
            done = await replica.generate(prompt, 32)
            expected = learner.probe(np.array(prompt + done["ids"], np.int32))[len(prompt) - 1 :]
            assert np.abs(expected - np.array(done["logprobs"])).max() < TOLERANCE
    finally:
        await engines.stop()
        await sender.aclose()
        await replay.aclose()
    moved = {name for name, tensor in learner.policy.weights() if not torch.equal(tensor, before[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    assert any(".experts." in name for name in moved)
    assert moved.isdisjoint(routers)
