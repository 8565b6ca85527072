"""FLOPs against the matrices that a model of the architecture really has, and against what torch counts in a step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.network.packing import Work
from headrace_services.trainer.telemetry.throughput import DATA_SHEETS, Architecture, find_peak
from tests.integration.trainer.learner_cases import config as learner_config
from tests.support.trainer import batch, trajectory

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 112}


def dense(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(**settings)


@pytest.mark.parametrize(
    "config",
    [
        dense("Qwen2Config", **GROUPED),
        dense("Qwen3Config", **GROUPED, head_dim=32),
        dense("LlamaConfig", **GROUPED),
        dense("MistralConfig", **GROUPED),
        dense("Gemma2Config", **GROUPED, head_dim=24),
        dense("Phi3Config", **GROUPED, pad_token_id=0),
        dense("GPTNeoXConfig", **SMALL, intermediate_size=112),
    ],
    ids=lambda config: config.model_type,
)
def test_every_matrix_of_the_model_is_counted_once(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    found = Architecture.of(config)
    assert found is not None
    assert found.layer_weights + found.vocabulary_weights == matrices


def test_a_mixture_counts_the_experts_that_a_token_goes_through() -> None:
    config = transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0]
    )
    found = Architecture.of(config)
    assert found is not None
    attention = 2 * 64 * 64 + 2 * 64 * 32
    assert found.layer_weights == 3 * attention + 3 * 64 * 112 + 2 * (3 * 64 * 24 * 2 + 8 * 64)


def sequences(lengths: list[int]) -> Work:
    """Of these alone, without padding, each place before a policy token."""
    return Work(sum(lengths), sum(lengths), sum(length**2 / 2 for length in lengths))


def test_attention_grows_with_the_square_of_the_length() -> None:
    found = Architecture.of(transformers.LlamaConfig(**GROUPED))
    assert found is not None
    per_token = 6 * (found.layer_weights + found.vocabulary_weights)
    assert found.training_flops(sequences([10, 20])) == per_token * 30 + 6 * 3 * 64 * (100 + 400)


def test_frozen_weights_take_no_gradients() -> None:
    trained, frozen = (Architecture.of(transformers.LlamaConfig(**GROUPED), frozen=frozen) for frozen in (False, True))
    assert trained is not None
    assert frozen is not None
    weights = trained.layer_weights + trained.vocabulary_weights
    assert trained.training_flops(sequences([30])) - frozen.training_flops(sequences([30])) == 2 * weights * 30


def test_whole_sequences_have_nemo_rls_formula_for_llama() -> None:
    hidden, layers, groups, heads, width, vocabulary, length = 64, 3, 2, 4, 112, 97, 50
    theirs = (
        length * layers * hidden**2
        * (12 + 12 * groups / heads + 18 * width / hidden + 6 * length / hidden + 6 * vocabulary / (layers * hidden))
    )  # fmt: skip
    found = Architecture.of(transformers.LlamaConfig(**GROUPED))
    assert found is not None
    assert found.training_flops(sequences([length])) == pytest.approx(theirs, rel=1e-12)


GROUPS, PROMPT, COMPLETIONS = 2, 9, (4, 11, 6)


def counted(learner: Learner) -> tuple[int, int]:
    """FLOPs that torch counts in a step: of attention's products, and of all others."""
    trajectories = [
        trajectory([1 + group] * PROMPT, [3] * length, group=str(group), index=index)
        for group in range(GROUPS)
        for index, length in enumerate(COMPLETIONS)
    ]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        train_step(learner, batch(trajectories, [1.0, 0.0, 2.0, 1.0, 3.0, 1.0]))
    by_kind = counter.get_flop_counts()["Global"]
    attention = by_kind[torch.ops.aten.bmm]
    return attention, sum(by_kind.values()) - attention


PACKED = {
    "max_total_sequence_length": 24,
    "sequence_packing": {"enabled": True, "train_mb_tokens": 48, "sequence_length_round": 1},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"train_micro_batch_size": 4},
    "packed": PACKED,
    "shared": {"share_prompts": True, "train_micro_batch_size": 3},
    "shared and packed": {"share_prompts": True, **PACKED},
    "chunked": {"logprob_chunk_size": 5},
    "recomputed": {"activation_checkpointing": True},
    "all": {"share_prompts": True, **PACKED, "logprob_chunk_size": 5, "activation_checkpointing": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_counted_is_what_a_step_computes(layout: str, tiny_model: Path) -> None:
    settings = learner_config(tiny_model, policy=LAYOUTS[layout])
    learner = Learner(settings)
    attention, products = counted(learner)
    found, work = Architecture.of(learner.policy.model.config), learner.work
    assert found is not None
    assert work is not None
    again = {"recompute": settings.policy.recomputes("cpu"), "chunked": settings.policy.chunk_size("cpu") is not None}
    assert found.training_flops(Work(work.places, work.targets), **again) == products
    # torch counts causal attention whole, of which a model needs half; but what follows a shared prompt sees all of that
    whole = attention / found.training_flops(Work(pairs=1), **again)
    after_shared = GROUPS * PROMPT * sum(COMPLETIONS) if settings.policy.share_prompts else 0
    assert work.pairs == pytest.approx((whole + after_shared) / 2, rel=1e-12)


def test_passes_without_gradients_are_not_of_the_training(tiny_model: Path) -> None:
    """Their time is not either: it is `policy_and_reference_logprobs`."""
    one = Learner(learner_config(tiny_model))
    reference = Learner(learner_config(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.1}))
    assert counted(reference)[1] > counted(one)[1]
    assert one.work is not None
    assert one.work == reference.work


@pytest.mark.parametrize(
    "config",
    [
        dense("Qwen2Config", **GROUPED),
        dense("Gemma2Config", **GROUPED, head_dim=24),
        dense("Phi3Config", **GROUPED, pad_token_id=0),
        dense("Starcoder2Config", **GROUPED),
        dense("Olmo2Config", **GROUPED),
        dense("Glm4Config", **GROUPED, head_dim=16, pad_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_what_a_layer_computes_again(config: Any) -> None:
    """Not the product that it ends with, unless a norm follows."""
    model = AutoModelForCausalLM.from_config(config).eval()
    names = set(model._no_split_modules)
    for layer in (module for module in model.modules() if type(module).__name__ in names):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(2, 10, dtype=torch.int64), use_cache=False).logits.sum().backward()
    by_kind = counter.get_flop_counts()["Global"]
    found = Architecture.of(config)
    assert found is not None
    work = Work(places=20, targets=20)
    assert sum(by_kind.values()) - by_kind[torch.ops.aten.bmm] == found.training_flops(work, recompute=True)


def test_an_unknown_architecture_has_no_formula() -> None:
    assert Architecture.of(transformers.MambaConfig()) is None


def test_a_cpu_is_measured_and_says_so() -> None:
    peak = find_peak(torch.device("cpu"), "float32")
    assert peak.tflops > 0
    assert "measured" in peak.source


def test_a_gpu_is_the_one_with_the_longest_name_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert find_peak(torch.device("cuda"), "bfloat16").tflops == DATA_SHEETS["NVIDIA H100 PCIe"]["bfloat16"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert find_peak(torch.device("cuda"), "bfloat16").tflops == 989.4
