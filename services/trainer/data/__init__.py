"""The source of prompts: problems, their order, and the groups made from them."""

from headrace_services.trainer.data.model_tokens import ModelTokens
from headrace_services.trainer.data.problems import load_problems
from headrace_services.trainer.data.prompts import (
    GroupBuilder,
    PromptOrder,
    Prompts,
    RoundRobinOrder,
    digest_problems,
    spread,
)
from headrace_services.trainer.data.sources import HUB_DATASETS, Problem

__all__ = [
    "HUB_DATASETS",
    "GroupBuilder",
    "ModelTokens",
    "Problem",
    "PromptOrder",
    "Prompts",
    "RoundRobinOrder",
    "digest_problems",
    "load_problems",
    "spread",
]
