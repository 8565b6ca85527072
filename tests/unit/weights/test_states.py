"""Where two computations of one model begin to differ, by what hooks see of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace_services.refit.state_watch import StateWatch, find_layers
from headrace_services.refit.states import EXACT, StateReference, first_difference

LAYERS, LENGTH, WIDTH = 3, 20, 16


class Layer(nn.Linear):
    """Of the trainer: it returns its state."""

    def forward(self, states: Tensor) -> Any:
        return states + super().forward(states)


class Split(Layer):
    """Of the engine: the next one adds its state and its residual."""

    def forward(self, states: Tensor, residual: Tensor | None = None) -> Any:
        whole = states if residual is None else states + residual
        return nn.functional.linear(whole, self.weight, self.bias), whole


class Backbone(nn.Module):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def __call__(self, states: Tensor) -> Any:
        return self.forward(states)  # without hooks, as vLLM's decorator does

    def forward(self, states: Tensor) -> Tensor:
        out: Any = (states,)
        for layer in self.layers:
            out = layer(*out) if isinstance(out, tuple) else layer(out)
        return self.norm(out[0] + out[1] if isinstance(out, tuple) else out)


class Model(nn.Module):
    def __init__(self, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.model = Backbone(kind)


def alike(kind: type[Layer]) -> Model:
    torch.manual_seed(1)
    return Model(kind)


def watched(model: Model, states: Tensor, chunks: int = 1) -> StateWatch:
    found = find_layers(model, LAYERS)
    assert found is not None
    name, layers, backbone = found
    assert name == "model.layers"
    watch = StateWatch(layers, backbone, LENGTH)
    with watch.watching(), torch.no_grad():
        for part in states.chunk(chunks):
            backbone(part)
    with torch.no_grad():
        backbone(states * 9)  # nothing watches any more
    return watch


def inputs() -> Tensor:
    return torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))


def reference() -> StateReference:
    sketches = np.array([readings[0] for readings in watched(alike(Layer), inputs()).sketches], np.float32)
    return StateReference(sketches.flatten(), np.full(LAYERS + 2, EXACT, np.float32))


def disturb(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data += 1e-2


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("kind", [Layer, Split])
def test_equal_models_agree_up_to_the_head(kind: type[Layer], chunks: int) -> None:
    watch = watched(alike(kind), inputs(), chunks)
    assert watch.problem is None
    assert "lm_head" in first_difference(reference(), watch.sketches, "model.layers")


@pytest.mark.parametrize("kind", [Layer, Split])
@pytest.mark.parametrize("wrong", range(LAYERS))
def test_the_first_layer_that_differs_is_named(kind: type[Layer], wrong: int) -> None:
    model = alike(kind)
    for layer in model.model.layers[wrong:]:
        disturb(layer)
    found = first_difference(reference(), watched(model, inputs()).sketches, "model.layers")
    assert f"model.layers.{wrong} " in found


def test_what_comes_before_and_after_the_layers_is_told_apart() -> None:
    before = first_difference(reference(), watched(alike(Layer), inputs() * 1.01).sketches, "model.layers")
    assert "embedding" in before
    model = alike(Split)
    disturb(model.model.norm)
    found = first_difference(reference(), watched(model, inputs()).sketches, "model.layers")
    assert "in the norm that follows it" in found


def test_states_that_are_no_numbers_differ() -> None:
    states = inputs()
    states[0] = torch.nan
    assert "before the first layer" in first_difference(reference(), watched(alike(Layer), states).sketches, "layers")


def test_what_was_not_seen_is_a_problem_and_no_error() -> None:
    model = alike(Layer)
    watch = StateWatch(list(model.model.layers), model.model, LENGTH)
    with watch.watching(), torch.no_grad():
        model.model(inputs()[:3])  # of all the places
    assert "did not run" in (watch.problem or "")
    layer = nn.Identity()
    watch = StateWatch([layer], nn.Identity(), LENGTH)
    with watch.watching():
        layer("no tensor, and no states by name")
    assert "Error: " in (watch.problem or "")


def test_a_model_without_a_list_of_as_many_layers_has_none() -> None:
    assert find_layers(alike(Layer), LAYERS + 1) is None
