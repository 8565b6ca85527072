"""Reads `HEADRACE_*` variables with pydantic-settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from headrace.config.root import Config
from headrace.config.yaml_text import parse


class _Settings(Config, BaseSettings):
    model_config = SettingsConfigDict(env_nested_delimiter="__", env_parse_none_str="null")


class _Source(EnvSettingsSource):
    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return parse(value, f"environment variable for {field_name}")


def read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what variables set, whose names are without their prefix: values by section and key."""
    source = _Source(_Settings)
    source.env_vars = {name.lower(): None if value == "null" else value for name, value in environ.items()}
    return source()
