"""What interpolations stand for, by OmegaConf. The arithmetic beside its own resolvers is what users of NeMo RL know."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from headrace.config.inherit import merge
from headrace.config.interpolate import MISSING, Keys

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}


def evaluate(
    expressions: Mapping[Keys, str], values: dict[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[Keys, Any], list[str]]:
    """What each expression of `values` stands for, and one line for each that stands for nothing."""
    for name, function in _ARITHMETIC.items():
        OmegaConf.register_resolver(name, _of_numbers(name, function), replace=True)
    # one that can't be parsed would spoil the whole container
    problems = [_problem(keys, text, error) for keys, text in expressions.items() if (error := _unreadable(text))]
    if problems:
        return {}, problems
    # not OmegaConf's merge: a single data set may be given as a mapping where the default is a list
    whole = OmegaConf.create(merge(dict(defaults), values))
    results: dict[Keys, Any] = {}
    for keys, text in expressions.items():
        try:
            results[keys] = _value(whole, keys, text)
        except OmegaConfBaseException as error:
            problems.append(_problem(keys, text, error))
    return results, problems


def _of_numbers(name: str, function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def checked(*given: Any) -> Any:
        if len(given) != 2 or not all(isinstance(one, int | float) for one in given):
            raise TypeError(
                f"{name} takes two numbers, not {', '.join(map(repr, given))} (oc.decode makes one of text)"
            )
        return function(*given)

    return checked


def _unreadable(text: str) -> OmegaConfBaseException | None:
    try:
        OmegaConf.create([text])
    except OmegaConfBaseException as error:
        return error
    return None


def _value(node: Any, keys: Keys, text: str) -> Any:
    if text == MISSING:
        raise MissingMandatoryValue
    for key in keys:
        node = node[key]
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _problem(keys: Keys, text: str, error: Exception) -> str:
    key = ".".join(map(str, keys))
    if text == MISSING:
        return f"{key}: {text} stands for a value that has to be given; give it, for example {key}=…"
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).partition("\n")[0]).strip("\"'")
    return f"{key}: {text!r:.160} can't be resolved: {reason}; mend it, or write \\${{ for the text ${{"
