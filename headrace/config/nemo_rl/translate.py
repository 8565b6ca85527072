"""Translates a NeMo RL file to Headrace's keys: what is used, what is replaced, and what can't be honoured."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace.config.explain import known_keys, nearest, pattern, similar
from headrace.config.in_yaml import in_yaml
from headrace.config.inherit import as_written
from headrace.config.keys import Keys, look
from headrace.config.nemo_rl.gathered import GATHERERS
from headrace.config.nemo_rl.in_force import (
    ITS_ENVIRONMENTS,
    leave_out_what_is_not_in_force,
    modernise,
    unclear_switches,
)
from headrace.config.nemo_rl.rules import TABLE, Rule
from headrace.config.nemo_rl.values import named_environments, off, sources

# what such a file means implicitly; keys of `grpo` and `ppo` apply to a file that has that section
IMPLIED: dict[str, Any] = {
    "grpo.val_at_start": False,
    "ppo.val_at_start": True,
    "loss_fn.sequence_is_aggregation": "sum",
    "data.remove_duplicates": False,
    "data.overlong_prompts": "leave_out",
    "ppo.scheduler_counts": "epochs",
}
# key -> (value, other key): implied if the file sets the other key and leaves this one out; null counts as set
IMPLIED_BY: dict[str, tuple[Any, str]] = {
    "loss_fn.truncated_importance_sampling_type": ("tis", "loss_fn.truncated_importance_sampling_ratio"),
}

# data sets of images, audio and video, by their names in small letters and with hyphens
_MULTIMODAL = ("clevr-cogent", "refcoco", "geometry3k", "mmpr-tiny", "avqa", "daily-omni", "intent")

# kinds of training that Headrace doesn't have, by their sections
_OTHERS = ("sft", "dpo", "rm", "distillation", "critic_pretraining", "eval")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A key that can't be honoured. The file that gave it is named between `what` and `remedy`. `also`: other keys that are refused for
    the same reason."""

    keys: Keys
    what: str
    remedy: str = ""
    also: tuple[str, ...] = ()

    def line(self, origin: str) -> str:
        also = f", and {_joined(self.also)}" if self.also else ""
        return f"{'.'.join(self.keys)}: {self.what}{origin}{also}{self.remedy}"


@dataclasses.dataclass
class Translation:
    """A NeMo RL file in Headrace's keys.

    `values`: the configuration. `came_from`: NeMo RL's key, for each key that has another name here. `placed`: the file's key, for each
    key that older releases have in another section; errors name that key. `problems`: keys that can't be honoured, the most important
    first. `replaced`: what replaces them -> NeMo RL's keys. `nothing`: unknown keys without effect. `renamed`: (NeMo RL's key, key
    here). `implied`: what such a file means implicitly. `used`: how many keys are used.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    came_from: dict[Keys, Keys] = dataclasses.field(default_factory=dict)
    placed: dict[Keys, Keys] = dataclasses.field(default_factory=dict)
    problems: list[Refusal] = dataclasses.field(default_factory=list)
    replaced: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    nothing: list[str] = dataclasses.field(default_factory=list)
    renamed: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    implied: dict[str, Any] = dataclasses.field(default_factory=dict)
    used: int = 0

    @property
    def summary(self) -> str:
        """The translation in one line."""
        others = sum(map(len, self.replaced.values())) + len(self.nothing)
        return f"read as a NeMo RL file: {self.used} keys used, {others} not applicable"

    def lines(self) -> Iterator[str]:
        """Yield the summary, renamed keys, replaced keys, and implied values, for people to read."""
        yield self.summary
        targets: dict[str, list[str]] = {}
        for theirs, ours in self.renamed:
            targets.setdefault(ours, []).append(theirs)
        yield from _listed("used by another name", (f"{_joined(keys)} -> {ours}" for ours, keys in targets.items()))
        others = [f"{_joined(keys)}: {says}" for says, keys in self.replaced.items()]
        if self.nothing:
            others.append(f"{_joined(self.nothing)}: unknown to Headrace, but null, false or empty")
        yield from _listed("not applicable", others)
        yield from _listed(
            "implied", (f"{key}: {in_yaml(value)}".replace("'", "") for key, value in self.implied.items())
        )


def _joined(keys: Iterable[str]) -> str:
    return ", ".join(shorten(keys))


def _listed(title: str, entries: Iterable[str]) -> Iterator[str]:
    """Yield `title` and the wrapped entries below it; nothing if there are no entries."""
    wrapped = [
        textwrap.fill(entry, 120, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        for entry in entries
    ]
    if wrapped:
        yield f"{title}:"
        yield from wrapped


def shorten(keys: Iterable[str]) -> list[str]:
    """Return keys of one section as `section.{a, b}`, in the given order."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    return [
        f"{section}.{{{', '.join(names)}}}" if len(names) > 1 else f"{section}.{names[0]}".lstrip(".")
        for section, names in sections.items()
    ]


