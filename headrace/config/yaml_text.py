"""Reads and writes YAML. Stricter than YAML 1.1 where it surprises: `1e-4` is a number, a date stays text, a duplicate key is an error."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from headrace.base.errors import ConfigError
from headrace.config.in_yaml import escape, in_yaml
from headrace.config.keys import item_at
from headrace.config.limits import MAX_DEPTH, MAX_NODES
from headrace.config.references import Expression
from headrace.config.root import Config

_FLOAT = re.compile(
    r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


def _resolvers(base: type) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return the resolvers of `base` without timestamps, and with the floats of YAML 1.2."""
    dropped = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
    kept = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in dropped]
        for first, resolvers in base.yaml_implicit_resolvers.items()  # type: ignore[attr-defined]
    }
    for first in "-+0123456789.":
        kept.setdefault(first, []).append(("tag:yaml.org,2002:float", _FLOAT))
    return kept


def _constructors() -> dict[Any, Callable[[Any, Any], Any]]:
    """Return YAML's own constructors, without those of dates, sets and bytes, which a configuration never contains."""
    dropped = {f"tag:yaml.org,2002:{name}" for name in ("timestamp", "binary", "set", "omap", "pairs")}
    return {tag: _check(make) for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag not in dropped}


def _check(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def made(loader: _Loader, node: yaml.Node) -> Any:
        try:
            return make(loader, node)
        except (ValueError, LookupError, AttributeError) as error:
            # a tag that the text doesn't fit (`!!int abc`), or a number of thousands of digits
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{in_yaml(node.value)} is not a valid {kind}; correct it, or put it in quotes",
                node.start_mark,
            ) from error

    return made


_TEXT = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:value")

# remedies for PyYAML's errors, by a part of the message
_REMEDIES = {
    "found character '\\t'": "indent with spaces, not tabs",
    "found another document": "keep one of them",
    "could not determine a constructor": "leave the tag out",
    "found undefined alias": "give its anchor (&name) before it",
    "got '<stream end>'": "close the bracket",
    "found unexpected end of stream": "close the quote or bracket",
    "special characters are not allowed": "save the file as plain text",
}


class _Strict(yaml.constructor.SafeConstructor):
    yaml_implicit_resolvers = _resolvers(yaml.SafeLoader)
    yaml_constructors = _constructors()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                kind = "mapping" if isinstance(key, yaml.MappingNode) else "list"
                raise yaml.constructor.ConstructorError(
                    None, None, f"a key is a {kind}; put text that begins with {{ or [ in quotes", key.start_mark
                )
            if key.tag not in _TEXT:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value or 'null'} is not text; put it in quotes", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {in_yaml(key.value)} is given twice; remove one of them", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Loader(_Strict, yaml.SafeLoader):
    pass


