"""`${…}` in a configuration, by OmegaConf: `${section.key}`, `${.sibling}`, `${oc.env:NAME,default}` and a little arithmetic.

`add`, `sub`, `mul`, `div` and `max` take two arguments, which may be interpolations themselves: `${mul:${a.b}, 2}`. A key that
no file gives has its default. `\\${` is the text `${`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import ConfigError

Keys = tuple[str | int, ...]

MISSING = "???"


def resolve(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with every interpolation replaced by what it stands for; `defaults` is where keys are found that `values` lacks.

    Arithmetic on whole numbers stays whole, but for `div`, which gives a float. Raises `ConfigError`, one line for each value
    that can't be resolved.
    """
    found = dict(_expressions(values, ()))
    if not found:
        return values
    # OmegaConf takes 0.1 s to import, and most files have no use for it
    from headrace.config.evaluate import evaluate

    results, problems = evaluate(found, values, defaults)
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
