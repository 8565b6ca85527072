"""What every section of the configuration shares."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the run's YAML: unknown keys are errors, values are checked on the way in, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
