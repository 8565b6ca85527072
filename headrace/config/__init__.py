"""The configuration of a run: one YAML file, one model a section, one `load()`.

Precedence: command line > environment (`HEADRACE_GRPO__NUM_PROMPTS_PER_STEP`) > file > defaults.
"""

from headrace.config.load import load
from headrace.config.loss import LossFn, ValueLossFn
from headrace.config.root import Config

__all__ = ["Config", "LossFn", "ValueLossFn", "load"]
