"""`headrace rollout` whose engine reports wrong log-probabilities while a file is there: those of the probe, and of what it samples.

python -m tests.chaos.noisy_rollout FILE rollout --config …
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from headrace.cli import main
from headrace_services.rollout import engine as engines


def spoil(output: Any, rng: random.Random) -> None:
    """Add noise of about a nat to each log-probability of a vLLM output."""
    for completion in output.outputs:
        if completion.logprobs is not None:
            sampled = completion.logprobs.logprobs
            sampled[:] = [logprob - abs(rng.gauss(1.0, 0.5)) for logprob in sampled]
    for row in output.prompt_logprobs or ():
        for logprob in (row or {}).values():
            logprob.logprob -= abs(rng.gauss(1.0, 0.5))


def make_noisy(switch: Path) -> None:
    """Engines that are started from now on are wrong while `switch` exists."""
    running = engines.running_engine
    rng = random.Random(str(switch))

    @contextlib.contextmanager
    def running_noisily(*arguments: Any) -> Iterator[Any]:
        with running(*arguments) as engine:
            generate = engine.generate

            async def generate_noisily(*given: Any, **named: Any) -> AsyncIterator[Any]:
                async with contextlib.aclosing(generate(*given, **named)) as outputs:
                    async for output in outputs:
                        if os.path.exists(switch):  # noqa: ASYNC240 - a call of a microsecond
                            spoil(output, rng)
                        yield output

            engine.generate = generate_noisily
            yield engine

    engines.running_engine = running_noisily


if __name__ == "__main__":
    make_noisy(Path(sys.argv.pop(1)))
    main()
