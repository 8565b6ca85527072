"""Configurations that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.config import load


def refusal(
    path: Path, *overrides: str, environ: Mapping[str, str] | None = None, read: Callable[..., Any] = load
) -> str:
    """Why `read` refuses the file with these overrides."""
    with pytest.raises(ConfigError) as error:
        read(path, overrides, environ or {})
    return str(error.value)
