"""Hooks that sketch the states between the layers of a model, the trainer's or the engine's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from .states import Sketches, choose_places, sketch


class StateWatch:
    """Sketches the states between the layers of a model in the passes that run while `watching`, which together compute `length` tokens.

    The hooks never raise, because an engine would die of it: `problem` says why there are no sketches.
    """

    def __init__(self, layers: Sequence[nn.Module], backbone: nn.Module, length: int) -> None:
        self._layers, self._backbone = layers, backbone
        self._places = choose_places(length)
        self._seen = [0] * (len(layers) + 2)
        self._sketches: list[list[NDArray[np.float32]]] = [[] for _ in self._seen]
        self._failure: str | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._take(0, lambda: read_inputs(arguments, named))

        def after(point: int) -> Callable[..., None]:
            return lambda module, arguments, output: self._take(point, lambda: read_outputs(output))

        own, before_it = self._backbone.forward, vars(self._backbone).get("forward")

        def forward(*arguments: Any, **named: Any) -> Any:
            output = own(*arguments, **named)
            self._take(len(self._layers) + 1, lambda: read_outputs(output))
            return output

        handles = [self._layers[0].register_forward_pre_hook(before, with_kwargs=True)]
        handles += [layer.register_forward_hook(after(point)) for point, layer in enumerate(self._layers, 1)]
        self._backbone.forward = forward  # vLLM's decorator of a backbone calls it without hooks
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if before_it is None:
                del self._backbone.forward
            else:
                self._backbone.forward = before_it

    @property
    def problem(self) -> str | None:
        if self._failure is not None:
            return self._failure
        if all(readings and len(readings[0]) == len(self._places) for readings in self._sketches):
            return None
        return (
            "its layers did not run one by one, as in compiled code and CUDA graphs; set "
            "policy.generation.vllm_cfg.enforce_eager: true to learn it"
        )

    @property
    def sketches(self) -> Sketches:
        return [[one.flatten().tolist() for one in readings] for readings in self._sketches]

    def _take(self, point: int, find: Callable[[], Sequence[Tensor]]) -> None:
        try:
            rows = [one.detach().reshape(-1, one.shape[-1]) for one in find()]
            start = self._seen[point]
            self._seen[point] += len(rows[0])
            places = [place - start for place in self._places if start <= place < self._seen[point]]
            taken = [sketch(states[places].float().cpu().numpy()) for states in rows]
            if before := self._sketches[point]:
                taken = [np.concatenate(parts) for parts in zip(before, taken, strict=True)]
            self._sketches[point] = taken
        except Exception as error:  # noqa: BLE001 - told by `problem`
            self._failure = f"{type(error).__name__}: {error}"


def read_inputs(arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """Return the states that a layer is called with."""
    states = [one for one in arguments if isinstance(one, Tensor) and one.is_floating_point()]
    return (states or [named["hidden_states"]])[:1]


def read_outputs(output: Any) -> list[Tensor]:
    """Return the states that a layer's output may mean. vLLM's layers return a state and a residual. Those of most families leave their sum
    to the next layer, others have added them."""
    if isinstance(output, Tensor):
        return [output]
    if (states := getattr(output, "last_hidden_state", None)) is not None:
        return [states]
    first, *rest = output
    if rest and isinstance(rest[0], Tensor) and rest[0].shape == first.shape:
        return [first, first + rest[0]]
    return [first]


def find_layers(model: nn.Module, count: int) -> tuple[str, Sequence[nn.Module], nn.Module] | None:
    """Return name and modules of the engine's list of so many layers, and the module that has it; None without such a list."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, list(module), model.get_submodule(name.rpartition(".")[0])
    return None
