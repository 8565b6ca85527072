"""The configuration of a run: one YAML file, one model a section, one `load()`.

Precedence: command line > environment (`HEADRACE_GRPO__NUM_PROMPTS_PER_STEP`) > file > defaults.
"""

from headrace.config.load import load
from headrace.config.loss import LossConfig, ValueLossConfig
from headrace.config.root import Config

__all__ = ["Config", "LossConfig", "ValueLossConfig", "load"]
