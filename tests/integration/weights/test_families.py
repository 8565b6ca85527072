"""Model families: exact through the learner, a refit and a real engine, or refused."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.probe import choose_token_ids, differences, tolerance
from headrace_services.refit.sender import WeightSender
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.network.policy_model import NOT_REFITTED_FAMILIES, check_refit
from tests.integration.trainer.learner_cases import config
from tests.support.engines import PATIENCE_S, TIMELINE, TOLERANCE, Engines, settings
from tests.support.family_engine import try_family
from tests.support.forks import ROOT, fork
from tests.support.learner_source import LearnerSource
from tests.support.tiny_family import CAPS, made, shrunk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NARROW = {"hidden_size": 64, "head_dim": 32}  # where a wrong model stands out from rounding
# What is special about it. All are in the table of docs/architecture.md.
EXACT: dict[str, dict[str, Any]] = {
    "cohere": {},
    "ernie4_5": {},
    "exaone4": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm4": {},
    "gpt2": {},
    "gptj": {},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "llama": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "nemotron": {},
    "olmoe": {},
    "phi3": {},
    "qwen2_moe": {},
    "qwen3": {},
    "stablelm": {},
}
# The tensor that a refit does not reach, by the engine's name
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "phi": ({}, "lm_head.bias"),
    "gpt_oss": ({}, "model.layers.0.attn.sinks"),
    "glm4_moe": ({"head_dim": 32}, "model.layers.1.mlp.experts.routed_experts.e_score_correction_bias"),
}


def test_the_table_of_families_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| family | what is special | here |")[2].partition("\n\n")[0]
    rows = {name: line.split("|")[3] for line in table.splitlines() for name in re.findall("`([a-z0-9_]+)`", line)}
    assert {name for name, verdict in rows.items() if verdict.strip() == "exact"} == set(EXACT)
    refused = {name for name, verdict in rows.items() if "refused by its configuration" in verdict}
    assert refused == {*REFUSED, *NOT_REFITTED_FAMILIES}


def tried(
    family: str, special: dict[str, Any], tiny_model: Path, folder: Path, engines_class: str | None = None
) -> dict[str, Any]:
    """What a learner and an engine in one process say of a model of this family."""
    made(shrunk(family, **special), AutoTokenizer.from_pretrained(tiny_model), folder)
    if engines_class is not None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [engines_class]}))
    answer, log = folder / "answer.json", folder / "log"
    process = fork(try_family, str(folder), str(answer), log=log, kind="engine")
    process.wait(PATIENCE_S)
    assert answer.exists(), log.read_text()[-4000:]
    return dict(json.loads(answer.read_text()))


@pytest.mark.nightly  # an engine for each
@pytest.mark.parametrize("family", EXACT)
def test_a_family_is_exact(tiny_model: Path, tmp_path: Path, family: str) -> None:
    found = tried(family, EXACT[family], tiny_model, tmp_path)
    assert found["initial"] < TOLERANCE
    assert found["refitted"] < TOLERANCE
    check_refit(config(tmp_path))


@pytest.mark.nightly  # an engine for each
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_with_a_tensor_beyond_a_refit_is_refused(tiny_model: Path, tmp_path: Path, family: str) -> None:
    special, tensor = REFUSED[family]
    found = tried(family, special, tiny_model, tmp_path)
    assert found["initial"] < TOLERANCE
    assert found["refused"].endswith(f"nothing, for the engine's {tensor}")
    with pytest.raises(ServiceError, match="doesn't reload"):
        check_refit(config(tmp_path))


@pytest.mark.nightly  # an engine for each
@pytest.mark.parametrize("bias", [True, False])
def test_of_phimoe_the_engine_leaves_out_a_bias_that_it_needs(tiny_model: Path, tmp_path: Path, bias: bool) -> None:
    special = {"attention_bias": True, "lm_head_bias": bias}  # its published models have both
    found = tried("phimoe", special, tiny_model, tmp_path, "PhiMoEForCausalLM")
    assert (found["initial"] > TOLERANCE) == bias
    if bias:
        assert found["refitted"] > TOLERANCE  # the refit itself was complete
    else:
        assert found["refused"].endswith("nothing, for the engine's lm_head.bias")
    with pytest.raises(ServiceError, match="leaves out of its logits"):
        check_refit(config(tmp_path))


@pytest.mark.nightly  # an engine for each
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_of_ministral3_the_engine_does_not_scale_later_queries(tiny_model: Path, tmp_path: Path, beta: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    special = {"rope_parameters": {**rope, "original_max_position_embeddings": 32, "llama_4_scaling_beta": beta}}
    found = tried("ministral3", special, tiny_model, tmp_path)
    assert (found["initial"] > TOLERANCE) == bool(beta)
    with pytest.raises(ServiceError, match="vLLM doesn't") if beta else nullcontext():
        check_refit(config(tmp_path))


@pytest.mark.asyncio
@pytest.mark.nightly  # an engine for each
@pytest.mark.parametrize(("family", "wrong"), [("gemma3_text", None), ("gemma2", None), ("gemma2", "sdpa")])
async def test_an_engine_in_bfloat16_differs_by_rounding_alone(
    redis_url: str, run_id: str, limits: Limits, tiny_model: Path, tmp_path: Path, family: str, wrong: str | None
) -> None:
    made(
        shrunk(family, **NARROW, **(CAPS if family == "gemma2" else {})),
        AutoTokenizer.from_pretrained(tiny_model),
        tmp_path,
    )
    chosen = config(tmp_path, policy={"precision": "bfloat16"})
    learner = Learner(chosen)
    if wrong:
        learner.policy.model.set_attn_implementation(wrong)  # which ignores soft caps
    probe = choose_token_ids(learner.policy.vocab_size, 96)
    logprobs, rounded = learner.probe(probe), learner.probe_rounded(probe)
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
