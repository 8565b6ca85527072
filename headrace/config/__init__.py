"""The configuration of a run: one YAML file, one model per section, one `load()`.

Precedence: command line > environment (`HEADRACE_GRPO__NUM_PROMPTS_PER_STEP`) > file > defaults.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config.loading import load
    from headrace.config.loss import LossConfig, ValueLossConfig
    from headrace.config.root import Config

__all__ = ["Config", "LossConfig", "ValueLossConfig", "load"]

# Imported on first use: a process that scores needs `headrace.config.data` alone.
_MODULES = {"Config": "root", "LossConfig": "loss", "ValueLossConfig": "loss", "load": "loading"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
