"""`data` and `env`: where prompts come from, and which environments score the answers."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from headrace.base.addresses import LOOPBACK, with_port
from headrace.config.marks import AnyPath, CodePath, Fixed, MayChange, ReadPath, Undecisive
from headrace.config.section import Section

Generator = Literal["arithmetic", "reasoning_gym", "verifiers"]
BuiltInName = Literal[
    "math",
    "math_multi_reward",
    "reasoning_gym",
    "regex",
    "format",
    "length",
    "repetition",
    "combine",
    "code",
    "llm_judge",
    "reward_model",
    "function",
    "verifiers",
]
BUILT_IN = get_args(BuiltInName)


class OptionOf:
    """The built-in environments that an option of `env` is for. An option that doesn't say is for all of them."""

    def __init__(self, *kinds: BuiltInName) -> None:
        self.kinds = kinds


# Which part of a completion is the answer.
Extract = Literal["none", "last_number", "boxed", "answer_tag", "answer_line", "choice"]
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


# A file in `env.<name>.target`, the alternative to a gRPC address.
_FILE_TARGET = re.compile(r".+\.py:[A-Za-z_][A-Za-z0-9_]*")
_FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
# An address with a port, or a socket on this machine.
_ADDRESS_TARGET = re.compile(r"unix(-abstract)?:.+|.*[^:]:\d{1,5}")
# the run's own data sets, as `evaluate` names them
OWN = ("validation", "train")
# the most prompts in which weighted data sets must reach their exact shares
LONGEST_ROUND = 10_000


def _in_yaml(value: Any) -> str:
    from headrace.config.in_yaml import in_yaml  # only a message needs it, and YAML

    return in_yaml(value)


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
        allow_inf_nan=False,
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
    def _weights_are_of_training(self) -> DataConfig:
        for number, source in enumerate(self.validation):
            if source.weight is not None:
                raise ValueError(
                    f"validation[{number}].weight {source.weight:g}: every problem of a validation set is asked; give weights only to sets "
                    "of train"
                )
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
        evaluated = (source for source in (self.evaluate or {}).values() if source is not None)
        return [*self.train, *self.validation, *evaluated]

    @model_validator(mode="after")
    def _evaluates_what_there_is(self) -> DataConfig:
        for name, source in (self.evaluate or {}).items():
            if source is None and name not in OWN:
                raise ValueError(
                    f"evaluate.{name} is null, but is not one of the run's own data sets, {' and '.join(OWN)}; give a data set"
                )
        return self


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


# Honest answers that are hard for a computer algebra system take up to 0.6 s of a core; hostile ones end never, each try.
MATH_TIMEOUT_S = 10.0


