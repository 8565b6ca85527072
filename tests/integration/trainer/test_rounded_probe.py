"""In bfloat16 a replica may differ from the trainer by what rounding changes: an honest implementation does, another model does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.records.trajectory import Float32
from headrace_services.refit.probe import Differences, choose_token_ids, differences, tolerance
from headrace_services.trainer.learning.learner import Learner
from tests.integration.trainer.learner_cases import config
from tests.support.tiny_family import CAPS, made, shrunk

LENGTH = 96  # longer than the windows
WINDOW = {"sliding_window": 64}
NARROW = {"hidden_size": 64, "head_dim": 32}  # where a wrong model stands out from rounding
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": WINDOW,
    "phi3": {},
    "olmo2": {},
    "gemma2": {**CAPS, **WINDOW},
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}


def of_replica(model: Path, *, attention: str | None = None) -> Float32:
    """The probe's log-probabilities by transformers alone, with weights and states in bfloat16, as in an engine."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation=attention).eval()
    ids = torch.from_numpy(choose_token_ids(plain.config.vocab_size, LENGTH)).long()
    with torch.no_grad():
        logp = plain(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return logp[:-1].gather(1, ids[1:, None])[:, 0].numpy()


def of_trainer(model: Path, precision: str) -> tuple[Float32, Differences]:
    """The trainer's log-probabilities of the probe, and the differences that it accepts."""
    chosen = config(
        model,
        policy={"precision": precision, "generation": {"vllm_cfg": {"precision": "bfloat16"}, "max_new_tokens": 16}},
    )
    learner = Learner(chosen)
    ids = choose_token_ids(learner.policy.vocab_size, LENGTH)
    logprobs, rounded = learner.probe(ids), learner.probe_rounded(ids)
    assert rounded is not None
    np.testing.assert_array_equal(learner.probe(ids), logprobs)  # nothing is left behind
    return logprobs, tolerance(chosen, differences(logprobs, rounded))


def accepted(found: Float32, expected: Float32, allowed: Differences) -> bool:
    return all(apart <= most for apart, most in zip(differences(found, expected), allowed, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_bfloat16_replica_is_accepted(tiny_model: Path, tmp_path: Path, family: str, precision: str) -> None:
    made(shrunk(family, **NARROW, **FAMILIES[family]), AutoTokenizer.from_pretrained(tiny_model), tmp_path)
    expected, allowed = of_trainer(tmp_path, precision)
    assert accepted(of_replica(tmp_path, attention="eager"), expected, allowed)
    assert allowed.mean < 0.1


WEAK = {**CAPS, "attn_logit_softcapping": 15.0, "query_pre_attn_scalar": 4, **WINDOW}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "special", "wrong"),
    [
        pytest.param("gemma2", WEAK, {}, id="soft caps of attention that it ignores"),
        pytest.param("mistral", WINDOW, {"sliding_window": 60}, id="a window"),
        pytest.param("gemma3_text", FAMILIES["gemma3_text"], {"sliding_window": 48}, id="a window in some layers"),
        pytest.param(
            "qwen2", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}, id="a rotary table"
        ),
        pytest.param("llama", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}, id="another one"),
    ],
)
def test_a_bfloat16_replica_with_a_slightly_other_model_is_refused(
    tiny_model: Path, tmp_path: Path, family: str, special: dict[str, Any], wrong: dict[str, Any], precision: str
) -> None:
    made(shrunk(family, **NARROW, **special), AutoTokenizer.from_pretrained(tiny_model), tmp_path)
    expected, allowed = of_trainer(tmp_path, precision)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    found = of_replica(tmp_path, attention="eager" if wrong else "sdpa")  # which ignores soft caps
    assert accepted(found, expected, Differences(2.0, 0.2)), "a model of 135 M parameters may differ by as much"
    assert not accepted(found, expected, allowed)


def test_where_rounding_chooses_experts_its_effect_is_not_a_bound(tiny_model: Path, tmp_path: Path) -> None:
    made(shrunk("qwen3_moe", **NARROW), AutoTokenizer.from_pretrained(tiny_model), tmp_path)
    learner = Learner(config(tmp_path, policy={"precision": "bfloat16"}))
    assert learner.probe_rounded(choose_token_ids(learner.policy.vocab_size)) is None
