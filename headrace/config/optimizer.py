"""`optimizer` and `scheduler` of a model that is trained, written as users of NeMo RL write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.config.base import Section

# torch's schedulers that need nothing but numbers, and what each takes
KEYS: dict[str, frozenset[str]] = {
    "ConstantLR": frozenset({"factor", "total_iters"}),
    "LinearLR": frozenset({"start_factor", "end_factor", "total_iters"}),
    "ExponentialLR": frozenset({"gamma"}),
    "StepLR": frozenset({"step_size", "gamma"}),
    "MultiStepLR": frozenset({"milestones", "gamma"}),
    "PolynomialLR": frozenset({"total_iters", "power"}),
    "CosineAnnealingLR": frozenset({"T_max", "eta_min"}),
    "CosineAnnealingWarmRestarts": frozenset({"T_0", "T_mult", "eta_min"}),
}
NAMESPACE = "torch.optim.lr_scheduler."


class OptimizerArgs(Section):
    lr: float = Field(5e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    foreach: bool | None = Field(None, description="torch's own choice of kernels; null leaves it to fused")
    fused: bool | None = Field(None, description="one kernel for all of it; null is true unless foreach is")


class Optimizer(Section):
    name: Literal["torch.optim.AdamW", "torch.optim.Adam"] = "torch.optim.AdamW"
    kwargs: OptimizerArgs = OptimizerArgs()


class Schedule(Section):
    """One of torch's schedulers, or the trainer steps at which the next one takes over."""

    name: str | None = Field(None, description=f"{NAMESPACE} and {', '.join(KEYS)}")
    kwargs: dict[str, int | float | list[int]] = Field({}, description="its arguments, by torch's names")
    milestones: list[int] | None = Field(None, description="in the last item alone: steps at which the next takes over")

    @model_validator(mode="after")
    def _one_of_torch_s(self) -> Schedule:
        if (self.name is None) == (self.milestones is None):
            raise ValueError("give name and kwargs, or milestones alone in the last item")
        if self.name is None:
            if self.kwargs:
                raise ValueError("kwargs without a name")
            return self
        short = self.name.removeprefix(NAMESPACE)
        if short == self.name or short not in KEYS:
            raise ValueError(f"name {self.name!r} is not {NAMESPACE} and one of {', '.join(KEYS)}")
        if unknown := sorted(self.kwargs.keys() - KEYS[short]):
            raise ValueError(f"{short} takes no {', '.join(unknown)}; it takes {', '.join(sorted(KEYS[short]))}")
        return self


def _several(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, dict) else value


def _in_sequence(items: list[Schedule]) -> list[Schedule]:
    named = [item for item in items if item.name]
    if any(item.milestones is not None for item in items[:-1]) or (items and not named):
        raise ValueError("schedulers come first, and milestones in the last item")
    steps = (items[-1].milestones or []) if items else []
    if len(steps) != max(len(named) - 1, 0):
        raise ValueError(
            f"{len(named)} schedulers follow each other at {max(len(named) - 1, 0)} milestones, not {len(steps)}"
        )
    if steps != sorted(set(steps)) or any(step < 1 for step in steps):
        raise ValueError(f"milestones {steps} do not ascend from 1 or more")
    return items


Scheduler = Annotated[
    list[Schedule],
    BeforeValidator(_several),
    AfterValidator(_in_sequence),
    Field(
        description="learning rate by trainer step: torch's schedulers, each for its part, then {milestones: [steps]}; one alone "
        "needs no list, and none is a constant rate"
    ),
]