def translate(values: dict[str, Any]) -> Translation:
    """Translate `values` (of a NeMo RL file, interpolations resolved) to Headrace's keys. Headrace's own keys in it stay as they are."""
    return _Builder(values).build()


class _Builder:
    def __init__(self, values: dict[str, Any]) -> None:
        self.given = values
        self.theirs = copy.deepcopy(values)  # changed step by step
        self.made = Translation()
        self.parts_refused: list[Refusal] = []
        self.values_refused: list[Refusal] = []
        self.unknown: list[Refusal] = []

    def build(self) -> Translation:
        if problem := _of_another_kind(self.theirs):
            return Translation(problems=[problem])  # the rest of a file that trains something else doesn't matter
        self._translate()
        refused = _together(dict.fromkeys([*self.parts_refused, *self.values_refused]))
        named = {other.keys[:end] for other in refused for end in range(len(other.keys) + 1)}
        unknown = [other for other in self.unknown if other.keys not in named]
        self.made.problems = list(dict.fromkeys([*refused, *unknown]))
        return self.made

    def _translate(self) -> None:
        for key, newer in modernise(self.theirs):
            self.made.renamed.append((key, newer))
            self.made.placed[_with_number(newer)] = tuple(key.split("."))
        _sources_as_lists(self.theirs)
        for key, what, remedy in unclear_switches(self.theirs):
            self.parts_refused.append(Refusal(tuple(key.split(".")), what, remedy))
        for key, says in leave_out_what_is_not_in_force(self.theirs):
            self.made.replaced.setdefault(says, []).append(self._written(tuple(key.split("."))))
        self._environments()
        for keys, value in _leaves(self.theirs, ()):
            self._one(keys, value)
        for gather in GATHERERS:
            for key, value, origin in gather(self.theirs, self._refuse_value):
                self._put(tuple(key.split(".")), value, tuple(origin.split(".")))
        ours = self.made.values
        for key, value in IMPLIED.items():
            section = key.partition(".")[0]
            if look(ours, key, self) is self and (section not in ("grpo", "ppo") or section in ours):
                keys = tuple(key.split("."))
                self._put(keys, value, keys)
                self.made.implied[key] = value
        for key, (value, because) in IMPLIED_BY.items():
            if look(self.theirs, key, self) is self and look(ours, because) is not None:
                self._put(tuple(key.split(".")), value, tuple(key.split(".")))
                self.made.implied[key] = value

    def _there(self, keys: Keys) -> Keys:
        """Return `keys` as the file spells them."""
        return self.made.placed.get(keys) or as_written(self.given, keys)

    def _written(self, keys: Keys) -> str:
        return ".".join(self._there(keys))

    def _one(self, keys: Keys, value: Any) -> None:
        rule = TABLE.find(keys)
        if rule is not None:
            self._decide(rule, keys, value)
        elif _is_ours(keys):
            if value is not None or _takes_null(keys):
                self._put(keys, value, keys)
        elif off(value, self.theirs):
            self.made.nothing.append(self._written(keys))
        else:
            self.unknown.append(_unknown(keys, value, self._there))

    def _decide(self, rule: Rule, keys: Keys, value: Any) -> None:
        if rule.does == "replaced":
            self.made.replaced.setdefault(rule.says, []).append(self._written(keys))
        elif rule.does == "refused":
            if not rule.fine(value, self.theirs, keys):
                self._refuse(rule, keys, value)
            elif _is_ours(keys):
                self._put(keys, value, keys)
            elif rule.once and not off(value, self.theirs):
                self.made.replaced.setdefault("not in force", []).append(self._written(keys))
        else:
            self._carry(rule, keys, value)

    def _refuse(self, rule: Rule, keys: Keys, value: Any) -> None:
        if rule.once:
            self.parts_refused.append(Refusal(tuple(rule.key.removesuffix(".**").split(".")), rule.says))
            return
        problems = self.parts_refused if value is True else self.values_refused
        problems.append(Refusal(self._there(keys), in_yaml(value), f": {rule.says}"))

    def _refuse_value(self, key: str, says: str) -> None:
        self.values_refused.append(Refusal(self._there(tuple(key.split("."))), says))

    def _carry(self, rule: Rule, keys: Keys, value: Any) -> None:
        target = rule.target(keys)
        if rule.does == "renamed":
            self.made.renamed.append((self._written(keys), ".".join(target)))
        self.made.used += 1
        if rule.gathered:
            return
        try:
            value = rule.convert(value)
        except ValueError as error:
            self._refuse_value(".".join(keys), str(error))
            return
        if value is None and not _takes_null(target):
            return
        self._put(target, value, keys)

    def _put(self, target: Keys, value: Any, origin: Keys) -> None:
        """Set `target`, creating sections on the way, but not below what is not a section; the configuration's checks report that."""
        here: Any = self.made.values
        for key, following in itertools.pairwise(target):
            here = _entered(here, key, [] if following.isdecimal() else {})
        if isinstance(here, list):
            _entered(here, target[-1], value)
        elif isinstance(here, dict):
            here[target[-1]] = value
        if target != origin:
            self.made.came_from[target] = self._there(origin)

    def _environments(self) -> None:
        """Drop the environments of NeMo RL that no data set names, as its files bring such along. Another environment that none names, or
        one that is enabled, is refused: in NeMo RL, a script of its own trains on it, whatever data sets the file inherits."""
        named, environments = named_environments(self.theirs), self.theirs.get("env")
        if not isinstance(environments, dict):
            return
        for name, env in list(environments.items()):
            if env is not None and not isinstance(env, dict):
                continue
            if named and name not in named:
                del environments[name]
                inherited = name in ITS_ENVIRONMENTS and look(env, "enabled") is not True
                if inherited or off(env, self.theirs):
                    says = "no data set names this environment (data.train.env_name), so it is not used"
                    self.made.replaced.setdefault(says, []).append(f"env.{name}")
                else:
                    self.parts_refused.append(_never_used(name, self.theirs))
                continue
            self.made.values.setdefault("env", {})[name] = {}
            if rule := TABLE.find(("env", name)):
                self._decide(rule, ("env", name), env)


