"""The base class of every section of the configuration."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from headrace.records.score import LARGEST_REWARD

# what rewards are multiplied by or mapped to: sums over a batch stay finite
Bounded = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class Section(BaseModel):
    """One section of the run's YAML. Unknown keys are errors, values are validated, and instances are immutable. Numbers are finite: an
    infinite deadline would let a hang last. A key whose infinity means something says so (`allow_inf_nan`)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,  # each validator when it is first used: most sections are validated by that of the whole configuration alone
    )
