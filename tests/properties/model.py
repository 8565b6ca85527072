"""The replay buffer as its contract states it, in plain Python: what each call must answer and leave behind.

No I/O and no clock of its own: `now` (milliseconds) is the caller's. Each operation has the name of the client's method, and takes what
the server answered as `seen`: where the contract leaves a choice (names of tokens, which of the trajectories that waited equally long),
the model checks that the choice is a lawful one and goes on with it; else it returns what the answer must be, or raises what the call
must raise. It was written from the design, not from the functions, so that the two can disagree.
"""

from __future__ import annotations

import collections
import math
from typing import NoReturn

from headrace.base.errors import InvalidCall, LeaseLost, ReplayError, WrongStep, WrongTimeline
from headrace.records.trajectory import Group
from headrace.replay import Limits
from headrace.replay.trainer import worst_case_bytes
from tests.properties.records import IN_FLIGHT, NEVER, Announced, EnvironmentModel, Held, Member, Meters, Offered, Piece

# A dead replica stays on the list this long.
REMEMBER_DEAD_MS = 600_000
# Of run time: the longest gap between two calls in which it passes, unless half of what a replica may be silent for is more; and how often
# the server's clock is written down.
LONGEST_GAP_MS = 5_000
TICK_MS = 1_000
# Groups that are sent back for want of memory in one call.
SHED = 64
# Of each kind of deadline, how many are looked at in one call.
SWEEP = 4
# Groups that a replica held when it died are leased again in cohorts of this share of them.
COHORTS = 2


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


