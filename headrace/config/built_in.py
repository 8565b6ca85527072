"""The options of built-in environments: which environment each is for, which combinations are valid, and which decide rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from headrace.config.data import BuiltInName, EnvConfig
from headrace.config.in_yaml import in_yaml

# The environments that an option is for. An option that is not listed is for all of them.
_OPTIONS: Mapping[str, tuple[BuiltInName, ...]] = {
    "extract": ("math", "reasoning_gym", "regex", "code"),
    "threshold": ("reasoning_gym", "llm_judge"),
    "tolerance": ("math",),
    "pattern": ("regex",),
    "tags": ("format",),
    "min_tokens": ("length",),
    "max_tokens": ("length",),
    "fade_tokens": ("length",),
    "ngram": ("repetition",),
    "runs_with": ("code",),
    "cpu_s": ("code",),
    "wall_s": ("code",),
    "memory_mb": ("code",),
    "processes": ("code",),
    "partial_credit": ("code",),
    "judges": ("llm_judge",),
    "rubric": ("llm_judge",),
    "scale": ("llm_judge",),
    "vote": ("llm_judge",),
    "budget": ("llm_judge",),
    "concurrency": ("llm_judge", "function", "verifiers"),
    "function": ("function",),
    "python": ("verifiers",),
    "verifiers": ("verifiers",),
    "model_name": ("reward_model",),
    "device": ("reward_model",),
    "precision": ("reward_model",),
    "batch_size": ("reward_model",),
    "max_model_len": ("reward_model",),
    "parts": ("combine",),
    "combine": ("combine",),
    "gate": ("combine",),
}
# The built-in environments that run episodes.
PROGRAMS = ("function", "verifiers")
# Options that decide no reward: how an environment is found, how long it takes, how much it does at a time, and what follows its failures.
# The kind stands for `type`; the process that computes there reports its `device`.
_UNDECISIVE = frozenset({
    "type", "target", "command", "attached", "port", "timeout_s", "max_batch_size", "failure_share", "give_up_after", "unsafe_no_sandbox",
    "budget", "concurrency", "device", "batch_size", "max_model_len", "episodes", "public", "grader", "python",
})  # fmt: skip
_UNDECISIVE_OF_JUDGE = frozenset({"api_key_file", "tls_ca"})
_TAG = re.compile(r"[A-Za-z_][\w.-]*")


def problems(name: str, environments: Mapping[str, EnvConfig]) -> Iterator[str]:
    """Yield what is wrong with the options of `environments[name]`: the value and the remedy, to be appended to the environment's key."""
    env = environments[name]
    kind = env.kind(name)
    for option, owners in _OPTIONS.items():
        value = getattr(env, option)
        if value != type(env).model_fields[option].get_default(call_default_factory=True) and kind not in owners:
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
    kind = env.kind(name)
    # `code` fails the tests for which no time is left after a program has used up its own
    undecisive = _UNDECISIVE - {"timeout_s"} if kind == "code" else _UNDECISIVE
    own = {option for option in type(env).model_fields if kind in _OPTIONS.get(option, (kind,))}
    return env.model_dump(
        mode="json", include=own - undecisive, exclude={"judges": {"__all__": set(_UNDECISIVE_OF_JUDGE)}}
    )


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
