"""The place of a value in a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# the keys from the top down: `("policy", "model_name")`; an item of a list by its number as text
Keys = tuple[str, ...]
# the same in parsed YAML, where an item of a list is an integer: `("data", "train", 0)`
ItemPath = tuple[str | int, ...]


def leaves(value: Any, keys: ItemPath = ()) -> Iterator[tuple[ItemPath, Any]]:
    """Yield what is no mapping or list, and the empty mappings, each with its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield keys, value
    for key, inner in items:
        yield from leaves(inner, (*keys, key))


def item_at(values: Any, keys: Sequence[str | int]) -> Any:
    """Return what is at `keys`. Raises `LookupError`, `TypeError` or `ValueError` if there is nothing."""
    for key in keys:
        values = values[int(key)] if isinstance(values, list) else values[key]
    return values


def look(whole: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key, or `default`."""
    for part in key.split("."):
        if not isinstance(whole, Mapping) or part not in whole:
            return default
        whole = whole[part]
    return whole
