"""Built-in environments, by the `type` that the configuration calls them. Each is imported only where it is used."""

from __future__ import annotations

from headrace.config.data import Env
from services.reward.environments.base import BuiltIn


def make(name: str, env: Env) -> BuiltIn:
    """The built-in environment of `env.<name>`. Raises `ImportError` if its library is not installed."""
    if (env.type or name) == "math":
        from services.reward.environments.math import Math

        return Math(name, env)
    if (env.type or name) == "math_multi_reward":
        from services.reward.environments.math_multi_reward import MathMultiReward

        return MathMultiReward(name, env)
    from services.reward.environments.reasoning_gym import ReasoningGym

    return ReasoningGym(name, env)
