"""Reads a configuration: file, environment and command line become one validated `Config`.

Precedence: command line > environment > file > the files it names by `defaults` > built-in defaults. Mappings are merged key by key; lists
are replaced whole. Interpolations are resolved last, so that an override reaches every value made from it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headrace.base.errors import ConfigError, Problems
from headrace.config.data import DataSourceConfig
from headrace.config.environments import drop_former
from headrace.config.explain import explain, known_keys, nearest, pattern
from headrace.config.in_yaml import in_yaml
from headrace.config.inherit import Inherited, as_written, merge, read
from headrace.config.interpolate import expressions, from_environment, resolve
from headrace.config.keys import Keys, item_at, leaves, look
from headrace.config.marks import Mark
from headrace.config.references import Reference, hide_values, of_variable
from headrace.config.root import Config
from headrace.config.yaml_text import find_item, find_line, parse

if TYPE_CHECKING:
    from headrace.config.nemo_rl import Translation

PREFIX = "HEADRACE_"
COMMAND_LINE, ENVIRONMENT = "command line", "environment"

# every NeMo RL file has one of these keys, and Headrace has none of them
NEMO_RL_KEYS = (
    "cluster",
    "policy.megatron_cfg",
    "policy.dtensor_cfg",
    "policy.automodel_cfg",
    "policy.generation.backend",
    "policy.generation.colocated",
    "data_plane",
    "async_rl",
)
# the most lines in an error about such a file; once the first ones are fixed, the user sees the others
_NEMO_RL_LINES = 10
# How often wrong values are left out: a section that lacks one that it needs shows when they are gone.
_MOST_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A configuration, and how it was translated from a NeMo RL file; None for one of Headrace's own. `origin` returns where the value at
    some keys was given, as text to append: " (run.yaml:12)", " (command line)", or nothing. `path` is the file that was read; `is_own`
    tells whether it, or the command line, gave the value at some keys, and not a variable or a file that it inherits from."""

    config: Config
    nemo_rl: Translation | None
    origin: Callable[[Keys], str] = lambda keys: ""
    path: Path | None = None
    is_own: Callable[[Keys], bool] = lambda keys: True


class InvalidConfig(ConfigError):
    """Raised for values that make no configuration. `rest` is the configuration without the wrong ones, if it is one; `sections` had
    them."""

    def __init__(self, message: str, rest: Loaded | None, sections: frozenset[str]) -> None:
        super().__init__(message)
        self.rest, self.sections = rest, sections


def variable_name(keys: Sequence[str]) -> str:
    """Return the name of the variable that sets the value at `keys`."""
    return PREFIX + "__".join(keys).upper()


