"""The rules for NeMo RL's keys, and how the rule for a key is found."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from headrace.config.keys import Keys

Whole = Mapping[str, Any]

Does = Literal["used", "renamed", "replaced", "refused"]

# the similarity of a misspelling to the intended key; keys of the families below are less similar to each other
_MISSPELT = 0.92
# looser for the switch of a section: no family of keys has names like it
ENABLED, MISSPELT_SWITCH = "enabled", 0.8


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for one key of NeMo RL. A part `*` stands for several keys, and a last part `**` for everything below.

    `used`: Headrace has the key by this name. `renamed`: Headrace has it as `to`. `replaced`: it belongs to a part of NeMo RL that Headrace
    does differently; `says` how. `refused`: it can't be honoured; `says` why and what to do. `fine(value, file)`: whether a value of a
    refused key has no effect. `convert(value)`: the value in Headrace's terms; raises `ValueError` with what is wrong.
    """

    key: str
    does: Does
    to: str = ""
    says: str = ""
    fine: Callable[[Any, Whole], bool] | None = None
    convert: Callable[[Any], Any] | None = None
    gathered: bool = False  # read together with other keys, by `translate`
    once: bool = False  # a refused section, reported in one line instead of a line per key

    @functools.cached_property
    def parts(self) -> Keys:
        return tuple(self.key.split("."))

    @functools.cached_property
    def exactness(self) -> tuple[int, int, bool]:
        """A measure of how exactly the rule names a key. Of the rules that match, the most exact one applies."""
        exact = sum("*" not in part for part in self.parts)
        return exact, sum("*" in part and part not in ("*", "**") for part in self.parts), self.parts[-1] != "**"

    def matches(self, keys: Keys) -> bool:
        parts = self.parts
        if parts[-1] == "**":
            parts, keys = parts[:-1], keys[: len(parts) - 1]
        return len(parts) == len(keys) and all(map(_matches, keys, parts))

    def target(self, keys: Keys) -> Keys:
        """Return Headrace's keys for `keys`, which match; a `*` of `to` stands for the name that the same `*` of `key` matched."""
        if self.does == "used":
            return keys
        names = iter([key for part, key in zip(self.parts, keys, strict=False) if part == "*"])
        return tuple(next(names) if part == "*" else part for part in self.to.split("."))


def _matches(key: str, part: str) -> bool:
    return key == part or part == "*" or ("*" in part and fnmatchcase(key, part))


class Table:
    """A searchable table of all rules. `dtensor_cfg`, the name of `automodel_cfg` in older releases, has the same ones."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._exact = {rule.parts: rule for rule in self.rules if "*" not in rule.key}
        self._patterns: dict[str, list[Rule]] = {}  # by first part, the most exact first
        for rule in sorted(self.rules, key=lambda rule: rule.exactness, reverse=True):
            if "*" in rule.key:
                self._patterns.setdefault(rule.parts[0], []).append(rule)
        self._beside: dict[Keys, list[str]] = {}

    def find(self, keys: Keys) -> Rule | None:
        """Return the most exact rule that matches `keys`; None if none does, or if `keys` is a misspelling of a key with its own rule."""
        keys = tuple("automodel_cfg" if key == "dtensor_cfg" else key for key in keys)
        if rule := self._exact.get(keys):
            return rule
        rule = next((rule for rule in self._patterns.get(keys[0], ()) if rule.matches(keys)), None)
        family = rule is not None and rule.parts[-1] not in (keys[-1], "*")
        return None if family and self._is_misspelt(keys) else rule

    def _is_misspelt(self, keys: Keys) -> bool:
        beside = self.beside(keys)
        near_switch = difflib.get_close_matches(keys[-1].lower(), {ENABLED} & {*beside}, 1, MISSPELT_SWITCH)
        return bool(near_switch or difflib.get_close_matches(keys[-1], beside, 1, _MISSPELT))

    def beside(self, keys: Keys) -> list[str]:
        """Return the names with their own rules in the section of `keys`."""
        section = tuple("automodel_cfg" if key == "dtensor_cfg" else key for key in keys[:-1])
        if section not in self._beside:
            longer = (rule.parts for rule in self.rules if len(rule.parts) > len(section))
            found = {parts[len(section)] for parts in longer if all(map(_matches, section, parts))}
            self._beside[section] = sorted(name for name in found if "*" not in name)
        return self._beside[section]


def names(section: str, keys: str) -> list[str]:
    """Return full keys for the keys of `section`, given separated by blanks."""
    return [f"{section}.{key}" for key in keys.split()]


def used(section: str, keys: str, says: str = "", convert: Callable[[Any], Any] | None = None) -> list[Rule]:
    """Return rules for keys (separated by blanks) of `section` that Headrace has by the same names."""
    return [Rule(key, "used", says=says, convert=convert) for key in names(section, keys)]


def renamed(key: str, to: str, says: str = "", *, gathered: bool = False) -> Rule:
    return Rule(key, "renamed", to=to, says=says, gathered=gathered)


def replaced(says: str, *keys: str) -> list[Rule]:
    return [Rule(key, "replaced", says=says) for key in keys]


def off(value: Any, whole: Whole) -> bool:
    """Whether a value has no effect, whatever its key is: null, false, empty."""
    return value is None or value is False or value in ("", "false", "none", {}, [])


def refused(says: str, *keys: str, fine: Callable[[Any, Whole], bool] = off, once: bool = False) -> list[Rule]:
    return [Rule(key, "refused", says=says, fine=fine, once=once) for key in keys]


def only(*values: Any) -> Callable[[Any, Whole], bool]:
    """Return a `fine` for a key for which these `values` ask for what Headrace does anyway."""
    return lambda value, whole: off(value, whole) or value in values


def sources(whole: Any, part: str) -> list[dict[str, Any]]:
    """Return the data sets in `data.train` or `data.validation` that are mappings."""
    given = look(whole, f"data.{part}")
    listed = given if isinstance(given, list) else [given]
    return [source for source in listed if isinstance(source, dict)]


def look(whole: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key, or `default`."""
    for part in key.split("."):
        if not isinstance(whole, Mapping) or part not in whole:
            return default
        whole = whole[part]
    return whole
