"""What becomes of the keys of another framework, and the configuration that is written for them."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError

from headrace.base.printable import printable
from headrace.config.in_yaml import escape
from headrace.config.root import Config
from headrace.config.yaml_text import dump_value

Kind = Literal["used", "replaced", "missing"]

TRACKERS = ["wandb", "tensorboard", "mlflow"]
NO_SUCH_LOSS = "its form of the loss is not there; docs/recipes.md has those that are"


@dataclasses.dataclass(frozen=True)
class Unread:
    """A value that only running the script would tell. `text` is its expression."""

    text: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One key of theirs, or several whose names a pattern matches (`*` is any part).

    `says` is, for a used key, ours; for a replaced one, what does its work here; for a missing one, why there is none and what to use.
    `default` is theirs. `direct`: ours takes the same value. `quiet` are values of a missing key that ask for nothing, besides its
    default, null, false and empty. `only_with` is what else a run has to set for a used key to do anything there.
    """

    name: str
    kind: Kind
    says: str
    default: Any = None
    direct: bool = False
    quiet: tuple[Any, ...] = ()
    only_with: str = ""


def direct(name: str, key: str, default: Any) -> Row:
    return Row(name, "used", key, default, direct=True)


def used(names: str, says: str, default: Any = None, only_with: str = "") -> Iterator[Row]:
    for name in names.split():
        yield Row(name, "used", says, default, only_with=only_with)


def replaced(names: str, says: str) -> Iterator[Row]:
    for name in names.split():
        yield Row(name, "replaced", says)


