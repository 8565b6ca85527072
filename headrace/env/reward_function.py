"""Reward functions of TRL and verl as environments: a plain function, known by the names of its parameters.

    def accuracy(completions, answer, **kwargs) -> list[float | None]            TRL's: `completions` (or `completion_ids`), lists
    def compute_score(data_source, solution_str, ground_truth, extra_info=None)  verl's: `solution_str`, a number or a dict with "score"

Both may be `async`. Columns of the data set are what `extra_env_info` holds. docs/from-trl.md and docs/from-verl.md have the contract.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from headrace.env.environment import Environment, Sample, Scored, make_failed
from headrace.env.slots import Raised, is_cancellation
from headrace.env.source_build import source_build
from headrace.records.score import NOT_APPLICABLE, Score
from headrace.records.trajectory import Message

TRL, VERL = "TRL", "verl"
# What a function must look like, for errors.
SIGNATURES = (
    "TRL's, `def reward(completions, **kwargs)`, which returns a list with a number or None for each completion; verl's, "
    "`def reward(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`, which returns a number or a dict with `score`; or "
    "write `class Reward(headrace.Environment)` with `def score(self, sample)`"
)
_NAMING = {"completions": TRL, "completion_ids": TRL, "solution_str": VERL}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
# Arguments of TRL's trainer that are no columns.
_LOGGERS = ("log_extra", "log_metric")


def style_of(signature: inspect.Signature) -> str | None:
    """Return whose reward function has this signature, `TRL` or `VERL`; None for any other function. Both call by keyword."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    styles = {style for name, style in _NAMING.items() if name in kinds and kinds[name] not in _POSITIONAL}
    required = (p for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty)
    return styles.pop() if len(styles) == 1 and not any(required) else None


def signature_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """Return the signature of a function that is not run: of its defaults, only that there are some."""
    given, kind = function.args, inspect.Parameter
    plain = [
        *((each, kind.POSITIONAL_ONLY) for each in given.posonlyargs),
        *((e, kind.POSITIONAL_OR_KEYWORD) for e in given.args),
    ]
    first_default = len(plain) - len(given.defaults)
    found = [
        kind(each.arg, of, default=None if at >= first_default else kind.empty) for at, (each, of) in enumerate(plain)
    ]
    if given.vararg:
        found.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    if given.kwarg:
        found.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(found)


def signature_text(function: Callable[..., Any]) -> str:
    """Return the parameters of a function as they are written, without parentheses; `…` where Python doesn't tell."""
    try:
        return str(inspect.signature(function)).removeprefix("(").rpartition(")")[0]
    except (TypeError, ValueError):
        return "…"


def make_environment(function: Callable[..., Any], name: str, module: str) -> Environment | None:
    """Return an environment that scores with the function, which the file of `module` has under this name; None if it is neither TRL's nor
    verl's."""
    try:
        style = style_of(inspect.signature(function))
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    if style is None:
        return None
    # a class in the function's module: its source is the build, and failures name its lines
    own = getattr(function, "__module__", module) if inspect.isroutine(function) else module
    members = {"function": staticmethod(function), "__module__": own}
    return cast(Environment, type(name, (_STYLES[style],), members)())


