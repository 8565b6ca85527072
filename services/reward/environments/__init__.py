"""The built-in environments that score in a sandboxed worker: `make` finds the class for a model of the configuration."""

from __future__ import annotations

from typing import Any

from headrace.config.environments import (
    CodeConfig,
    FormatConfig,
    LengthConfig,
    MathConfig,
    MathMultiRewardConfig,
    ReasoningGymConfig,
    RegexConfig,
    RepetitionConfig,
    SandboxedConfig,
)

from .base import SandboxedEnvironment


def make(name: str, env: SandboxedConfig) -> SandboxedEnvironment[Any]:
    """Create the built-in environment of `env.<name>`. Imports its module only now, because some need heavy libraries. Raises `ImportError`
    if a library is not installed."""
    match env:
        case MathConfig():
            from .math import Math

            return Math(name, env)
        case MathMultiRewardConfig():
            from .math_multi_reward import MathMultiReward

            return MathMultiReward(name, env)
        case ReasoningGymConfig():
            from .reasoning_gym import ReasoningGym

            return ReasoningGym(name, env)
        case CodeConfig():
            from .code import Code

            return Code(name, env)
    from . import text

    match env:
        case RegexConfig():
            return text.Regex(name, env)
        case FormatConfig():
            return text.Format(name, env)
        case LengthConfig():
            return text.Length(name, env)
        case RepetitionConfig():
            return text.Repetition(name, env)
    raise TypeError(f"no class scores {type(env).__name__}")
