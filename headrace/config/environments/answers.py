"""Built-in environments that compare a completion's answer with the expected one: `math`, `math_multi_reward`, `reasoning_gym`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.config.environments.base import PARTS, Extract, ExtractingConfig, SandboxedConfig
from headrace.config.marks import Fixed, MayChange, Undecisive


class MathConfig(SandboxedConfig):
    """Is the answer mathematically equal to the expected one?"""

    type: Undecisive[Fixed[Literal["math"]]] = "math"
    # Honest answers that are hard for a computer algebra system take up to 0.6 s of a core; hostile ones end never, each try.
    timeout_s: MayChange[float] = Field(10.0, gt=0, description="seconds for one trajectory; after that: TIMED_OUT")
    extract: Fixed[Extract] = Field(
        "none",
        description="which part of the completion is the answer. none: the boxed or else the last expression in all of it; "
        f"{PARTS}; choice: the letter of a multiple choice",
    )
    tolerance: Fixed[float | None] = Field(
        None,
        gt=0,
        lt=1,
        description="a number that differs from the expected one by at most this share of it is right too; null: it must be equal",
    )

    @model_validator(mode="after")
    def _letters_have_no_tolerance(self) -> Self:
        if self.extract == "choice" and self.tolerance is not None:
            raise ValueError(
                f"tolerance {self.tolerance} with extract choice, which compares letters; leave one of them out"
            )
        return self


class MathMultiRewardConfig(SandboxedConfig):
    """Components for a correct answer, a whole number, and the requested format."""

    type: Undecisive[Fixed[Literal["math_multi_reward"]]] = "math_multi_reward"


class ReasoningGymConfig(ExtractingConfig):
    """The tasks of reasoning-gym."""

    type: Undecisive[Fixed[Literal["reasoning_gym"]]] = "reasoning_gym"
    threshold: Fixed[float | None] = Field(
        None,
        description="a score (from 0 to 1) of at least this counts as 1, a lower one as 0; null: the score itself",
    )