def _never_used(name: str, values: dict[str, Any]) -> Refusal:
    found = [source.get("dataset_name") or source.get("data_path") for source in sources(values, "train")]
    data = ", ".join(str(one) for one in found if one) or "the data sets"
    return Refusal(
        ("env", name),
        f"no data set names this environment, so the run would train on {data} with {', '.join(sorted(named_environments(values)))}",
        f"; give its own data (data.train), name it in data.train.env_name, and write it (docs/environments.md; docs/agents.md for several "
        f"turns) as env.{name}.target, or leave it out",
    )


def _of_another_kind(values: dict[str, Any]) -> Refusal | None:
    """Return why this file has nothing for Headrace to train; None if it has something."""
    if values.get("grpo") is None and values.get("ppo") is None:
        for section in _OTHERS:
            if values.get(section) is not None:
                return Refusal(
                    (section,), "Headrace trains by reinforcement learning", "; give a file with a section grpo or ppo"
                )
    for path in ("data", "data.default", "data.train", "data.validation"):
        given = look(values, path)
        for number, source in enumerate(given if isinstance(given, list) else [given]):
            name = source.get("dataset_name") if isinstance(source, dict) else None
            if isinstance(name, str) and name.lower().replace("_", "-") in _MULTIMODAL:
                keys = (*path.split("."), *([str(number)] if isinstance(given, list) else []), "dataset_name")
                return Refusal(
                    keys,
                    f"{in_yaml(name)} holds images, audio or video",
                    "; models of these are not supported, give text data and a text model",
                )
    return None