class Core:
    """The state, and the moves that several operations share."""

    def __init__(self, limits: Limits, now: int, timeline: str, incarnation: str) -> None:
        self.limits = limits
        self.now = now  # in run time
        self.clock = self.written = self.written_now = (
            now  # the server's clock; what it and run time were when last written down
        )
        self.left = math.inf  # bytes that the server may still take
        self.full = 0  # bytes that it refused and that don't fit
        self.refusals: collections.Counter[str] = collections.Counter()
        self.used: set[str] = set()  # timelines and incarnations that have ended, replicas that have left
        self.call_number = 0  # of the call that is made
        self.newest: collections.Counter[str] = collections.Counter()  # number of the newest such call
        self.meters = Meters()
        self.begin(timeline, incarnation, 0, -1, -1)

    def begin(self, timeline: str, incarnation: str, next_step: int, committed: int, enqueued: int) -> None:
        """Nothing is known but these."""
        self.timeline, self.incarnation = timeline, incarnation
        self.timelines: list[tuple[str, int]] = [(timeline, next_step)]
        self.next_step, self.committed, self.enqueued, self.closed = next_step, committed, enqueued, False
        self.refill = False
        self.freed = next_step  # older steps are not held any more
        self.groups: dict[str, Held] = {}
        self.gone: collections.Counter[tuple[str, str]] = (
            collections.Counter()
        )  # (lane, state) of groups not held any more
        self.ended: set[int] = set()  # orders of train groups that are failed or filtered
        self.failures: set[int] = set()  # of those that failed
        self.retries: collections.Counter[int] = collections.Counter()
        self.wanted: set[int] = set()  # orders to be enqueued again
        self.requeues: collections.Counter[str] = collections.Counter()
        self.refusals = collections.Counter()
        self.last_ticket = -1
        self.rejected = ""  # nonce of the newest rejection
        self.tokens: set[str] = set()
        self.scored_since = self.filtered_since = 0
        self.batch_counts = (0, 0)
        self.last_place = 0.0
        self.members: dict[str, Member] = {}
        self.runners: dict[str, Member] = {}  # by the name that groups have for their runner
        self.environments: dict[str, EnvironmentModel] = {}  # those that groups were enqueued for
        # by the kind of groups: who gets no more of them until it can have suspects
        self.draining: dict[str | None, str] = collections.defaultdict(str)
        self.epoch_now: Announced | None = None
        self.epochs: set[str] = set()  # of this timeline
        self.offers: dict[str, Offered] = {}  # likewise, while work may begin under their versions
        self.validation = 0  # groups of older ones are dropped, and come no more
        self.validators: set[str] = set()  # replicas that were named for it

    # -- what people see

    def count(self, lane: str) -> dict[str, int]:
        counts = collections.Counter({state: number for (of, state), number in self.gone.items() if of == lane})
        counts.update(held.state for held in self.groups.values() if held.lane == lane)
        return {state: number for state, number in counts.items() if number}

    @property
    def bytes(self) -> int:
        return sum(held.bytes for held in self.groups.values())

    def train(self, *states: str) -> list[Held]:
        return [held for held in self.groups.values() if held.lane == "train" and held.state in states]

    def in_flight(self) -> list[Held]:
        return [*self.train(*IN_FLIGHT), *(held for held in self.train("queued") if held.passed)]

    def queue(self, lane: str) -> list[Held]:
        """Those that have no place in line, in their order."""
        queued = [held for held in self.groups.values() if held.lane == lane and held.state == "queued"]
        return sorted((held for held in queued if not held.passed), key=lambda held: held.group.order)

    def line(self) -> list[Held]:
        """Groups with a place in line, lowest ticket first; those that a rewind kept for a step have their place there."""
        return sorted((held for held in self.in_flight() if not held.pinned), key=lambda held: held.ticket or 0)

    def of_step(self, step: int, *states: str) -> list[Held]:
        return sorted((h for h in self.train(*states) if h.step == step), key=lambda held: held.ticket or 0)

    # -- refusals (law 4: counted, and nothing changes)

    def refusal(self, error: ReplayError) -> ReplayError:
        self.refusals[error.code] += 1
        return error

    def refuse(self, kind: type[ReplayError]) -> NoReturn:
        raise self.refusal(kind("as the contract says"))

    def require_timeline(self, timeline: str) -> None:
        if timeline != self.timeline:
            self.refuse(WrongTimeline)

    def require_unused(self, *names: str) -> None:
        """However late a rewind or restore arrives, it never begins again what has ended."""
        if self.used & set(names):
            self.refuse(WrongTimeline)

    # -- meters (of all incarnations)

    def meter(self, moment: str, held: Held) -> None:
        if held.lane == "train":
            for piece in held.pieces.values():
                self.meters.add(moment, piece, self.next_step)

    def meter_trained(self, held: Held) -> None:
        """Once, however often a rewind has it trained again."""
        if held.metered or held.step is None:
            return
        held.metered = True
        for piece in held.pieces.values():
            self.meters.add("trained", piece, held.step)
            if self.limits.staleness_policy == "mask" and held.step - piece.oldest > self.limits.max_age:
                self.meters.add("masked", piece, held.step)

    # -- moves

    def forget(self, held: Held, state: str | None = None) -> None:
        """The group goes; it counts on as `state`."""
        del self.groups[held.id]
        if state:
            self.gone[held.lane, state] += 1

    def end(self, held: Held, state: str) -> None:
        if state == "failed":
            self.meter("failed", held)
        held.start_over()
        held.state = state
        if held.lane == "train" and state in ("failed", "filtered"):
            self.ended.add(held.group.order)
        if held.lane == "train" and state == "failed":
            self.failures.add(held.group.order)

    def requeue(self, held: Held, cause: str, *, counted: bool) -> None:
        self.requeues[cause] += 1
        if cause == "over_age":
            self.meter("expired", held)
        held.failures += counted
        if counted and held.failures >= self.limits.max_attempts:
            self.end(held, "failed")
            return
        held.start_over()
        held.state = "queued"

    def pass_on(self, held: Held, cause: str) -> None:
        """The lease is lost; the group keeps its place, its attempt and what it has, for whoever leases it next. It has no deadline while
        it waits."""
        self.requeues[cause] += 1
        held.token, held.replica, held.lease_end, held.deadline = None, "", NEVER, NEVER

    def suspect(self, held: Held, together: int, cause: str) -> None:
        """Its holder died, or was silent on it, with so many groups. One that was alone is charged an attempt."""
        if together == 1 and held.failures + 1 >= self.limits.max_attempts:
            self.requeue(held, cause, counted=True)
            return
        held.failures += together == 1
        self.pass_on(held, cause)
        held.cohort = max(1, together // COHORTS)

    def begin_lease(self, held: Held) -> None:
        """From now on its holder has to progress."""
        held.progress = 0
        self.progress(held)

    def progress(self, held: Held) -> None:
        """Its deadline starts over, and its lease is renewed."""
        held.moved = self.now
        held.deadline = self.now + milliseconds(self.limits.group_deadline_s)
        self.renew(held)

    def renew(self, held: Held) -> None:
        held.lease_end = min(self.now + milliseconds(self.limits.lease_s), held.deadline)

    def heard(self, held: Held, progress: int) -> None:
        """Its holder renews it, and has progressed so far."""
        if progress > held.progress:
            held.progress = progress
            self.progress(held)
        self.renew(held)

    def environment(self, name: str) -> EnvironmentModel:
        return self.environments.get(name) or EnvironmentModel()  # of one that nothing was enqueued for

    def waiting(self, name: str) -> dict[tuple[str, int], Piece]:
        """What waits for a score by this environment."""
        return {place: piece for place, piece in self._pieces_of(name) if piece.waits}

    def taken(self, name: str) -> set[tuple[str, int]]:
        return {place for place, piece in self._pieces_of(name) if piece.taken}

    def _pieces_of(self, name: str) -> list[tuple[tuple[str, int], Piece]]:
        mine = [held for held in self.groups.values() if held.group.env_name == name]
        return [((held.id, index), piece) for held in mine for index, piece in held.pieces.items()]

    def void(self, held: Held, index: int, delay: int = 0, alone: bool | None = None) -> None:
        """The trajectory waits for a scorer again, at no cost."""
        piece = held.pieces[index]
        piece.token, piece.since = None, self.now + delay
        piece.attempts -= 1
        piece.alone = piece.alone if alone is None else alone

    def drop(self, held: Held, index: int) -> None:
        """A trajectory failed for good: the group fails with it, unless others were started beyond n."""
        if len(held.dropped) >= held.count - held.group.n:
            self.end(held, "failed")
        else:
            self.meters.add("failed", held.pieces.pop(index), self.next_step)
            held.dropped.add(index)

    def lawful(self, oldest: int, newest: int) -> bool:
        """Law 2, for tokens of these versions at the next step: none newer than the weights; the oldest within the age bound (`mask`: the
        newest; those over it leave the loss)."""
        age = self.next_step - (newest if self.limits.staleness_policy == "mask" else oldest)
        return age <= self.limits.max_age and newest <= self.next_step

    # -- time and memory

    @property
    def longest_gap(self) -> float:
        return max(LONGEST_GAP_MS, 500 * min(self.limits.lease_s, self.limits.replica_dead_s))

    @property
    def stands(self) -> bool:
        gap = self.clock - self.written
        return gap < 0 or gap > self.longest_gap or self.full > 0

    @property
    def present(self) -> int:
        """Run time goes on with the server's clock, but not back, nor over a gap that nobody can have called in, nor while it is full."""
        return self.written_now + (0 if self.stands else self.clock - self.written)

    def tell_time(self) -> None:
        self.now, stands = self.present, self.stands
        if stands or self.clock - self.written >= TICK_MS:
            self.written, self.written_now = self.clock, self.now

    def make_room(self, refused: int = 0, sheds: bool = True, *, seen: object) -> int:
        self.expire()
        refused = max(self.full, refused)
        if not refused:
            return 0
        lacks = refused - self.left
        if self.full != (full := refused if lacks > 0 else 0):
            self.full = full
            self.written, self.written_now = self.clock, self.now
        if lacks > 0 and not self.evict() and sheds:
            self.shed(lacks)
        return self.full

    def evict(self) -> bool:
        """The payloads of the oldest trained step go; False if there is none."""
        trained = [h for h in self.train("reserved", "trained") if h.step is not None and not h.evicted]
        steps = {h.step for h in trained if h.step < max(self.committed, self.next_step - 1)}  # type: ignore[operator]
        for held in self.of_step(min(steps), "reserved", "trained") if steps else []:  # type: ignore[type-var]
            self.meter_trained(held)
            held.pieces, held.evicted = {}, True
        return bool(steps)

    def shed(self, lacks: float) -> None:
        """The highest tickets go back, if the next step waits for the lowest."""
        need = self.limits.prompts_per_step - len(self.of_step(self.next_step, "ready"))
        line = self.line()
        first = line if self.limits.staleness_policy != "ordered" else line[:need]
        if need <= 0 or sum(held.state == "ready" for held in first) >= need:
            return
        for held in line[need:][::-1][:SHED]:
            if lacks > 0 and (held.pieces or held.saved or held.calls):
                lacks -= sum(piece.size for piece in held.pieces.values())
                self.requeue(held, "memory", counted=False)

    def expire(self, *, fills: bool = False) -> None:
        """What every call that may write does first: a replica whose time has passed; if there is none, leases, then scorers, those
        first that are due the longest. What is left over is for the next call. `fills`: the server would refuse it if it had no memory
        left."""
        self.tell_time()
        if fills:
            self.full = 0
        if self._expire_member(self.members) or self._expire_member(self.runners):
            return
        due = [(held.lease_end, held.id) for held in self.groups.values() if held.overdue(self.now)]
        for _, group in sorted(due)[:SWEEP]:
            held = self.groups[group]
            if held.deadline > self.now:
                self.pass_on(held, "lease")
            elif self.environment(held.group.env_name).broken is not None:
                self.pass_on(held, "deadline")
            else:
                member = self.members.get(held.replica) or self.runners[held.replica]
                self.suspect(held, member.together, "deadline")
        for name in self.environments:
            overdue = [
                (p.deadline, f"{place[0]}:{place[1]}", place)
                for place, p in self._pieces_of(name)
                if p.overdue(self.now)
            ]
            for _, _, (group, index) in sorted(overdue)[:SWEEP]:
                self.void(self.groups[group], index)

    def _expire_member(self, members: dict[str, Member]) -> bool:
        """One a call: its groups are the work."""
        due = sorted((member.due, name) for name, member in members.items() if member.due <= self.now)
        if not due:
            return False
        name = due[0][1]
        member = members[name]
        if member.dead:
            del members[name]
            self.used.add(name)
        else:
            self.take_back(name, member, died=True)
            member.dead, member.due = True, self.now + REMEMBER_DEAD_MS
        return True

    def held_by(self, replica: str) -> list[Held]:
        return [held for held in self.groups.values() if held.state == "open" and held.replica == replica]

    def take_back(self, holder: str, member: Member, *, died: bool) -> None:
        for held in self.held_by(holder):
            if died:
                self.suspect(held, member.together, "dead")
            else:
                self.pass_on(held, "returned")

    def next_due(self) -> int | None:
        """The nearest time at which something happens by itself."""
        times = [held.lease_end for held in self.groups.values() if held.state == "open"]
        times += [held.deadline for held in self.groups.values() if held.state == "open"]
        pieces = [piece for held in self.groups.values() for piece in held.pieces.values()]
        times += [piece.deadline for piece in pieces if piece.taken] + [piece.since for piece in pieces if piece.waits]
        times += [environment.probe_at for environment in self.environments.values() if environment.broken is not None]
        times += [member.due for member in (*self.members.values(), *self.runners.values())]
        return min((time for time in times if self.now < time < NEVER), default=None)

    # -- the queue

    def enqueue(self, groups: list[Group], timeline: str, refill: bool, validation: int = 0, *, seen: object) -> int:
        self.expire(fills=True)
        self.require_timeline(timeline)
        new: dict[str, Group] = {}
        for group in sorted(groups, key=lambda group: group.order):
            if group.id in self.groups or group.id in new:
                continue
            asked = refill and (self.refill or group.order in self.wanted)
            fresh = (asked or group.order > self.enqueued) and group.order not in self.ended
            if validation >= self.validation if group.lane == "validation" else fresh:
                new[group.id] = group
        # a feeder goes on where it left off
        ahead = [group.order for group in new.values() if group.lane == "train" and group.order > self.enqueued]
        if ahead and min(ahead) > self.enqueued + 1:
            self.refuse(WrongStep)
        wanted = self.wanted if refill else set()
        if self.closed and any(group.lane == "train" and group.order not in wanted for group in new.values()):
            self.refuse(InvalidCall)
        for group in new.values():
            worst = worst_case_bytes(1, group.prompt_token_ids.size, group.sampling.max_new_tokens)
            settings = self.limits.environments.get(group.env_name)
            episodes = settings is not None and settings.episodes
            if episodes:  # its calls, and then its record
                worst = 2 * self.limits.max_episode_bytes
            kind = "episodes" if episodes else None
            if group.lane == "validation" and self.validators:
                kind = kind or "validators"
            self.groups[group.id] = Held(group, worst, validation if group.lane == "validation" else 0, kind)
            self.environments.setdefault(group.env_name, EnvironmentModel())
            if group.lane == "train":
                self.enqueued = max(self.enqueued, group.order)
                self.wanted.discard(group.order)
        return len(new)

    def retry(self, failures: dict[int, int], seen: object) -> int:
        """Those that have failed, and were retried as often as is said; each retry undoes one failure."""
        self.expire()
        again = [order for order in failures if order in self.failures and self.retries[order] == failures[order]]
        for order in again:
            self.failures.discard(order)
            self.ended.discard(order)
            self.retries[order] += 1
            self.wanted.add(order)
            letter = next((held for held in self.train("failed") if held.group.order == order), None)
            if letter is None:
                self.gone["train", "failed"] -= 1
            else:
                self.forget(letter)
        return len(again)

    def close(self, timeline: str, seen: object) -> None:
        self.expire()
        self.require_timeline(timeline)
        self.closed = True

    def held_lease(self, group: str, token: str) -> Held:
        """The group that is leased under this token. Raises `LeaseLost`."""
        held = self.groups.get(group)
        if held is None or held.state != "open" or held.token != token or held.overdue(self.now):
            self.refuse(LeaseLost)
        return held
