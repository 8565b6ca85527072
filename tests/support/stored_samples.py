"""Samples as files keep them, without a trainer that wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.run.sample_files import Kind, SampleFiles
from headrace.run.samples import StoredCall, StoredSample


def sample(group: str, index: int = 0, reward: float | None = 1.0, **changes: Any) -> StoredSample:
    """A completion of two tokens, to the prompt `1+1`."""
    fields = {
        "task": "sums",
        "attempt": 1,
        "environment": "math",
        "messages": ({"role": "user", "content": "1+1"},),
        "content": "2",
        "finish_reason": "stop",
        "spans": ((3, 0, 2),),
        "token_ids": (5, 6),
        "generation_logprobs": (-0.5, None),
        "extra_env_info": {"answer": "2"},
    }
    return StoredSample(**{**fields, **changes}, group=group, index=index, reward=reward)


def hostile_sample(text: str, **changes: Any) -> StoredSample:
    """A completion with `text` wherever others can write."""
    fields = {"task": text, "messages": ({"role": text, "content": text},), "content": text, "components": {text: 1.0}}
    fields |= {"extra_env_info": {"answer": text}, "message": text, "traceback": text}
    return sample(text, **{**fields, **changes})


def hostile_episode(text: str) -> StoredSample:
    """An episode of two calls, with artifacts, and with `text` wherever its program, the policy or a replica can write."""
    message = {"role": text, "content": text, "tool_calls": [{text: text}]}
    calls = [
        StoredCall(
            parent=parent,
            tokens=(parent + 1, parent + 2),
            trained=True,
            finish_reason="length",
            replica=text,
            messages=({"role": "tool", "content": [text, {"deep": text}]}, message),
            answer=message,
        )
        for parent in (-1, 0)
    ]
    return hostile_sample(text, calls=tuple(calls), artifacts={text: [text]})


def write(folder: Path, kind: Kind, step: int, samples: Sequence[StoredSample]) -> None:
    SampleFiles(folder, None).write(kind, step, [msgspec.to_builtins(each) for each in samples])
