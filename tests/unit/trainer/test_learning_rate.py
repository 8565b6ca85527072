"""The rate of learning by trainer step, against torch's schedulers on an optimizer of their own and the formulae as written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch.optim import lr_scheduler

from headrace.base.errors import ServiceError
from headrace.config.policy import OptimizerConfig, OptimizerKwargs, SchedulerConfig, SchedulerConfigs
from headrace_services.trainer.learning.optimizer import LearningRate, ModelOptimizer

WARM_UP = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 5}},
    {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10_000_000_000}},
    {"milestones": [5]},
]


def schedule(items: Any) -> list[SchedulerConfig]:
    return TypeAdapter(SchedulerConfigs).validate_python(items)


def rates(items: Any, base: float, steps: int) -> list[float]:
    rate = LearningRate(base, schedule(items), "policy")
    found = []
    for _ in range(steps):
        found.append(rate.value)
        rate.advance()
    return found


def test_without_a_schedule_the_rate_stays() -> None:
    assert rates([], 3e-4, 4) == [3e-4] * 4


def test_a_linear_warm_up_then_constant() -> None:
    expected = [2e-3 * (0.1 + 0.9 * min(step, 5) / 5) for step in range(12)]
    assert rates(WARM_UP, 2e-3, 12) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("ExponentialLR", {"gamma": 0.9}),
        ("StepLR", {"step_size": 3, "gamma": 0.5}),
        ("MultiStepLR", {"milestones": [2, 5], "gamma": 0.5}),
        ("PolynomialLR", {"total_iters": 8, "power": 2.0}),
        ("CosineAnnealingLR", {"T_max": 10, "eta_min": 1e-5}),
        ("CosineAnnealingWarmRestarts", {"T_0": 4, "T_mult": 2}),
    ],
)
def test_every_scheduler_is_torch_s_own_to_the_last_bit(name: str, kwargs: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    scheduler = getattr(lr_scheduler, name)(optimizer, **kwargs)
    expected = []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates({"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs}, 0.1, 12) == expected


def test_gone_through_again_it_is_the_same_to_the_last_bit() -> None:
    again = LearningRate(2e-3, schedule(WARM_UP), "policy")
    again.advance(7)
    straight = LearningRate(2e-3, schedule(WARM_UP), "policy")
    for _ in range(7):
        straight.advance()
    assert (again.value, again.steps) == (straight.value, 7)


def test_arguments_that_torch_refuses_name_the_section() -> None:
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 7.0}}
    with pytest.raises(ServiceError, match=r"^value\.scheduler: .*LinearLR"):
        LearningRate(1e-3, schedule(linear), "value")


def test_a_step_takes_the_rate_of_its_place_and_clips() -> None:
    """The first step of AdamW moves every weight by the rate, however long the gradient is."""
    model = torch.nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    settings = OptimizerConfig(kwargs=OptimizerKwargs(lr=1e-2, weight_decay=0, eps=1e-12))
    halving = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}}
    optimizer = ModelOptimizer(model, settings, schedule(halving), 1.0, "policy")
    optimizer.rate.advance()
    model(torch.tensor([[3.0, -4.0, 12.0]])).sum().backward()
    assert optimizer.grad_norm() == pytest.approx(13.0)
    optimizer.step(13.0)
    assert model.weight.grad is None
    expected = before - 5e-3 * torch.tensor([[1.0, -1.0, 1.0]])
    torch.testing.assert_close(model.weight.detach(), expected, atol=1e-7, rtol=0)


def test_gradients_longer_than_the_bound_are_scaled_to_it() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    # this eps makes the move follow the gradient
    settings = OptimizerConfig(kwargs=OptimizerKwargs(lr=1.0, weight_decay=0, eps=1e3))
    before = model.weight.detach().clone()
    optimizer = ModelOptimizer(model, settings, [], 0.5, "policy")
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    optimizer.step(optimizer.grad_norm())
    torch.testing.assert_close(model.weight.detach(), before - torch.tensor([[0.3, 0.4]]) / 1e3, atol=1e-6, rtol=0)
