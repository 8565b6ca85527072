"""Where prompts come from: problems, their order, and the groups made of them."""

from services.trainer.data.order import EvenOrder, PromptOrder
from services.trainer.data.problems import Problem, load_problems
from services.trainer.data.prompter import Prompter

__all__ = ["EvenOrder", "Problem", "PromptOrder", "Prompter", "load_problems"]
