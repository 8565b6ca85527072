"""`env`: the environments that score the answers, one model a kind.

A built-in environment's kind is its `type`; without one, its own name. A custom one is known by the key that says where it is: `target`,
`command` or `attached`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError, to_jsonable_python

from headrace.config.environments.answers import MathConfig, MathMultiRewardConfig, ReasoningGymConfig
from headrace.config.environments.base import (
    BuiltInConfig,
    EnvConfig,
    EpisodicConfig,
    Extract,
    SandboxedConfig,
    ScoringConfig,
    in_yaml,
)
from headrace.config.environments.code import CodeConfig
from headrace.config.environments.combine import CombineConfig
from headrace.config.environments.custom import (
    AttachedConfig,
    CommandConfig,
    CustomConfig,
    StartableConfig,
    TargetConfig,
)
from headrace.config.environments.models import JudgeConfig, LLMJudgeConfig, RewardModelConfig
from headrace.config.environments.programs import FunctionConfig, ProgramConfig, VerifiersConfig
from headrace.config.environments.text import FormatConfig, LengthConfig, RegexConfig, RepetitionConfig

if TYPE_CHECKING:
    from pydantic_core import InitErrorDetails

__all__ = [
    "BUILT_IN",
    "KINDS",
    "AnyEnvConfig",
    "AttachedConfig",
    "BuiltInConfig",
    "CodeConfig",
    "CombineConfig",
    "CommandConfig",
    "CustomConfig",
    "EnvConfig",
    "EpisodicConfig",
    "Extract",
    "FormatConfig",
    "FunctionConfig",
    "JudgeConfig",
    "LLMJudgeConfig",
    "LengthConfig",
    "MathConfig",
    "MathMultiRewardConfig",
    "ProgramConfig",
    "ReasoningGymConfig",
    "RegexConfig",
    "RepetitionConfig",
    "RewardModelConfig",
    "SandboxedConfig",
    "ScoringConfig",
    "StartableConfig",
    "TargetConfig",
    "VerifiersConfig",
    "drop_former",
    "name_type",
    "read_environment",
]

_Kind = (
    MathConfig
    | MathMultiRewardConfig
    | ReasoningGymConfig
    | RegexConfig
    | FormatConfig
    | LengthConfig
    | RepetitionConfig
    | CombineConfig
    | CodeConfig
    | LLMJudgeConfig
    | RewardModelConfig
    | FunctionConfig
    | VerifiersConfig
    | TargetConfig
    | CommandConfig
    | AttachedConfig
)
_BOOL = TypeAdapter(bool)
# Options that every environment took, though only some heeded them, before each kind had a model of its own.
_ONCE_OF_ALL = ("require_stop", "unsafe_no_sandbox")


def _key(kind: type[EnvConfig]) -> str:
    return kind.key if issubclass(kind, CustomConfig) else get_args(kind.model_fields["type"].annotation)[0]


# by the type, or by the key of a custom environment
KINDS: Mapping[str, type[EnvConfig]] = {_key(kind): kind for kind in get_args(_Kind)}
BUILT_IN = tuple(key for key, kind in KINDS.items() if issubclass(kind, BuiltInConfig))
_NAMED = {key: key if key in BUILT_IN else f"an environment with {key}" for key in KINDS}
_DECIDING = ("type", *(key for key in KINDS if key not in BUILT_IN))


def _of_its_kind(values: Any, handler: ValidatorFunctionWrapHandler) -> EnvConfig:
    if isinstance(values, EnvConfig):
        return values
    if not isinstance(values, dict):
        raise _error([{"type": "model_type", "input": values, "ctx": {"class_name": EnvConfig.__name__}}])
    kind = _find_kind(values)
    return kind.model_validate(_own(values, kind))


AnyEnvConfig = Annotated[_Kind, WrapValidator(_of_its_kind)]
_ANY = TypeAdapter[EnvConfig](AnyEnvConfig)


def read_environment(values: Mapping[str, object]) -> EnvConfig:
    """Return the environment with these options. Raises pydantic's `ValidationError`."""
    return _ANY.validate_python(values)


def name_type(name: str, values: Any) -> Any:
    """Return the options of `env.<name>` with their `type`, if it is the environment's name."""
    if isinstance(values, dict) and name in BUILT_IN and not _deciding(values):
        return {**values, "type": name}
    return values


