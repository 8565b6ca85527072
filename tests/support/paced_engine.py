"""A vLLM engine that pauses before each token of a long completion, so that it takes seconds of time and not of a core."""

from __future__ import annotations

import time

# Tokens of a completion that is still being written when it is interrupted, and that a whole refit finds there; and of one that a refit
# waits for to the last.
LONG, DRAINED = 256, 128
PAUSE_S = 0.02


def pace() -> None:
    """Has the engine pause that is forked from this process."""
    from vllm.v1.engine.core import EngineCoreProc

    step = EngineCoreProc._process_engine_step

    def paced(core: EngineCoreProc) -> bool:
        if any(request.max_tokens in (LONG, DRAINED) for request in core.scheduler.running):
            time.sleep(PAUSE_S)
        return bool(step(core))

    EngineCoreProc._process_engine_step = paced
