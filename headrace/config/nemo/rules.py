"""What a row of the table says of one key of NeMo RL."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

Keys = tuple[str, ...]
Whole = Mapping[str, Any]

Does = Literal["used", "renamed", "replaced", "refused"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One key, or with `*` for a name and a last `**` for everything below, several.

    `used`: Headrace has it, by this name. `renamed`: Headrace has it as `to`. `replaced`: it belongs to a part that something
    else takes the place of; `says` what. `refused`: it can't be honoured; `says` why and what to do.
    `fine`: values of a refused key that ask for nothing, given the value and the whole file. `convert`: the value in Headrace's
    terms; raises `ValueError` saying what is wrong.
    """

    key: str
    does: Does
    to: str = ""
    says: str = ""
    fine: Callable[[Any, Whole], bool] | None = None
    convert: Callable[[Any], Any] | None = None
    gathered: bool = False  # read together with others, by `table.GATHERED`
    once: bool = False  # of a refused section, said once for all its keys

    @functools.cached_property
    def parts(self) -> Keys:
        return tuple(self.key.split("."))

    def matches(self, keys: Keys) -> bool:
        parts = self.parts
        if parts[-1] == "**":
            parts, keys = parts[:-1], keys[: len(parts) - 1]
        return len(parts) == len(keys) and all(part in ("*", key) for part, key in zip(parts, keys, strict=True))

    def target(self, keys: Keys) -> Keys:
        """Headrace's keys for `keys`, which match; a `*` of `to` stands for the name that the same `*` of `key` matched."""
        if self.does == "used":
            return keys
        names = iter([key for part, key in zip(self.parts, keys, strict=False) if part == "*"])
        return tuple(next(names) if part == "*" else part for part in self.to.split("."))


def names(section: str, keys: str) -> list[str]:
    """Keys of `section`, given separated by blanks."""
    return [f"{section}.{key}" for key in keys.split()]


def used(section: str, keys: str, says: str = "", convert: Callable[[Any], Any] | None = None) -> list[Rule]:
    """Rows for keys (separated by blanks) of `section` that are Headrace's as they are."""
    return [Rule(key, "used", says=says, convert=convert) for key in names(section, keys)]


def renamed(key: str, to: str, says: str = "", *, gathered: bool = False) -> Rule:
    return Rule(key, "renamed", to=to, says=says, gathered=gathered)


def replaced(says: str, *keys: str) -> list[Rule]:
    return [Rule(key, "replaced", says=says) for key in keys]


def off(value: Any, whole: Whole) -> bool:
    """Null, false, and nothing at all ask for nothing."""
    return value is None or value is False or value in ("", "false", {}, [])


def refused(says: str, *keys: str, fine: Callable[[Any, Whole], bool] = off, once: bool = False) -> list[Rule]:
    return [Rule(key, "refused", says=says, fine=fine, once=once) for key in keys]


def only(*values: Any) -> Callable[[Any, Whole], bool]:
    """`fine` for a key that null, false and these values leave as it is in Headrace."""
    return lambda value, whole: off(value, whole) or value in values


def sources(whole: Any, part: str) -> list[dict[str, Any]]:
    """The data sets in `data.train` or `data.validation`, as far as they are mappings."""
    given = look(whole, f"data.{part}")
    listed = given if isinstance(given, list) else [given]
    return [source for source in listed if isinstance(source, dict)]


def look(whole: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key, or `default`."""
    for part in key.split("."):
        if not isinstance(whole, Mapping) or part not in whole:
            return default
        whole = whole[part]
    return whole
