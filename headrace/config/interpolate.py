"""`${…}` in a configuration, by OmegaConf: `${section.key}`, `${.sibling}`, `${oc.env:NAME,default}` and a little arithmetic.

`add`, `sub`, `mul`, `div` and `max` take two arguments, which may be interpolations themselves: `${mul:${a.b}, 2}`. A key that no file sets
has its default. `\\${` is the text `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.base.errors import ConfigError
from headrace.config.in_yaml import in_yaml
from headrace.config.keys import ItemPath, Keys, item_at, leaves
from headrace.config.references import Expression, Reference, hide_values, of_variables

MISSING = "???"
_SHOWN = 160  # characters of an expression in an error


def resolve(values: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Replace every interpolation in `values` by its value. `whole` is `values` merged over the defaults: keys are looked up in it.

    Arithmetic on whole numbers stays whole, except for `div`, which gives a float. Raises `ConfigError`, with one line for each value that
    can't be resolved.
    """
    found = _expressions(values)
    if not found:
        return values
    results, problems = _evaluate(found, whole)
    if problems:
        raise ConfigError("\n".join(problems))
    resolved: dict[str, Any] = _replace(values, (), results)
    return resolved


def from_environment(values: dict[str, Any], whole: dict[str, Any], resolved: Any) -> list[tuple[Keys, Reference]]:
    """Return the references of everything in `resolved`, which `resolve` made of `values`, that came from a variable, with their keys. A
    reference reads variables alone, and no other keys."""
    found = _expressions(values)
    if not any("oc.env" in text for text in found.values()):
        return []
    from headrace.config.resolvers import Evaluation, OmegaConfBaseException, Unread

    unread = Unread()
    evaluation = Evaluation(found, whole, unread)
    references: list[tuple[Keys, Reference]] = []

    def compare(keys: Keys, value: Any, symbol: Any) -> None:
        if isinstance(symbol, str) and (expression := unread.expression(symbol)) is not None:
            name = next((key for key in reversed(keys) if not key.isdecimal()), "")
            references.append((keys, Reference(name, value, Expression(expression))))
        elif isinstance(symbol, dict) and isinstance(value, dict):
            for key in symbol:
                compare((*keys, str(key)), value[key], symbol[key])
        elif isinstance(symbol, list) and isinstance(value, list):
            for number, inner in enumerate(symbol):
                compare((*keys, str(number)), value[number], inner)

    for place, text in found.items():
        value = item_at(resolved, place)
        try:
            compare(tuple(map(str, place)), value, evaluation.result(place))
        except OmegaConfBaseException:  # what it does with the variable can't be done with a mark
            if "oc.env" in text:
                compare(tuple(map(str, place)), value, unread.mark(text))
    return references


def expressions(values: Any) -> dict[tuple[str, ...], str]:
    """Return the interpolations in `values`, by their keys as text."""
    return {tuple(map(str, keys)): text for keys, text in _expressions(values).items()}


def _expressions(values: Any) -> dict[ItemPath, str]:
    texts = ((keys, value) for keys, value in leaves(values) if isinstance(value, str))
    return {keys: text for keys, text in texts if "${" in text or text == MISSING}


def _replace(value: Any, keys: ItemPath, results: Mapping[ItemPath, Any]) -> Any:
    if keys in results:
        return results[keys]
    if isinstance(value, dict):
        return {key: _replace(inner, (*keys, key), results) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace(inner, (*keys, number), results) for number, inner in enumerate(value)]
    return value


def _evaluate(expressions: Mapping[ItemPath, str], whole: dict[str, Any]) -> tuple[dict[ItemPath, Any], list[str]]:
    """Return the value of each expression, and a line for each that can't be evaluated. If one grows without end, return its line alone."""
    # imported here because it takes 0.1 s, and most files have no interpolation
    from headrace.config.resolvers import Evaluation, InterpolationsTooLarge, OmegaConfBaseException, parse_error

    # one expression that can't be parsed would break the whole container
    problems = [_problem(keys, text, str(error)) for keys, text in expressions.items() if (error := parse_error(text))]
    if problems:
        return {}, problems
    evaluation = Evaluation(expressions, whole)
    results: dict[ItemPath, Any] = {}
    for keys, text in expressions.items():
        try:
            results[keys] = evaluation.result(keys)
        except InterpolationsTooLarge as error:
            return {}, [_problem(keys, text, str(error))]
        except OmegaConfBaseException as error:
            problems.append(hide_values(_problem(keys, text, str(error)), of_variables(expressions.values())))
    return results, problems


def _problem(keys: ItemPath, text: str, error: str) -> str:
    key = ".".join(map(str, keys))
    if text == MISSING:
        return f"{key}: {text} marks a value that must be given; set it, for example {key}=…"
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", error.partition("\n")[0]).strip("\"'")
    return f"{key}: {in_yaml(text, _SHOWN)} can't be resolved: {reason}; correct it, or write \\${{ for the text ${{"
