"""YAML in and out. Stricter than YAML 1.1 where it surprises: `1e-4` is a number, a date stays text, a key given twice is an error."""

from __future__ import annotations

import re
from typing import Any

import yaml

from headrace.config.base import Section
from headrace.config.interpolate import escape
from headrace.errors import ConfigError

_FLOAT = re.compile(
    r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


def _resolvers(base: type) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """The resolvers of `base` without timestamps, and with the floats of YAML 1.2."""
    dropped = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
    kept = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in dropped]
        for first, resolvers in base.yaml_implicit_resolvers.items()  # type: ignore[attr-defined]
    }
    for first in "-+0123456789.":
        kept.setdefault(first, []).append(("tag:yaml.org,2002:float", _FLOAT))
    return kept


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers(yaml.SafeLoader)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers(yaml.SafeDumper)


# text with `${` in it would be read as an interpolation
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_str(escape(text)))


def parse(text: str, where: str) -> Any:
    """The value of one YAML document. Raises `ConfigError` naming `where` and, for a document of lines, the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark and "\n" in text else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


def dump(config: Section) -> str:
    """`config` as YAML that `load` reads back as an equal configuration; every key is written out, of `grpo` or `ppo` the one there is."""
    sections = {name: section for name, section in config.model_dump(mode="json").items() if section is not None}
    text: str = yaml.dump(sections, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return text
