"""Metrics, advantages and gradients of trainer steps on fixed batches: every loss, estimator and option that changes a number."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tests.golden import comparison, product
from tests.golden.product import Sample, Turn

VOCABULARY, GROUPS, SIZE, LONGEST = 20, 4, 4, 12
STEP = 3  # the first that is trained: tokens are up to so many versions old
# no gradient is clipped, and none is so small that the optimizer divides by its rounding errors
OPTIMIZER = {"kwargs": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}}
SEQUENCES = {"token_level_loss": False}
CORRECTED = {"use_importance_sampling_correction": True}
LEARNT = {"ppo_epochs": 2}


def bounded(kind: str) -> dict[str, Any]:
    low_high = {"truncated_importance_sampling_ratio": 1.5, "truncated_importance_sampling_ratio_min": 0.5}
    return {**CORRECTED, "truncated_importance_sampling_type": kind, **low_high}


def loss(**keys: Any) -> dict[str, Any]:
    return {"loss_fn": keys}


def grpo(**keys: Any) -> dict[str, Any]:
    return {"grpo": keys}


def estimator(name: str, loss_fn: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"grpo": {"adv_estimator": {"name": name, **keys}}, "loss_fn": loss_fn or {}}


def ppo(
    loss_fn: dict[str, Any] | None = None, value_loss_fn: dict[str, Any] | None = None, **keys: Any
) -> dict[str, Any]:
    return {"ppo": {**LEARNT, **keys}, "loss_fn": loss_fn or {}, "value_loss_fn": value_loss_fn or {}}


KL = {"reference_policy_kl_penalty": 0.1}
KL_IN_REWARD = {**KL, "use_kl_in_reward": True}
CASES: dict[str, dict[str, Any]] = {
    # what the loss is averaged over, and the clip
    "loss-tokens": {},
    "loss-sequences": loss(**SEQUENCES),
    "loss-constant-length": loss(constant_length=10),
    "loss-clip-bounds": loss(ratio_clip_min=0.1, ratio_clip_max=0.05),
    "loss-dual-clip": loss(ratio_clip_c=1.2, prev_logprobs_source="generation"),
    "loss-generation": loss(prev_logprobs_source="generation"),
    "loss-gspo": loss(**SEQUENCES, sequence_level_importance_ratios=True, ratio_clip_min=3e-4, ratio_clip_max=4e-4),
    "loss-gspo-generation": loss(
        **SEQUENCES, sequence_level_importance_ratios=True, prev_logprobs_source="generation", ratio_clip_c=1.5
    ),
    "loss-cispo": loss(use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.5, prev_logprobs_source="generation"),
    "loss-no-ratio": loss(disable_ppo_ratio=True),
    "loss-on-policy-ratio": {**loss(force_on_policy_ratio=True), "policy": {"train_global_batch_size": None}},
    "loss-proximal-recompute": loss(proximal="recompute"),
    "loss-proximal-interpolate": loss(proximal="interpolate"),
    "loss-probability-band": loss(probability_difference_mask=0.05, prev_logprobs_source="generation"),
    # importance weights
    "weights": loss(**CORRECTED),
    "weights-tis": loss(**bounded("tis")),
    "weights-icepop": loss(**bounded("icepop")),
    "weights-seq-mask-tis": loss(**bounded("seq-mask-tis")),
    "weights-no-ratio-tis": loss(**bounded("tis"), disable_ppo_ratio=True),
    "weights-cispo-icepop": loss(**bounded("icepop"), use_cispo=True),
    "weights-sequences-mean": loss(**SEQUENCES, **CORRECTED, sequence_level_importance_ratios=True),
    "weights-sequences-sum": loss(
        **SEQUENCES, **bounded("tis"), sequence_level_importance_ratios=True, sequence_is_aggregation="sum"
    ),
    "weights-proximal-tis": loss(**{**bounded("tis"), "use_importance_sampling_correction": False}, proximal="recompute"),
    # the reference policy
    "kl-k1": loss(**KL, reference_policy_kl_type="k1"),
    "kl-k2": loss(**KL, reference_policy_kl_type="k2"),
    "kl-k3": loss(**KL, reference_policy_kl_type="k3"),
    "kl-clamped": loss(**KL, kl_input_clamp_value=0.001, kl_output_clamp_value=1e-7),
    "kl-unclamped-on-policy": loss(
        **KL, kl_input_clamp_value=None, kl_output_clamp_value=None, use_on_policy_kl_approximation=True
    ),
    "kl-sequences": loss(**KL, **SEQUENCES),
    "positive-nll": loss(positive_example_nll_weight=0.3),
    # estimators of grpo
    "grpo-leave-one-out": grpo(use_leave_one_out_baseline=True),
    "grpo-not-normalized": grpo(normalize_rewards=False),
    "grpo-rloo": grpo(normalize_rewards=False, use_leave_one_out_baseline=True),
    "grpo-own-keys": estimator("grpo", normalize_rewards=False, use_leave_one_out_baseline=True),
    "grpo-clipped-advantages": grpo(advantage_clip_low=-0.5, advantage_clip_high=0.8),
    "grpo-scaled": grpo(
        reward_scaling={"enabled": True, "source_min": -1, "source_max": 1.5, "target_min": 0, "target_max": 2}
    ),
    "grpo-overlong-shaped": grpo(
        reward_shaping={
            "enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 0.7, "max_response_length": 9,
        }
    ),
    "grpo-stop-properly": grpo(reward_shaping={"enabled": True, "stop_properly_penalty_coef": 0.3}),
    "grpo-overlong-filtered": grpo(overlong_filtering=True),
    "grpo-logprob-error": grpo(seq_logprob_error_threshold=2.5),
    "gdpo": estimator("gdpo"),
    "gdpo-weights": {
        "grpo": {
            "use_leave_one_out_baseline": True,
            "normalize_rewards": False,
            "adv_estimator": {"name": "gdpo", "reward_weights": [1.0, 0.25]},
        }
    },
    "reinforce": estimator("reinforce_plus_plus", minus_baseline=False),
    "reinforce-baseline": estimator("reinforce_plus_plus"),
    "reinforce-kl-k1": estimator("reinforce_plus_plus", {**KL_IN_REWARD, "reference_policy_kl_type": "k1"}),
    "reinforce-kl-k2-to-go": estimator(
        "reinforce_plus_plus", {**KL_IN_REWARD, "reference_policy_kl_type": "k2"}, kl_to_go=True
    ),
    "reinforce-kl-k3": estimator("reinforce_plus_plus", KL_IN_REWARD),
    "opd": estimator("opd", {"disable_ppo_ratio": True, **bounded("icepop")}, teacher_model_name="TEACHER"),
    # ppo
    "ppo-gae": ppo(),
    "ppo-gae-discounted": ppo(adv_estimator={"gae_lambda": 0.8, "gae_gamma": 0.9, "normalize_advantages": False}),
    "ppo-two-lambdas": ppo(adv_estimator={"gae_lambda_value": 1.0, "gae_lambda_policy": 0.7}),
    "ppo-vapo": ppo(
        {"positive_example_nll_weight": 0.1, "ratio_clip_max": 0.28},
        adv_estimator={"gae_lambda_value": 1.0, "length_adaptive_alpha": 0.5},
    ),
    "ppo-kl-in-reward": ppo(KL_IN_REWARD),
    "ppo-value-unclipped": ppo(None, {"scale": 1.0, "cliprange": None}, critic_ppo_epochs=3),
    "ppo-value-clipped": ppo(None, {"scale": 1.0, "cliprange": 0.001}),
    "ppo-value-first": ppo(policy_training_start_step=STEP + 1),
    "ppo-raw-rewards": ppo(adv_estimator={"name": "raw_reward"}),
    "ppo-raw-rewards-whole": ppo(adv_estimator={"name": "raw_reward", "normalize_advantages": False}),
    "ppo-schedule-of-epochs": {
        **ppo(scheduler_counts="epochs"),
        "policy": {
            "scheduler": [
                {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 4}}
            ]
        },
    },
    # the policy and its optimizer
    "policy-top-p": {
        **estimator("reinforce_plus_plus", KL_IN_REWARD),
        "policy": {"generation": {"max_new_tokens": 16, "top_p": 0.9, "temperature": 0.7}},
    },
    "policy-top-k": {"policy": {"generation": {"max_new_tokens": 16, "top_k": 7}}},
    "policy-clipped-gradients": {
        "policy": {
            "max_grad_norm": 0.1,
            "optimizer": {"kwargs": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "betas": [0.8, 0.9]}},
        }
    },
    "policy-adapter": {
        **loss(**KL),
        "policy": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8, "dropout": 0.0}},
    },
    "policy-packed": {
        "policy": {"share_prompts": True, "sequence_packing": {"enabled": True, "train_mb_tokens": 64}, "logprob_chunk_size": 7}
    },
}  # fmt: skip
# By day those that hold most of the others; each term has its formula in tests/unit/trainer. `make golden` has all.
BY_DAY = {
    "loss-tokens", "loss-sequences", "loss-gspo-generation", "loss-cispo", "loss-proximal-recompute", "weights-seq-mask-tis",
    "weights-cispo-icepop", "weights-sequences-sum", "kl-k2", "kl-clamped", "positive-nll", "grpo-own-keys", "grpo-overlong-shaped",
    "grpo-logprob-error", "gdpo-weights", "reinforce-kl-k2-to-go", "opd", "ppo-vapo", "ppo-kl-in-reward", "ppo-value-unclipped",
    "ppo-schedule-of-epochs", "policy-top-p", "policy-adapter", "policy-packed",
}  # fmt: skip
# On episodes of several calls, where it is another thing: means over sequences, corrections and penalties of tokens.
EPISODES = (
    "loss-tokens", "loss-sequences", "loss-proximal-interpolate", "weights-tis", "kl-k3", "grpo-leave-one-out", "gdpo",
    "reinforce-kl-k3", "opd",
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Path]:
    """A policy, and a teacher of the same size, both with weights of numpy's generator, which is the same in every version."""
    folder = tmp_path_factory.mktemp("models")
    made = []
    for seed, name in enumerate(("policy", "teacher")):
        sizes = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        }  # fmt: skip
        model, rng = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)), np.random.default_rng(seed)
        with torch.no_grad():
            for name_of, parameter in model.named_parameters():
                drawn = rng.normal(0, 0.25, parameter.shape).astype(np.float32)
                parameter.copy_(torch.from_numpy(1 + 0.1 * drawn if "norm" in name_of else drawn))
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / name)
        made.append(folder / name)
    return made[0], made[1]


