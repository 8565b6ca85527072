"""Python values as JSON and back, without loss: tuples, sets, fractions and mappings whose keys are not text carry a tag.

A data set describes a problem with the types of its library, and the environment that scores it is in another process. Plain JSON would
give it lists for tuples and "3" for 3, which some scorers treat as another answer.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from headrace.base.errors import CodecError

TUPLE, SET, MAP, FRACTION = "__tuple__", "__set__", "__map__", "__fraction__"


def to_json(value: Any, where: str = "value") -> Any:
    """Return `value` with JSON types only. Raises `CodecError` naming the place of anything that can't be represented."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return to_json(value.tolist(), where)
    if isinstance(value, list):
        return [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {TUPLE: to_json(list(value), where)}
    if isinstance(value, set | frozenset):
        return {SET: to_json(sorted(value), where)}
    if isinstance(value, Fraction):
        return {FRACTION: [value.numerator, value.denominator]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not {TUPLE, SET, MAP, FRACTION} & value.keys():
            return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
        return {MAP: [[to_json(key, where), to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    raise CodecError(f"{where} is a {type(value).__name__}, which JSON can't carry")


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given (a frozen set comes back as a set, a numpy value as Python's own)."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, items = next(iter(value.items()))
        if tag == TUPLE:
            return tuple(from_json(items))
        if tag == SET:
            return set(from_json(items))
        if tag == FRACTION:
            match items:
                case [int(numerator), int(denominator)] if denominator:
                    return Fraction(numerator, denominator)
        if tag == MAP:
            return {from_json(key): from_json(item) for key, item in items}
    return {key: from_json(item) for key, item in value.items()}
