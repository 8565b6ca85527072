"""The built-in environments that score in a sandboxed worker: `make` finds the class that a `type` in the configuration names."""

from __future__ import annotations

from headrace.config.data import EnvConfig
from headrace_services.reward.environments.base import BuiltInEnvironment


def make(name: str, env: EnvConfig) -> BuiltInEnvironment:
    """Create the built-in environment of `env.<name>`. Imports its module only now, because some need heavy libraries. Raises `ImportError`
    if a library is not installed."""
    kind = env.kind(name)
    if kind == "math":
        from headrace_services.reward.environments.math import Math

        return Math(name, env)
    if kind == "math_multi_reward":
        from headrace_services.reward.environments.math_multi_reward import MathMultiReward

        return MathMultiReward(name, env)
    if kind == "reasoning_gym":
        from headrace_services.reward.environments.reasoning_gym import ReasoningGym

        return ReasoningGym(name, env)
    if kind == "code":
        from headrace_services.reward.environments.code import Code

        return Code(name, env)
    from headrace_services.reward.environments import text

    made = {"regex": text.Regex, "format": text.Format, "length": text.Length, "repetition": text.Repetition}
    return made[str(kind)](name, env)
