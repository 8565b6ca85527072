"""Built-in environments in which a model judges: `llm_judge`, `reward_model`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.base.addresses import has_host
from headrace.config.environments.base import ScoringConfig, undecisive
from headrace.config.marks import Fixed, ReadPath, Undecisive
from headrace.config.section import Section


class JudgeConfig(Section):
    """A language model that judges completions, at any endpoint with OpenAI's API."""

    base_url: str = Field(
        pattern=r"^https?://[^\s@?#]+$",
        description="the URL before /chat/completions, for example https://judge.internal/v1",
    )
    model: str = Field(min_length=1)
    api_key_file: Undecisive[ReadPath[str | None]] = Field(
        None, description="a file that contains only the key; it is read for each request"
    )
    tls_ca: Undecisive[ReadPath[str | None]] = Field(
        None, description="certificates (PEM) of the authority that signed the endpoint's; null: the system's"
    )
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=16, description="the longest answer: a reason and a score")

    @field_validator("base_url")
    @classmethod
    def _has_a_host(cls, base_url: str) -> str:
        if not has_host(base_url):
            raise ValueError(f"{base_url!r} has no host, or no port from 0 to 65535; correct it")
        return base_url


class LLMJudgeConfig(ScoringConfig):
    """Language models judge the completion by a rubric."""

    type: Undecisive[Fixed[Literal["llm_judge"]]] = "llm_judge"
    judges: Fixed[list[JudgeConfig]] = Field(min_length=1, description="the models that judge each completion")
    rubric: Fixed[str] = Field(min_length=1, description="the criteria for the judges")
    scale: Fixed[tuple[int, int]] = Field(
        (1, 10), description="the worst and the best score of a judge, which become 0 and 1"
    )
    threshold: Fixed[float | None] = Field(
        None,
        description="a judge's score (from 0 to 1) of at least this counts as 1, a lower one as 0; null: the score itself",
    )
    vote: Fixed[Literal["mean", "majority"]] = Field(
        "mean",
        description="the reward is the mean of the judges' scores, or 1 if more than half of the judges give 1",
    )
    budget: Undecisive[Fixed[int | None]] = Field(
        None,
        ge=0,
        description="requests that the run may send to the judges; once they are used up, the breaker opens. null: no limit",
    )
    concurrency: Undecisive[Fixed[int]] = Field(16, ge=1, description="completions that are judged at a time")

    @field_validator("scale")
    @classmethod
    def _ascends(cls, scale: tuple[int, int]) -> tuple[int, int]:
        lowest, highest = scale
        if lowest >= highest:
            raise ValueError(f"[{lowest}, {highest}]: the best score is not above the worst; give the worst first")
        return scale

    @model_validator(mode="after")
    def _majority_of_yes(self) -> Self:
        if self.vote == "majority" and self.threshold is None:
            raise ValueError(
                "vote majority without threshold; give the lowest score, from 0 to 1, that counts as a judge's yes"
            )
        return self

    def decisive_options(self) -> dict[str, object]:
        judges = [judge.model_dump(mode="json", exclude=undecisive(JudgeConfig)) for judge in self.judges]
        return {**super().decisive_options(), "judges": judges}


class RewardModelConfig(ScoringConfig):
    """The output of a sequence-classification model."""

    type: Undecisive[Fixed[Literal["reward_model"]]] = "reward_model"
    model_name: Fixed[ReadPath[str]] = Field(
        description="directory, or name on the Hugging Face Hub, of a model with one label and its tokenizer"
    )
    device: Undecisive[Fixed[str]] = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="the device that it computes on; auto: a GPU if the machine has one",
    )
    precision: Fixed[Literal["float32", "bfloat16", "float16"]] = Field(
        "float32", description="precision of its weights"
    )
    batch_size: Undecisive[Fixed[int]] = Field(32, ge=1, description="completions in one forward pass")
    max_model_len: Undecisive[Fixed[int | None]] = Field(
        None,
        ge=1,
        description="the most tokens of prompt and completion; null: as many as the model can read",
    )
