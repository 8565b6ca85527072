"""Explains what is wrong with a configuration, in one line per problem: the full key, the value, and the remedy."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headrace.config.in_yaml import in_yaml
from headrace.config.other_names import NAMES
from headrace.config.references import Reference, restore_references
from headrace.config.root import Config

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Path = tuple[str, ...]
Origin = Callable[[Path], str]
Named = Callable[[Path], Path]

# the similarity of a misspelt name to the intended one; names with different meanings are rarely this similar
_VERY_CLOSE = 0.8
# long names are often similar by chance
_CLOSE, _LONG, _CLOSE_IF_LONG = 0.6, 10, 0.75
_KEY = re.compile(r"[a-z_]+(?:\.\w+)+")


def _models(annotation: Any, path: Path) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Yield the models inside a field's type. The items of a list or a mapping are named `*`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield path, annotation
    for inner in get_args(annotation):
        container = getattr(annotation, "__origin__", None) in (list, dict, tuple)
        yield from _models(inner, (*path, "*") if container else path)


def _walk(model: type[BaseModel], path: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield (*path, name), field
        for inner_path, inner in _models(field.annotation, (*path, name)):
            yield from _walk(inner, inner_path)


@functools.cache
def known_keys() -> Mapping[Path, FieldInfo]:
    """Return every key of the configuration, sections included. The items of lists and mappings are named `*` (`env.*.type`)."""
    return dict(_walk(Config))


@functools.cache
def _differ() -> frozenset[Path]:
    """Return the keys whose default differs between kinds of one section."""
    known = known_keys()
    return frozenset(keys for keys, field in _walk(Config) if field.get_default() != known[keys].get_default())


def pattern(path: Path) -> Path:
    """Return `path` with the names of items replaced by `*`, as in `known_keys`."""
    found: Path = ()
    for part in path:
        found = (*found, "*" if (*found, "*") in _prefixes() else part)
    return found


@functools.cache
def _prefixes() -> frozenset[Path]:
    return frozenset(key[:end] for key in known_keys() for end in range(1, len(key)))


def similar(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `name` probably means: a similar spelling, or a longer name with a similar beginning."""
    names = list(names)
    if close := difflib.get_close_matches(name, names, 1, _CLOSE if len(name) <= _LONG else _CLOSE_IF_LONG):
        return close[0]
    if len(name) > _LONG:
        begun = {other[: len(name)]: other for other in reversed(names)}
        if close := difflib.get_close_matches(name, begun, 1, _VERY_CLOSE):
            return begun[close[0]]
    return None


def _beside(path: Path) -> list[str]:
    return [key[-1] for key in known_keys() if key[:-1] == pattern(path[:-1])]


def nearest(path: Path, known: Sequence[str] = ()) -> str | None:
    """Return the known key most similar to the unknown `path`: a close one in the same section, else the key that another framework calls
    so, else one of a similar name elsewhere. The section has the keys `known`, if not all sections at this place have the same."""
    parent, name = path[:-1], path[-1]
    beside = known or _beside(path)
    if close := difflib.get_close_matches(name, beside, 1, _VERY_CLOSE):
        return ".".join((*parent, close[0]))
    if name in NAMES:
        return NAMES[name].replace("grpo.", "ppo.", 1) if path[0] == "ppo" else NAMES[name]
    if found := similar(name, beside):
        return ".".join((*parent, found))
    by_name: dict[str, Path] = {}
    for key in known_keys():
        if key[:-1] != pattern(parent):
            by_name.setdefault(key[-1], key)
    if close := difflib.get_close_matches(name, by_name, 1, 0.75):
        return ".".join("<name>" if part == "*" else part for part in by_name[close[0]])
    return None


def _unknown(path: Path, value: Any, origin: str, named: Named, known: Sequence[str]) -> str:
    key = ".".join(named(path))
    shown = "" if isinstance(value, dict) else f", value {in_yaml(value)}"
    if found := nearest(path, known):
        return f"{key}: unknown key{shown}{origin}; did you mean {'.'.join(named(tuple(found.split('.'))))}?"
    where = ".".join(named(path[:-1])) or "the top level"
    return f"{key}: unknown key{shown}{origin}; {where} has {', '.join(sorted(known or _beside(path)))}"


def _remedy(path: Path, error: ErrorDetails) -> str:
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        return "; put it in quotes"
    field = known_keys().get(pattern(path))
    default = field.get_default() if field else None
    if (
        field is None
        or field.is_required()
        or isinstance(default, BaseModel | dict | list)
        or pattern(path) in _differ()
    ):
        return ""
    return f"; the default is {default if isinstance(default, str) else in_yaml(default)}"


def _line(error: ErrorDetails, origin: Origin, named: Named, references: Sequence[Reference]) -> str:
    path = tuple(str(part) for part in error["loc"])
    name = next((part for part in reversed(path) if not part.isdecimal()), "")
    key, value = ".".join(named(path)), restore_references(error["input"], references, name)
    if error["type"] == "extra_forbidden":
        return _unknown(path, value, origin(path), named, error.get("ctx", {}).get("known", ()))
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        mentioned = (tuple(name.split(".")) for name in _KEY.findall(message))
        # of a section, the key that the message blames; of two keys that contradict each other, one that was given
        blamed = [
            *([] if _beside((*path, "")) else [path]),
            *(keys for keys in mentioned if pattern(keys) in known_keys()),
            path,
            path[:-1],
        ]
        message = message if not path or message.startswith((f"{key}.", f"{key} ")) else f"{key}: {message}"
        return message + next((place for keys in blamed if keys and (place := origin(keys))), "")
    if error["type"] == "missing" and (field := known_keys().get(pattern(path))) is not None:
        return f"{key} is missing{origin(path[:-1])}; give {field.description or 'a value'}"
    if error["type"] == "model_type":
        return f"{key}: {in_yaml(value)} is not a section of keys{origin(path)}; give a mapping"
    message = error["msg"].replace("Input should", "should").split(", unable to parse")[0]
    return f"{key}: {in_yaml(value)} {message[0].lower()}{message[1:]}{origin(path)}{_remedy(path, error)}"


def explain(
    error: ValidationError,
    origin: Origin,
    named: Named = lambda path: path,
    references: Sequence[Reference] = (),
) -> str:
    """Explain an error, one line per problem. `origin` returns where a path's value was given, as text to append (" (command line)");
    `named` returns the path as the user wrote it. What came from the environment is shown as its `references`."""
    errors = error.errors()
    # a wrong value in `data.default` is copied into each source; report it once
    default = {e["loc"][2:] for e in errors if e["loc"][:2] == ("data", "default")}
    return "\n".join(
        _line(e, origin, named, references)
        for e in errors
        if not (e["loc"][:2] in (("data", "train"), ("data", "validation")) and e["loc"][3:] in default)
    )
