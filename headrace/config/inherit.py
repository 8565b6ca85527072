"""`defaults:` in a configuration file: the files it builds on, and how they are merged.

`defaults` is one path or a list, relative to the file that contains it. Later files win over earlier ones, and the file itself over all of
them. Mappings are merged key by key; lists and scalars are replaced whole. A mapping that contains `_override_: true` replaces the
inherited one instead. A null section removes the inherited one (`grpo: null` makes room for `ppo`), or one of `grpo` and `ppo` where the
other is given. Otherwise a null section is one whose keys are all commented out, and counts as empty.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError
from headrace.config.in_yaml import in_yaml
from headrace.config.yaml_text import parse

DEFAULTS = "defaults"
OVERRIDE = "_override_"
_OTHER_ALGORITHM = {"grpo": "ppo", "ppo": "grpo"}


@dataclasses.dataclass(frozen=True)
class Inherited:
    """A configuration with what it inherits. `values` is the merged mapping. `files` has what each file itself gives, in the order of
    merging; the requested file is last."""

    values: dict[str, Any]
    files: tuple[tuple[Path, dict[str, Any]], ...]

    def source(self, keys: tuple[str, ...]) -> Path | None:
        """Return the file that gave the value at `keys`; None if no file did."""
        return next((path for path, own in reversed(self.files) if _gives(own, keys)), None)


def read(path: Path) -> Inherited:
    """Read the file at `path` and merge it over the files that its `defaults` names. Raises `ConfigError` naming the file at fault."""
    return _read(path, ())


def _read(path: Path, above: tuple[Path, ...]) -> Inherited:
    if path.resolve() in (file.resolve() for file in above):
        chain = " -> ".join(str(file) for file in (*above, path))
        raise ConfigError(f"{DEFAULTS}: {path} builds on itself ({chain}); remove {DEFAULTS} from one of these files")
    own = _mapping(path, above)
    files: list[tuple[Path, dict[str, Any]]] = []
    values: dict[str, Any] = {}
    for base in _bases(own.pop(DEFAULTS, None), path):
        inherited = _read(base, (*above, path))
        values = merge(values, inherited.values, f"{base}: ")
        files += inherited.files
    values = merge(values, {key: value for key, value in own.items() if value is not None}, f"{path}: ")
    nulls = [key for key, value in own.items() if value is None]
    if values.keys() & {"grpo", "ppo"} and {"grpo", "ppo"} <= set(nulls):
        raise ConfigError(f"{path}: grpo and ppo are both null; give one of them, or leave the inherited one as it is")
    for section in nulls:
        # null removes an inherited section, or the algorithm that is not used; otherwise it is a section with all keys commented out
        other = _OTHER_ALGORITHM.get(section)
        if values.pop(section, None) is None and (other in nulls or other not in values):
            values[section] = {}
    return Inherited(values, (*files, (path, own)))


def merge(base: dict[str, Any], over: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Merge `over` into `base`. `where` begins the message about an `_override_` that is neither true nor false."""
    merged = dict(base)
    for key, value in over.items():
        if not isinstance(value, dict):
            merged[key] = value
            continue
        mark = value.get(OVERRIDE, False)
        if not isinstance(mark, bool):
            raise ConfigError(f"{where}{key}.{OVERRIDE}: {in_yaml(mark)} is neither true nor false; give one of them")
        old = merged.get(key)
        inner = {name: item for name, item in value.items() if name != OVERRIDE}
        merged[key] = merge(old if isinstance(old, dict) and not mark else {}, inner, f"{where}{key}.")
    return merged


def _bases(value: Any, path: Path) -> list[Path]:
    names = [value] if isinstance(value, str) else value
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{path}: {DEFAULTS}: {in_yaml(value)} is neither a path nor a list of paths; name YAML files"
        )
    return [Path(os.path.normpath(path.parent / name)) for name in names]


def _mapping(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the content of one file. Raises `ConfigError` if it can't be read, or is not a mapping of sections."""
    wanted = f" ({DEFAULTS} of {above[-1]}, relative to that file)" if above else ""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: can't read the configuration ({error.strerror}){wanted}; give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not text in UTF-8 (byte {error.start}){wanted}; give the path of a YAML file"
        ) from error
    values = parse(text, str(path))
    if values is None:
        raise ConfigError(
            f"{path}: empty{wanted}; write sections like `grpo:` with keys below them ({{}} means all defaults)"
        )
    if not isinstance(values, dict):
        kind = {list: "a list", str: "text", bool: "true or false"}.get(type(values), "a number")
        raise ConfigError(f"{path}: {kind}, not a mapping; write sections like `grpo:` with keys below them")
    return values


def as_written(values: Any, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return `keys` without the index 0 where `values` has a mapping in place of a list of one."""
    found = []
    for key in keys:
        if isinstance(values, dict) and key == "0" and "0" not in values:
            continue
        found.append(key)
        if isinstance(values, dict):
            values = values.get(key)
        elif isinstance(values, list) and key.isdecimal() and int(key) < len(values):
            values = values[int(key)]
        else:
            values = None
    return tuple(found)


def _gives(values: Any, keys: tuple[str, ...]) -> bool:
    """Whether `values` has `keys`, or a list or scalar above them."""
    for key in keys:
        if not isinstance(values, dict):
            return values is not None
        if key in values:
            values = values[key]
        elif key != "0":  # a mapping may stand for a list of one
            return False
    return True