def missing(names: str, says: str, default: Any = None, quiet: tuple[Any, ...] = ()) -> Iterator[Row]:
    for name in names.split():
        yield Row(name, "missing", says, default, quiet=quiet)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The value of a key of ours, the keys of theirs that it came from, and what the file says of it."""

    value: Any
    names: tuple[str, ...]
    comment: str


class Draft:
    """Collects settings and notes. `given` are the keys that the run sets, `whose` the framework's name."""

    def __init__(self, whose: str, table: Sequence[Row], given: Mapping[str, Any], section: str) -> None:
        self.whose, self.table, self.given, self.section = whose, table, given, section
        self.settings: dict[tuple[str, ...], Setting] = {}
        self.same: list[str] = []
        self.replaced: list[str] = []
        self.missing: list[str] = []
        self.to_add: list[str] = []
        self.files: dict[str, str] = {}  # to be written beside the configuration, by name
        self._rows = {row.name: row for row in table}
        patterns = sorted((row for row in table if "*" in row.name), key=lambda row: -len(row.name))
        self._patterns = [(re.compile(re.escape(row.name).replace(r"\*", ".*")), row) for row in patterns]
        self._unread: set[str] = set()  # those that were reported
        self._noted: set[str] = set()  # keys of theirs that a note accounts for
        self._put: set[tuple[str, ...]] = set()

    def is_given(self, *names: str) -> bool:
        return any(name in self.given for name in names)

    def those_given(self, *names: str) -> list[str]:
        return [name for name in names if name in self.given]

    def value(self, name: str, like: Any = None) -> Any:
        """Return the value of a key of theirs; its default if the run doesn't set it, or sets what can't be read, or what is not like the
        default, or not like `like` where the default is null."""
        row = self._rows[name]
        found = self.given.get(name, row.default)
        is_known = isinstance(found, Unread) or (found is None and row.default is None)
        if not is_known and not is_like(found, row.default if like is None else like):
            found = Unread(_short(found))
        if isinstance(found, Unread):
            self._refuse(name, found.text, self._ours(row))
            return row.default
        return found

    def size(self, name: str) -> Any:
        """`value`, for a key that counts something: a whole number of 1 or more, or null."""
        found = self.value(name, 1)
        if found is None or (found >= 1 and found == int(found)):
            return found if found is None else int(found)
        self._refuse(name, _short(found), self._ours(self._rows[name]))
        return self._rows[name].default

    def _refuse(self, name: str, shown: str, ours: str) -> None:
        self._noted.add(name)
        if name not in self._unread:
            self._unread.add(name)
            self.to_add.append(f"{name} is {shown}, which can't be read as its value; set {ours} yourself")

    def put(self, key: str | tuple[str, ...], value: Any, *names: str, says: str = "") -> None:
        """Set a key of ours (dots lead into sections), for the keys `names` of theirs."""
        keys = tuple(key.split(".")) if isinstance(key, str) else key
        self._put.add(keys)
        if _has_unread(value):
            unread = [name for name in names if _has_unread(self.given.get(name))]
            for name in unread or [".".join(keys)]:
                self._refuse(name, _short(self.given.get(name, value)), ".".join(keys))
            return
        own = tuple(name for name in names if name in self.given and not isinstance(self.given[name], Unread))
        if names and not own and _default(keys, self.section) == value:
            return
        of = ", ".join(f"{name} {_short(self.given[name])}" for name in own) or (
            f"{self.whose}'s default of {', '.join(names)}" if names else ""
        )
        if own and _default(keys, self.section) == value:
            self._noted.update(own)
            self.same.append(f"{of}: {'.'.join(keys)} {_short(value)}")
            return
        self.settings[keys] = Setting(value, own, "; ".join(filter(None, (of, says))))

    def copy(self, name: str, key: str) -> None:
        """Put the value of a key of theirs, if it has one."""
        value = self.value(name)
        if value is not None:
            self.put(key, value, name)

    def note(self, names: str | Sequence[str], why: str, under: list[str] | None = None) -> None:
        """Report keys of theirs, or values of them: without a counterpart, if not `under` another of the lists."""
        names = [names] if isinstance(names, str) else names
        self._noted.update(names)
        notes = self.missing if under is None else under
        shown = (f"{name} {_short(self.given[name])}" if name in self.given else name for name in names)
        notes.append(f"{', '.join(shown)}: {why}")

    def add(self, text: str) -> None:
        """Report what the user has to add."""
        self.to_add.append(text)

    def finish(self) -> Draft:
        """Put every direct key, and account for each key that the run sets."""
        for row in self.table:
            if row.direct and tuple(row.says.split(".")) not in self._put:
                value = self.value(row.name)
                if value is not None or row.name in self.given:
                    self.put(row.says, value, row.name)
        accounted = self._noted.union(*(setting.names for setting in self.settings.values()))
        for name, value in self.given.items():
            if name not in accounted:
                self._account(name, value)
        return self

    def _account(self, name: str, value: Any) -> None:
        """Report a key that no setting and no note accounts for."""
        row, shown = self._find(name), f"{name} {_short(value)}"
        if row is None:
            close = difflib.get_close_matches(name, [each.name for each in self.table], 1, 0.8)
            meant = f"did you mean {close[0]}? Else" if close else "it is not a key that is known here;"
            self.note(name, f"{meant} set what it does yourself")
        elif row.kind == "replaced":
            self.replaced.append(f"{shown}: {row.says}")
        elif row.kind == "missing":
            nothing = (None, False, [], {}, "", row.default, *row.quiet)
            if value in nothing and not isinstance(value, Unread):
                self.same.append(f"{shown}: it asks for nothing")
            else:
                self.missing.append(f"{shown}: {row.says}")
        elif isinstance(value, Unread):
            self._refuse(name, value.text, self._ours(row))
        elif value in (None, row.default) or (value is False and row.default is None):
            self.same.append(f"{shown}: nothing to set beside the other keys ({self._ours(row)})")
        elif row.only_with:
            self.same.append(f"{shown}: it does nothing without {row.only_with}")
        else:
            self.missing.append(f"{shown}: not understood; set {self._ours(row)} yourself")

    def _find(self, name: str) -> Row | None:
        """Return the row of a key: the one of its name, or else the longest pattern that matches."""
        matching = (row for pattern, row in self._patterns if pattern.fullmatch(name))
        return self._rows.get(name) or next(matching, None)

    def _ours(self, row: Row) -> str:
        return row.says.replace("{section}", self.section)

    def values(self) -> dict[str, Any]:
        """Return the configuration as nested mappings."""
        made: dict[str, Any] = {}
        for keys, setting in self.settings.items():
            place = made
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = setting.value
        return made

    def problem(self) -> str | None:
        """Return why the configuration is none, or None."""
        try:
            Config.model_validate(self.values())
        except ValidationError as error:
            return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        return None

    def text(self, source: str) -> str:
        """Return the file: what is not in it as comments, and each key with where it came from."""
        lines = [
            f"# The run of {self.whose} in {_one_line(source)}, written by `headrace migrate`. Check it: headrace config check FILE"
        ]
        for title, notes in (
            ("To add", self.to_add),
            ("No counterpart", self.missing),
            ("Not needed here", self.replaced),
            ("Same by default", self.same),
        ):
            if notes:
                lines += ["#", f"# {title}:", *(f"#   {_one_line(note)}" for note in notes)]
        order = list(Config.model_fields)
        lines += ["", *_write(dict(sorted(self.settings.items(), key=lambda item: order.index(item[0][0]))), ())]
        return "\n".join(lines) + "\n"


