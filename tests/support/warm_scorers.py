"""What scoring workers import, and the grammars that `math` makes when it is first used."""

from headrace.config.environments import MathConfig
from headrace_services.reward import function_process, scoring_worker  # noqa: F401
from headrace_services.reward.environments import math, math_multi_reward, text  # noqa: F401

math.Math("math", MathConfig()).prepare(())
