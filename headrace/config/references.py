"""What came from the environment: it is used, and stored and shown as the `${oc.env:NAME}` that gives it.

A path, a model's name, a number and a switch are no secrets, and a run's folder is of use without the shell that started it. So they are
stored as they are. Every other text is stored as its reference, because it may be a token or a password.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.config.in_yaml import in_yaml

# shorter text is no secret, and would be found in the midst of words
_SHORTEST = 6
# the resolver that returns an item of the YAML in a variable, by its keys
ITEM_OF = "headrace.item_of"
_VARIABLE = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)")


class Expression(str):
    """Text that is an interpolation, and is written into a file as it is."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Reference:
    """A value from the environment: the last name of its key, the value, and the expression that gives it."""

    name: str
    value: Any
    expression: Expression


def of_variable(variable: str, keys: Sequence[str]) -> Expression:
    """Return the expression for the item at `keys` of the YAML in a variable; without keys, for its text."""
    whole = f"${{oc.env:{variable}}}"
    escaped = (key.replace("\\", "\\\\").replace("'", "\\'") for key in keys)
    quoted = [key if key.isidentifier() else f"'{key}'" for key in escaped]
    return Expression(f"${{{ITEM_OF}:{','.join((whole, *quoted))}}}" if keys else whole)


def restore_references(value: Any, references: Sequence[Reference], name: str = "") -> Any:
    """Return `value`, the value of a key called `name`, with the expression in place of everything that came from the environment."""
    if not references or value is None or isinstance(value, bool | int | float):
        return value
    for reference in references:
        if reference.name == name and reference.value == value:
            return reference.expression
    if isinstance(value, dict):
        return {key: restore_references(inner, references, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [restore_references(inner, references, name) for inner in value]
    return value


def hide_values(text: str, references: Iterable[Reference]) -> str:
    """Return a message with the expressions in place of values that came from the environment."""
    for reference in references:
        if isinstance(reference.value, str):
            text = text.replace(in_yaml(reference.value), in_yaml(reference.expression))
            if len(reference.value) >= _SHORTEST:
                text = text.replace(reference.value, reference.expression)
    return text


def variables(expressions: Iterable[str]) -> set[str]:
    """Return the names of the variables that these expressions read."""
    return {name for text in expressions for name in _VARIABLE.findall(text)}


def of_variables(expressions: Iterable[str]) -> list[Reference]:
    """Return the variables that these expressions read, for `hide_values`."""
    return [
        Reference("", os.environ[name], Expression(f"${{oc.env:{name}}}"))
        for name in sorted(variables(expressions))
        if os.environ.get(name)
    ]
