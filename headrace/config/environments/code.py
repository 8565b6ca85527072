"""The built-in environment `code`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.config.environments.base import ExtractingConfig
from headrace.config.marks import Fixed, Undecisive


class CodeConfig(ExtractingConfig):
    """Does the completion's program pass its tests? With `extract: none`, the program is the last fenced block, if there is one."""

    type: Undecisive[Fixed[Literal["code"]]] = "code"
    runs_with: Fixed[list[str] | None] = Field(
        None,
        min_length=1,
        description="a program in /usr and its arguments, to which the file with the completion's program is appended; null: this "
        "Python, with only the standard library",
    )
    cpu_s: Fixed[int] = Field(5, ge=1, description="CPU seconds per test")
    wall_s: Fixed[float] = Field(10.0, gt=0, description="seconds per test")
    memory_mb: Fixed[int] = Field(512, ge=16, description="memory of the program, all its processes together")
    processes: Fixed[int] = Field(
        1,
        ge=1,
        description="processes and threads that the program may have; 1: one process of at most 64 threads",
    )
    partial_credit: Fixed[bool] = Field(
        False, description="the reward is the share of tests that pass; false: 1 if all pass, else 0"
    )

    @model_validator(mode="after")
    def _tests_fit(self) -> Self:
        if self.wall_s >= self.timeout_s:
            raise ValueError(
                f"wall_s {self.wall_s:g} is not less than timeout_s {self.timeout_s:g}, the limit of all tests; lower wall_s or raise "
                "timeout_s"
            )
        return self

    def decisive_options(self) -> dict[str, object]:
        # it fails the tests for which no time is left after a program has used up its own
        return {**super().decisive_options(), "timeout_s": self.timeout_s}
