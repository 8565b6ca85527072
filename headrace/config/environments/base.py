"""What environments have in common, whatever their kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from headrace.config.marks import Fixed, Mark, MayChange, Undecisive
from headrace.config.section import Section

# Which part of a completion is the answer; `choice`, the letter of a multiple choice, is for mathematics.
Part = Literal["none", "last_number", "boxed", "answer_tag", "answer_line"]
Extract = Literal[Part, "choice"]


class EnvConfig(Section):
    """One environment, under the name by which data sets refer to it. A built-in one says its `type`, unless that is its name; a custom one
    has `target`, `command` or `attached`. Its keys are those of its kind, and these of all:"""

    timeout_s: MayChange[float] = Field(
        60.0,
        gt=0,
        description="seconds for one call of a served environment, or for one trajectory of a built-in one; after that: TIMED_OUT",
    )
    max_batch_size: MayChange[int] = Field(64, ge=1, description="trajectories in one call of a served environment")
    failure_share: MayChange[float] = Field(
        0.5,
        gt=0,
        le=1,
        description="while more than this share of its last 32 trajectories has failed, the environment is broken, and the run waits for "
        "it",
    )
    give_up_after: MayChange[float | None] = Field(
        None, gt=0, description="seconds after which a broken environment ends the run as an error; null waits for ever"
    )

    @property
    def runs_episodes(self) -> bool:
        """Whether it runs programs that call the policy themselves."""
        return False

    @property
    def scorers(self) -> tuple[str, ...]:
        """The other environments that score for it."""
        return ()

    @property
    def is_started(self) -> bool:
        """Whether `headrace up` starts its process."""
        return False

    @property
    def address(self) -> str | None:
        """The address on which its process listens; None for a built-in environment, for one that dials, and for one to be started whose
        port is not settled."""
        return None

    def problems(self, name: str, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
        """Yield what is wrong with `env.<name>` among the run's other `environments`: the value and the remedy, to be appended to its
        key."""
        yield from ()


class EpisodicConfig(EnvConfig):
    """An environment that may run episodes."""

    episodes: Undecisive[Fixed[bool]] = Field(
        False,
        description="the environment runs programs that call the policy themselves (the method `episode`)",
    )
    public: Undecisive[Fixed[list[str]]] = Field(
        [],
        description="with episodes: fields of a problem (`extra_env_info`) that the program gets besides the messages; only the grader "
        "gets the others",
    )
    grader: Undecisive[Fixed[str | None]] = Field(
        None,
        description="with episodes: the environment that scores what the program did, by its name under env; null: the program returns "
        "its reward",
    )

    @property
    def runs_episodes(self) -> bool:
        return self.episodes

    @property
    def scorers(self) -> tuple[str, ...]:
        return () if self.grader is None else (self.grader,)

    @model_validator(mode="after")
    def _of_episodes(self) -> Self:
        for key, value in {"public": self.public, "grader": self.grader}.items():
            if value and not self.episodes:
                raise ValueError(
                    f"{key} {in_yaml(value)} is for an environment with episodes: true; set that, or leave it out"
                )
        return self

    def problems(self, name: str, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
        if self.grader is None:
            return
        others = [other for other, env in environments.items() if not env.runs_episodes and other != name]
        if self.grader not in others:
            wrong = "runs episodes itself" if self.grader in environments else "is not under env"
            known = ", ".join(others) or "env has none"
            yield f".grader {self.grader!r} {wrong}; name an environment that scores ({known})"


class _TypedConfig(Section):
    type: Undecisive[Fixed[str]]


# `type` comes from a base of its own, so that it is shown before the other keys
class BuiltInConfig(EnvConfig, _TypedConfig):
    """A built-in environment. Each has its own `type`."""

    def decisive_options(self) -> dict[str, object]:
        """Return the options, as JSON, on which its rewards depend. An option counts unless it is known not to matter."""
        return self.model_dump(mode="json", exclude=undecisive(type(self)))


class ScoringConfig(BuiltInConfig):
    """A built-in environment that reads completions itself."""

    require_stop: Fixed[bool] = Field(False, description="a completion cut off before its end token earns 0")


class SandboxedConfig(ScoringConfig):
    """A built-in environment that scores in a worker with a sandbox."""

    unsafe_no_sandbox: Undecisive[Fixed[bool]] = Field(
        False,
        description="score without a sandbox where the machine allows none; false refuses to start there. Without a sandbox, what the "
        "policy writes can read and do whatever the reward service can",
    )


PARTS = (
    "last_number: its last number; boxed: the content of the last `\\boxed{…}`; answer_tag: the last <answer>…</answer>; answer_line: "
    "what follows the last `Answer:` on its line, in the last 300 characters"
)


class ExtractingConfig(SandboxedConfig):
    """An environment that looks for the answer in a part of the completion."""

    extract: Fixed[Part] = Field(
        "none",
        description=f"which part of the completion is the answer. none: all of it; {PARTS}",
    )


def in_yaml(value: Any) -> str:
    from headrace.config.in_yaml import in_yaml  # only a message needs it, and YAML

    return in_yaml(value)


def undecisive(model: type[BaseModel]) -> set[str]:
    marks = (Mark.UNDECISIVE, Mark.MAY_CHANGE)
    return {option for option, field in model.model_fields.items() if any(mark in field.metadata for mark in marks)}
