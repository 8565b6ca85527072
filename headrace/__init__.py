"""Headrace: the contract that every service and every user's environment shares. Light: no torch, no vllm, no transformers."""

from headrace.environment import Environment, Sample, serve
from headrace.trajectory import Score

__all__ = ["Environment", "Sample", "Score", "serve"]
