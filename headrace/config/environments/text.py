"""Built-in environments for how a completion is written: `regex`, `format`, `length`, `repetition`."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.config.environments.base import ExtractingConfig, SandboxedConfig
from headrace.config.marks import Fixed, Undecisive

_TAG = re.compile(r"[A-Za-z_][\w.-]*")


class RegexConfig(ExtractingConfig):
    """Is a pattern found?"""

    type: Undecisive[Fixed[Literal["regex"]]] = "regex"
    pattern: Fixed[str] = Field(
        description="a Python regular expression; a completion earns 1 if it is found in the part chosen by `extract`, else 0"
    )

    @field_validator("pattern")
    @classmethod
    def _is_a_regular_expression(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression ({error}); correct it") from error
        return pattern


class FormatConfig(SandboxedConfig):
    """Does the completion consist of tags?"""

    type: Undecisive[Fixed[Literal["format"]]] = "format"
    tags: Fixed[list[str]] = Field(
        ["think", "answer"],
        min_length=1,
        description="a completion that consists of these tags, each once and in this order, earns 1, else 0",
    )

    @field_validator("tags")
    @classmethod
    def _are_tags(cls, tags: list[str]) -> list[str]:
        for tag in tags:
            if not _TAG.fullmatch(tag):
                raise ValueError(f"{tag!r} is not the name of a tag; give a name without < and >, for example think")
        if len(set(tags)) != len(tags):
            raise ValueError(f"{tags} names a tag twice; name each once, as a completion has each once")
        return tags


class LengthConfig(SandboxedConfig):
    """Is the completion as long as it should be?"""

    type: Undecisive[Fixed[Literal["length"]]] = "length"
    min_tokens: Fixed[int] = Field(0, ge=0, description="a completion of fewer tokens doesn't earn 1")
    max_tokens: Fixed[int | None] = Field(None, ge=0, description="a completion of more tokens doesn't earn 1")
    fade_tokens: Fixed[int] = Field(
        0,
        ge=0,
        description="tokens below min_tokens or above max_tokens over which the reward falls from 1 to 0",
    )

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.min_tokens == 0 and self.max_tokens is None:
            raise ValueError("min_tokens 0 and max_tokens null limit nothing; give one of them")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(
                f"max_tokens {self.max_tokens} is less than min_tokens {self.min_tokens}; raise max_tokens or lower min_tokens"
            )
        return self


class RepetitionConfig(SandboxedConfig):
    """Does the completion go round in circles?"""

    type: Undecisive[Fixed[Literal["repetition"]]] = "repetition"
    ngram: Fixed[int] = Field(4, ge=1, description="the reward is the share of distinct runs of this many tokens")
