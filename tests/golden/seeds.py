"""The real trainer and replica, but what the replica samples depends only on the prompt and the number of the completion.

A single completion has no seed: two runs of one configuration see other ones. vLLM takes a seed with each request. Here each request that
has none gets one, and nothing else of the run is changed.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.forks import ROOT, command, fork


def services(folder: Path) -> dict[str, str]:
    """The environment of a `headrace up` whose trainer and replica are these, through a distribution in `folder`."""
    info = folder / "golden_services-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: golden-services\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[headrace.services]\n"
        "trainer = tests.support.idle_services:forked_trainer\n"
        f"rollout = {__name__}:forked_rollout\n"
    )
    path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def forked_rollout(config: Any) -> None:
    service = fork(_seeded_command, *sys.argv[1:], kind="engine")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: service.send_signal(number))
    sys.exit(service.wait())


def _seeded_command(*arguments: str) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    generate = AsyncLLM.generate

    @functools.wraps(generate)
    def seeded(self: Any, prompt: Any, sampling_params: Any, request_id: str, *rest: Any, **named: Any) -> Any:
        if sampling_params.seed is None:
            ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
            sampling_params.seed = zlib.crc32(repr((list(ids), request_id.rpartition("-")[2])).encode())
        return generate(self, prompt, sampling_params, request_id, *rest, **named)

    AsyncLLM.generate = seeded
    command(*arguments)
