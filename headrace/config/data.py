"""`data`: where prompts come from, and which environment scores the answers."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from headrace.config.keys import ItemPath
from headrace.config.marks import CodePath, Fixed, MayChange, ReadPath
from headrace.config.section import Section

Generator = Literal["arithmetic", "reasoning_gym", "verifiers"]
# data sets on the Hugging Face Hub that are known by NeMo RL's names; services/trainer/data/sources.py knows their fields
HubName = Literal[
    "OpenMathInstruct-2",
    "DeepScaler",
    "DAPOMath17K",
    "DAPOMathAIME2024",
    "AIME2024",
    "AIME2025",
    "AIME2026",
    "gsm8k",
    "GSM8K",
    "OpenR1-Math-220k",
    "NuminaMath-1.5",
    "HelpSteer3",
    "squad",
    "tulu3_sft_mixture",
]
ProcessorName = Literal["multichoice_qa_processor"]
# a user's function or class, by its file or by its import path
OWN_CODE = re.compile(r".+\.py:[A-Za-z_]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# the run's own data sets, as `evaluate` names them
OWN = ("validation", "train")
# the most prompts in which weighted data sets must reach their exact shares
LONGEST_ROUND = 10_000
# the keys that say what is generated, and those that name the columns of what is not
GENERATED, _COLUMNS = ("task", "task_config", "size"), ("input_key", "output_key")


def _check_known(name: str | None, names: Sequence[str], what: str) -> str | None:
    if name is None or name in names or OWN_CODE.fullmatch(name):
        return name
    close = difflib.get_close_matches(name, names, 1, 0.6)
    meant = f"did you mean {close[0]}?" if close else f"known ones are {', '.join(names)}."
    raise ValueError(f"unknown {what} {name!r}; {meant} Write your own as FILE.py:NAME")


class DataSourceConfig(Section):
    """One data set: a built-in generator or a known set on the Hugging Face Hub by `dataset_name`; or a file, a folder or any set on the
    Hub by `data_path`."""

    dataset_name: Fixed[CodePath[str | None]] = Field(
        None,
        description=f"{', '.join((*get_args(Generator), *get_args(HubName)))}; or your own function or class, FILE.py:NAME or "
        "package.module.NAME, which is called with task_config and returns rows",
    )
    data_path: MayChange[ReadPath[str | None]] = Field(
        None,
        description="a JSONL file with one problem per line, a JSON list, a Parquet file, a folder that datasets can load, or the "
        "owner/name of a data set on the Hugging Face Hub",
    )
    input_key: Fixed[str] = Field(
        "input",
        description="field of a row with the problem: text, or a list of chat messages; dots select nested fields",
    )
    output_key: Fixed[str | None] = Field(
        "output",
        description="field of a row with the expected answer; null: the last message of the problem if it is the assistant's, else no "
        "answer",
    )
    info_keys: Fixed[list[str] | None] = Field(
        None,
        description="the other fields of a row that the environment gets (`extra_env_info`) and prompt_file may use; what the rest holds "
        "does not matter. null: all of them, but none of a set on the Hub",
    )
    task: Fixed[str | None] = Field(None, description="reasoning_gym: name of the task")
    processor: MayChange[CodePath[str | None]] = Field(
        None,
        description="converts each row before input_key and output_key are read: your own function, FILE.py:NAME or package.module.NAME; "
        "or multichoice_qa_processor, for rows with question, options and answer",
    )
    task_config: Fixed[dict[str, Any]] = Field(
        {},
        description="reasoning_gym: arguments of the task; arithmetic: digits; verifiers: which tasks, as in its section `select`; your "
        "own data set: its arguments",
    )
    size: Fixed[int] = Field(
        1000,
        ge=1,
        description="problems to generate, before duplicates are removed; verifiers: tasks to take of an endless task set",
    )
    seed: Fixed[int] = Field(0, ge=0, description="seed of the generator, and of split_validation_size")
    subset: Fixed[str | None] = Field(None, description="subset of a set on the Hub; null: the usual one")
    split: Fixed[str | None] = Field(None, description="split of a set on the Hub; null: the usual one")
    split_validation_size: Fixed[float] = Field(
        0.0, ge=0, lt=1, description="share of a training set that is held out for validation, drawn with seed"
    )
    repeat: Fixed[int | None] = Field(
        None, ge=1, description="how often each problem is asked; null: once, but 16 times for AIME2024 to AIME2026"
    )
    weight: Fixed[float | None] = Field(
        None,
        gt=0,
        description="share of the training prompts that are drawn from this set, relative to the other sets; null: 1 beside sets with a "
        "weight. Without any weights, all sets are mixed into one",
    )
    prompt_file: MayChange[ReadPath[str | None]] = Field(
        None,
        description="file with the text of the user's message, with {} for the problem and {name} for other fields of the row; null: the "
        "problem as it is",
    )
    env_name: Fixed[str | None] = Field(None, description="the environment that scores; null: `default.env_name`")
    system_prompt: Fixed[str | None] = None
    system_prompt_file: MayChange[ReadPath[str | None]] = Field(
        None, description="a file with the system prompt, instead of system_prompt"
    )

    def unread(self, part: str) -> tuple[str, ...]:
        """Return the keys that have no effect on this kind of data set in `data.<part>`."""
        name, of_part = self.dataset_name, () if part == "train" else ("weight", "split_validation_size")
        if name in get_args(Generator):
            of_rows = (*_COLUMNS, "info_keys", "processor", "subset", "split")
            return (*of_part, *of_rows, *(() if name == "reasoning_gym" else ("task",)))
        if name in get_args(HubName):
            return (*of_part, *GENERATED, *(() if self.processor else _COLUMNS))
        if name is None:  # only where a path is read is it known whether it is a file, which has no subset or split
            return (*of_part, *GENERATED)
        return (*of_part, "task", "size", "subset", "split")

    @field_validator("dataset_name")
    @classmethod
    def _check_data_set(cls, name: str | None) -> str | None:
        return _check_known(name, (*get_args(Generator), *get_args(HubName)), "data set")

    @field_validator("processor")
    @classmethod
    def _check_processor(cls, name: str | None) -> str | None:
        return _check_known(name, get_args(ProcessorName), "processor")

    @model_validator(mode="after")
    def _one_source(self) -> DataSourceConfig:
        if self.dataset_name and self.data_path:
            raise ValueError(f"dataset_name {self.dataset_name!r} and data_path {self.data_path!r}: give one of them")
        if self.system_prompt is not None and self.system_prompt_file is not None:
            raise ValueError(f"system_prompt and system_prompt_file {self.system_prompt_file!r}: give one of them")
        if self.dataset_name == "reasoning_gym" and not self.task:
            raise ValueError(
                "dataset_name reasoning_gym needs task, the name of one of its tasks (for example chain_sum)"
            )
        return self


class DataConfig(Section):
    shuffle: Fixed[bool] = Field(True, description="a new order of prompts every epoch, drawn from grpo.seed")
    max_input_seq_length: Fixed[int | None] = Field(
        None, ge=1, description="the longest prompt in tokens; null: as long as the context allows"
    )
    overlong_prompts: Fixed[Literal["refuse", "leave_out"]] = Field(
        "refuse",
        description="what happens to a longer prompt. refuse: the run ends and names it; leave_out: its problem is left out from the start",
    )
    use_multiple_dataloader: Fixed[bool] = Field(
        False,
        description="draw from every set of `train` in turn, each with its own order and epochs; false mixes them into one set. "
        "A set that is used up starts again, until all have been used max_num_epochs times",
    )
    num_prompts_per_dataloader: Fixed[int | None] = Field(
        None,
        ge=1,
        description="with use_multiple_dataloader: prompts from a set at its turn; null divides num_prompts_per_step among the sets",
    )
    train: list[DataSourceConfig] = Field([])
    validation: list[DataSourceConfig] = Field(
        [], description="problems that also occur in train are removed from train"
    )
    evaluate: Fixed[
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], DataSourceConfig | None], Field(min_length=1)
        ]
        | None
    ] = Field(
        None,
        description="written by `headrace eval`: data sets by name, each asked once; the run trains nothing. null under `validation` or "
        "`train`: the run's own",
    )
    remove_duplicates: Fixed[bool] = Field(
        True, description="keep only the first of equal problems; false keeps a set's own weighting"
    )
    default: DataSourceConfig = Field(DataSourceConfig(), description="fills what a source leaves out")

    @model_validator(mode="before")
    @classmethod
    def _fill_gaps(cls, values: Any) -> Any:
        """Make a list of a single mapping, and fill the gaps of each source from `default`."""
        if not isinstance(values, dict):
            return values
        default = values.get("default") or {}
        filled = dict(values)
        for key in ("train", "validation"):
            sources = values.get(key) or []
            sources = [sources] if isinstance(sources, dict) else sources
            if isinstance(sources, list) and isinstance(default, dict):
                filled[key] = [{**default, **s} if isinstance(s, dict) else s for s in sources]
        if isinstance(values.get("evaluate"), dict) and isinstance(default, dict):
            filled["evaluate"] = {
                name: {**default, **s} if isinstance(s, dict) else s for name, s in values["evaluate"].items()
            }
        return filled

    @property
    def shares(self) -> list[int] | None:
        """The number of prompts that each set of `train` gives in a round; None if no set has a weight."""
        if all(source.weight is None for source in self.train):
            return None
        # by their text, so that 0.1 is exactly a tenth
        weights = [Fraction(str(source.weight or 1)) for source in self.train]
        unit = Fraction(math.gcd(*(w.numerator for w in weights)), math.lcm(*(w.denominator for w in weights)))
        return [int(weight / unit) for weight in weights]

    @model_validator(mode="after")
    def _weights_can_be_followed(self) -> DataConfig:
        if (shares := self.shares) is None:
            return self
        if self.use_multiple_dataloader:
            raise ValueError(
                "use_multiple_dataloader true draws equally many prompts from every set; leave out this key, or the weights of the sets"
            )
        if sum(shares) > LONGEST_ROUND:
            shown = ", ".join(f"{source.weight or 1:g}" for source in self.train)
            raise ValueError(
                f"train: the weights {shown} need {sum(shares)} prompts to reach their exact shares; round them, so that "
                f"{LONGEST_ROUND} are enough"
            )
        return self

    @property
    def sources(self) -> list[DataSourceConfig]:
        """All data sets that the run may ask."""
        return [*self.places.values()]

    @property
    def places(self) -> dict[ItemPath, DataSourceConfig]:
        """All data sets that the run may ask, by their keys in the configuration."""
        places: dict[ItemPath, DataSourceConfig] = {}
        for part, sources in (("train", self.train), ("validation", self.validation)):
            places |= {("data", part, number): source for number, source in enumerate(sources)}
        evaluated = (self.evaluate or {}).items()
        return places | {("data", "evaluate", name): source for name, source in evaluated if source is not None}

    @model_validator(mode="after")
    def _evaluates_what_there_is(self) -> DataConfig:
        for name, source in (self.evaluate or {}).items():
            if source is None and name not in OWN:
                raise ValueError(
                    f"evaluate.{name} is null, but is not one of the run's own data sets, {' and '.join(OWN)}; give a data set"
                )
        return self
