"""The memory that a run takes on its GPUs, and whether it fits: computed from the configuration, before anything starts."""

from .fit import plan

__all__ = ["plan"]