def load(path: Path | str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Return the configuration that `examine` reads."""
    return examine(path, overrides, environ).config


def examine(path: Path | str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """Read the run's YAML at `path` under `overrides` (`section.key=value`, YAML values) and `HEADRACE_SECTION__KEY` variables.

    A variable's value is text for a scalar key, YAML for a list or a mapping, and `null` for none. `environ` None means the process's own
    (`${oc.env:NAME}` always reads that). Raises `ConfigError`, with one line per problem, naming the key, the value and, for an unknown
    key, the nearest known one.
    """
    path, environ = Path(path), os.environ if environ is None else environ
    inherited = read(path)
    written = copy.deepcopy(inherited.values)
    overridden, named_by = _put_all(written, overrides, environ)
    if [written.get(section, "") for section in ("grpo", "ppo")] == [None, None]:
        raise ConfigError("grpo and ppo are both null; give one of them")
    given = _Given(path, inherited, overridden, written, expressions(written))
    # not OmegaConf's merge: a single data set may be given as a mapping where the default is a list
    whole = merge(Config().model_dump(mode="json"), written)
    resolved = resolve(written, whole)
    references = _of_variables(written, named_by, environ) | dict(from_environment(written, whole, resolved))
    references = {keys: reference for keys, reference in references.items() if not _is_plain(keys)}
    # `grpo=null` makes room for `ppo`
    values = {key: value for key, value in resolved.items() if value is not None}
    _find_files(values, given)
    if any(look(inherited.values, key) is not None for key in NEMO_RL_KEYS):
        return _translate(values, references, given)
    config = _checked(values, [*references.values()], given.origin, given.key)
    return Loaded(config, None, given.origin, path, given.is_own)


def _translate(values: dict[str, Any], references: Mapping[Keys, Reference], given: _Given) -> Loaded:
    """Return the configuration that the `values` of a NeMo RL file make."""
    # imported only for such a file: it is as large as the rest of the configuration
    from headrace.config.nemo_rl import translate

    translation = translate(values)
    moved = [
        dataclasses.replace(references[there], name=here[-1])
        for here, there in {**translation.came_from, **translation.placed}.items()
        if there in references
    ]

    def named(keys: Keys) -> Keys:
        """Return the file's name for a key that only stands in another place."""
        return translation.placed.get(keys) or given.key(keys)

    def origin(keys: Keys) -> str:
        there = translation.placed.get(keys) or translation.came_from.get(keys, keys)
        name = f" ({'.'.join(there)} in NeMo RL)" if there not in (keys, named(keys)) else ""
        return given.origin(there) + name

    problems = [problem.line(given.origin(problem.keys)) for problem in translation.problems]
    config = _checked(translation.values, [*references.values(), *moved], origin, named, problems, _NEMO_RL_LINES)
    return Loaded(config, translation, origin)


@dataclasses.dataclass(frozen=True)
class _Given:
    """Where the values of a configuration were given: in the file at `path`, in one that it inherits from, or over these, by a variable or
    on the command line, which `overridden` has by keys. `values` has all of them before interpolations are resolved, and `expressions` has
    the interpolations in it, by keys."""

    path: Path
    inherited: Inherited
    overridden: Mapping[Keys, str]
    values: dict[str, Any]
    expressions: Mapping[Keys, str]

    def over(self, keys: Keys) -> str | None:
        """Return COMMAND_LINE or ENVIRONMENT, if one of them gave the value at `keys`."""
        overlaps = (at for place, at in self.overridden.items() if place[: len(keys)] == keys[: len(place)])
        return next(overlaps, None)

    def is_own(self, keys: Keys) -> bool:
        """Whether the file, or the command line, gave the value at `keys`."""
        over = self.over(keys)
        return over == COMMAND_LINE if over else self.inherited.source(keys) in (None, self.path)

    def folder(self, keys: Keys) -> Path | None:
        """Return the folder of the file that gave the value at `keys`, if a file did."""
        file = None if self.over(keys) else self.inherited.source(keys)
        return file and file.parent

    def key(self, keys: Keys) -> Keys:
        """Return `keys` as they are in the files."""
        return as_written(self.inherited.values, keys)

    def origin(self, keys: Keys) -> str:
        """Return where the value at `keys` was given, and the interpolation it came from, if any, as text to append."""
        over = self.over(as_written(self.values, keys))
        source = self.inherited.source(keys)
        if over is None and source is None and keys[:2] in (("data", "train"), ("data", "validation")):
            keys = ("data", "default", *keys[3:])  # the value comes from there
            over, source = self.over(keys), self.inherited.source(keys)
        where = [over] if over else []
        if not where and source is not None:
            line = find_line(source.read_text(encoding="utf-8"), keys)
            where = [str(source) if line is None else f"{source}:{line}"]
        if (place := as_written(self.values, keys)) in self.expressions:
            where.append(self.expressions[place])
        return f" ({', '.join(where)})" if where else ""


def _put_all(
    values: dict[str, Any], overrides: Sequence[str], environ: Mapping[str, str]
) -> tuple[dict[Keys, str], dict[Keys, Keys]]:
    """Put what variables and the command line give into `values`. Returns by the keys there which of the two gave a value, and for one of
    a variable the keys by which it names it. Raises `ConfigError` with every override that is none."""
    origins: dict[Keys, str] = {}
    named_by: dict[Keys, Keys] = {}
    for keys, value in _environment(environ):
        place = _put(values, keys, value, variable_name(keys))
        origins[place], named_by[place] = ENVIRONMENT, keys
    wrong = Problems()
    for override in overrides:
        with wrong.gathered():
            keys, value = _override(override)
            place = _put(values, keys, value, override)
            for replaced in [known for known in origins if known[: len(place)] == place]:
                del origins[replaced]
                named_by.pop(replaced, None)
            origins[place] = COMMAND_LINE
    wrong.tell()
    return origins, named_by


def _of_variables(
    values: dict[str, Any], named_by: Mapping[Keys, Keys], environ: Mapping[str, str]
) -> dict[Keys, Reference]:
    """Return the references of the text in `values` that `HEADRACE_*` variables gave, alone or in a list or mapping, by its keys.
    `named_by` has the keys by which a variable named what stands at other keys in `values`."""
    names = {name.upper(): name for name in environ}
    references = {}
    for place, keys in named_by.items():
        for depth in range(len(keys), 0, -1):
            name = names.get(variable_name(keys[:depth]))
            if name is None:
                continue
            for inner, text in leaves(item_at(values, place)):
                item, there = ((*above, *map(str, inner)) for above in (keys[depth:], place))
                if isinstance(text, str) and "${" not in text and _is_item(text, environ[name], item):
                    last = next(key for key in reversed(there) if not key.isdecimal())
                    references[there] = Reference(last, text, of_variable(name, item))
            break
    return references


def _is_item(text: str, variable: str, keys: Keys) -> bool:
    """Whether `text` is the item at `keys` of the YAML in a variable; without keys, whether it is the variable's text."""
    try:
        return text == (find_item(variable, *keys) if keys else variable)
    except (LookupError, TypeError, ValueError):
        return False  # the command line put it there


def _is_plain(keys: Keys) -> bool:
    """Whether the value at these keys is stored and shown as it is, wherever it came from: a number, a switch, a choice, a path, the name
    of a model, or what names the run."""
    field = known_keys().get(pattern(keys))
    if field is not None and not _takes_text(field.annotation):
        return True
    named = tuple(key for key in keys if not key.isdecimal())
    return named[0] == "run" or any(
        len(named) == len(place) and all(one in ("*", key) for one, key in zip(place, named, strict=True))
        for place in _places(Mark.PATH)
    )


def _find_files(values: dict[str, Any], given: _Given) -> None:
    """Make the paths in `values` lead to the files that are meant: `~/`, which a shell leaves as it is behind `key=`; what a file names
    beside itself; and in a configuration that a run saved, what was named where the run was started, and a run's folder that was moved."""
    for keys, holder in _holders(values, [*_places(Mark.PATH), ("run", "dir")]):
        path = holder.get(keys[-1])
        if isinstance(path, str) and path.startswith("~/"):
            holder[keys[-1]] = os.path.expanduser(path)
    here = given.path.resolve().parent
    run = values["run"] if isinstance(values.get("run"), dict) else {}
    started_in, name, folder = run.pop("started_in", None), run.get("id"), run.get("dir")
    start = (here / started_in).resolve() if isinstance(started_in, str) else None
    # a run saved this file in its folder
    is_in_place = isinstance(name, str) and isinstance(folder, str) and here == (Path(folder) / name).resolve()
    if start is not None or is_in_place:
        _drop_unread(values)
        if "env" in values:
            values["env"] = drop_former(values["env"])
    if start is None:
        if not is_in_place:
            _find_in(values, Mark.READ, given.folder)
        return
    if start != Path.cwd():
        _find_in(values, Mark.PATH, lambda keys: None if given.over(keys) else start)
    if name == here.name and not is_in_place and not given.over(("run", "dir")):
        run["dir"] = str(here.parent)  # the folder was moved


def _drop_unread(values: dict[str, Any]) -> None:
    """Remove what has no effect under `data`: earlier versions took it."""
    parts = (("train",), ("validation",), ("evaluate", "*"))
    for keys, source in _holders(values, [("data", *part, "dataset_name") for part in parts]):
        name, processor = source.get("dataset_name"), source.get("processor")
        for key in DataSourceConfig.model_construct(dataset_name=name, processor=processor).unread(keys[1]):
            source.pop(key, None)
    if isinstance(data := values.get("data"), dict) and not data.get("use_multiple_dataloader"):
        data.pop("num_prompts_per_dataloader", None)


@functools.cache
def _places(mark: Mark) -> tuple[Keys, ...]:
    """Return the keys with this mark. A list has no number, as a single item may stand for a list of one."""
    return tuple(
        tuple(key for end, key in enumerate(keys) if key != "*" or not _is_list(keys[:end]))
        for keys, field in known_keys().items()
        if mark in field.metadata
    )


def _find_in(values: dict[str, Any], mark: Mark, folder: Callable[[Keys], Path | None]) -> None:
    """Move the paths whose keys have `mark` into the folder that `folder` returns for their keys, if they exist there. For None a path
    stays as it is."""
    code = {place[-1] for place in _places(Mark.CODE)}
    for keys, holder in _holders(values, _places(mark)):
        name, where = holder.get(keys[-1]), folder(keys)
        if isinstance(name, str) and name and where is not None:
            if keys[-1] in code and ".py:" not in name:
                continue
            # FILE.py:CLASS is a file, too
            file = name.rpartition(":")[0] if ".py:" in name else name
            if os.path.exists(where / file):
                holder[keys[-1]] = os.path.normpath(where / name)


def _holders(values: Any, places: Iterable[Keys], above: Keys = ()) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """Yield the keys of `places` that `values` may have, each with the mapping that holds the last of them. `*` stands for each key of a
    mapping; the items of a list are visited by number."""
    for keys in places:
        if isinstance(values, list):
            for number, item in enumerate(values):
                yield from _holders(item, [keys], (*above, str(number)))
        elif isinstance(values, dict) and len(keys) == 1:
            yield (*above, *keys), values
        elif isinstance(values, dict):
            for key in values if keys[0] == "*" else keys[:1]:
                yield from _holders(values.get(key), [keys[1:]], (*above, key))


def _takes_text(annotation: Any) -> bool:
    """Whether a value of this type is text, or may contain it."""
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation in (str, Any) or is_section or any(map(_takes_text, get_args(annotation)))


def _checked(
    values: dict[str, Any],
    references: Sequence[Reference],
    origin: Callable[[Keys], str],
    named: Callable[[Keys], Keys],
    problems: Sequence[str] = (),
    most: int | None = None,
) -> Config:
    """Return the configuration. Raises `InvalidConfig` with the `problems` and with those of `values` at other keys, in at most `most`
    lines. `origin` and `named` return where a key was given, and its name there. What `references` name is not shown."""
    lines, wrong = list(problems), list[tuple[int | str, ...]]()
    rest: Config | None = None
    try:
        config = Config.model_validate(values).referring(references)
    except ValidationError as error:
        wrong = _wrong_in(error)
        reported = {problem.partition(": ")[0] for problem in problems}
        found = explain(error, origin, named, references).splitlines()
        if not problems:
            rest, wrong, hidden = _without(values, wrong)
            # Unknown keys hide what sections contradict. What a section lacks without them may be what they were meant to be.
            unknown = [each["loc"][:-1] for each in error.errors() if each["type"] == "extra_forbidden"]
            lacking = [] if hidden is None else [keys for keys in _wrong_in(hidden) if keys and keys in unknown]
            if hidden is not None and len(unknown) == error.error_count() and not lacking:
                found += explain(hidden, origin, named, references).splitlines()
        lines += (line for line in found if line.partition(": ")[0] not in reported)
    if most is not None and len(lines) > most:
        lines[most - 1 :] = [f"and {len(lines) - most + 1} more, shown once these are fixed"]
    if lines:
        raise InvalidConfig(
            "\n".join(hide_values(line, references) for line in lines),
            None if rest is None else Loaded(rest.referring(references), None, origin),
            frozenset(str(keys[0]) for keys in wrong if keys),
        )
    return config


def _without(
    values: dict[str, Any], wrong: Sequence[tuple[int | str, ...]]
) -> tuple[Config | None, list[tuple[int | str, ...]], ValidationError | None]:
    """Return the configuration of `values` without the `wrong` ones, or None if there is none; what was left out: also what is wrong
    without the others, as a data set without its environment; and what was wrong without the `wrong` ones alone. What is wrong with the
    whole has no keys."""
    rest, found, left_out = copy.deepcopy(values), [*wrong], [*wrong]
    hidden: ValidationError | None = None
    for _ in range(_MOST_ROUNDS):
        if not all(found):
            break
        for keys in found:
            _drop(rest, keys)
        try:
            return Config.model_validate(rest), left_out, hidden
        except ValidationError as error:
            hidden = hidden or error
            found = _wrong_in(error)
            left_out += found
    return None, left_out, hidden


def _wrong_in(error: ValidationError) -> list[tuple[int | str, ...]]:
    return [each["loc"] for each in error.errors()]


def _drop(values: dict[str, Any], keys: Sequence[int | str]) -> None:
    """Remove the value at `keys`; where it is missing, the section that lacks it."""
    path: list[Any] = [values]
    for key in keys[:-1]:
        here = path[-1]
        if isinstance(key, int):  # a single item may stand for a list of one
            path.append(here[key] if isinstance(here, list) else here)
        else:
            path.append(here.get(key) if isinstance(here, dict) else None)
    for holder, key in zip(reversed(path), reversed(keys), strict=True):
        if isinstance(holder, dict) and key in holder:
            del holder[key]
            return


def _environment(environ: Mapping[str, str]) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, value) of every `HEADRACE_*` variable. Raises `ConfigError` for one whose section is unknown."""
    named = {name: value for name, value in environ.items() if name.upper().startswith(PREFIX)}
    problems = Problems()
    for name in named:
        section, *rest = name[len(PREFIX) :].lower().split("__")
        if section not in Config.model_fields:
            close = nearest((section, *rest)) or nearest((section,))
            hint = f"did you mean {variable_name(close.split('.'))}?" if close else "the section does not exist"
            problems.add(f"{name}: unknown variable; {hint}")
    problems.tell()
    if named:
        from headrace.config.variables import read_variables  # it takes a twentieth of a second to import

        yield from _leaves(read_variables({name[len(PREFIX) :]: value for name, value in named.items()}), ())


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, key))
    elif keys:
        yield keys, value


def _override(text: str) -> tuple[Keys, Any]:
    key, equals, value = text.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(
            f"{text!r} is not an override; write section.key=value, for example grpo.num_prompts_per_step=8"
        )
    return keys, parse(value, key)


def _put(values: dict[str, Any], keys: Keys, value: Any, given: str) -> Keys:
    """Set `keys` in `values`, creating mappings on the way; a number selects an item of a list. Returns the keys of the place: a single
    item may stand for a list of one, and a list of one for its item."""
    here: Any = values
    place: list[str] = []
    for depth, key in enumerate(keys):
        at, is_last, is_list = ".".join(keys[:depth]), depth == len(keys) - 1, _is_list(keys[:depth])
        if is_list and not key.isdecimal() and isinstance(here, list) and len(here) == 1 and isinstance(here[0], dict):
            here = here[0]
            place.append("0")
        elif is_list and key.isdecimal() and isinstance(here, dict) and here and not is_last:
            if int(key):
                raise ConfigError(f"{given}: {at} is a single item; use index 0, not {key!r}")
            continue
        slot: Any = key
        if isinstance(here, list):
            if not key.isdecimal() or int(key) >= len(here):
                allowed = f"0 to {len(here) - 1}" if len(here) > 1 else "only 0" if here else "none"
                raise ConfigError(
                    f"{given}: {at} has {len(here)} item{'s' * (len(here) != 1)}; index {key!r} is out of range ({allowed})"
                )
            slot = int(key)
        place.append(key)
        if is_last:
            here[slot] = value
            break
        inner, at = here[slot] if isinstance(here, list) else here.get(slot), ".".join(keys[: depth + 1])
        if isinstance(here, dict) and not isinstance(inner, dict | list):
            if isinstance(inner, str) and "${" in inner:
                raise ConfigError(f"{given}: {at} is {in_yaml(inner)}, not a section of keys; set {at} as a whole")
            here[slot] = inner = {}
        if not isinstance(inner, dict | list):
            raise ConfigError(f"{given}: {at} is {in_yaml(inner)}, which has no keys; leave it out")
        here = inner
    return tuple(place)


def _is_list(keys: Keys) -> bool:
    field = known_keys().get(pattern(keys))
    return field is not None and get_origin(field.annotation) is list
