"""The source of prompts: problems, their order, and the groups made of them."""

from services.trainer.data.problems import load_problems
from services.trainer.data.prompts import GroupBuilder, PromptOrder, Prompts, RoundRobinOrder
from services.trainer.data.sources import HUB_DATASETS, Problem

__all__ = ["HUB_DATASETS", "GroupBuilder", "Problem", "PromptOrder", "Prompts", "RoundRobinOrder", "load_problems"]
