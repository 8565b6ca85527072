"""`policy.torch_compile`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM

from headrace.base.errors import ServiceError
from headrace_services.trainer.network.packing import Packing, pack, plan
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel
from tests.integration.trainer.policy_cases import MODES, SIZES, factors, groups, settings, weights_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    """An engine that ran in this process has switched compilation off."""
    with torch._dynamo.config.patch(disable=False):
        yield


def batch(policy: PolicyModel, packing: Packing, seed: int) -> list[Tensor]:
    """Log-probabilities of the batch that the seed gives, with and without gradients, and the gradients of all parameters."""
    trajectories = groups(seed)
    found = []
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing)
        with torch.no_grad():
            found.append(policy.forward(packed, LogitsWarper()).logprobs)
        values = policy.forward(packed, LogitsWarper()).logprobs
        found.append(values.detach())
        (values * factors(weights_of(trajectories), packed.indices)).sum().backward()
    gradients = [p.grad for p in policy.model.parameters() if p.grad is not None]
    for parameter in policy.model.parameters():
        parameter.grad = None
    return found + gradients


@pytest.mark.nightly  # compiles for minutes
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", ["padded", "all"])
def test_compiled_layers_compute_the_same_and_compile_once(model: Path, mode: str) -> None:
    chosen, compiled = (settings(model, {**MODES[mode], "torch_compile": on}) for on in (False, True))
    packing = Packing.of(chosen.policy, training=True)
    counters.clear()
    policy = PolicyModel(compiled)
    found = batch(policy, packing, seed=0)
    versions: Any = counters["stats"]["unique_graphs"]
    assert versions > 0
    for ours, theirs in zip(found, batch(PolicyModel(chosen), packing, seed=0), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    for seed in (1, 2):
        batch(policy, packing, seed)
    assert counters["stats"]["unique_graphs"] == versions


def test_a_missing_compiler_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-g++")
    with pytest.raises(ServiceError, match=r"policy\.torch_compile true.*no-such-g\+\+"):
        PolicyModel(settings(model, {"torch_compile": True}))
