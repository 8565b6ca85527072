"""Built-in environments in which a model judges: `llm_judge`, `reward_model`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.base.addresses import has_host
from headrace.config.environments.base import ScoringConfig, undecisive
from headrace.config.jinja_file import read_template
from headrace.config.marks import Fixed, MayChange, ReadPath, Undecisive
from headrace.config.policy import HOTTEST
from headrace.config.section import Section
from headrace.records.score import LARGEST_REWARD

MOST_SAMPLES = 64


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
    temperature: float = Field(0.0, ge=0, le=HOTTEST)
    max_tokens: int = Field(512, ge=16, description="the longest answer: a reason and a score")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**63 - MOST_SAMPLES,  # endpoints take 64 bits
        description="sent with each request, plus the number of the sample; null: the endpoint draws its own",
    )

    @field_validator("base_url")
    @classmethod
    def _has_a_host(cls, base_url: str) -> str:
        if not has_host(base_url):
            raise ValueError(f"{base_url!r} has no host, or no port from 0 to 65535; correct it")
        return base_url


Finite = Annotated[float, Field(allow_inf_nan=False)]


class LLMJudgeConfig(ScoringConfig):
    """Language models judge the completion by a rubric."""

    type: Undecisive[Fixed[Literal["llm_judge"]]] = "llm_judge"
    judges: Fixed[list[JudgeConfig]] = Field(min_length=1, description="the models that judge each completion")
    rubric: Fixed[str | None] = Field(
        None, min_length=1, description="the criteria for the judges; null: the template has them"
    )
    template: Fixed[ReadPath[str | None]] = Field(
        None,
        description="what a judge reads: a Jinja template, or a file that ends in .jinja, which is read when the run starts; null: prompt, "
        "completion and reference answer as JSON",
    )
    scale: Fixed[tuple[int | Finite, int | Finite]] = Field(
        (1, 10),
        description="the worst and the best score of a judge, which become 0 and 1. Between two whole numbers, scores are whole numbers",
    )
    compare: Fixed[Literal["group", "pairs", "reference"] | None] = Field(
        None,
        description="group: a judge sees all completions of a group at once, and scores each. pairs: it says which of two completions of a "
        "group is better; the reward is the share of wins. reference: likewise, of the completion and the row's reference answer. null: it "
        "scores each completion alone",
    )
    opponents: Fixed[int] = Field(
        4,
        ge=1,
        description="with compare pairs: with how many others of its group a completion is compared, rounded up to an even number",
    )
    samples: Fixed[int] = Field(1, ge=1, le=MOST_SAMPLES, description="verdicts of each judge on each completion")
    threshold: Fixed[float | None] = Field(
        None,
        description="a verdict (from 0 to 1) of at least this counts as 1, a lower one as 0; null: the verdict itself",
    )
    vote: Fixed[Literal["mean", "median", "majority"]] = Field(
        "mean",
        description="the reward is the mean or the median of all verdicts, or 1 if more than half of them are 1",
    )
    calibration: Undecisive[Fixed[ReadPath[str | None]]] = Field(
        None,
        description="a file of JSON lines (prompt, completion, score, extra_env_info) with the scores that people gave, on the scale. The "
        "judges judge them before they judge the run's, and the agreement is logged",
    )
    min_agreement: Undecisive[MayChange[float | None]] = Field(
        None,
        ge=0,
        le=1,
        description="the least rank correlation of the rewards with the scores of people; below it, the judges aren't used. null: no bound",
    )
    map_to_people: Fixed[bool] = Field(
        False,
        description="map the reward to what people gave, by the monotone function that fits the calibration best",
    )
    retries: Undecisive[Fixed[int]] = Field(
        1, ge=0, description="how often a judge is asked again after an answer that is no verdict on the scale"
    )
    budget: Undecisive[Fixed[int | None]] = Field(
        None,
        ge=0,
        description="requests that the run may send to the judges; once they are used up, the breaker opens. null: no limit",
    )
    concurrency: Undecisive[Fixed[int]] = Field(16, ge=1, description="completions that are judged at a time")

    @field_validator("template")
    @classmethod
    def _is_text(cls, template: str | None) -> str | None:
        return None if template is None else read_template(template)

    @field_validator("scale")
    @classmethod
    def _ascends(cls, scale: tuple[float, float]) -> tuple[float, float]:
        lowest, highest = scale
        if lowest >= highest:
            raise ValueError(f"[{lowest}, {highest}]: the best score is not above the worst; give the worst first")
        if max(-lowest, highest) > LARGEST_REWARD:
            raise ValueError(
                f"[{lowest!s:.20}, {highest!s:.20}]: give scores between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
            )
        return scale

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.vote == "majority" and self.threshold is None:
            raise ValueError(
                "vote majority without threshold; give the lowest score, from 0 to 1, that counts as a judge's yes"
            )
        if self.rubric is None and self.template is None:
            raise ValueError("neither rubric nor template; give the criteria for the judges in one of them")
        if self.calibration is None and (self.min_agreement is not None or self.map_to_people):
            raise ValueError(
                "min_agreement or map_to_people without calibration; give a file of completions that people scored"
            )
        if self.map_to_people and self.compare is not None:
            raise ValueError(
                f"map_to_people with compare {self.compare}, whose rewards are relative to other completions; leave one of the two out"
            )
        greedy = [place for place, judge in enumerate(self.judges) if judge.temperature == 0]
        if self.samples > 1 and greedy:
            raise ValueError(
                f"samples {self.samples} with judges.{greedy[0]}.temperature 0, where all would be equal; give a temperature above 0"
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
