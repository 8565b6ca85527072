"""The memory that a run takes on its GPUs, and whether it fits: computed from the configuration, before anything starts."""

from headrace_services.trainer.memory.fit import plan
from headrace_services.trainer.memory.models import KNOWN, ModelSize, ModelUse
from headrace_services.trainer.memory.parts import GIB, trainer_memory

__all__ = ["GIB", "KNOWN", "ModelSize", "ModelUse", "plan", "trainer_memory"]