def _together(refused: Iterable[Refusal]) -> list[Refusal]:
    """Merge the refusals that have the same reason into the first of them."""
    reasons: dict[str, list[Refusal]] = {}
    for each in refused:
        # a rule's reason applies to every value
        of_rule = each.remedy.startswith(": ")
        reasons.setdefault(each.remedy if of_rule else f"{each.what}{each.remedy}", []).append(each)
    return [
        dataclasses.replace(first, also=tuple(".".join(other.keys) for other in others))
        for first, *others in reasons.values()
    ]


def _is_ours(keys: Keys) -> bool:
    """Whether `keys` are a key of Headrace, or below a key that is not a section (pydantic then reports what is wrong)."""
    found = pattern(keys)
    return any(
        found[:end] in known_keys() and (end == len(found) or not _has_keys_below(found[:end]))
        for end in range(1, len(found) + 1)
    )


def _has_keys_below(path: Keys) -> bool:
    return any(len(key) > len(path) and key[: len(path)] == path for key in known_keys())


def _unknown(keys: Keys, value: Any, there: Callable[[Keys], Keys]) -> Refusal:
    # the nearest existing section above
    depth = next(depth for depth in reversed(range(len(keys))) if _beside(keys[: depth + 1]))
    section, beside = ".".join(there(keys[:depth])), _beside(keys[: depth + 1])
    close = similar(keys[depth], beside)
    meant = f"; did you mean {section}{'.' if section else ''}{close}?" if close else ""
    if depth < len(keys) - 1:
        if keys[depth] in beside:
            return Refusal(there(keys[: depth + 1]), "is not a section of keys", "; give it one value")
        if meant:
            return Refusal(there(keys[: depth + 1]), "unknown section", meant)
    elif keys[-1] in beside:
        return Refusal(there(keys), f"{in_yaml(value)} is not a section of keys", "; give a mapping")
    refuse = functools.partial(Refusal, there(keys), f"unknown key, value {in_yaml(value)}")
    if meant:
        return refuse(meant)
    if depth == len(keys) - 1 and len(", ".join(beside)) < 600:
        return refuse(f"; {section or 'the top level'} has {', '.join(beside)}")
    return refuse(f"; did you mean {elsewhere}?" if (elsewhere := nearest(keys)) else "; leave it out")


def _beside(keys: Keys) -> list[str]:
    """Return the names that exist in the section of `keys`, of both frameworks."""
    ours = (known[-1] for known in known_keys() if known[:-1] == pattern(keys[:-1]))
    return sorted({*TABLE.beside(keys), *ours})


def _entered(here: Any, key: str, empty: Any) -> Any:
    """Return what is at `key` of `here`, after putting `empty` there if there is nothing."""
    if isinstance(here, dict):
        return here.setdefault(key, empty)
    if isinstance(here, list) and key.isdecimal():
        here += [{} for _ in range(int(key) - len(here))]
        if int(key) == len(here):
            here.append(empty)
        return here[int(key)]
    return None


def _sources_as_lists(values: dict[str, Any]) -> None:
    data = values.get("data")
    if isinstance(data, dict):
        for part in ("train", "validation"):
            if isinstance(data.get(part), dict):
                data[part] = [data[part]]


def _with_number(key: str) -> Keys:
    """Return the keys of `key`, with the index of a data set that is given without a list."""
    keys = tuple(key.split("."))
    return (*keys[:2], "0", *keys[2:]) if keys[:2] in (("data", "train"), ("data", "validation")) else keys


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield every value with its keys. Lists are values, except the lists of data sets."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, str(key)))
    elif isinstance(value, list) and keys in (("data", "train"), ("data", "validation")):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*keys, str(number)))
    elif keys:
        yield keys, value


def _takes_null(target: Keys) -> bool:
    """Whether null is a value of Headrace's key; otherwise null means the default."""
    field = known_keys().get(pattern(target))
    return field is None or field.default is None or type(None) in getattr(field.annotation, "__args__", ())