class _RewardFunction(Environment):
    """An environment whose rewards a plain function computes."""

    function: Callable[..., Any]

    @functools.cached_property
    def build(self) -> str:
        return source_build(self, type(self).__mro__[1])

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def _chosen(self, offered: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function takes of those that are offered. Raises `TypeError` naming a column that there isn't."""
        parameters = self._signature.parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            chosen = dict(offered)
        else:
            chosen = {each.name: offered[each.name] for each in parameters if each.name in offered}
        for each in parameters:
            if (
                each.default is each.empty
                and each.kind not in (*_POSITIONAL, each.VAR_KEYWORD)
                and each.name not in offered
            ):
                there = ", ".join(sorted(columns)) or "none"
                raise TypeError(
                    f"{self.label} takes {each.name}, which is not a column of this problem; it has {there}. Add the "
                    "column, or give the parameter a default"
                )
        return chosen


class _TrainerState:
    """Stands for TRL's state of the trainer, which an environment can't know."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name}: a reward is computed while the trainer is at another step, so it must not depend on the trainer's state"
        )


class _Log:
    """What a call of a TRL function logs: numbers of the call (`log_metric`), and columns with a value for each completion
    (`log_extra`)."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.columns: dict[str, Sequence[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.columns[column] = list(values)


class TRLFunction(_RewardFunction):
    """TRL's reward function, which is called with lists: one entry for each completion of a call."""

    def __init__(self) -> None:
        # TRL runs one call at a time, and the coroutines of one call beside each other
        self.concurrency = Environment.concurrency if inspect.iscoroutinefunction(self.function) else 1

    def score_batch(self, samples: Sequence[Sample]) -> Any:
        log = _Log()
        arguments = self._arguments(samples, log)
        rewards: Any = None
        with contextlib.suppress(BaseException) if len(samples) > 1 else contextlib.nullcontext():
            returned = self.function(**arguments)
            rewards = returned if inspect.isawaitable(returned) else self._listed(returned)
        if rewards is None:  # it raised
            return [self._alone(sample) for sample in samples]
        if inspect.isawaitable(rewards):
            return self._awaited(rewards, samples, log)
        return self._scores(rewards, samples, log)

    def _alone(self, sample: Sample) -> Scored:
        """Score one sample of a call that raised: only those that raise again fail."""
        try:
            return cast(Scored, self.score_batch([sample])[0])
        except BaseException as error:  # noqa: BLE001
            return make_failed(self, error)

    async def _awaited(self, returned: Awaitable[Any], samples: Sequence[Sample], log: _Log) -> list[Scored]:
        rewards: list[Any] | None = None
        try:
            rewards = self._listed(await returned)
        except BaseException as error:
            if len(samples) == 1 or is_cancellation(error):
                raise
        if rewards is None:  # not above: the errors of the calls to come would each bring this one's traceback
            return [await self._awaited_alone(sample) for sample in samples]
        return self._scores(rewards, samples, log)

    async def _awaited_alone(self, sample: Sample) -> Scored:
        try:
            return cast(Scored, (await self.score_batch([sample]))[0])
        except BaseException as error:
            if is_cancellation(error):
                raise
            return make_failed(self, Raised(error).error)

    def _arguments(self, samples: Sequence[Sample], log: _Log) -> dict[str, Any]:
        """Return the arguments of a call: prompts and completions are lists of messages, but texts where the data set's prompt is text."""
        rows = [sample.extra_env_info for sample in samples]
        # as in TRL, a column is one of the first row; a row without it has None
        columns = {
            name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)
        }
        texts = [row.get("prompt") if isinstance(row.get("prompt"), str) else None for row in rows]
        columns.pop("prompt", None)
        own = {
            "prompts": [list(s.messages) if t is None else t for s, t in zip(samples, texts, strict=True)],
            "completions": [_completion(s) if t is None else s.completion for s, t in zip(samples, texts, strict=True)],
            "completion_ids": [list(sample.completion_token_ids) for sample in samples],
            **{name: getattr(log, name) for name in _LOGGERS},
        }
        state = self._signature.parameters.get("trainer_state")
        if state is None or state.default is state.empty:
            own["trainer_state"] = _TrainerState()
        return self._chosen({**columns, **own}, columns)

    def _listed(self, returned: Any) -> list[Any]:
        try:
            return list(returned)
        except TypeError:
            what = f"{returned!r:.80} ({type(returned).__name__})"
            raise TypeError(f"{self.label} returned {what}, not a list with a reward for each completion") from None

    def _scores(self, rewards: Sequence[Any], samples: Sequence[Sample], log: _Log) -> list[Scored]:
        if len(rewards) != len(samples):
            raise ValueError(
                f"{self.label} returned {len(rewards)} rewards for {len(samples)} completions; return one for each, in order"
            )
        for column, logged in log.columns.items():
            if len(logged) != len(samples):
                raise ValueError(f"log_extra({column!r}, …) has {len(logged)} values for {len(samples)} completions")
        extra = [{column: logged[at] for column, logged in log.columns.items()} for at in range(len(samples))]
        return [self._scored(reward, log.metrics, each) for reward, each in zip(rewards, extra, strict=True)]

    def _scored(self, reward: Any, components: dict[str, float], metadata: dict[str, Any]) -> Scored:
        if reward is None:
            return Score(
                "INVALID",
                message=f"{self.label} returned None: it does not apply to this completion, and no other function scores it",
                metadata={NOT_APPLICABLE: True},
            )
        if isinstance(reward, Score) or not hasattr(reward, "__float__"):
            return cast(Scored, reward)  # judged as what an environment returns is
        try:
            return Score("SCORED", reward=float(reward), components=components, metadata=metadata)
        except Exception as error:  # noqa: BLE001  # a number that is not finite, or an object that refuses
            return make_failed(self, str(error))


def _completion(sample: Sample) -> list[Message]:
    """Return what the policy and its tools said, as messages."""
    after = sample.conversation[len(sample.messages) :]
    return [*after] if after else [{"role": "assistant", "content": sample.completion}]


class VerlFunction(_RewardFunction):
    """verl's reward function, which is called for one completion."""

    def score(self, sample: Sample) -> Any:
        value = self.function(**self._arguments(sample))
        return self._awaited(value) if inspect.isawaitable(value) else _of_verl(value)

    async def _awaited(self, value: Any) -> Scored:
        return _of_verl(await value)

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        row = sample.extra_env_info
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        offered = {
            "data_source": row.get("data_source", sample.task_name),
            "solution_str": sample.completion,
            "ground_truth": row.get("answer") if truth is None else truth,
            "extra_info": dict(row.get("extra_info") or {}),
        }
        return self._chosen(offered, offered)


def _of_verl(value: Any) -> Scored:
    """Return the reward that a verl function returned: a number, or a mapping with `score`. Its other numbers become components, the rest
    metadata."""
    if not isinstance(value, Mapping):
        return cast(Scored, value)
    if "score" not in value:
        raise ValueError(f"it returned {dict(value)!r:.80}, without `score`; return a number, or a dict with `score`")
    rest = {str(name): each for name, each in value.items() if name != "score"}
    components = {name: float(cast(Any, each)) for name, each in rest.items() if isinstance(each, numbers.Real)}
    metadata = {name: each for name, each in rest.items() if name not in components}
    return Score("SCORED", reward=float(value["score"]), components=components, metadata=metadata)


_STYLES: Mapping[str, type[_RewardFunction]] = {TRL: TRLFunction, VERL: VerlFunction}
