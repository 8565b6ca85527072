"""A worker that can schedule asynchronously on a CPU, where vLLM doesn't: CUDA's streams and events have stand-ins.

vLLM imports this before it makes the model runner. Nothing else may, because it changes torch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from headrace_services.refit.engine_extension import WeightChannelExtension


class _Done:
    """An event or a stream, where everything has been computed by the time that it is asked."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass


class AsyncExtension(WeightChannelExtension):
    """That of the service."""


torch.cuda.Event = _Done  # type: ignore[misc, assignment]
torch.cuda.current_stream = _Done  # type: ignore[assignment]
torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment, misc]
