"""The source of prompts: problems, their order, and the groups made from them."""

from .model_tokens import ModelTokens
from .problems import load_problems
from .prompts import (
    GroupBuilder,
    PromptOrder,
    Prompts,
    RoundRobinOrder,
    digest_problems,
    spread,
)
from .sources import HUB_DATASETS, Problem

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
