"""Evaluates the interpolations in a configuration with OmegaConf's resolvers. It is imported only if a file has any, because OmegaConf
takes 0.1 s."""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers import oc

from headrace.config.in_yaml import escape, in_yaml
from headrace.config.keys import ItemPath
from headrace.config.limits import MAX_CHARACTERS, MAX_DEPTH, MAX_NODES
from headrace.config.references import ITEM_OF
from headrace.config.yaml_text import find_item

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}

# the most interpolations in one expression; counted before evaluation
_MAX_IN_TEXT = 100
# the longest chain of expressions that refer to each other: each takes 33 of Python's 1,000 frames
_MAX_CHAIN = 20
_MAX_BITS = 1000
_TOO_LARGE = f"the interpolations make more than {MAX_NODES} values or {MAX_CHARACTERS} characters in all"

# a name with an interpolation inside or of dots alone, or a resolver that takes names (of OmegaConf's own, only `oc.env` takes none)
_COMPUTED = re.compile(r"\$\{[^:}]*\$\{|\$\{\.+\}|oc\.(?!env\b)")

# the resolver that returns the value of an expression to those that refer to it
_VALUE_OF = "headrace.value_of"


class InterpolationsTooLarge(InterpolationResolutionError):
    """Raised when interpolations grow without end. OmegaConf passes errors of this kind on unchanged."""


@functools.lru_cache(1000)  # the page reads many runs, whose expressions are the same
def parse_error(text: str) -> OmegaConfBaseException | None:
    """Return why `text` can't be parsed; None if it can."""
    # counted first: OmegaConf's parser takes more frames per level than Python has
    if text.count("${") > _MAX_IN_TEXT:
        return InterpolationsTooLarge(f"it holds more than {_MAX_IN_TEXT} interpolations")
    try:
        OmegaConf.create([text])
    except OmegaConfBaseException as error:
        return error
    except RecursionError:
        return InterpolationsTooLarge("its interpolations are nested too deep")
    return None


class Evaluation:
    """Evaluates each of `expressions`, which are values in `whole`, once.

    OmegaConf alone evaluates an expression each time that another refers to it, and writes the result out every time: ten lines can stand
    for 10⁹ values. So each expression is replaced by a call that returns its value, and the values written out are counted.

    With `unread`, variables of the environment are not read: what is made from them is a mark in its place (`Unread`).
    """

    def __init__(
        self, expressions: Mapping[ItemPath, str], whole: dict[str, Any], unread: Unread | None = None
    ) -> None:
        resolvers: dict[str, Callable[..., Any]] = {"oc.env": oc.env, "oc.decode": oc.decode}
        resolvers |= {name: _of_numbers(name, function) for name, function in _ARITHMETIC.items()} | {
            ITEM_OF: find_item
        }
        for name, resolver in (resolvers if unread is None else unread.resolvers(resolvers)).items():
            OmegaConf.register_resolver(name, resolver, replace=True)
        OmegaConf.register_resolver(_VALUE_OF, self._value, replace=True)
        self._container = OmegaConf.create(_reachable(whole, expressions))
        self._expressions = {keys: text for keys, text in expressions.items() if text != MISSING}
        self._places = list(self._expressions)
        self._numbers = {keys: number for number, keys in enumerate(self._places)}
        self._values: dict[int, Any] = {}
        # by id: a section or list (kept, so that the id stays valid), its plain values, and the number of values and characters in them
        self._written: dict[int, tuple[Any, Any, int, int]] = {}
        self._nodes = self._characters = self._chain = 0
        for keys, number in self._numbers.items():
            self._put(keys, _call(number))

    def result(self, keys: ItemPath) -> Any:
        """Return the value of the expression at `keys`, as plain values. Raises OmegaConf's errors, `InterpolationsTooLarge` among them."""
        if keys not in self._expressions:
            raise MissingMandatoryValue
        try:
            return self._plain(self._value(self._numbers[keys]), 0)
        except RecursionError as error:
            raise InterpolationResolutionError("it contains itself") from error

    def _holder(self, keys: ItemPath) -> Any:
        node: Any = self._container
        for key in keys[:-1]:
            node = node[key]
        return node

    def _put(self, keys: ItemPath, text: str) -> None:
        self._holder(keys)[keys[-1]] = text

    def _value(self, number: int) -> Any:
        if number not in self._values:
            keys = self._places[number]
            text = self._expressions[keys]
            if self._chain == _MAX_CHAIN:
                raise InterpolationResolutionError(f"it leads through more than {_MAX_CHAIN} others")
            self._put(keys, text)
            self._chain += 1
            try:
                value = self._holder(keys)[keys[-1]]
            finally:
                self._chain -= 1
                self._put(keys, _call(number))
            if isinstance(value, str) and len(value) > MAX_CHARACTERS:
                raise InterpolationsTooLarge(_TOO_LARGE)
            if isinstance(value, str) and f"${{{_VALUE_OF}:" in value:
                raise InterpolationResolutionError("a list or section with interpolations can't stand inside text")
            self._values[number] = value
        return self._values[number]

    def _plain(self, value: Any, depth: int) -> Any:
        """Return `value` with everything below it written out."""
        if id(value) in self._written:
            _, plain, nodes, characters = self._written[id(value)]
            self._count(nodes, characters)
            return copy.deepcopy(plain)
        if depth > MAX_DEPTH:
            raise RecursionError
        nodes, characters = self._nodes, self._characters
        self._count(1, len(value) if isinstance(value, str) else 0)
        if isinstance(value, DictConfig):
            plain = {key: self._plain(_inside(value, key), depth + 1) for key in value}
        elif isinstance(value, ListConfig):
            plain = [self._plain(_inside(value, number), depth + 1) for number in range(len(value))]
        else:
            return value
        self._written[id(value)] = value, plain, self._nodes - nodes, self._characters - characters
        return plain

    def _count(self, nodes: int, characters: int) -> None:
        self._nodes, self._characters = self._nodes + nodes, self._characters + characters
        if self._nodes > MAX_NODES or self._characters > MAX_CHARACTERS:
            raise InterpolationsTooLarge(_TOO_LARGE)


