"""`policy.torch_compile`: the layers of a model, compiled by torch.

Only layers are compiled, each by itself: they are alike, so that what is made for the first serves all of them. Lengths and numbers of rows
are variables in it, so rows of other lengths need no new one; `tree_attention` stays outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import torch
from torch import nn

from headrace.errors import ServiceError

# How many versions of one function torch may make; beyond that it would compute as if nothing were compiled. Versions are those for passes
# with and without gradients, one row and several, one place and several, and for each kind of model.
VERSIONS = 64


def compile_layers(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Have each layer compiled when it is first called. Raises `ServiceError` without the compiler that torch calls for this device."""
    variable, usual = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
    compiler = os.environ.get(variable, usual)
    if shutil.which(compiler) is None:
        raise ServiceError(
            f"policy.torch_compile true: torch compiles by {compiler!r} here, and there is none; install it (apt-get install "
            f"{usual} python3-dev), name another in {variable}, or set the key to false"
        )
    torch._dynamo.config.recompile_limit = VERSIONS
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
