"""Reading a configuration: file, environment and command line become one checked `Config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.config.root import Config


def load(path: Path | str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Read the run's YAML at `path` under `overrides` (`section.key=value`, YAML values) and `HEADRACE_SECTION__KEY` variables.

    Raises `ConfigError` naming the key, the value and, for an unknown key, the nearest known one.
    """
    raise NotImplementedError