def configured(case: str, models: tuple[Path, Path]) -> dict[str, Any]:
    given = CASES[case]
    algorithm = next((name for name in ("ppo", "grpo") if name in given), "grpo")
    common = {"num_prompts_per_step": GROUPS, "num_generations_per_prompt": SIZE}
    usual = {"use_leave_one_out_baseline": False} if algorithm == "grpo" else {}
    section = {**common, **usual, **given.get(algorithm, {})}
    own = section.get("adv_estimator", {})
    if "teacher_model_name" in own:
        section["adv_estimator"] = {**own, "teacher_model_name": str(models[1])}
    policy = {
        "model_name": str(models[0]),
        "precision": "float32",
        "train_global_batch_size": GROUPS * SIZE // 2,
        "train_micro_batch_size": 3,
        "max_total_sequence_length": 64,
        "max_grad_norm": 1e9,
        "generation": {"max_new_tokens": 16},
        "optimizer": OPTIMIZER,
    }
    sections = {
        algorithm: section,
        "loss_fn": {"reference_policy_kl_penalty": 0, **given.get("loss_fn", {})},
        "policy": {**policy, **given.get("policy", {})},
        "trainer": {"device": "cpu", "num_threads": 1},
    }
    if algorithm == "ppo":
        sections["value_loss_fn"] = given["value_loss_fn"]
        sections["value"] = {"optimizer": OPTIMIZER}
    return sections


