"""A learner that trains an adapter (`policy.lora_cfg`) on a model that stays as it is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import config, random_batch, weights
from tests.support.tiny_family import made, shrunk

IDS = np.arange(20, dtype=np.int32)


def adapted(model: Path, *, loss_fn: dict[str, Any] | None = None, **lora: Any) -> Config:
    return config(model, policy={"lora_cfg": {"enabled": True, "dim": 4, **lora}}, loss_fn=loss_fn or {})


def logprobs(model: Any) -> np.ndarray:
    """Of the tokens of `IDS` after the first, by transformers alone."""
    ids = torch.from_numpy(IDS.astype(np.int64))
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[None]).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, ids[1:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Learner, Path]:
    """A learner after two steps, and what it saved."""
    learner, folder = (
        Learner(adapted(tiny_model, target_modules=["q_proj", "down_proj"])),
        tmp_path_factory.mktemp("adapter"),
    )
    for seed in range(2):
        train_step(learner, random_batch(5, seed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.snapshot()(folder)
    return learner, folder


def test_only_the_layers_that_are_named_change(tiny_model: Path, trained: tuple[Learner, Path]) -> None:
    before, after = weights(Learner(config(tiny_model))), weights(trained[0])
    assert list(before) == list(after) == [name for name, _ in trained[0].policy.weight_shapes()]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj.weight" in name or "down_proj.weight" in name}
    a_and_b = 2 * 4 * sum(sum(after[name].shape) for name in changed)
    assert sum(tensor.numel() for tensor in trained[0].policy_optimizer.moments().values() if tensor.dim()) == a_and_b


def test_a_new_adapter_changes_nothing(tiny_model: Path) -> None:
    np.testing.assert_array_equal(Learner(adapted(tiny_model)).probe(IDS), Learner(config(tiny_model)).probe(IDS))


def test_the_policy_is_saved_merged_with_its_adapter_beside_it(tiny_model: Path, trained: tuple[Learner, Path]) -> None:
    from peft import PeftModel

    learner, folder = trained
    merged = AutoModelForCausalLM.from_pretrained(folder / "policy")
    sent = weights(learner)
    assert all(torch.equal(tensor, sent[name]) for name, tensor in merged.named_parameters())
    np.testing.assert_allclose(logprobs(merged), learner.probe(IDS), atol=2e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert np.abs(logprobs(base) - learner.probe(IDS)).max() > 1e-3
    np.testing.assert_allclose(
        logprobs(PeftModel.from_pretrained(base, folder / "policy" / "adapter")), learner.probe(IDS), atol=2e-5
    )


def test_going_on_from_a_checkpoint_gives_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    settings = adapted(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.1}, init="uniform")
    straight = Learner(settings)
    train_step(straight, random_batch(5))
    straight.snapshot()(tmp_path)
    resumed = Learner(settings, tmp_path)
    for seed in range(1, 3):
        assert train_step(straight, random_batch(5, seed)) == train_step(resumed, random_batch(5, seed))
    ours, theirs = weights(straight), weights(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_reference_policy_is_the_base_without_a_copy_of_it(tiny_model: Path) -> None:
    learner = Learner(adapted(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.1}))
    whole = Learner(config(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.1}))
    assert learner.reference is learner.policy
    for seed in range(2):
        ours, theirs = random_batch(5, seed), random_batch(5, seed)
        metrics = train_step(learner, ours)
        train_step(whole, theirs)
        np.testing.assert_allclose(ours.ref_logprobs, theirs.ref_logprobs, atol=1e-6)
    assert metrics["kl_penalty"] > 0, "the policy is no longer its reference"


def test_gradients_are_clipped_and_reported_as_of_a_whole_model(tiny_model: Path) -> None:
    """A step of the adapter by hand: B's gradient alone, since B is 0."""
    settings = adapted(tiny_model, target_modules=["q_proj"])
    learner = Learner(settings)
    norm = train_step(learner, random_batch(5))["grad_norm"]
    whole = Learner(config(tiny_model))
    whole.policy_optimizer.step = lambda norm: None  # type: ignore[method-assign]  # keeps the gradients
    train_step(whole, random_batch(5))
    drawn = dict(Learner(settings).policy.adapter.tensors())
    squares = 0.0
    for name, parameter in whole.policy.model.named_parameters():
        if name.endswith("q_proj.weight"):
            a = drawn[f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"]
            squares += float((32 / 4 * parameter.grad @ a.T).square().sum())
    assert norm == pytest.approx(squares**0.5, rel=1e-4)


def test_dropout_is_of_training_alone_and_repeats(tiny_model: Path, tmp_path: Path) -> None:
    dropping = Learner(adapted(tiny_model, dropout=0.5))
    train_step(dropping, random_batch(5))  # B is no longer 0
    dropping.snapshot()(tmp_path)
    np.testing.assert_array_equal(dropping.probe(IDS), dropping.probe(IDS))
    again, plain = (Learner(adapted(tiny_model, dropout=dropout), tmp_path) for dropout in (0.5, 0.0))
    batches = [random_batch(5, 1), random_batch(5, 1)]
    first, without = train_step(dropping, batches[0]), train_step(plain, batches[1])
    np.testing.assert_allclose(batches[0].old_logprobs, batches[1].old_logprobs, atol=1e-6)
    assert first["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-3)
    torch.rand(7)
    assert train_step(again, random_batch(5, 1)) == first


def test_dropout_is_the_same_in_a_layer_that_is_computed_again(tiny_model: Path) -> None:
    lora = {"enabled": True, "dim": 4, "dropout": 0.5}
    kept, recomputed = (
        train_step(
            Learner(config(tiny_model, policy={"lora_cfg": lora, "activation_checkpointing": again})), random_batch(5)
        )
        for again in (False, True)
    )
    assert kept["grad_norm"] == pytest.approx(recomputed["grad_norm"], rel=1e-5)


def test_what_is_no_adapter_is_refused(tiny_model: Path, trained: tuple[Learner, Path]) -> None:
    with pytest.raises(ValidationError, match=r"lora_cfg\.dim"):
        adapted(tiny_model, dim=0)
    with pytest.raises(ServiceError, match=r"'lm_head'.*down_proj"):
        Learner(adapted(tiny_model, target_modules=["lm_head"]))
    with pytest.raises(ServiceError, match=r"not the one that policy\.lora_cfg"):
        Learner(adapted(tiny_model, dim=3), trained[1])


def test_experts_keep_their_names_beside_adapted_layers(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first layer has no experts, the second has some, and shared ones: PEFT would take all of these for its experts."""
    made(shrunk("deepseek_v2"), AutoTokenizer.from_pretrained(tiny_model), tmp_path)
    before = weights(Learner(config(tmp_path)))
    assert "experts" not in caplog.text
    learner = Learner(adapted(tmp_path, target_modules=["up_proj"]))
    assert "are those of experts, which have no adapter" in caplog.text
    train_step(learner, random_batch(5))
    after = weights(learner)
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"}


def test_a_value_model_is_trained_whole_beside_an_adapter(tiny_model: Path) -> None:
    settings = config(
        tiny_model,
        ppo={"num_prompts_per_step": 1, "num_generations_per_prompt": 4},
        policy={"lora_cfg": {"enabled": True}},
    )
    learner = Learner(settings)
    train_step(learner, random_batch(4))
    assert all(parameter.requires_grad for parameter in learner.value.root.parameters())
    assert len(learner.value_optimizer.moments()) == 3 * len(list(learner.value.root.parameters()))
