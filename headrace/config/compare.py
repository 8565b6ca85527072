"""Compares two configurations of one run, and decides which changes are allowed when the run continues."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.config.explain import known_keys, pattern
from headrace.config.in_yaml import without_password
from headrace.config.keys import Keys, leaves
from headrace.config.marks import Mark
from headrace.config.root import Config


@dataclasses.dataclass(frozen=True)
class Change:
    key: str
    before: Any
    after: Any

    @property
    def allowed(self) -> bool:
        """Whether a run may continue with this change."""
        return may_change(tuple(self.key.split("."))) is True

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.before)} -> {_show(self.after)}"


def may_change(keys: Keys) -> bool | None:
    """Return what the outermost mark says of the key or of a section that it is in; None if there is no mark."""
    path = pattern(keys)
    for end in range(1, len(path) + 1):
        marks = field.metadata if (field := known_keys().get(path[:end])) else ()
        if Mark.MAY_CHANGE in marks or Mark.FIXED in marks:
            return Mark.MAY_CHANGE in marks
    return None


def select_fixed(config: Config) -> dict[str, Any]:
    """Return every key that may not change when the run continues, with its value."""
    return {key: value for key, value in flatten(config.model_dump(mode="json")) if not Change(key, None, None).allowed}


def digest(config: Config) -> str | None:
    """Return a digest of the fixed keys whose text comes from the environment and is not stored; None without any."""
    shown = dict(flatten(config.show()))
    hidden = {key: value for key, value in select_fixed(config).items() if shown.get(key) != value}
    if not hidden:
        return None
    # slow on purpose: it stands in a file, and a short value could be guessed
    key = hashlib.scrypt(json.dumps(hidden).encode(), salt=str(config.run.id).encode(), n=2**14, r=8, p=1, dklen=16)
    return key.hex()


def diff(before: Config, after: Config) -> list[Change]:
    """Return the keys whose values differ: those of `before` in its order, then the others. A key that only one of them has is null in the
    other. Text from the environment is compared, and given as the expression that gives it."""
    old, new = dict(flatten(before.model_dump(mode="json"))), dict(flatten(after.model_dump(mode="json")))
    old_shown, new_shown = dict(flatten(before.show())), dict(flatten(after.show()))
    return [Change(key, old_shown.get(key), new_shown.get(key)) for key in differing(old, new)]


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, of what `flatten` makes of two configurations."""
    return [key for key in [*old, *(key for key in new if key not in old)] if _differs(old, new, key)]


def is_own(key: str) -> bool:
    """Whether a key differs between any two runs: a name, a folder or a port."""
    return key in ("run.id", "run.dir", "run.from_environment", "security.credentials") or key.endswith("port")


def _differs(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> bool:
    if key in old and key in new:
        return bool(old[key] != new[key])
    # a missing key equals null and an empty mapping or list
    return (old[key] if key in old else new[key]) not in (None, {}, [])


def flatten(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a tree, with their values: `a.b`, and `a.0` for an item of a list."""
    return ((".".join(map(str, keys)), leaf) for keys, leaf in leaves(value))


def _show(value: Any) -> str:
    return "null" if value is None else without_password(repr(value))
