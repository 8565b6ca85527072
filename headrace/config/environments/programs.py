"""Built-in environments that run episodes: `function`, `verifiers`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.config.environments.base import BuiltInConfig, EpisodicConfig
from headrace.config.marks import Fixed, Undecisive

_FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class ProgramConfig(BuiltInConfig, EpisodicConfig):
    """A program that the reward service runs in its own process."""

    episodes: Undecisive[Fixed[bool]] = Field(True, description="a program runs episodes: always true")
    concurrency: Undecisive[Fixed[int]] = Field(16, ge=1, description="episodes that run at a time")

    @field_validator("episodes")
    @classmethod
    def _runs_episodes(cls, episodes: bool) -> bool:
        if not episodes:
            raise ValueError("false, but this type runs episodes; leave it out")
        return episodes


class FunctionConfig(ProgramConfig):
    """A function that plays an episode."""

    type: Undecisive[Fixed[Literal["function"]]] = "function"
    function: Fixed[str] = Field(
        pattern=_FUNCTION,
        description="package.module:NAME of a function of one headrace.Episode, async or plain, which the reward service runs in its own "
        "process",
    )


class VerifiersConfig(ProgramConfig):
    """An environment of the library verifiers."""

    type: Undecisive[Fixed[Literal["verifiers"]]] = "verifiers"
    public: Undecisive[Fixed[list[str]]] = Field(
        ["task"], description="fields of a problem that the program gets: always the task alone"
    )
    python: Undecisive[Fixed[str]] = Field(
        description="the Python that verifiers 0.4 and the environment are installed in, by its path, for example "
        ".venv-verifiers/bin/python"
    )
    verifiers: Fixed[dict[str, Any]] = Field(
        description="the environment, as in section [env] of verifiers' own configuration: taskset: {id: NAME, …}, its agents, and its "
        "other keys"
    )

    @field_validator("public")
    @classmethod
    def _is_the_task(cls, public: list[str]) -> list[str]:
        if public != ["task"]:
            raise ValueError(f"{public}: a verifiers environment gets only the task of a row; leave it out")
        return public

    @field_validator("verifiers")
    @classmethod
    def _names_an_environment(cls, verifiers: dict[str, Any]) -> dict[str, Any]:
        taskset = verifiers.get("taskset")
        if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
            raise ValueError(
                f"{verifiers} names no environment; give taskset: {{id: NAME}}, and other keys of verifiers' [env] as needed"
            )
        return verifiers
