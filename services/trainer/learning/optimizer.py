"""The optimizer of a model: torch's own, with a learning rate schedule and gradient clipping; and its state in a checkpoint.

The learning rate is a function of the number of trainer steps (or epochs) that trained the model, so a schedule's only state is that
count. When a run resumes, the schedule of the configuration, which may have changed, is stepped up to it.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from headrace.config.policy import NAMESPACE, OptimizerConfig, SchedulerConfig
from headrace.errors import ServiceError
from headrace_services.trainer.distributed import (
    Place,
    full_tensor,
    local_part,
    local_rows,
    place_of,
    with_local_part,
)

log = logging.getLogger(__name__)

CLASSES: dict[str, type[optim.AdamW] | type[optim.Adam]] = {
    "torch.optim.AdamW": optim.AdamW,
    "torch.optim.Adam": optim.Adam,
}


class LearningRate:
    """The learning rate by number of steps, computed by torch's own schedulers from `base`."""

    def __init__(self, base: float, schedule: Sequence[SchedulerConfig], section: str) -> None:
        """Raises `ServiceError` naming `section` for arguments that torch refuses."""
        self._steps = 0
        self._carrier = optim.SGD([torch.zeros(1)], base)  # torch's schedulers need an optimizer
        self._scheduler: lr_scheduler.LRScheduler | None = None
        named = [item for item in schedule if item.name is not None]
        try:
            parts = [_scheduler(self._carrier, item) for item in named]
            if len(parts) > 1:
                with _quiet():
                    milestones = schedule[-1].milestones or []
                    self._scheduler = lr_scheduler.SequentialLR(self._carrier, parts, milestones)
            elif parts:
                self._scheduler = parts[0]
        except (TypeError, ValueError, ZeroDivisionError) as error:
            names = ", ".join(str(item.name) for item in named)
            raise ServiceError(f"{section}.scheduler: torch refuses {names} ({error}); correct its kwargs") from error

    @property
    def value(self) -> float:
        return float(self._carrier.param_groups[0]["lr"])

    @property
    def steps(self) -> int:
        return self._steps

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._steps += 1
            if self._scheduler is not None:
                with _quiet():
                    self._carrier.step()
                    self._scheduler.step()


class ModelOptimizer:
    """The optimizer of one model. With several ranks every method is a collective."""

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerConfig,
        schedule: Sequence[SchedulerConfig],
        max_grad_norm: float,
        section: str,
    ) -> None:
        """`section` is its name in errors: `policy` or `value`. Raises `ServiceError` for a schedule that torch refuses."""
        self._model = model
        self._settings = settings
        self._schedule = schedule
        self.section = section
        self._max_grad_norm = max_grad_norm
        self._rate = LearningRate(settings.kwargs.lr, schedule, section)
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._optimizer = CLASSES[settings.name](self._trained.values(), **self._arguments())

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer step."""
        return self._rate.value

    def grad_norm(self) -> float:
        """2-norm of all gradients together, before they are clipped."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained.values() if p.grad is not None])
        return float(full_tensor(norm))

    def step(self, grad_norm: float) -> None:
        """Clip the gradients, whose 2-norm is `grad_norm`, to `max_grad_norm`; take one optimizer step; drop the gradients."""
        torch.nn.utils.clip_grads_with_norm_(self._trained.values(), self._max_grad_norm, torch.tensor(grad_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate.value
        self._optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad()

    def advance_schedule(self) -> None:
        """Advance the learning rate schedule by one: a trainer step (or an epoch) has trained this model."""
        self._rate.advance()

    @property
    def scheduled(self) -> int:
        """How often the schedule advanced."""
        return self._rate.steps

    def moments(self) -> dict[str, Tensor]:
        """This rank's part of the optimizer's own state, by `<parameter>/<moment>`; nothing before the first optimizer step."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._trained.items()}
        return {
            f"{names[parameter]}/{moment}": local_part(tensor)
            for parameter, state in self._optimizer.state.items()
            for moment, tensor in state.items()
        }

    @property
    def place(self) -> Place:
        """What this rank holds of the model."""
        return place_of(next(self._model.parameters()))

    def shards(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """The rows `[first, last)` of each parameter that this rank holds, and the shape of the whole."""
        return {name: (*local_rows(tensor), tuple(tensor.shape)) for name, tensor in self._model.named_parameters()}

    def restore(self, scheduled: int, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on where `scheduled` and `moments`, this rank's part by parameter, left off; without moments they start from zero. Learning
        rate, betas and so on come from the configuration, which may have changed since."""
        if scheduled and not moments:
            log.warning(
                "the checkpoint has no optimizer state of the %s model; its moments start from zero", self.section
            )
        state = {
            place: {key: with_local_part(parameter, tensor) for key, tensor in moments[name].items()}
            for place, (name, parameter) in enumerate(self._trained.items())
            if name in moments
        }
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        for group in self._optimizer.param_groups:
            group.update(self._arguments())
        self._rate = LearningRate(self._settings.kwargs.lr, self._schedule, self.section)
        self._rate.advance(scheduled)

    def _arguments(self) -> dict[str, Any]:
        arguments = self._settings.kwargs.model_dump()
        if arguments["fused"] is None:
            arguments["fused"] = not arguments["foreach"]
        return arguments


def _scheduler(carrier: optim.Optimizer, item: SchedulerConfig) -> lr_scheduler.LRScheduler:
    assert item.name is not None
    made: lr_scheduler.LRScheduler = getattr(lr_scheduler, item.name.removeprefix(NAMESPACE))(carrier, **item.kwargs)
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning about its own SequentialLR, which calls its parts in a deprecated way at each milestone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The epoch parameter in", category=UserWarning)
        yield
