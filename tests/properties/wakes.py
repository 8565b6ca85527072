"""Whether everyone who waits is woken once there is something to do, as far as the model knows: a caller that isn't asks again after a
second, so no other test notices."""

from __future__ import annotations

import copy
import math
from typing import Any

from headrace.base.errors import HeadraceError
from headrace.replay import Lease, Waiting
from tests.properties.fleet import Taker
from tests.properties.learning import Model
from tests.properties.records import Held

TRAINER, SCORER = "the trainer", "a scorer"
TRAINERS = {
    "reserve",
    "enqueue",
    "end_refill",
    "close",
    "commit",
    "rewind",
    "restore",
    "drop_validation",
    "reject_step",
}


class Given(Exception):
    """The first group that a taker would get."""


class Asking(Taker):
    def next(self, held: Held) -> Lease:
        raise Given


def waiters(model: Model) -> list[tuple[str, str]]:
    """Everyone who may wait, with the channel that wakes them."""
    holders = [*filter(model.healthy, model.members), *filter(model.is_alive, model.runners)]
    return [*(("work", holder) for holder in holders), ("ready", TRAINER), ("scoring", SCORER)]


def callers(model: Model, name: str, args: tuple[Any, ...]) -> set[str]:
    """Whose call it is: they don't wait."""
    if name == "verify" and not model.pulls(str(args[0])):  # the end of the epoch wakes all at once
        return {who for _, who in waiters(model)}
    if name in TRAINERS:
        return {TRAINER}
    if name in ("take_scoring", "release_scoring", "score_many"):
        return {SCORER}
    first = args[0] if args else None
    if isinstance(first, str):
        return {first, f"runner {first}"}
    pairs = [each for each in first if isinstance(each, tuple)] if isinstance(first, list) else [(first,)]
    ids = [lease.group.id for lease, *_ in pairs if isinstance(lease, Lease)]
    return {model.groups[id_].replica for id_ in ids if id_ in model.groups}


def has_work(model: Model, who: str) -> bool:
    """Whether a call of theirs would get something now. Nothing of `model` changes."""
    if not _is_something_there(model, who):
        return False
    model = _copy(model)
    try:
        if who == SCORER:
            model.expire()
            return any(_takes(model, name) for name in model.environments)
        if who == TRAINER:
            return not isinstance(model.reserve(model.next_step, model.timeline, {*model.unlawful()}, None), Waiting)
        model.expire(fills=True)
        taker = _taker(model, who)
        if taker is not None:
            model.lease_to(taker, [])
        return False
    except Given:
        return True
    except HeadraceError:
        return who == TRAINER  # it is told why it need not wait


def _taker(model: Model, who: str) -> Asking | None:
    if who in model.members and model.healthy(who):
        member = model.members[who]
        kind = "validators" if model.validates(who) else None
        return Asking(who, member, member.version, {member.version}, 1, kind=kind)
    versions = model.versions_held()
    if who in model.runners and model.is_alive(who) and versions:
        slots = {"train": math.inf, "validation": math.inf}
        return Asking(who, model.runners[who], min(versions), versions, 1, slots, "episodes")
    return None


def _is_something_there(model: Model, who: str) -> bool:
    """Whether anything is waiting at all: a copy of the model takes longer than many calls."""
    if who == SCORER:
        return any(model.waiting(name) for name in model.environments)
    if who == TRAINER:
        return model.closed or len(model.train("ready")) >= model.limits.prompts_per_step
    return any(held.state == "queued" or held.orphaned or held.cohort is not None for held in model.groups.values())


def _takes(model: Model, name: str) -> bool:
    waiting = {place: piece for place, piece in model.waiting(name).items() if piece.since <= model.now}
    count, suspects, _ = model._allowance(name, 1, waiting)
    return count > 0 and any(piece.alone == suspects for piece in waiting.values())


def _copy(model: Model) -> Model:
    """What no call changes is shared."""
    shared = [model.limits, model.tokens, model.used]
    for held in model.groups.values():
        shared += [
            held.group,
            *held.saved.values(),
            *held.calls.values(),
            *(p.trajectory for p in held.pieces.values()),
        ]
    for member in (*model.members.values(), *model.runners.values()):
        shared.append(member.answer)
    return copy.deepcopy(model, {id(each): each for each in shared})
