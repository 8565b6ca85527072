"""The model's part of replicas, leases and what comes under them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence, Set

from headrace.base.errors import Fenced, InvalidCall, LeaseLost, NotVerified, ReplayError, Surplus, WrongTimeline
from headrace.records.trajectory import AnyTrajectory, Trajectory
from headrace.replay import HeartbeatReply, Lease, RefitVerdict
from tests.properties.model import milliseconds
from tests.properties.records import Announced, Held, Member, Offered, Piece
from tests.properties.scoring import Scoring

Take = Callable[[Lease, Trajectory], ReplayError | None]


@dataclasses.dataclass
class Taker:
    """Who takes groups, and what it still may: `most` groups, and of each lane as many trajectories as it has `slots`. `left` of what it
    was given, the next first. `versions`: those that may write for it."""

    holder: str
    member: Member
    version: int
    versions: Set[int]
    most: int
    slots: dict[str, float] = dataclasses.field(default_factory=lambda: {"train": math.inf, "validation": math.inf})
    kind: str | None = None
    left: list[Lease] = dataclasses.field(default_factory=list)
    admitted: int = -1  # the version whose admission goes for it

    def fits(self, held: Held, count: int) -> bool:
        """A group that does not fit keeps what is behind it in its lane waiting as well."""
        if count > self.slots[held.lane]:
            self.slots[held.lane] = 0
            return False
        return self.most > 0

    def version_for(self, held: Held) -> int:
        """The oldest weights that a lease of the group allows: those that a validation evaluates write it, and no others."""
        return self.version if held.lane == "train" else held.validation

    def next(self, held: Held) -> Lease:
        assert _ids(self.left[:1]) == [held.id], f"{self.holder} could have {held.id}, and was given {_ids(self.left)}"
        self.most -= 1
        return self.left.pop(0)


class Fleet(Scoring):
    # -- membership

    def healthy(self, replica: str) -> bool:
        member = self.members.get(replica)
        return self.takes_part(replica) and member is not None and member.timeline == self.timeline

    def descends(self, timeline: str, version: int) -> bool:
        """Whether the run's weights descend from these, or are these."""
        names, starts = zip(*self.timelines, strict=True)
        ends = dict(zip(names, [*starts[1:], math.inf], strict=True))
        return timeline in ends and version <= ends[timeline]

    def takes_part(self, replica: str) -> bool:
        """Whether anyone waits for it."""
        member = self.members.get(replica)
        return member is not None and not (member.dead or member.quarantined or member.loading)

    def validates(self, replica: str) -> bool:
        """Whether it keeps its weights, and leases the groups of the validation alone: it was named, and some group is not evaluated."""
        return replica in self.validators and self.is_validating

    @property
    def is_validating(self) -> bool:
        lane = [held for held in self.groups.values() if held.lane == "validation"]
        return any(held.state in ("queued", "open", "scoring") for held in lane)

    def state_of(self, replica: str) -> str:
        member = self.members.get(replica)
        if member is None or member.dead:
            return "DEAD"
        if member.quarantined:
            return "QUARANTINED"
        if member.loading:
            return "LOADING"
        return "HEALTHY" if self.healthy(replica) else "STALE"

    def register(
        self, replica: str, info: object, loading: bool = False, *, seen: object, incarnation: str | None = None
    ) -> None:
        """`incarnation`: that the caller knew, None is the present one."""
        self._enter(replica, incarnation, loading=loading)

    def register_puller(self, replica: str, info: object, *, seen: object, incarnation: str | None = None) -> None:
        self._enter(replica, incarnation, pulls=True)

    def _enter(self, replica: str, incarnation: str | None, *, loading: bool = False, pulls: bool = False) -> None:
        self.expire()
        if incarnation not in (None, self.incarnation):
            self.refuse(WrongTimeline)
        member = self.members.get(replica)
        if replica in self.used or (member and member.dead):
            self.refuse(Fenced)
        if member is None:
            due = self.now + milliseconds(self.limits.replica_dead_s)
            self.members[replica] = Member(due, loading=loading, pulls=pulls)

    def deregister(self, replica: str, died: bool, seen: object) -> None:
        self.expire()
        if member := self.members.get(replica):
            member.together = len(self.held_by(replica))
            self.take_back(replica, member, died=died)
            del self.members[replica]
            self.used.add(replica)

    def quarantine(self, replica: str, timeline: str, reason: str, seen: object) -> bool:
        self.expire()
        self.require_timeline(timeline)
        if self.state_of(replica) == "QUARANTINED":
            return True
        if not self.takes_part(replica) or not any(self.healthy(other) for other in self.members if other != replica):
            return False
        self.members[replica].quarantined = True
        self.take_back(replica, self.members[replica], died=False)
        return True

    def quarantine_again(self, number: int, replica: str, timeline: str, reason: str, seen: object) -> bool:
        """It quarantines nobody."""
        self.expire()
        self.require_timeline(timeline)
        return self.state_of(replica) == "QUARANTINED"

    def heartbeat(
        self, replica: str, tokens: Sequence[str], progress: Sequence[int] = (), *, seen: HeartbeatReply
    ) -> HeartbeatReply:
        self.expire()
        state = self.state_of(replica)
        lost = set(seen.lost)
        assert set(seen.complete) <= lost <= set(tokens)
        for token, reported in zip(tokens, progress or [0] * len(tokens), strict=True):
            held = next((held for held in self.groups.values() if held.token == token), None)
            if not self.takes_part(replica) or held is None:
                assert token in lost, f"{token} is void, and the heartbeat of {replica} is not told"
            elif held.overdue(self.now):
                assert token in lost, f"{token} is over, and the heartbeat of {replica} is not told"
            elif held.state == "open" and held.replica == replica:
                assert token not in lost, f"{token} is valid, and the heartbeat of {replica} is told that it is lost"
                self.heard(held, reported)
            elif held.surplus:
                assert token in seen.complete, f"{held.id} is complete, and what is generated under {token} is surplus"
        if state != "DEAD":
            member = self.members[replica]
            member.due = self.now + milliseconds(self.limits.replica_dead_s)
            member.together = len(self.held_by(replica))
        newest = (self.epoch_now.id, self.epoch_now.state) if self.epoch_now else None
        assert newest == ((seen.epoch.id, seen.epoch.state) if seen.epoch else None)
        assert bool(seen.reason) == (state == "QUARANTINED")
        descends = self.takes_part(replica) and self.descends(
            self.members[replica].timeline, self.members[replica].version
        )
        return HeartbeatReply(state, self.timeline, seen.lost, seen.epoch, seen.complete, seen.reason, descends)  # type: ignore[arg-type]

    def heartbeat_again(
        self, number: int, replica: str, tokens: Sequence[str], progress: Sequence[int] = (), *, seen: object
    ) -> object:
        """It renews nothing."""
        self.expire()
        return seen

    # -- epochs

    def _view(self) -> tuple[object, ...]:
        epoch = self.epoch_now
        assert epoch is not None
        left = ("asked", "left out")
        members = {m for m, did in epoch.did.items() if epoch.state == "announced" or did not in left}
        acknowledged = {m for m, did in epoch.did.items() if did in ("acknowledged", "verified")}
        verified = {m for m, did in epoch.did.items() if did == "verified"}
        refused = {m for m, did in epoch.did.items() if did == "refused"}
        return (epoch.id, epoch.version, epoch.timeline, epoch.state, members, acknowledged, verified, refused)

    def require_epoch(self, epoch: str, *states: str) -> Announced:
        newest = self.epoch_now
        if newest is None or newest.id != epoch:
            self.refuse(Fenced)
        if newest.timeline != self.timeline:
            self.refuse(WrongTimeline)
        if newest.state not in states:
            self.refuse(Fenced)
        return newest

    def require_member(self, epoch: Announced, replica: str, *did: str) -> None:
        if not self.takes_part(replica) or epoch.did.get(replica) not in did:
            self.refuse(Fenced)

    def holds(self, replica: str, epoch: Announced) -> bool:
        member = self.members[replica]
        return self.takes_part(replica) and (member.version, member.timeline) == (epoch.version, epoch.timeline)

    def keeps(self, replica: str, epoch: Announced) -> bool:
        """Whether it has the epoch's weights, or pulls its own, or validates others."""
        return self.holds(replica, epoch) or self.members[replica].pulls or self.validates(replica)

    def open_epoch(self, epoch: str, version: int, timeline: str, rendezvous: object, seen: object) -> object:
        self.expire()
        self.require_timeline(timeline)
        if self.epoch_now is None or self.epoch_now.id != epoch:
            if epoch in self.epochs:
                self.refuse(Fenced)
            self.epochs.add(epoch)
            self.epoch_now = Announced(epoch, version, timeline, "announced", {})
            asked = [id_ for id_ in self.members if self.takes_part(id_) and not self.keeps(id_, self.epoch_now)]
            self.epoch_now.did = dict.fromkeys(asked, "asked")
        return self._view()

    def acknowledge(self, replica: str, epoch: str, seen: object) -> None:
        self.expire()
        newest = self.require_epoch(epoch, "announced")
        self.require_member(newest, replica, "asked", "acknowledged")
        newest.did[replica] = "acknowledged"

    def begin_epoch(
        self, epoch: str, rendezvous: object, logprobs: list[float], tolerance: float, seen: object
    ) -> object:
        self.expire()
        newest = self.require_epoch(epoch, "announced", "transfer")
        if newest.state == "announced":
            newest.state, newest.logprobs, newest.tolerance = "transfer", logprobs, tolerance
            newest.did = {m: "left out" if did == "asked" else did for m, did in newest.did.items()}
            for id_, member in self.members.items():
                if not self.keeps(id_, newest):
                    member.timeline = ""
        return self._view()

    @property
    def reach(self) -> int:
        """How far behind the next step weights may be for work to begin under them."""
        ahead = self.limits.ahead_steps
        return self.limits.max_age if self.limits.staleness_policy == "ordered" or ahead is None else ahead

    def offer(
        self,
        offer: str,
        version: int,
        timeline: str,
        rendezvous: object,
        logprobs: list[float],
        tolerance: float,
        mean_tolerance: float,
        seen: object,
    ) -> None:
        self.expire()
        self.require_timeline(timeline)
        if version > max((each.version for each in self.offers.values()), default=-1):
            self.offers = {id_: each for id_, each in self.offers.items() if each.version >= version - self.reach}
            self.offers[offer] = Offered(version, logprobs, tolerance)

    def pulls(self, replica: str) -> bool:
        return replica in self.members and self.members[replica].pulls

    def require_offer(self, replica: str, offer: str) -> Offered:
        found = self.offers.get(offer)
        if found is None or found.version + self.reach < self.next_step or not self.takes_part(replica):
            self.refuse(Fenced)
        member = self.members[replica]
        verified = self.healthy(replica) and member.version == found.version
        if found.version < member.tried or (found.version == member.tried and not verified):
            self.refuse(Fenced)
        return found

    def verify(self, replica: str, epoch: str, logprobs: list[float], seen: object) -> RefitVerdict:
        self.expire()
        newest: Announced | Offered
        if self.pulls(replica):
            newest = self.require_offer(replica, epoch)
        else:
            newest = self.require_epoch(epoch, "transfer")
            self.require_member(newest, replica, "acknowledged", "verified")
        if len(logprobs) != len(newest.logprobs):
            self.refuse(InvalidCall)
        differences = [abs(ours - theirs) for ours, theirs in zip(newest.logprobs, logprobs, strict=True)]
        difference, mean = max(differences), sum(differences) / len(differences)
        is_verified = difference <= newest.tolerance
        if isinstance(newest, Announced):
            newest.did[replica] = "verified" if is_verified else "refused"
        else:
            self.members[replica].tried = newest.version
        if not is_verified:
            self.members[replica].timeline = ""
            return RefitVerdict(False, difference, mean, newest.tolerance, newest.tolerance)
        self.members[replica].version, self.members[replica].timeline = newest.version, self.timeline
        return RefitVerdict(True, difference, mean, newest.tolerance, newest.tolerance)

    def refuse_epoch(self, replica: str, epoch: str, reason: str, seen: object) -> None:
        self.expire()
        if self.pulls(replica):
            self.members[replica].tried = self.require_offer(replica, epoch).version
            self.members[replica].timeline = ""
            return
        newest = self.require_epoch(epoch, "announced", "transfer")
        if replica not in newest.did:
            self.refuse(Fenced)
        newest.did[replica] = "refused"
        if replica in self.members:
            self.members[replica].timeline = ""

    def end_epoch(self, epoch: str, aborted: bool, seen: object) -> object:
        self.expire()
        newest = self.require_epoch(epoch, "announced", "transfer", "done", "aborted")
        if newest.state == "announced" and not aborted:
            self.refuse(InvalidCall)
        if newest.state in ("announced", "transfer"):
            newest.state = "aborted" if aborted else "done"
        return self._view()

    # -- leases

    def room(self, version: int) -> int:
        """Train groups that admission would grant to a replica of this version."""
        prompts = self.limits.prompts_per_step
        return (version + self.reach + 1) * prompts - prompts * self.next_step - len(self.in_flight())

    def _room_for_probe(self, kind: str | None) -> int:
        """Train groups up to the one that is to be a broken environment's probe, which admission must not keep out."""
        for place, held in enumerate(self.queue("train"), 1):
            if self.environment(held.group.env_name).broken is not None:
                return place if held.kind == kind and self.may_generate(held.group.env_name) else 0
        return 0

    def started(self, held: Held) -> int:
        """Trajectories that a lease starts."""
        return held.group.n + (self.limits.redundant if held.lane == "train" else 0)

    def fits(self, held: Held) -> bool:
        """Memory: a group over the bound is let in alone; payloads of trained steps go first."""
        if self.bytes == 0 or self.bytes + held.worst * self.started(held) <= self.limits.max_bytes:
            return True
        if not self.evict():
            return False
        return self.fits(held)

    def lease(self, replica: str, most: int, seen: list[Lease]) -> list[Lease]:
        self.expire(fills=True)
        member = self.members.get(replica)
        if member:
            member.leased, member.answer = self.call_number, None
        if member is None or not self.healthy(replica):
            self.refuse(NotVerified)
        assert isinstance(seen, list), seen
        kind = "validators" if self.validates(replica) else None
        self.lease_to(Taker(replica, member, member.version, {member.version}, most, kind=kind), seen)
        return seen

    def lease_to(self, taker: Taker, seen: list[Lease]) -> None:
        taker.member.answer, taker.left = seen, list(seen)
        asked, taker.admitted = taker.most, taker.version
        is_apart = self._lease(taker)
        if not taker.kind:
            taker.member.waits = not is_apart and len(seen) < asked and self.may_work(taker.member)
        assert not taker.left, f"{taker.holder} was given {_ids(taker.left)} against admission, memory, slots or order"
        taker.member.together = len(self.held_by(taker.holder))

    def _share(self, taker: Taker) -> int:
        """Groups that a replica may get, so that others that wait get as many, and none for which their weights are too old."""
        waiting = [
            id
            for id, member in self.members.items()
            if id != taker.holder and member.waits and self.healthy(id) and self.may_work(member)
        ]
        if not waiting:
            return taker.most
        taker.admitted = min([taker.version, *(self.members[id].version for id in waiting if self.pulls(id))])
        mine = len(self.held_by(taker.holder))
        held = mine + sum(len(self.held_by(id)) for id in waiting)
        groups = [each for each in self.groups.values() if not each.kind]
        there = sum(each.orphaned or each.passed for each in groups)
        there += sum(not each.kind for each in self.queue("validation"))
        there += min(0 if self.refill else max(0, self.room(taker.admitted)), len(self.queue("train")))
        return min(taker.most, max(0, math.ceil((max(there, 1) + held) / (len(waiting) + 1)) - mine))

    def may_work(self, member: Member) -> bool:
        """Whether work may begin under the replica's weights: what one has pulled may be too old."""
        return not member.pulls or member.version + self.reach >= self.next_step

    def _lease(self, taker: Taker) -> bool:
        """Returns whether the taker is set apart for suspects."""
        mine = [held for held in self.groups.values() if held.kind == taker.kind]
        suspects = sorted((held for held in mine if held.cohort is not None), key=_ticket)
        if suspects and not self.may_write(taker, suspects[0]):
            suspects = []
        if self.held_by(taker.holder):
            if taker.member.cohort or (suspects and self._drains(taker, suspects[0])):
                assert not taker.left, f"{taker.holder} was given {_ids(taker.left)}, and has to be empty for suspects"
                return True
        else:
            taker.member.cohort = bool(suspects)
        if taker.member.cohort:
            self._lease_cohort(suspects, taker)
            return True
        if not taker.kind:
            taker.most = self._share(taker)
        for held in sorted((held for held in mine if held.orphaned), key=_ticket):
            if self.may_write(taker, held) and taker.fits(held, len(self.missing(held))):
                self._hand_on(held, taker)
        for held in self.queue("validation"):
            if held.kind == taker.kind and not self._begin(held, taker):
                break
        if taker.kind == "validators":
            return False
        if not self.refill and self._lease_passed(taker, sorted((h for h in mine if h.passed), key=_ticket)):
            room = self.room(taker.admitted)
            self._lease_queue(taker, room if room > 0 else self._room_for_probe(taker.kind))
        return False

    def may_write(self, taker: Taker, held: Held) -> bool:
        """Whether the taker's weights may write this group: what a replica has pulled may be too old, or not what is evaluated."""
        if held.lane == "validation":
            return held.validation in taker.versions
        return not taker.member.pulls or taker.version + self.reach >= self.next_step

    def _lease_passed(self, taker: Taker, passed: Sequence[Held]) -> bool:
        """Those that have their place in line, as far as it is admitted. Returns whether that is all of them."""
        for held in passed:
            admitted = self.room(taker.admitted) + len(self.line())
            if self.line().index(held) >= admitted or not self._begin(held, taker):
                return False
        return True

    def _lease_queue(self, taker: Taker, room: int) -> None:
        """The first so many: those of the other kind get their place in line."""
        for held in self.queue("train")[:room]:
            if not taker.most:
                return
            if held.kind == taker.kind:
                if not self._begin(held, taker):
                    return
            elif self.environment(held.group.env_name).broken is not None or not self.fits(held):
                return
            else:
                self.last_place += 1e-6
                held.passed, held.ticket, held.count = True, self.last_place, self.started(held)

    def _begin(self, held: Held, taker: Taker) -> bool:
        """Lease a queued group, if its environment, the slots and memory allow it."""
        environment = self.environment(held.group.env_name)
        if (
            not taker.most
            or not self.may_write(taker, held)
            or not self.may_generate(held.group.env_name)
            or not taker.fits(held, self.started(held))
        ):
            return False
        if not held.passed and not self.fits(held):
            return False
        self._grant(held, taker)
        if environment.broken is not None:
            environment.group, environment.asked = held.id, environment.probes
        return True

    def missing(self, held: Held) -> list[int]:
        """What is to be generated once it goes on."""
        kept = {i for i, p in held.pieces.items() if held.lane != "train" or self._trainable(p.trajectory)}
        return [i for i in range(held.count) if i not in kept and i not in held.dropped]

    def lease_again(self, number: int, replica: str, most: int, seen: list[Lease]) -> list[Lease]:
        """The newest is answered as before; nothing more is granted."""
        member = self.members.get(replica)
        if member is None or number > member.leased:  # the buffer has not seen it
            return self.lease(replica, most, seen)
        self.expire(fills=True)
        if number < member.leased or member.answer is None:
            self.refuse(Fenced)
        assert {lease.token for lease in seen} <= {lease.token for lease in member.answer}
        return seen

    def _drains(self, taker: Taker, first: Held) -> bool:
        """Whether the taker, which holds groups, gets no more until it has none: the lowest ticket is a suspect, and no other drains."""
        if first.lane == "train" and self.line()[0] is not first:
            return False
        other = self.draining[taker.kind]
        if other != taker.holder and (self.healthy(other) or self.is_alive(other)):
            return False
        self.draining[taker.kind] = taker.holder
        return True

    def is_alive(self, holder: str) -> bool:
        runner = self.runners.get(holder)
        return runner is not None and not runner.dead

    def _lease_cohort(self, suspects: list[Held], taker: Taker) -> None:
        """As many, lowest tickets first, as each of them allows."""
        chosen, most = 0, taker.most
        for held in suspects:
            most = min(most, held.cohort or 1)
            if chosen >= most or not self.may_write(taker, held) or not taker.fits(held, len(self.missing(held))):
                break
            held.cohort = None
            self._hand_on(held, taker)
            chosen += 1
        assert not taker.left, "another cohort of suspects"
        if chosen:
            self.draining[taker.kind] = ""

    def _grant(self, held: Held, taker: Taker) -> None:
        lease = taker.next(held)
        held.attempt += 1
        held.leased = self.now
        self._check_lease(held, taker, lease)
        assert (lease.count, lease.missing) == (self.started(held), tuple(range(lease.count)))
        assert (lease.prefixes, lease.tries) == ({}, {})
        taker.slots[held.lane] -= lease.count
        if held.lane != "train":
            held.ticket = held.number = -1
            assert lease.ticket == -1
        elif held.passed:
            numbered = [other for other in self.line() if other.number >= 0 and not other.passed]
            before = [other.number < lease.ticket for other in numbered]
            assert before == [(other.ticket or 0) < (held.ticket or 0) for other in numbered], (
                "it keeps its place in line"
            )
            held.number = lease.ticket
            self.last_ticket = max(self.last_ticket, lease.ticket)
        else:
            assert lease.ticket > self.last_ticket, "tickets are taken in order"
            self.last_ticket = held.number = lease.ticket
            self.last_place += 1e-6
            held.ticket = self.last_place
        held.state, held.replica, held.count, held.passed = "open", taker.holder, lease.count, False

    def _hand_on(self, held: Held, taker: Taker) -> None:
        """The group goes on where it was: what could not be trained any more starts over, and so do episodes that have not ended."""
        lease = taker.next(held)
        if held.lane == "train":
            for piece in held.pieces.values():
                # over age; what an abandoned timeline wrote is not
                if not self._trainable(piece.trajectory) and piece.trajectory.newest_version <= self.next_step:
                    self.meters.add("expired", piece, self.next_step)
            held.pieces = {i: p for i, p in held.pieces.items() if self._trainable(p.trajectory)}
            held.saved = {i: prefix for i, prefix in held.saved.items() if self._trainable(prefix)}
        held.calls = {}
        self._check_lease(held, taker, lease)
        missing = self.missing(held)
        assert (lease.count, list(lease.missing), lease.ticket) == (held.count, missing, held.number)
        prefixes = {index: prefix.encode() for index, prefix in lease.prefixes.items()}
        assert prefixes == {index: prefix.encode() for index, prefix in held.saved.items()}
        assert lease.tries == {index: tries for index, (tries, *_) in held.tries.items()}
        taker.slots[held.lane] -= len(missing)
        held.replica = taker.holder

    def _trainable(self, trajectory: AnyTrajectory) -> bool:
        return self.lawful(trajectory.oldest_version, trajectory.newest_version)

    def _check_lease(self, held: Held, taker: Taker, lease: Lease) -> None:
        assert (lease.group.encode(), lease.attempt, lease.version) == (
            held.group.encode(),
            held.attempt,
            taker.version_for(held),
        )
        assert (lease.timeline, lease.incarnation) == (self.timeline, self.incarnation)
        assert lease.token not in self.tokens, "a token is never used twice"
        self.tokens.add(lease.token)
        held.token, held.version = lease.token, lease.version
        self.begin_lease(held)
        assert lease.expires_in_s == (held.lease_end - self.now) / 1000

    def release(self, lease: Lease, reason: str, failed: bool, seen: object) -> None:
        held = self._of_lease(lease)
        if failed:
            self.requeue(held, "failed", counted=True)
        else:
            self.pass_on(held, "returned")

    def reject(self, lease: Lease, reason: str, seen: object) -> None:
        self.end(self._of_lease(lease), "failed")

    def _of_lease(self, lease: Lease) -> Held:
        self.expire()
        if self.is_foreign(lease):
            self.refuse(WrongTimeline)
        return self.held_lease(lease.group.id, lease.token)

    def is_foreign(self, lease: Lease, timeline: str | None = None) -> bool:
        """Whether the lease is of an earlier timeline (or the one that a call names) or incarnation, and did not outlive its end."""
        held = self.groups.get(lease.group.id)
        outlives = held is not None and held.token == lease.token
        return lease.incarnation != self.incarnation or ((timeline or lease.timeline) != self.timeline and not outlives)

    # -- trajectories

    def push_many(self, items: Sequence[tuple[Lease, Trajectory]], seen: object) -> list[ReplayError | None]:
        return self._hand_in(items, self._push)

    def save_many(self, items: Sequence[tuple[Lease, Trajectory]], seen: object) -> list[ReplayError | None]:
        return self._hand_in(items, self._save)

    def _hand_in(self, items: Sequence[tuple[Lease, Trajectory]], take: Take) -> list[ReplayError | None]:
        """One call a fence."""
        fences: dict[tuple[str, str], list[int]] = {}
        for place, (lease, _) in enumerate(items):
            fences.setdefault((lease.timeline, lease.incarnation), []).append(place)
        answers: list[ReplayError | None] = [None] * len(items)
        for places in fences.values():
            self.expire(fills=True)
            for place in places:
                if self.is_foreign(items[place][0]):
                    answers[place] = self.refusal(WrongTimeline(""))
                else:
                    answers[place] = take(*items[place])
        return answers

    def _objection(self, lease: Lease, trajectory: Trajectory) -> ReplayError | None:
        held = self.groups.get(lease.group.id)
        if held is None or held.token != lease.token or held.overdue(self.now):
            return self.refusal(LeaseLost(""))
        if held.state != "open":
            return self.refusal(Surplus(""))
        if trajectory.index >= held.count or trajectory.newest_version > self.next_step:
            return self.refusal(InvalidCall(""))
        return None

    def _push(self, lease: Lease, trajectory: Trajectory) -> ReplayError | None:
        held, index = self.groups.get(lease.group.id), trajectory.index
        if held and held.token == lease.token and (index in held.pieces or index in held.dropped):
            return None  # the same again
        error = self._objection(lease, trajectory)
        if error is None and held is not None:
            held.pieces[index] = Piece(trajectory, len(trajectory.encode()), self.now, self.now - held.leased)
            held.saved.pop(index, None)
            self.progress(held)
            if held.generated:
                held.state = "scoring"
        return error

    def _save(self, lease: Lease, trajectory: Trajectory) -> ReplayError | None:
        held, index = self.groups.get(lease.group.id), trajectory.index
        error = self._objection(lease, trajectory)
        if error is None and held is not None and index not in held.pieces and index not in held.dropped:
            before = held.saved.get(index)
            if before is None or before.completion_token_ids.size < trajectory.completion_token_ids.size:
                held.saved[index] = trajectory
                self.progress(held)
        return error

    def abandon(self, lease: Lease, index: int, reason: str, seen: object) -> bool:
        held = self._of_lease(lease)
        if index >= held.count:
            self.refuse(InvalidCall)
        if index in held.pieces or index in held.dropped:
            return True
        if len(held.dropped) >= held.count - held.group.n:
            self.requeue(held, "failed", counted=True)
            return False
        self.do_without(held, index)
        return True

    def do_without(self, held: Held, index: int) -> None:
        held.dropped.add(index)
        self.progress(held)
        self.meters.trajectories["failed"] += 1
        held.saved.pop(index, None)
        held.calls.pop(index, None)
        if held.generated:
            held.state = "scoring"


def _ids(leases: Sequence[Lease]) -> list[str]:
    return [lease.group.id for lease in leases]


def _ticket(held: Held) -> tuple[float, str]:
    return -1 if held.ticket is None else held.ticket, held.id
