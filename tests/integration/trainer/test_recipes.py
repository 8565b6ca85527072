"""Each recipe of `examples/`: its configuration loads, and the learner takes steps with it that change the policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.config import load
from headrace.run.metric_names import unknown
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import weights
from tests.support.sampling import Completion, Sampler, batch_of, problems

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.glob("*_arithmetic.yaml"))


def test_every_recipe_is_here() -> None:
    methods = {"cispo", "dapo", "dr_grpo", "gdpo", "gspo", "lora", "opd", "ppo", "reinforce_plus_plus", "rloo", "vapo"}
    assert {name.removesuffix("_arithmetic.yaml") for name in RECIPES} == methods
    assert (EXAMPLES / "arithmetic_tiny.yaml").is_file(), "GRPO, which the others build on"


@pytest.mark.timeout(900)  # the model may be in the making
@pytest.mark.parametrize("recipe", ["arithmetic_tiny.yaml", *RECIPES])
def test_steps_of_the_recipe_move_the_policy(recipe: str, warm_model: Path, tiny_model: Path) -> None:
    section = "ppo" if recipe.startswith(("ppo", "vapo")) else "grpo"
    size = [f"{section}.num_prompts_per_step=4", f"{section}.num_generations_per_prompt=4"]
    if section == "ppo":
        size.append("ppo.policy_training_start_step=1")
    if recipe.startswith("opd"):
        size.append(f"grpo.adv_estimator.teacher_model_name={tiny_model}")
    config = load(EXAMPLES / recipe, [f"policy.model_name={warm_model}", *size], {})
    learner = Learner(config)
    sampler = Sampler(warm_model, config.policy.generation.max_new_tokens)
    before = weights(learner)
    questions = problems(seed=0, count=4)
    for step in range(3):
        sampler.load(dict(learner.policy.weights()))
        drawn = sampler.draw(next(questions), 4, seed=step)
        metrics = train_step(learner, batch_of(drawn, 4, components=[components(one) for one in drawn]))
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        assert not unknown(metrics), "every metric is in docs/metrics.md"
        if section == "ppo" and step == 0:
            assert same(before, weights(learner)), "the critic has the first step for itself"
    assert not same(before, weights(learner))
    assert learner.version == 3


def components(one: Completion) -> dict[str, float]:
    """As the environment of the recipe of gdpo gives them."""
    return {"correctness": one.reward, "format": 0.0, "integer": float(one.ended)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