_MARK = re.compile("\0([0-9]+)\0")
_NAME = re.compile(r"[A-Za-z_]\w*")


class Unread:
    """Variables of the environment, and what is computed from them, as the expressions that give them. In text each is a mark: its number
    between two NUL characters, which no variable contains."""

    def __init__(self) -> None:
        self._expressions: list[str] = []

    def resolvers(self, read: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Return resolvers that leave marks where those of `read` would take the environment's text."""

        def env(*given: Any) -> str:
            return self._call("oc.env", given)

        def decode(text: Any, _parent_: Any, _node_: Any) -> Any:
            return self._call("oc.decode", [text]) if _is_marked(text) else read["oc.decode"](text, _parent_, _node_)

        def computed(name: str) -> Callable[..., Any]:
            return lambda *given: self._call(name, given) if any(map(_is_marked, given)) else read[name](*given)

        return {"oc.env": env, "oc.decode": decode, **{name: computed(name) for name in (*_ARITHMETIC, ITEM_OF)}}

    def expression(self, text: str) -> str | None:
        """Return the expression that gives the text; None if it has no mark."""
        return self._written(text, escape) if _is_marked(text) else None

    def mark(self, expression: str) -> str:
        """Return a mark for the expression."""
        self._expressions.append(expression)
        return f"\0{len(self._expressions) - 1}\0"

    def _call(self, name: str, given: Any) -> str:
        return self.mark(f"${{{name}:{','.join(map(self._argument, given))}}}")

    def _argument(self, value: Any) -> str:
        if not isinstance(value, str) or _NAME.fullmatch(value):
            return value if isinstance(value, str) else in_yaml(value)
        if _MARK.fullmatch(value):
            return self._written(value, escape)
        return f"'{self._written(value, _quote)}'"

    def _written(self, text: str, literal: Callable[[str], str]) -> str:
        *pairs, last = _MARK.split(text)
        parts = []
        for before, number in zip(pairs[::2], pairs[1::2], strict=True):
            slashes = len(before) - len(before.rstrip("\\"))
            # a backslash before an interpolation would make it text
            parts += [literal(before) + "\\" * slashes, self._expressions[int(number)]]
        return "".join((*parts, literal(last)))


def _is_marked(value: Any) -> bool:
    return isinstance(value, str) and _MARK.search(value) is not None


def _quote(text: str) -> str:
    return re.sub(r"(\\*)'", lambda found: f"{found[1] * 2}\\'", escape(text))


def _reachable(whole: dict[str, Any], expressions: Mapping[ItemPath, str]) -> dict[str, Any]:
    """Return what holds an expression or is named in one: OmegaConf takes 0.1 ms for each key. A name that is computed may be any."""
    texts = " ".join(expressions.values())
    if _COMPUTED.search(texts):
        return whole
    holders = {keys[:depth] for keys in expressions for depth in range(1, len(keys) + 1)}

    def part(section: dict[str, Any], path: ItemPath) -> dict[str, Any]:
        kept = ((key, value, (*path, key)) for key, value in section.items())
        return {
            # a section that a reference ends at is needed whole
            key: part(value, place) if isinstance(value, dict) and not _ends_at(str(key), texts) else value
            for key, value, place in kept
            if place in holders or str(key) in texts
        }

    return part(whole, ())


def _ends_at(key: str, texts: str) -> bool:
    return re.search(rf"{re.escape(key)}(?![.\[])", texts) is not None


def _call(number: int) -> str:
    return f"${{{_VALUE_OF}:{number}}}"


def _inside(value: Any, key: Any) -> Any:
    return MISSING if OmegaConf.is_missing(value, key) else value[key]


def _of_numbers(name: str, function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def checked(*given: Any) -> Any:
        if len(given) != 2 or not all(isinstance(one, int | float) for one in given):
            raise TypeError(f"{name} takes two numbers, not {', '.join(map(in_yaml, given))} (oc.decode converts text)")
        result = function(*given)
        # a number multiplied by itself has twice the digits each time
        if isinstance(result, int) and result.bit_length() > _MAX_BITS:
            raise OverflowError(f"{name} makes a number of more than {_MAX_BITS} bits")
        return result

    return checked