@functools.cache
def samples(step: int) -> list[Sample]:
    """A batch of completions: some cut off, some with tokens of the environment, some that count less or not at all."""
    rng = np.random.default_rng(100 + step)
    found = []
    for group in range(GROUPS):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, 9))).tolist()
        for index in range(SIZE):
            length = int(rng.integers(1, LONGEST + 1))
            own = (rng.random(length) < 0.9).astype(int)
            own[-1] = 1
            versions = np.sort(rng.integers(0, STEP + 1, length)) if group else np.full(length, step)
            reward = float(rng.normal()) if group % 2 else float(rng.integers(0, 2))
            found.append(
                Sample(
                    group,
                    index,
                    reward,
                    {"first": float(rng.normal()), "second": float(rng.integers(0, 2))},
                    float(rng.choice([1.0, 1.0, 1.0, 0.5, 0.0])),
                    prompt,
                    rng.integers(0, VOCABULARY, length).tolist(),
                    np.where(own > 0, -rng.uniform(1.0, 5.0, length), 0.0).tolist(),
                    own.tolist(),
                    versions.tolist(),
                    truncated=bool(rng.random() < 0.25),
                )
            )
    return found


@functools.cache
def episodes(step: int) -> list[Sample]:
    """A batch of episodes: chains, branches, several roots, calls that are not trained."""
    rng = np.random.default_rng(200 + step)
    found = []
    for group in range(GROUPS):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, 9))).tolist()
        for index in range(SIZE):
            turns: list[Turn] = []
            for number in range(int(rng.integers(1, 6))):
                parent = number - 1 if rng.random() < 0.5 else int(rng.integers(-1, number))
                length = int(rng.integers(1, 5))
                more = rng.integers(0, VOCABULARY, int(rng.integers(0, 4)) + (parent < 0)).tolist()
                turns.append(
                    Turn(
                        parent,
                        more if number else prompt,
                        rng.integers(0, VOCABULARY, length).tolist(),
                        (-rng.uniform(1.0, 5.0, length)).tolist(),
                        int(rng.integers(0, STEP + 1)),
                        trained=number == 0 or bool(rng.random() < 0.8),
                    )
                )
            components = {"first": float(rng.normal()), "second": float(rng.integers(0, 2))}
            truncated = bool(rng.random() < 0.25)
            found.append(Sample(group, index, float(rng.normal()), components, truncated=truncated, turns=turns))
    return found


