"""On-policy distillation on real models: what the policy is compared with, who may teach it, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel
from tests.integration.trainer.learner_cases import config, random_batch, shaken, unpacked
from tests.support.sampling import Sampler, batch_of, problems

GAP = "on_policy_distillation/teacher_student_logprob_gap_mean"


def distilled(student: Path, teacher: Path, *, lr: float = 1e-4, **sections: dict[str, Any]) -> Config:
    estimator = {"name": "opd", "teacher_model_name": str(teacher)}
    return config(
        student,
        grpo={"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "adv_estimator": estimator},
        policy={"optimizer": {"kwargs": {"lr": lr}}},
        **sections,
    )


@pytest.fixture
def other_model(tiny_model: Path, tmp_path: Path) -> Path:
    return shaken(tiny_model, tmp_path / "other")


def said(name: Path, settings: Config, batch: Batch) -> np.ndarray:
    """Log-probabilities [N] of the policy tokens of `batch` by the model in `name`."""
    with torch.no_grad():
        output = PolicyModel(settings, name).forward(unpacked(batch.trajectories), LogitsWarper())
    found: np.ndarray = output.logprobs.numpy()
    return found


def test_a_step_compares_with_the_teacher_and_the_reference_policy(tiny_model: Path, other_model: Path) -> None:
    settings = distilled(tiny_model, other_model, loss_fn={"reference_policy_kl_penalty": 0.5})
    learner, batch = Learner(settings), random_batch(8)
    assert train_step(learner, batch)["kl_penalty"] == pytest.approx(0, abs=1e-9), (
        "the reference policy is the policy itself"
    )
    teacher, reference = (said(name, settings, batch) for name in (other_model, tiny_model))
    assert np.abs(teacher - reference).max() > 0.1
    np.testing.assert_allclose(batch.teacher_logprobs, teacher, atol=2e-5)
    np.testing.assert_allclose(batch.ref_logprobs, reference, atol=2e-5)
    np.testing.assert_allclose(batch.advantages, teacher - reference, atol=4e-5)
    moved = train_step(learner, random_batch(8))["kl_penalty"]
    assert moved > 0, "the policy has moved away from the reference policy"


def test_without_a_penalty_no_reference_policy_is_loaded(tiny_model: Path, other_model: Path) -> None:
    learner = Learner(distilled(tiny_model, other_model, loss_fn={"reference_policy_kl_penalty": 0}))
    batch = random_batch(8)
    train_step(learner, batch)
    assert batch.ref_logprobs is None
    assert batch.teacher_logprobs is not None


def test_one_completion_of_a_prompt_is_enough(tiny_model: Path, other_model: Path) -> None:
    estimator = {"name": "opd", "teacher_model_name": str(other_model)}
    keys = {"num_prompts_per_step": 8, "num_generations_per_prompt": 1, "adv_estimator": estimator}
    metrics = train_step(Learner(config(tiny_model, grpo=keys)), random_batch(8))
    assert np.isfinite(metrics[GAP])


def test_a_teacher_of_a_smaller_vocabulary_is_refused(tiny_model: Path, other_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.float32)
    model.resize_token_embeddings(19)
    model.save_pretrained(other_model)
    with pytest.raises(ServiceError, match=r"teacher_model_name '.*other'.*19.*policy.*20"):
        Learner(distilled(tiny_model, other_model))


def test_a_teacher_with_a_longer_padded_embedding_teaches_the_same(tiny_model: Path, other_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.float32)
    model.resize_token_embeddings(32, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[20:] = 0
    model.save_pretrained(other_model)
    assert train_step(Learner(distilled(tiny_model, other_model)), random_batch(8))[GAP] != 0


def test_a_teacher_with_other_token_ids_is_refused(tiny_model: Path, other_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokens = tokenizer.get_vocab()
    tokens["1"], tokens["2"] = tokens["2"], tokens["1"]
    swapped = type(tokenizer)(vocab=tokens, merges=[], eos_token="<eos>", pad_token="<pad>", unk_token="<pad>")
    swapped.save_pretrained(other_model)
    with pytest.raises(ServiceError, match=r"tokenizers.*teacher_model_name '.*other'.*differ.*'1' is 7"):
        Learner(distilled(tiny_model, other_model))


@pytest.mark.nightly  # what a step computes is compared above and recorded; that recipes learn is nightly
@pytest.mark.timeout(900)  # the model may be in the making
def test_a_policy_learns_from_its_teacher_without_a_reward(warm_model: Path, tmp_path: Path) -> None:
    """The warmed-up model's weights are shaken, and it is taught by the model it was: the divergence from its teacher, on what it
    writes itself, falls. All rewards are 0."""
    student, teacher = tmp_path / "student", warm_model
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.6)
    model.save_pretrained(student)
    AutoTokenizer.from_pretrained(warm_model).save_pretrained(student)
    estimator = {"name": "opd", "teacher_model_name": str(teacher)}
    keys = {"num_prompts_per_step": 32, "num_generations_per_prompt": 8, "adv_estimator": estimator}
    lr = {"optimizer": {"kwargs": {"lr": 2e-4}}}
    learner = Learner(config(student, grpo=keys, policy=lr, loss_fn={"reference_policy_kl_penalty": 0}))
    sampler, questions = Sampler(student, 6), problems(seed=0, count=32)
    divergence = []
    for step in range(20):
        sampler.load(dict(learner.policy.weights()))
        batch = batch_of(sampler.draw(next(questions), 8, seed=step), 8)
        batch.rewards[:] = 0
        divergence.append(-train_step(learner, batch)[GAP])
    assert np.mean(divergence[-4:]) < 0.7 * np.mean(divergence[:4]), divergence
