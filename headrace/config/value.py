"""`value`: the model that PPO estimates returns with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from headrace.config.base import Section
from headrace.config.optimizer import Optimizer, OptimizerArgs, Scheduler


class Value(Section):
    """A transformers backbone with a linear head, under `ppo` with the estimator `gae`; nothing of it is loaded otherwise."""

    model_name: str | None = Field(
        None,
        description="directory or name of a model whose backbone it starts from, or `value/` of a checkpoint, head and all; null takes "
        "policy.model_name",
    )
    hf_config_overrides: dict[str, Any] = Field({}, description="as of policy, for the value model")
    train_global_batch_size: int | None = Field(
        None, ge=1, description="trajectories in an optimizer step; null takes policy.train_global_batch_size"
    )
    train_micro_batch_size: int | None = Field(
        None, ge=1, description="sequences in a pass; null takes policy.train_micro_batch_size"
    )
    freeze_moe_router: bool = Field(False, description="in a mixture of experts, keep the routers' weights as they are")
    precision: Literal["float32", "bfloat16"] | None = Field(None, description="null takes policy.precision")
    max_grad_norm: float = Field(1.0, gt=0)
    optimizer: Optimizer = Optimizer(kwargs=OptimizerArgs(lr=1e-5))
    scheduler: Scheduler = Field([])
