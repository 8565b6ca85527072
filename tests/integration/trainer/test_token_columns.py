"""What a step writes of each token: the loss adds up, whatever the form of the term, the mean, the split and the algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.run.samples import MaskReason
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import REWARD_IS_ADVANTAGE, config, random_batch, sampled, weights
from tests.support.episodes import random_episodes
from tests.support.trainer import batch

FORMS: dict[str, dict[str, Any]] = {
    "ratio": {"ratio_clip_c": 1.5, "use_importance_sampling_correction": True},
    "cispo": {"use_cispo": True},
    "forced": {"force_on_policy_ratio": True},
    "reinforce": {"disable_ppo_ratio": True},
}
MEANS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "sequences": {"token_level_loss": False},
    "constant": {"constant_length": 9},
}
# many optimizer steps, of several micro-batches each
SPLIT = {"train_micro_batch_size": 2, "train_global_batch_size": 4}


def add_up(given: Batch, metrics: dict[str, float]) -> None:
    """The law: the losses of all tokens of the step are the reported loss, of the policy and of the value model."""
    assert given.token_losses is not None
    total = float(np.nansum(given.token_losses.astype(np.float64)))
    assert total == pytest.approx(metrics["loss"], abs=1e-6)
    assert total != 0
    if "critic/loss" in metrics:
        assert given.token_value_losses is not None
        of_values = float(np.nansum(given.token_value_losses.astype(np.float64)))
        assert of_values == pytest.approx(metrics["critic/loss"], abs=1e-6)
        assert of_values > 1e-4


@pytest.mark.parametrize(
    ("form", "mean"), [(form, mean) for form in FORMS for mean in MEANS if (form, mean) != ("cispo", "sequences")]
)
def test_token_losses_add_up_to_the_reported_loss(tiny_model: Path, form: str, mean: str) -> None:
    several = {} if form == "forced" else {"train_global_batch_size": 4}
    settings = config(
        tiny_model,
        loss_fn={**FORMS[form], **MEANS[mean], "reference_policy_kl_penalty": 0.1, "positive_example_nll_weight": 0.1},
        policy={"train_micro_batch_size": 2, **several},
    )
    given = random_batch(8)
    add_up(given, train_step(Learner(settings), given))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_with_several_epochs_the_losses_still_add_up(tiny_model: Path, algorithm: str) -> None:
    """The last pass is kept, in which the policy has moved; the losses are of all passes."""
    sections: dict[str, Any] = {
        "ppo": {
            "ppo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "ppo_epochs": 3},
            "value": {"optimizer": {"kwargs": {"lr": 1e-3}}, "train_global_batch_size": 8},
        },
        "grpo": {"grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}},
    }
    settings = config(tiny_model, **sections[algorithm], policy=SPLIT)
    given = random_batch(8, prompts=2)
    metrics = train_step(Learner(settings), given)
    add_up(given, metrics)
    assert (given.values is not None) is (given.returns is not None) is (algorithm == "ppo")
    if algorithm == "ppo":
        assert given.ratios is not None
        assert given.policy_logprobs is not None
        assert given.old_logprobs is not None
        moved = given.policy_logprobs != given.old_logprobs
        assert moved.all()
        np.testing.assert_allclose(np.exp(given.policy_logprobs - given.old_logprobs), given.ratios, rtol=1e-5)


def test_a_single_pass_is_the_one_before_the_update(tiny_model: Path) -> None:
    given = random_batch(8)
    metrics = train_step(Learner(config(tiny_model)), given)
    assert given.old_logprobs is not None
    assert given.policy_logprobs is not None
    assert given.entropies is not None
    np.testing.assert_array_equal(given.policy_logprobs, given.old_logprobs)
    assert given.entropies.mean() == pytest.approx(metrics["entropy"], rel=1e-5)


def test_gradients_are_those_of_the_tokens_logprobs(tiny_model: Path) -> None:
    """Without a clip, a ratio of 1 has the gradient of its term; with top-k, that of the penalty comes before the filter."""
    given = random_batch(8)
    train_step(Learner(config(tiny_model)), given)
    assert given.token_loss_gradients is not None
    assert given.token_losses is not None
    np.testing.assert_allclose(given.token_loss_gradients, given.token_losses, rtol=1e-5, atol=1e-9)
    generation = {"max_new_tokens": 16, "top_k": 19}
    loss_fn = {"reference_policy_kl_penalty": 0.5, "disable_ppo_ratio": True}
    filtered = random_batch(8)
    learner = Learner(config(tiny_model, policy={"generation": generation}, loss_fn=loss_fn))
    for parameter in learner.policy.model.parameters():
        parameter.data.mul_(1.1)
    add_up(filtered, train_step(learner, filtered))
    assert filtered.mask_reasons is not None
    out = filtered.mask_reasons == MaskReason.SAMPLING_FILTER
    assert out.any()
    assert filtered.token_loss_gradients is not None
    assert (filtered.token_loss_gradients[out] != 0).all()


def test_trajectories_that_left_the_loss_have_the_reason_alone(tiny_model: Path) -> None:
    trajectories, rewards = sampled(6)
    trajectories[2] = msgspec.structs.replace(trajectories[2], finish_reason="length")
    given = batch(trajectories, rewards, multipliers=[1.0, 0.0, 1.0, 1.0, 1.0, 1.0], environment="math")
    given.mask[given.tokens_of([3])] = False
    given.rollout_logprobs[given.tokens_of([4])] = -90.0
    ppo = {**REWARD_IS_ADVANTAGE, "overlong_filtering": True, "seq_logprob_error_threshold": 1e6}
    train_step(Learner(config(tiny_model, ppo=ppo)), given)
    assert given.mask_reasons is not None
    assert given.token_losses is not None
    expected = [0, MaskReason.ZERO_MULTIPLIER, MaskReason.OVERLONG, MaskReason.OVER_AGE, MaskReason.LOGPROB_ERROR, 0]
    assert [set(part.tolist()) for part in given.split(given.mask_reasons)] == [{reason} for reason in expected]
    passed = [bool(np.isfinite(part).all()) for part in given.split(given.token_losses)]
    assert passed == [True, False, False, True, False, True]


def test_episodes_with_paths_in_several_micro_batches_add_up(tiny_model: Path) -> None:
    settings = config(tiny_model, policy={"train_micro_batch_size": 1}, loss_fn={"token_level_loss": False})
    given = batch(*random_episodes(8, 0), environment="math")
    add_up(given, train_step(Learner(settings), given))


def test_without_samples_no_column_is_made_and_the_step_is_the_same(tiny_model: Path) -> None:
    given, other = random_batch(8), random_batch(8)
    learners = [Learner(config(tiny_model, policy=SPLIT, logger={"keep_step_data": keep})) for keep in (0, 20)]
    assert train_step(learners[0], given) == train_step(learners[1], other)
    assert given.token_losses is given.mask_reasons is given.policy_logprobs is None
    assert other.token_losses is not None
    assert all((value == weights(learners[1])[name]).all() for name, value in weights(learners[0]).items())
