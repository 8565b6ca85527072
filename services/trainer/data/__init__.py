"""The source of prompts: problems, their order, and the groups made from them."""

from .prompts import Prompts

__all__ = ["Prompts"]
