"""`${…}` in a configuration, by OmegaConf: `${section.key}`, `${.sibling}`, `${oc.env:NAME,default}` and a little arithmetic.

`add`, `sub`, `mul`, `div` and `max` take two arguments, which may be interpolations themselves: `${mul:${a.b}, 2}`. A key that
no file gives has its default. `\\${` is the text `${`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException

Keys = tuple[str | int, ...]

MISSING = "???"

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}


def resolve(values: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Replace every interpolation in `values` by its value. `whole` is `values` merged over the defaults: keys are looked up in it.

    Arithmetic on whole numbers stays whole, except for `div`, which gives a float. Raises `ConfigError`, one line for each value
    that can't be resolved.
    """
    found = dict(_expressions(values, ()))
    if not found:
        return values
    results, problems = _evaluate(found, whole)
    if problems:
        raise ConfigError("\n".join(problems))
    resolved: dict[str, Any] = _replaced(values, (), results)
    return resolved


def expressions(values: Any) -> dict[tuple[str, ...], str]:
    """The interpolations in `values`, by their keys as text."""
    return {tuple(map(str, keys)): text for keys, text in _expressions(values, ())}


def escape(text: str) -> str:
    """`text` written so that `resolve` gives it back."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def _expressions(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    if isinstance(value, str) and ("${" in value or value == MISSING):
        yield keys, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _expressions(inner, (*keys, key))


def _replaced(value: Any, keys: Keys, results: Mapping[Keys, Any]) -> Any:
    if keys in results:
        return results[keys]
    if isinstance(value, dict):
        return {key: _replaced(inner, (*keys, key), results) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, (*keys, number), results) for number, inner in enumerate(value)]
    return value


def _evaluate(expressions: Mapping[Keys, str], whole: dict[str, Any]) -> tuple[dict[Keys, Any], list[str]]:
    """The value of each expression, and one line for each that has none."""
    # imported here because it takes 0.1 s, and most files have no interpolation
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    for name, function in _ARITHMETIC.items():
        OmegaConf.register_resolver(name, _of_numbers(name, function), replace=True)

    def unreadable(text: str) -> OmegaConfBaseException | None:
        try:
            OmegaConf.create([text])
        except OmegaConfBaseException as error:
            return error
        return None

    # one that can't be parsed would spoil the whole container
    problems = [_problem(keys, text, str(error)) for keys, text in expressions.items() if (error := unreadable(text))]
    if problems:
        return {}, problems
    container = OmegaConf.create(whole)
    results: dict[Keys, Any] = {}
    for keys, text in expressions.items():
        try:
            if text == MISSING:
                raise MissingMandatoryValue
            node: Any = container
            for key in keys:
                node = node[key]
            results[keys] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            problems.append(_problem(keys, text, str(error)))
        except RecursionError:
            problems.append(_problem(keys, text, "it contains itself"))
    return results, problems


def _of_numbers(name: str, function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def checked(*given: Any) -> Any:
        if len(given) != 2 or not all(isinstance(one, int | float) for one in given):
            raise TypeError(
                f"{name} takes two numbers, not {', '.join(map(repr, given))} (oc.decode makes one of text)"
            )
        return function(*given)

    return checked


def _problem(keys: Keys, text: str, error: str) -> str:
    key = ".".join(map(str, keys))
    if text == MISSING:
        return f"{key}: {text} marks a value that must be given; set it, for example {key}=…"
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", error.partition("\n")[0]).strip("\"'")
    return f"{key}: {text!r:.160} can't be resolved: {reason}; correct it, or write \\${{ for the text ${{"