@contextmanager
def gradients() -> Iterator[list[Any]]:
    """Of each optimizer step meanwhile: of each tensor's gradient the product with a fixed direction."""
    found: list[Any] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        products = []
        for number, gradient in enumerate(taken):
            direction = torch.from_numpy(np.random.default_rng(number).normal(size=gradient.shape))
            products.append((gradient.double() * direction).sum().item())
        found.append(products)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def trained(case: str, models: tuple[Path, Path], *, of_episodes: bool = False) -> dict[str, Any]:
    make = episodes if of_episodes else samples
    with gradients() as found:
        steps = product.train(
            configured(case, models), [make(STEP), make(STEP + 1)], first=STEP, max_age=2 if "mask" in case else STEP
        )
    return {
        "gradients": found,
        "steps": [
            {"metrics": metrics, **{name: column.tolist() for name, column in columns.items()}}
            for metrics, columns in steps
        ],
    }


@pytest.mark.parametrize(
    "case", [case if case in BY_DAY else pytest.param(case, marks=pytest.mark.nightly) for case in CASES]
)
def test_steps_on_completions(case: str, models: tuple[Path, Path]) -> None:
    comparison.check_numbers(f"learning/{case}.json", trained(case, models))


@pytest.mark.parametrize("case", EPISODES)
def test_steps_on_episodes(case: str, models: tuple[Path, Path]) -> None:
    comparison.check_numbers(f"learning/episodes-{case}.json", trained(case, models, of_episodes=True))