class _FastLoader(_Strict, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """libyaml, which reads ten times as fast. Its errors have other words, and it lets `_ODD` pass where `_Loader` doesn't."""


_ODD = re.compile(r"[\t\ufeff!?]|[|>]\S*#")


def _check_size(node: yaml.Node) -> None:
    """Raise `_DocumentTooLarge` if the document, with every alias written out, is too large or too deep, or contains itself.

    Nothing expands aliases while it reads, but every later walk over the values does: ten lines of YAML can stand for 10⁹ values.
    """
    sizes: dict[int, tuple[int, int]] = {}
    above: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Return (nodes, levels) below and including `node`."""
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in above:
            raise _DocumentTooLarge("an alias (*name) is inside the value of its own anchor (&name)")
        above.add(id(node))
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        measured = [measure(part) for part in inner]
        above.discard(id(node))
        nodes, levels = 1 + sum(n for n, _ in measured), 1 + max((depth for _, depth in measured), default=0)
        if nodes > MAX_NODES:
            raise _DocumentTooLarge(f"more than {MAX_NODES} values once its aliases (*name) are written out")
        if levels > MAX_DEPTH:
            raise _DocumentTooLarge(f"nested more than {MAX_DEPTH} levels deep")
        sizes[id(node)] = nodes, levels
        return sizes[id(node)]

    measure(node)


class _DocumentTooLarge(Exception):
    pass


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers(yaml.SafeDumper)


# text with `${` in it would be read as an interpolation
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_str(escape(text)))
_Dumper.add_representer(Expression, lambda dumper, text: dumper.represent_str(str(text)))


def parse(text: str, where: str) -> Any:
    """Return the value of one YAML document. Raises `ConfigError` naming `where` and, for a document of several lines, the line."""
    if not _ODD.search(text):
        with contextlib.suppress(yaml.YAMLError, _DocumentTooLarge, RecursionError, UnicodeEncodeError):
            return _read(_FastLoader, text)
    try:
        return _read(_Loader, text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark and "\n" in text else ""
        raise ConfigError(
            f"{where}{line}: not valid YAML: {_with_remedy(error.problem or str(error.context))}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {_with_remedy(' '.join(str(error).split()))}") from error
    except _DocumentTooLarge as error:
        raise ConfigError(f"{where}: {error}; shorten it, as no configuration needs that") from error
    except RecursionError as error:
        raise ConfigError(
            f"{where}: nested more than {MAX_DEPTH} levels deep; shorten it, as no configuration needs that"
        ) from error


def _read(kind: Any, text: str) -> Any:
    loader = kind(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _check_size(node)
    return loader.construct_document(node)


def find_item(text: str, *keys: str) -> Any:
    """Return the item at `keys` of `text`, a YAML document. Raises `ConfigError`, and as `item_at` does."""
    return item_at(parse(text, "a variable of the environment"), keys)


def _with_remedy(problem: str) -> str:
    remedy = next((remedy for says, remedy in _REMEDIES.items() if says in problem), None)
    return problem if remedy is None else f"{problem}; {remedy}"


@functools.lru_cache(4)  # a start asks for the line of each key of a few files
def _compose(text: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = _Loader(text).get_single_node()
    except yaml.YAMLError:
        return None
    return node


def find_line(text: str, keys: Sequence[str]) -> int | None:
    """Return the line, counted from 1, where the YAML document `text` gives the value at `keys`, or the nearest mapping or list above it;
    None if it gives none of them. A number is the place of an item; for a mapping, 0 is the mapping itself, as a list of one."""
    node = _compose(text)
    line = None
    for key in keys:
        inner: tuple[int, yaml.Node] | None = None
        if isinstance(node, yaml.MappingNode):
            named = [(name, value) for name, value in node.value if isinstance(name, yaml.ScalarNode)]
            inner = next(((name.start_mark.line, value) for name, value in named if name.value == key), None)
            if inner is None and key == "0":
                continue
        elif isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
            item = node.value[int(key)]
            inner = item.start_mark.line, item
        if inner is None:
            break
        line, node = inner[0] + 1, inner[1]
    return line


def dump_value(value: Any, *, flow: bool = False) -> str:
    """Return a value as YAML that `parse` reads back as an equal one; with `flow` in one line. Raises `yaml.YAMLError` for a type that YAML
    doesn't have."""
    text: str = yaml.dump(
        value,
        Dumper=_ValueDumper,
        sort_keys=False,
        width=sys.maxsize,
        allow_unicode=True,
        default_flow_style=flow or None,
    )
    return text.removesuffix("...\n").strip() if flow else text


class _ValueDumper(yaml.SafeDumper):
    """Writes values as they are: `${` is not escaped."""

    yaml_implicit_resolvers = _resolvers(yaml.SafeDumper)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(config: Config) -> str:
    """Return `config` as YAML that `load` reads back as an equal configuration, if the environment still has what came from it. Every key
    is written, but only the section of the algorithm that is used."""
    sections = {name: section for name, section in config.show().items() if section is not None}
    text: str = yaml.dump(sections, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return text