def drop_former(environments: Any) -> Any:
    """Return the section `env` of a configuration that a run saved, without the options of other kinds. Runs saved the options of all
    kinds, at their defaults, before each kind had a model of its own."""
    if not isinstance(environments, dict):
        return environments
    return {name: _drop_former(name, values) for name, values in environments.items()}


def _drop_former(name: str, values: Any) -> Any:
    if not isinstance(values, dict):
        return values  # validation says what is wrong, here and below
    try:
        kind = _find_kind(name_type(name, values))
    except ValueError:
        return values
    return {
        option: value
        for option, value in values.items()
        if option in kind.model_fields or not (option in _ONCE_OF_ALL or _is_default(option, value))
    }


def _is_default(option: str, value: Any) -> bool:
    """Whether this is the option's default in a kind that has it, or null or empty where that kind needs one."""
    fields = [kind.model_fields[option] for kind in KINDS.values() if option in kind.model_fields]
    defaults = [to_jsonable_python(field.default) for field in fields if not field.is_required()]
    return bool(fields) and (value in (None, [], {}) or value in defaults)


def _deciding(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the keys that decide the kind which are given."""
    return {key: value for key in _DECIDING if not _is_off(key, value := values.get(key))}


def _is_off(option: str, value: Any) -> bool:
    """Whether the value says that the option is left out."""
    if value is None or option != AttachedConfig.key:
        return value is None
    try:
        return not _BOOL.validate_python(value)
    except ValidationError:
        return False  # the model says what is wrong


def _find_kind(values: Mapping[str, Any]) -> type[EnvConfig]:
    """Return the model of the environment's kind. Raises `ValueError`; where nothing says the kind, for unknown options, as one of them may
    be what would, misspelt."""
    given = _deciding(values)
    if not given:
        if unknown := {option: value for option, value in values.items() if not _owners(option)}:
            raise _error(
                [{"type": "extra_forbidden", "loc": (option,), "input": unknown[option]} for option in unknown]
            )
        raise ValueError(
            f"give `type` ({', '.join(BUILT_IN)}), `target` (FILE.py:CLASS, or host:port of your environment), `command`, or "
            "`attached: true`"
        )
    if len(given) > 1:
        shown = " and ".join(f"{key} {in_yaml(value)}" for key, value in given.items())
        raise ValueError(f"{shown}: give one of them, and set the others to null (attached to false)")
    ((key, value),) = given.items()
    if key != "type":
        return KINDS[key]
    if isinstance(value, str) and value in BUILT_IN:
        return KINDS[value]
    close = difflib.get_close_matches(str(value), BUILT_IN, 1)
    meant = f"did you mean {close[0]}?" if close else f"they are {', '.join(BUILT_IN)}"
    raise _error([_wrong("type", value, f"{in_yaml(value)} is not a built-in environment; {meant}")])


def _own(values: Mapping[str, Any], kind: type[EnvConfig]) -> dict[str, Any]:
    """Return the options without those that are null or off to say that they are left out. Raises `ValueError` for options that the kind
    doesn't have."""
    own: dict[str, Any] = {}
    wrong: list[InitErrorDetails] = []
    whose = f"type {_key(kind)}" if issubclass(kind, BuiltInConfig) else _NAMED[_key(kind)]
    for option, value in values.items():
        field = kind.model_fields.get(option)
        owners = _owners(option)
        left_out = _is_off(option, value)
        if field is not None and not (left_out and field.is_required()):
            own[option] = value
        elif not owners:
            # pydantic's own error, with the keys that may be meant: those of the kind, and those that would have decided it
            known = sorted({*kind.model_fields, *_DECIDING})
            unknown = PydanticCustomError("extra_forbidden", "Extra inputs are not permitted", {"known": known})
            wrong.append({"type": unknown, "loc": (option,), "input": value})
        elif not left_out:
            reason = f"{in_yaml(value)} is an option of {', '.join(owners)}, not of {whose}; leave it out or null"
            wrong.append(_wrong(option, value, reason))
    if wrong:
        raise _error(wrong)
    return own


def _owners(option: str) -> list[str]:
    """Return the names of the kinds that have the option."""
    return [_NAMED[key] for key, kind in KINDS.items() if option in kind.model_fields]


def _wrong(option: str, value: Any, reason: str) -> InitErrorDetails:
    return {"type": "value_error", "loc": (option,), "input": value, "ctx": {"error": ValueError(reason)}}


def _error(found: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data(EnvConfig.__name__, found)
