"""On-policy distillation on real models: what the policy is compared with, who may teach it, and that it learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import config, experiences, shaken
from services.trainer.network.policy import Policy
from services.trainer.network.projection import Warp
from services.trainer.network.rows import Layout, MicroBatch, build
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.sampler import Sampler, problems
from benchmarks.staleness import experiences as drawn
from headrace.config import Config
from headrace.errors import ServiceError
from services.trainer.learning.learner import Learner

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


def said(name: Path, settings: Config, batch: list[Any]) -> np.ndarray:
    """Log-probabilities of the policy tokens of `batch`, one trajectory after the other, by the model in `name`."""
    rows = build(
        [e.tokens for e in batch],
        MicroBatch(tuple(((i,),) for i in range(len(batch)))),
        Layout.of(settings.policy, training=False),
    )
    with torch.no_grad():
        found: np.ndarray = Policy(settings, name).logprobs(rows, Warp()).curr.numpy()
    return found


def test_a_step_compares_with_the_teacher_and_its_penalty_with_the_reference_policy(
    tiny_model: Path, other_model: Path
) -> None:
    settings = distilled(tiny_model, other_model, loss_fn={"reference_policy_kl_penalty": 0.5})
    learner, batch = Learner(settings), experiences(8)
    assert learner.step(batch)["kl_penalty"] == pytest.approx(0, abs=1e-9), "the reference policy is the policy itself"
    teacher, reference = (said(name, settings, batch) for name in (other_model, tiny_model))
    assert np.abs(teacher - reference).max() > 0.1
    for name, expected in (("teacher", teacher), ("ref", reference)):
        found = np.concatenate([getattr(trace, name) for trace in learner.traces])
        np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(
        np.concatenate([trace.advantages for trace in learner.traces]), teacher - reference, atol=4e-5
    )
    assert learner.step(batch)["kl_penalty"] > 0, "the policy has moved away from the reference policy"


def test_without_a_penalty_no_reference_policy_is_loaded(tiny_model: Path, other_model: Path) -> None:
    learner = Learner(distilled(tiny_model, other_model, loss_fn={"reference_policy_kl_penalty": 0}))
    learner.step(experiences(8))
    assert all(trace.ref is None and trace.teacher is not None for trace in learner.traces)


def test_one_completion_of_a_prompt_is_enough(tiny_model: Path, other_model: Path) -> None:
    estimator = {"name": "opd", "teacher_model_name": str(other_model)}
    keys = {"num_prompts_per_step": 8, "num_generations_per_prompt": 1, "adv_estimator": estimator}
    metrics = Learner(config(tiny_model, grpo=keys)).step(experiences(8))
    assert np.isfinite(metrics[GAP])


def test_a_teacher_of_a_smaller_vocabulary_is_refused(tiny_model: Path, other_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.float32)
    model.resize_token_embeddings(19)
    model.save_pretrained(other_model)
    with pytest.raises(
        ServiceError, match=r"teacher_model_name '.*other' has a vocabulary of 19, the policy '.*' one of 20"
    ):
        Learner(distilled(tiny_model, other_model))


def test_a_teacher_whose_embedding_is_only_padded_further_teaches_the_same(tiny_model: Path, other_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.float32)
    model.resize_token_embeddings(32, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[20:] = 0
    model.save_pretrained(other_model)
    assert Learner(distilled(tiny_model, other_model)).step(experiences(8))[GAP] != 0


def test_a_teacher_with_other_token_ids_is_refused(tiny_model: Path, other_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokens = tokenizer.get_vocab()
    tokens["1"], tokens["2"] = tokens["2"], tokens["1"]
    swapped = type(tokenizer)(vocab=tokens, merges=[], eos_token="<eos>", pad_token="<pad>", unk_token="<pad>")
    swapped.save_pretrained(other_model)
    with pytest.raises(
        ServiceError,
        match=r"tokenizers of grpo.*teacher_model_name '.*other' and of the policy, '.*', differ: '1' is 7",
    ):
        Learner(distilled(tiny_model, other_model))


@pytest.mark.slow
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
        sampler.load(dict(learner.iter_weights()))
        completions = drawn(sampler.draw(next(questions), 8, seed=step), 8, age=0)
        divergence.append(-learner.step([dataclasses.replace(e, reward=0.0) for e in completions])[GAP])
    assert np.mean(divergence[-4:]) < 0.7 * np.mean(divergence[:4]), divergence
