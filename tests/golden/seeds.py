"""The real trainer and replica, but what the replica samples depends only on the prompt and the number of the completion.

A single completion has no seed: two runs of one configuration see other ones. vLLM takes a seed with each request. Here each request that
has none gets one, and nothing else of the run is changed.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.light_services import instead_of


def services(folder: Path) -> dict[str, str]:
    """The environment of a `headrace up` whose trainer and replica are these, through a distribution in `folder`."""
    return instead_of(folder, rollout=f"{__name__}:seeded_rollout")


def seeded_rollout(config: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from headrace_services.rollout.main import main

    generate = AsyncLLM.generate

    @functools.wraps(generate)
    def seeded(self: Any, prompt: Any, sampling_params: Any, request_id: str, *rest: Any, **named: Any) -> Any:
        if sampling_params.seed is None:
            ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
            sampling_params.seed = zlib.crc32(repr((list(ids), request_id.rpartition("-")[2])).encode())
        return generate(self, prompt, sampling_params, request_id, *rest, **named)

    AsyncLLM.generate = seeded
    main(config)
