"""The built-in environment `combine`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from headrace.config.environments.base import BuiltInConfig, EnvConfig
from headrace.config.marks import Fixed, Undecisive
from headrace.config.section import Bounded


class CombineConfig(BuiltInConfig):
    """One reward from several environments."""

    type: Undecisive[Fixed[Literal["combine"]]] = "combine"
    parts: Fixed[dict[str, Bounded]] = Field(
        min_length=1,
        description="the environments that score each completion, by name, with their weights, for example {math: 1.0, brief: 0.2}",
    )
    combine: Fixed[Literal["sum", "product"]] = Field(
        "sum", description="the reward is the weighted sum of the parts', or their product"
    )
    gate: Fixed[str | None] = Field(
        None,
        description="the part that scores first; if its reward is not above 0, the others are not called, and the reward is 0",
    )

    @property
    def scorers(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def problems(self, name: str, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
        for part, weight in self.parts.items():
            if part not in environments or isinstance(environments[part], CombineConfig):
                others = (other for other, env in environments.items() if not isinstance(env, CombineConfig))
                known = ", ".join(others) or "none"
                yield f".parts.{part} is not under env, or is a combination itself; name one of {known}"
                return
            if environments[part].runs_episodes:
                yield f".parts.{part} runs episodes and scores no completions; leave it out, or move its reward to a grader"
                return
            if self.combine == "product" and weight != 1:
                yield f".parts.{part} {weight:g} with combine product, which has no weights; give 1, or combine: sum"
        if self.gate is not None and self.gate not in self.parts:
            yield f".gate {self.gate!r} is not one of its parts ({', '.join(self.parts)}); name one of them"
            return
        others_s = [environments[part].timeout_s for part in self.parts if part != self.gate]
        first_s = 0.0 if self.gate is None else environments[self.gate].timeout_s
        longest_s = first_s + max(others_s, default=0.0)
        if self.timeout_s < longest_s:
            gate = "" if self.gate is None else ", the gate's before the others'"
            yield (
                f".timeout_s {self.timeout_s:g} is less than the {longest_s:g} s that its parts have{gate}; raise it or lower theirs"
            )