def put_trackers(draft: Draft, reports: Any, name: str, quiet: tuple[str, ...]) -> None:
    """Put the trackers that their key `name` lists. Those in `quiet` ask for nothing."""
    reports = reports if isinstance(reports, list) else [reports]
    for tracker in TRACKERS:
        if tracker in reports:
            of = "after `wandb login`, or else into the run's folder, for `wandb sync`" if tracker == "wandb" else ""
            draft.put(f"logger.{tracker}_enabled", True, name, says=of)
    if others := ", ".join(str(each) for each in reports if each not in (*TRACKERS, *quiet)):
        draft.note(name, f"{others}: W&B, TensorBoard and MLflow are there, and curves without any of them")
    elif draft.is_given(name) and not any(tracker in reports for tracker in TRACKERS):
        draft.note(name, "no tracker", draft.same)


def put_adapted_layers(draft: Draft, modules: Any, names: str, excluded: str) -> None:
    """Put the layers that an adapter has: `modules`, the value of their key `names`, without those of their key `excluded`."""
    draft.put(("policy", "lora_cfg", "init"), "uniform", says="as PEFT draws A")
    if isinstance(modules, list) or modules == "all-linear":
        draft.put(("policy", "lora_cfg", "target_modules"), modules if isinstance(modules, list) else [], names)
    elif modules is not None:
        draft.note(names, "give a list of names: policy.lora_cfg.target_modules")
    if without := draft.value(excluded, []):
        draft.put("policy.lora_cfg.exclude_modules", without, excluded)


def _write(settings: Mapping[tuple[str, ...], Setting], place: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of the settings below `place`."""
    indent, depth = "  " * len(place), len(place)
    for name in dict.fromkeys(keys[depth] for keys in settings if keys[:depth] == place):
        here = (*place, name)
        shown = _flow(name)
        if (setting := settings.get(here)) is not None:
            comment = f"    # {_one_line(setting.comment)}" if setting.comment else ""
            yield f"{indent}{shown}: {_flow(setting.value)}{comment}"
        else:
            yield f"{indent}{shown}:"
            yield from _write(settings, here)


def _flow(value: Any) -> str:
    return dump_value(_escaped(value), flow=True)


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(each) for each in value]
    if isinstance(value, Unread):
        return value.text
    return escape(value) if isinstance(value, str) else value


def _has_unread(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_has_unread, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Unread)


def _short(value: Any) -> str:
    shown = value.text if isinstance(value, Unread) else _flow(value)
    return shown if len(shown) <= 60 else f"{shown[:59]}…"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def is_like(value: Any, like: Any) -> bool:
    """Whether a value can stand where `like` does. A number stands for a switch, and a switch for text, as in both frameworks. Of a list or
    mapping, what it holds must be like the first that `like` holds."""
    if like is None:
        return True
    if isinstance(value, list | dict) and like and isinstance(like, type(value)):
        items, first = (each if isinstance(each, list) else list(each.values()) for each in (value, like))
        return all(is_like(each, first[0]) for each in items)
    if isinstance(like, str | list):  # one name stands for a list of one
        return isinstance(value, str | list) or (isinstance(like, str) and isinstance(value, bool))
    if isinstance(like, bool):
        return isinstance(value, int | float)
    if isinstance(like, int | float):
        # neither infinite nor NaN
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return isinstance(value, type(like))


_NONE = object()


@functools.cache
def _defaults(section: str) -> Config:
    return Config.model_validate({section: {}})


def _default(keys: tuple[str, ...], section: str) -> Any:
    """Return our default of a key; an object that equals nothing for one that has none."""
    found: Any = _defaults(section)
    for key in keys:
        if not isinstance(found, BaseModel) or key not in type(found).model_fields:
            return _NONE
        found = getattr(found, key)
    if isinstance(found, BaseModel):
        return _NONE
    return list(found) if isinstance(found, tuple) else found


def read_scalar(text: str) -> Any:
    """Return the value of a word of a command: YAML's, and Python's numbers (`1e-6`); text that is neither, and a date, stays text."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # the second for 2024-31-12, which is no date
        return text
    if isinstance(value, datetime.date):
        return text
    try:
        return float(value) if isinstance(value, str) and re.fullmatch(r"[-+.\deE]+", value) else value
    except ValueError:
        return value