class EnvConfig(Section):
    """One environment, under the name by which data sets refer to it."""

    type: Undecisive[Fixed[BuiltInName | None]] = Field(
        None,
        description="a built-in environment; null: the one with the environment's own name, unless target, command or attached is set",
    )
    target: MayChange[AnyPath[str | None]] = Field(
        None,
        description="a custom environment: FILE.py:CLASS, which `headrace up` serves (without `up`, the reward service does), or the "
        "host:port of a process that serves it over gRPC",
    )
    command: MayChange[list[str] | None] = Field(
        None,
        min_length=1,
        description="a custom environment: a program and its arguments, which `headrace up` starts. It serves the environment over gRPC on "
        "$ENVIRONMENT_HOST and $ENVIRONMENT_PORT",
    )
    attached: MayChange[bool] = Field(
        False,
        description="a custom environment: processes that dial the reward hub (`headrace.attach`) and share its load",
    )
    episodes: Undecisive[Fixed[bool]] = Field(
        False,
        description="the environment runs programs that call the policy themselves (the method `episode`); true for types function and "
        "verifiers",
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
    function: Annotated[Fixed[str | None], OptionOf("function")] = Field(
        None,
        pattern=_FUNCTION,
        description="function: package.module:NAME of a function of one headrace.Episode, async or plain, which the reward service runs in "
        "its own process",
    )
    python: Undecisive[Annotated[Fixed[str | None], OptionOf("verifiers")]] = Field(
        None, description="verifiers: the Python that verifiers 0.4 and the environment are installed in, by its path"
    )
    verifiers: Annotated[Fixed[dict[str, Any]], OptionOf("verifiers")] = Field(
        {},
        description="verifiers: the environment, as in section [env] of verifiers' own configuration: taskset: {id: NAME, …}, its "
        "agents, and its other keys",
    )
    port: MayChange[int] = Field(
        0,
        ge=0,
        le=65535,
        description="port on the loopback interface for an environment that `headrace up` starts; 0 chooses a free one",
    )
    require_stop: Fixed[bool] = Field(
        False, description="a completion cut off before its end token earns 0 (built-in environments)"
    )
    extract: Annotated[Fixed[Extract], OptionOf("math", "reasoning_gym", "regex", "code")] = Field(
        "none",
        description="math, reasoning_gym, regex and code: which part of the completion is the answer. none: all of it (math then uses the "
        "boxed or else the last expression, code the last fenced block if it has one); last_number: its last number; boxed: the content of "
        "the last `\\boxed{…}`; answer_tag: the last <answer>…</answer>; answer_line: what follows the last `Answer:` on its line, in the "
        "last 300 characters; choice (math): the letter of a multiple choice",
    )
    tolerance: Annotated[Fixed[float | None], OptionOf("math")] = Field(
        None,
        gt=0,
        lt=1,
        description="math: a number that differs from the expected one by at most this share of it is right too; null: it must be equal",
    )
    threshold: Annotated[Fixed[float | None], OptionOf("reasoning_gym", "llm_judge")] = Field(
        None,
        description="reasoning_gym, and each judge of llm_judge: a score (from 0 to 1) of at least this counts as 1, a lower one as 0; "
        "null: the score itself",
    )
    pattern: Annotated[Fixed[str | None], OptionOf("regex")] = Field(
        None,
        description="regex: a Python regular expression; a completion earns 1 if it is found in the part chosen by `extract`, else 0",
    )
    tags: Annotated[Fixed[list[str]], OptionOf("format")] = Field(
        ["think", "answer"],
        min_length=1,
        description="format: a completion that consists of these tags, each once and in this order, earns 1, else 0",
    )
    min_tokens: Annotated[Fixed[int], OptionOf("length")] = Field(
        0, ge=0, description="length: a completion of fewer tokens doesn't earn 1"
    )
    max_tokens: Annotated[Fixed[int | None], OptionOf("length")] = Field(
        None, ge=0, description="length: a completion of more tokens doesn't earn 1"
    )
    fade_tokens: Annotated[Fixed[int], OptionOf("length")] = Field(
        0,
        ge=0,
        description="length: tokens below min_tokens or above max_tokens over which the reward falls from 1 to 0",
    )
    ngram: Annotated[Fixed[int], OptionOf("repetition")] = Field(
        4, ge=1, description="repetition: the reward is the share of distinct runs of this many tokens"
    )
    runs_with: Annotated[Fixed[list[str] | None], OptionOf("code")] = Field(
        None,
        min_length=1,
        description="code: a program in /usr and its arguments, to which the file with the completion's program is appended; null: this "
        "Python, with only the standard library",
    )
    cpu_s: Annotated[Fixed[int], OptionOf("code")] = Field(5, ge=1, description="code: CPU seconds per test")
    wall_s: Annotated[Fixed[float], OptionOf("code")] = Field(10.0, gt=0, description="code: seconds per test")
    memory_mb: Annotated[Fixed[int], OptionOf("code")] = Field(
        512, ge=16, description="code: memory of the program, all its processes together"
    )
    processes: Annotated[Fixed[int], OptionOf("code")] = Field(
        1,
        ge=1,
        description="code: processes and threads that the program may have; 1: one process of at most 64 threads",
    )
    partial_credit: Annotated[Fixed[bool], OptionOf("code")] = Field(
        False, description="code: the reward is the share of tests that pass; false: 1 if all pass, else 0"
    )
    judges: Annotated[Fixed[list[JudgeConfig]], OptionOf("llm_judge")] = Field(
        [], description="llm_judge: the models that judge each completion"
    )
    rubric: Annotated[Fixed[str | None], OptionOf("llm_judge")] = Field(
        None, min_length=1, description="llm_judge: the criteria for the judges"
    )
    scale: Annotated[Fixed[tuple[int, int]], OptionOf("llm_judge")] = Field(
        (1, 10), description="llm_judge: the worst and the best score of a judge, which become 0 and 1"
    )
    vote: Annotated[Fixed[Literal["mean", "majority"]], OptionOf("llm_judge")] = Field(
        "mean",
        description="llm_judge: the reward is the mean of the judges' scores, or 1 if more than half of the judges give 1",
    )
    budget: Undecisive[Annotated[Fixed[int | None], OptionOf("llm_judge")]] = Field(
        None,
        ge=0,
        description="llm_judge: requests that the run may send to the judges; once they are used up, the breaker opens. null: no limit",
    )
    concurrency: Undecisive[Annotated[Fixed[int], OptionOf("llm_judge", "function", "verifiers")]] = Field(
        16,
        ge=1,
        description="llm_judge: completions that are judged at a time; function and verifiers: episodes that run at a "
        "time",
    )
    model_name: Annotated[Fixed[ReadPath[str | None]], OptionOf("reward_model")] = Field(
        None,
        description="reward_model: directory, or name on the Hugging Face Hub, of a model with one label and its tokenizer",
    )
    device: Undecisive[Annotated[Fixed[str], OptionOf("reward_model")]] = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="reward_model: the device that it computes on; auto: a GPU if the machine has one",
    )
    precision: Annotated[Fixed[Literal["float32", "bfloat16", "float16"]], OptionOf("reward_model")] = Field(
        "float32", description="reward_model: precision of its weights"
    )
    batch_size: Undecisive[Annotated[Fixed[int], OptionOf("reward_model")]] = Field(
        32, ge=1, description="reward_model: completions in one forward pass"
    )
    max_model_len: Undecisive[Annotated[Fixed[int | None], OptionOf("reward_model")]] = Field(
        None,
        ge=1,
        description="reward_model: the most tokens of prompt and completion; null: as many as the model can read",
    )
    parts: Annotated[Fixed[dict[str, Annotated[float, Field(allow_inf_nan=False)]]], OptionOf("combine")] = Field(
        {}, description="combine: the environments that score each completion, by name, with their weights"
    )
    combine: Annotated[Fixed[Literal["sum", "product"]], OptionOf("combine")] = Field(
        "sum", description="combine: the reward is the weighted sum of the parts', or their product"
    )
    gate: Annotated[Fixed[str | None], OptionOf("combine")] = Field(
        None,
        description="combine: the part that scores first; if its reward is not above 0, the others are not called, and the reward is 0",
    )
    timeout_s: MayChange[float] = Field(
        60.0,
        gt=0,
        description="seconds for one call of a served environment, or for one trajectory of a built-in one (math: 10 unless given); after "
        "that: TIMED_OUT",
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
    unsafe_no_sandbox: Undecisive[Fixed[bool]] = Field(
        False,
        description="score without a sandbox where the machine allows none (built-in environments); false refuses to start there. Without "
        "a sandbox, what the policy writes can read and do whatever the reward service can",
    )

    @model_validator(mode="before")
    @classmethod
    def _programs_run_episodes(cls, values: Any) -> Any:
        match values:
            case {"type": "function"}:
                return {"episodes": True, **values}
            case {"type": "verifiers"}:
                return {"episodes": True, "public": ["task"], **values}
        return values

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = ("type", "target", "command", "attached")
        given = {key: value for key in kinds if (value := getattr(self, key)) not in (None, False)}
        if len(given) > 1:
            shown = " and ".join(f"{key} {_in_yaml(value)}" for key, value in given.items())
            raise ValueError(f"{shown}: give one of them, and set the others to null (attached to false)")
        target = self.target
        if target is not None and not self.is_started and not _ADDRESS_TARGET.fullmatch(target):
            raise ValueError(
                f"target {target!r} is neither FILE.py:CLASS nor the host:port of a process that serves the environment"
            )
        if self.port and not self.is_started:
            raise ValueError(
                f"port {self.port} is for an environment that `headrace up` starts (target: FILE.py:CLASS, or command); leave it out"
            )
        for key, value in {"public": self.public, "grader": self.grader}.items():
            if value and not self.episodes:
                raise ValueError(
                    f"{key} {_in_yaml(value)} is for an environment with episodes: true; set that, or leave it out"
                )
        return self

    def kind(self, name: str) -> str | None:
        """Return the built-in environment that this is, under the name `name`; None for a served one, or if it is unknown."""
        kind = self.type or name
        return kind if kind in BUILT_IN and not self.is_served else None

    @property
    def is_served(self) -> bool:
        """Whether the environment runs in its own process, which listens or dials; otherwise it is built in."""
        return self.target is not None or self.command is not None or self.attached

    @property
    def is_started(self) -> bool:
        """Whether `headrace up` starts that process."""
        return self.command is not None or (self.target is not None and _FILE_TARGET.fullmatch(self.target) is not None)

    @property
    def address(self) -> str | None:
        """The address on which that process listens; None for a built-in environment, for one that dials, and for one to be started whose
        port is not settled."""
        if self.is_started:
            return with_port(LOOPBACK, self.port) if self.port else None
        return self.target
