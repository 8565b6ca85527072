"""The options of built-in environments: which environment each is for, which combinations are valid, and which decide rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config.data import EnvConfig, JudgeConfig, OptionOf
from headrace.config.in_yaml import in_yaml
from headrace.config.marks import Mark

# The built-in environments that run episodes.
PROGRAMS = ("function", "verifiers")
_TAG = re.compile(r"[A-Za-z_][\w.-]*")


def problems(name: str, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    """Yield what is wrong with the options of `environments[name]`: the value and the remedy, to be appended to the environment's key."""
    env = environments[name]
    kind = env.kind(name)
    for option, field in type(env).model_fields.items():
        value, owners = getattr(env, option), _owners(field)
        if owners and kind not in owners and value != field.get_default(call_default_factory=True):
            whose = "a custom environment" if kind is None else f"type {kind}"
            yield f".{option} {in_yaml(value)} is an option of {', '.join(owners)}, not of {whose}; leave it out"
    if kind in _CHECKS:
        yield from _CHECKS[kind](name, env, environments)
    if env.episodes and kind not in (None, *PROGRAMS):
        yield f".episodes true is for a program, not for type {kind}, which scores; leave it out, and name it as a program's grader"
    if env.grader is not None:
        yield from _grader(name, env.grader, environments)


def decisive_options(name: str, env: EnvConfig) -> dict[str, object]:
    """Return the options, as JSON, on which the rewards of the built-in environment `env.<name>` depend. An option counts unless it is
    known not to matter."""
    kind, fields = env.kind(name), type(env).model_fields
    undecisive = _undecisive(type(env))
    if kind == "code":
        # it fails the tests for which no time is left after a program has used up its own
        undecisive -= {"timeout_s"}
    own = {option for option, field in fields.items() if kind in (_owners(field) or (kind,))}
    return env.model_dump(
        mode="json", include=own - undecisive, exclude={"judges": {"__all__": _undecisive(JudgeConfig)}}
    )


def _owners(field: FieldInfo) -> tuple[str, ...]:
    """Return the environments that an option is for; nothing if it is for all of them."""
    return next((mark.kinds for mark in field.metadata if isinstance(mark, OptionOf)), ())


def _undecisive(model: type[BaseModel]) -> set[str]:
    marks = (Mark.UNDECISIVE, Mark.MAY_CHANGE)
    return {option for option, field in model.model_fields.items() if any(mark in field.metadata for mark in marks)}


def _grader(name: str, grader: str, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    others = [other for other, env in environments.items() if not env.episodes and other != name]
    if grader not in others:
        wrong = "runs episodes itself" if grader in environments else "is not under env"
        yield f".grader {grader!r} {wrong}; name an environment that scores ({', '.join(others) or 'env has none'})"


def _function(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if env.function is None:
        yield ".function null; name the program, package.module:NAME"
    if not env.episodes:
        yield ".episodes false, but a function runs episodes; set it to true"


def _verifiers(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if not env.episodes:
        yield ".episodes false, but a verifiers environment runs episodes; write type: verifiers, and leave episodes out"
    if env.python is None:
        yield ".python null; name the Python that verifiers is installed in, for example .venv-verifiers/bin/python"
    taskset = env.verifiers.get("taskset")
    if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
        yield f".verifiers {env.verifiers} names no environment; give taskset: {{id: NAME}}, and other keys of verifiers' [env] as needed"
    if env.public != ["task"]:
        yield f".public {env.public}: a verifiers environment gets only the task of a row; leave it out"


def _math(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if env.extract == "choice" and env.tolerance is not None:
        yield f".tolerance {env.tolerance} with extract choice, which compares letters; leave one of them out"


def _no_choice(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if env.extract == "choice":
        yield ".extract choice is for math, whose answer is then a letter; use answer_tag or answer_line"


def _code(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    yield from _no_choice(name, env, environments)
    if env.wall_s >= env.timeout_s:
        yield (
            f".wall_s {env.wall_s:g} is not less than timeout_s {env.timeout_s:g}, the limit of all tests; lower wall_s or raise "
            "timeout_s"
        )


def _regex(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if env.pattern is None:
        yield ".pattern null; give the regular expression that earns 1 where it is found"
        return
    try:
        re.compile(env.pattern)
    except re.error as error:
        yield f".pattern {env.pattern!r} is not a regular expression ({error}); correct it"


def _format(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    for tag in env.tags:
        if not _TAG.fullmatch(tag):
            yield f".tags {tag!r} is not the name of a tag; give a name without < and >, for example think"
    if len(set(env.tags)) != len(env.tags):
        yield f".tags {env.tags} names a tag twice; name each once, as a completion has each once"


def _length(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if env.min_tokens == 0 and env.max_tokens is None:
        yield ".min_tokens 0 and max_tokens null limit nothing; give one of them"
    if env.max_tokens is not None and env.max_tokens < env.min_tokens:
        yield f".max_tokens {env.max_tokens} is less than min_tokens {env.min_tokens}; raise max_tokens or lower min_tokens"


def _llm_judge(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if not env.judges:
        yield ".judges [] is empty; give one or more, each with base_url and model"
    if env.rubric is None:
        yield ".rubric null; give the criteria for the judges"
    lowest, highest = env.scale
    if lowest >= highest:
        yield f".scale [{lowest}, {highest}]: the best score is not above the worst; give the worst first"
    if env.vote == "majority" and env.threshold is None:
        yield ".vote majority without threshold; give the lowest score, from 0 to 1, that counts as a judge's yes"


def _reward_model(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if env.model_name is None:
        yield ".model_name null; name the model, a directory or a name on the Hugging Face Hub"


def _combine(name: str, env: EnvConfig, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    if not env.parts:
        yield ".parts {} is empty; name the environments to combine, with their weights, for example {math: 1.0, brief: 0.2}"
        return
    for part, weight in env.parts.items():
        if part not in environments or environments[part].kind(part) == "combine":
            known = ", ".join(other for other in environments if environments[other].kind(other) != "combine") or "none"
            yield f".parts.{part} is not under env, or is a combination itself; name one of {known}"
            return
        if environments[part].episodes:
            yield f".parts.{part} runs episodes and scores no completions; leave it out, or move its reward to a grader"
            return
        if env.combine == "product" and weight != 1:
            yield f".parts.{part} {weight:g} with combine product, which has no weights; give 1, or combine: sum"
    if env.require_stop:
        yield ".require_stop true is not for a combination; set it for the parts that need an end token, or for the gate"
    if env.gate is not None and env.gate not in env.parts:
        yield f".gate {env.gate!r} is not one of its parts ({', '.join(env.parts)}); name one of them"
        return
    others = [environments[part].timeout_s for part in env.parts if part != env.gate]
    first = 0.0 if env.gate is None else environments[env.gate].timeout_s
    longest = first + max(others, default=0.0)
    if env.timeout_s < longest:
        gate = "" if env.gate is None else ", the gate's before the others'"
        yield f".timeout_s {env.timeout_s:g} is less than the {longest:g} s that its parts have{gate}; raise it or lower theirs"


_CHECKS = {
    "math": _math,
    "reasoning_gym": _no_choice,
    "regex": _regex,
    "format": _format,
    "length": _length,
    "combine": _combine,
    "code": _code,
    "llm_judge": _llm_judge,
    "reward_model": _reward_model,
    "function": _function,
    "verifiers": _verifiers,
}
