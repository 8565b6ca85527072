"""One rank shards its models over itself on a CPU too, as it does in bfloat16 on a GPU: parameters are DTensors, and layers are computed in
bfloat16. `BENCHMARK_SHARDS_ALONE=1` switches it on in the parts, and in the trainers that they start.
"""

from __future__ import annotations

import os

from headrace.config import Config
from headrace_services.trainer.distributed import sharding
from headrace_services.trainer.network import backbone

VARIABLE = "BENCHMARK_SHARDS_ALONE"


def asked() -> bool:
    return os.environ.get(VARIABLE) == "1"


def switch_on_if_asked() -> None:
    if asked():
        for module in (sharding, backbone):
            module.shards_alone = lambda device, *, bfloat16: bfloat16  # type: ignore[attr-defined]


def trainer(config: Config) -> None:
    """The trainer, which `headrace trainer` finds in place of its own."""
    from headrace_services.trainer.main import main

    switch_on_if_asked()
    main(config)
