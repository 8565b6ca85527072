"""The build of a built-in environment. One build scores a group, so the build covers everything that decides a reward."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path

from headrace.config.built_in import decisive_options
from headrace.config.data import EnvConfig
from headrace.env.source_build import digest_of
from headrace.records.trajectory import BUILD_BYTES


def compute_build(name: str, env: EnvConfig, *software: str) -> str:
    """Return the build of `env.<name>`: the `software` that it judges with, and a digest of the reward service's source and of the options
    that decide its rewards. It is the same in every process and on every machine."""
    options = json.dumps(decisive_options(name, env), sort_keys=True)
    digest = digest_of((importlib.metadata.version("headrace"), *_source(), str(env.kind(name)), options))
    said = ", ".join((*software, digest))
    return said if len(said.encode()) <= BUILD_BYTES else digest_of([said])


def read_version(distribution: str) -> str:
    """Return the name and version of an installed package, for the `software` of a build."""
    return f"{distribution} {importlib.metadata.version(distribution)}"


@functools.cache
def _source() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.rglob("*.py")))
