"""Model families with something of their own: exact through the learner, a refit and a real engine, or refused, with these words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headrace.config import Config
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace.weights.probe import choose_token_ids, differences, tolerance
from headrace_services.trainer.control.weight_sender import WeightSender
from headrace_services.trainer.learning.learner import Learner
from tests.integration.trainer.learner_cases import config
from tests.integration.weights.test_refit import TIMELINE, TOLERANCE, Engines, settings
from tests.support.learner_source import LearnerSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 1}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
# by model type: what is special about it, and the words of a refusal, None if it is exact
FAMILIES: dict[str, tuple[dict[str, Any], str | None]] = {
    "gemma2": ({**CAPS, "sliding_window": 64}, None),
    "gemma3_text": ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, None),
    "phi": ({}, "nothing, for the engine's lm_head.bias"),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
        "nothing, for the engine's model.layers.0.attn.sinks",
    ),
    # vLLM has the bias twice, and reloads one of the two
    "glm4_moe": (
        {**MOE, **ROUTED},
        "nothing, for the engine's model.layers.1.mlp.experts.routed_experts.e_score_correction_bias",
    ),
}


def made(family: str, special: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    """Write a model with random weights, among them those that are initialized to 0 or 1."""
    torch.manual_seed(0)
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **ids, **special)).float()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.nightly  # an engine for each
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_is_exact_or_refused(
    redis_url: str, run_id: str, limits: Limits, tiny_model: Path, tmp_path: Path, family: str
) -> None:
    special, refusal = FAMILIES[family]
    made(family, special, AutoTokenizer.from_pretrained(tiny_model), tmp_path)
    learner = Learner(config(tmp_path))
    engines = Engines(redis_url, tmp_path, tmp_path)
    replay = ReplayClient(open_redis(redis_url), run_id)
    await replay.open_run(limits)
    await replay.rewind(0, TIMELINE)
    sender = WeightSender(Config.model_validate(settings(tmp_path)), replay)
    try:
        replica = await engines.get("tied")
        await replica.join(run_id, "a")
        probe = choose_token_ids(learner.vocab_size, 96)
        prompt = choose_token_ids(learner.vocab_size, 100, seed=1).tolist()
        for version in (0, 1):
            if version:
                for tensor in learner.policy.model.state_dict().values():
                    if tensor.is_floating_point():
                        tensor.add_(torch.randn_like(tensor) * 0.02)
            report = await sender.refit(version, TIMELINE, LearnerSource(learner), probe, learner.probe(probe))
            if refusal is not None:
                assert refusal in report.refused["a"]
                return
            assert (report.verified, report.refused) == (("a",), {})
            done = await replica.generate(prompt, 32)
            expected = learner.probe(np.array(prompt + done["ids"], np.int32))[len(prompt) - 1 :]
            assert np.abs(expected - np.array(done["logprobs"])).max() < TOLERANCE
    finally:
        await engines.stop()
        await sender.aclose()
        await replay.aclose()


@pytest.mark.nightly  # an engine for each
@pytest.mark.parametrize(("family", "wrong"), [("gemma3_text", None), ("gemma2", None), ("gemma2", "sdpa")])
async def test_an_engine_in_bfloat16_differs_by_no_more_than_rounding_explains(
    redis_url: str, run_id: str, limits: Limits, tiny_model: Path, tmp_path: Path, family: str, wrong: str | None
) -> None:
    made(family, FAMILIES.get(family, ({}, None))[0], AutoTokenizer.from_pretrained(tiny_model), tmp_path)
    chosen = config(tmp_path, policy={"precision": "bfloat16"})
    learner = Learner(chosen)
    if wrong:
        learner.policy.model.set_attn_implementation(wrong)  # which ignores soft caps
    probe = choose_token_ids(learner.vocab_size, 96)
    logprobs, rounded = learner.probe(probe), learner.rounded_probe(probe)
    assert rounded is not None
    engines = Engines(redis_url, tmp_path, tmp_path)
    replay = ReplayClient(open_redis(redis_url), run_id)
    await replay.open_run(limits)
    await replay.rewind(0, TIMELINE)
    sent = settings(tmp_path, precision="bfloat16")
    sent["weight_channel"]["timeout_s"] = 120.0  # bfloat16 is slow on many a CPU
    sender = WeightSender(Config.model_validate(sent), replay)
    try:
        replica = await engines.get("bfloat16")
        await replica.join(run_id, "a")
        allowed = tolerance(chosen, differences(logprobs, rounded))
        report = await sender.refit(0, TIMELINE, LearnerSource(learner), probe, logprobs, tolerance=allowed)
        assert report.verified == (() if wrong else ("a",)), report.refused
    finally:
        await engines.stop()
        await sender.aclose()
        await replay.aclose()
