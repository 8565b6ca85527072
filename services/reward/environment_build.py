"""The build of a built-in environment. One build scores a group, so the build covers everything that decides a reward."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path

from headrace.config.environments import BuiltInConfig
from headrace.env.source_build import digest_texts
from headrace.records.score import BUILD_BYTES


def compute_build(env: BuiltInConfig, *software: str) -> str:
    """Return the build of a built-in environment: the `software` that it judges with, and a digest of the reward service's source and of
    the options that decide its rewards. It is the same in every process and on every machine, whatever the environment's name."""
    options = json.dumps(env.decisive_options(), sort_keys=True)
    digest = digest_texts((importlib.metadata.version("headrace"), *_source(), env.type, options))
    named = ", ".join((*software, digest))
    return named if len(named.encode()) <= BUILD_BYTES else digest_texts([named])


def read_version(distribution: str) -> str:
    """Return the name and version of an installed package, for the `software` of a build."""
    return f"{distribution} {importlib.metadata.version(distribution)}"


@functools.cache
def _source() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.rglob("*.py")))
