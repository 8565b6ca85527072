"""Whether everyone who waits is woken once there is something for them, as far as the model knows: a caller that isn't asks again after a
second, so no other test notices."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

from headrace.base.errors import HeadraceError
from headrace.records.trajectory import Call, EpisodeTrajectory, Group, Trajectory
from headrace.replay import Lease, Limits, Waiting
from tests.properties.fleet import Taker
from tests.properties.learning import Model
from tests.properties.records import Held, Meters

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
# What no call changes: every copy of the model has the same.
_SHARED = {Group, Trajectory, EpisodeTrajectory, Call, Lease, Limits}


class Given(Exception):
    """The first group that a taker would get."""


class Asking(Taker):
    def next(self, held: Held) -> Lease:
        raise Given


def _give() -> bool:
    raise Given


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tokens: set[str]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[Any] = []
        self._tokens = tokens

    def persistent_id(self, each: Any) -> int | None:
        if type(each) is Meters:  # an answer does not depend on them
            return -1
        if type(each) not in _SHARED and each is not self._tokens:
            return None
        self.shared.append(each)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: int) -> Any:
        return Meters() if place < 0 else self._shared[place]


class Moment:
    """The model as it is now. To ask changes it, so each who is asked for gets a copy."""

    def __init__(self, model: Model) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file, model.tokens)
        pickler.dump(model)
        self._packed, self._shared = file.getvalue(), pickler.shared

    def has_work(self, who: str, *, noted: bool = True) -> bool:
        """Whether a call of theirs would get something: of what is there, not of what it would be the first to find due. Unless it is
        `noted` that there was no memory for someone, who lacks it now has not asked since, and does not wait."""
        model: Model = _Unpickler(io.BytesIO(self._packed), self._shared).load()
        model.expire = lambda **_: model.tell_time()  # type: ignore[method-assign]
        if not noted:
            model.fits = lambda held: Model.fits(model, held) or _give()  # type: ignore[method-assign]
        try:
            if who == SCORER:
                model.tell_time()
                return any(_takes(model, name) for name in model.environments)
            if who == TRAINER:
                batch = model.reserve(model.next_step, model.timeline, {*model.unlawful()}, None)
                return not isinstance(batch, Waiting)
            taker = _taker(model, who)
            if taker is not None:
                model.lease_to(taker, [])
            return False
        except Given:
            return True
        except HeadraceError:
            return who == TRAINER  # it is told why it need not wait


class Look:
    """Before a call: what those who wait were told, and, if it looks `closely`, who waits with nothing to do. `short`: the buffer has
    noted that there was no memory for someone."""

    def __init__(self, model: Model, name: str, args: tuple[Any, ...], *, closely: bool, short: bool) -> None:
        self._name, self._news, self._short = name, news(model), short
        busy = callers(model, name, args)
        self._waiters = [each for each in waiters(model) if each[1] not in busy] if closely else []
        self._before = Moment(model) if self._waiters else None

    def missed(self, model: Model, woken: set[str]) -> list[str]:
        """After the call: whom it gave something to do or to learn, and did not wake."""
        found = []
        for channel, told in news(model).items():
            own = channel == "epoch" and self._name in ("open_epoch", "begin_epoch")
            if channel not in woken and not own and is_news(self._news[channel], told):
                found.append(f"those who wait on {channel} were told {self._news[channel]}, and {told} is true now")
        asleep = [who for channel, who in self._waiters if channel not in woken and _is_something_there(model, who)]
        if asleep and self._before:
            after = Moment(model)
            given = [who for who in asleep if after.has_work(who) and not self._before.has_work(who, noted=self._short)]
            found += [f"there is something for {who} now" for who in given]
        return found


def waiters(model: Model) -> list[tuple[str, str]]:
    """Everyone who may wait, with the channel that wakes them."""
    holders = [*filter(model.healthy, model.members), *filter(model.is_alive, model.runners)]
    return [*(("work", holder) for holder in holders), ("ready", TRAINER), ("scoring", SCORER)]


def callers(model: Model, name: str, args: tuple[Any, ...]) -> set[str]:
    """Whose call it is: they don't wait."""
    if name in ("heartbeat", "runner_heartbeat"):  # who lives on waits meanwhile
        return set()
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


def news(model: Model) -> dict[str, tuple[str, Any]]:
    """What those who wait on a channel learn, beside whether a call would get them something: the timeline, and members of an epoch how far
    it is, replicas that pull the newest version, a refit what its members did, a trainer which groups of a validation have ended."""
    epoch, offered = model.epoch_now, max((offer.version for offer in model.offers.values()), default=-1)
    lane = [held for held in model.groups.values() if held.lane == "validation"]
    found = {
        "work": (epoch and (epoch.id, epoch.state), offered),
        "epoch": {id_: did for id_, did in epoch.did.items() if model.takes_part(id_)} if epoch else {},
        "ready": {held.id for held in lane if held.state in ("evaluated", "failed")},
    }
    return {channel: (model.timeline, what) for channel, what in found.items()}


def is_news(before: tuple[str, Any], now: tuple[str, Any]) -> bool:
    """A group of a validation that is no longer held is none."""
    if isinstance(now[1], set) and before[0] == now[0]:
        return not now[1] <= before[1]
    return before != now


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
    """Whether anything is waiting at all, which is cheaper to ask."""
    if who == SCORER:
        return any(model.waiting(name) for name in model.environments)
    if who == TRAINER:
        most, prompts = model.limits.max_scored_per_step, model.limits.prompts_per_step
        is_told = model.closed or any(each.broken is not None for each in model.environments.values())
        return is_told or bool(most and model.scored_since > most) or len(model.train("ready")) >= prompts
    return any(held.state == "queued" or held.orphaned or held.cohort is not None for held in model.groups.values())


def _takes(model: Model, name: str) -> bool:
    waiting = {place: piece for place, piece in model.waiting(name).items() if piece.since <= model.now}
    count, suspects, _ = model._allowance(name, 1, waiting)
    return count > 0 and any(piece.alone == suspects for piece in waiting.values())
