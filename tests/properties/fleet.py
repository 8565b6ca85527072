"""The model's part of replicas, leases and what comes under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.errors import Fenced, InvalidCall, LeaseLost, NotVerified, ReplayError, Surplus, WrongTimeline
from headrace.replay import HeartbeatReply, Lease, RefitVerdict
from headrace.trajectory import Trajectory
from tests.properties.records import Announced, Held, Member, Piece
from tests.properties.scoring import Scoring

Take = Callable[[Lease, Trajectory], ReplayError | None]


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


class Fleet(Scoring):
    # -- membership

    def healthy(self, replica: str) -> bool:
        member = self.members.get(replica)
        return self.takes_part(replica) and member is not None and member.timeline == self.timeline

    def takes_part(self, replica: str) -> bool:
        """Whether anyone waits for it."""
        member = self.members.get(replica)
        return member is not None and not member.dead and not member.quarantined

    def state_of(self, replica: str) -> str:
        member = self.members.get(replica)
        if member is None or member.dead:
            return "DEAD"
        if member.quarantined:
            return "QUARANTINED"
        return "HEALTHY" if self.healthy(replica) else "STALE"

    def register(self, replica: str, info: object, seen: object, incarnation: str | None = None) -> None:
        """`incarnation`: that the caller knew, None is the present one."""
        self.expire()
        if incarnation not in (None, self.incarnation):
            self.refuse(WrongTimeline)
        member = self.members.get(replica)
        if replica in self.used or (member and member.dead):
            self.refuse(Fenced)
        if member is None:
            self.members[replica] = Member(self.now + milliseconds(self.limits.replica_dead_s))

    def deregister(self, replica: str, died: bool, seen: object) -> None:
        self.expire()
        if member := self.members.get(replica):
            member.together = len(self.held_by(replica))
            self.take_back(replica, died=died)
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
        self.take_back(replica, died=False)
        return True

    def quarantine_again(self, number: int, replica: str, timeline: str, reason: str, seen: object) -> bool:
        """It quarantines nobody."""
        self.expire()
        self.require_timeline(timeline)
        return self.state_of(replica) == "QUARANTINED"

    def heartbeat(self, replica: str, tokens: Sequence[str], seen: HeartbeatReply) -> HeartbeatReply:
        self.expire()
        state = self.state_of(replica)
        lost = set(seen.lost)
        assert set(seen.complete) <= lost <= set(tokens)
        for token in tokens:
            held = next((held for held in self.groups.values() if held.token == token), None)
            if not self.takes_part(replica) or held is None:
                assert token in lost, f"{token} is void, and the heartbeat of {replica} is not told"
            elif held.overdue(self.now):
                assert token in lost, f"{token} is over, and the heartbeat of {replica} is not told"
            elif held.state == "open" and held.replica == replica:
                assert token not in lost, f"{token} is valid, and the heartbeat of {replica} is told that it is lost"
                held.lease_end = min(self.now + milliseconds(self.limits.lease_s), held.deadline)
            elif held.surplus:
                assert token in seen.complete, f"{held.id} is complete, and what is generated under {token} is surplus"
        if state != "DEAD":
            member = self.members[replica]
            member.due = self.now + milliseconds(self.limits.replica_dead_s)
            member.together = len(self.held_by(replica))
        newest = (self.epoch_now.id, self.epoch_now.state) if self.epoch_now else None
        assert newest == ((seen.epoch.id, seen.epoch.state) if seen.epoch else None)
        assert bool(seen.reason) == (state == "QUARANTINED")
        return HeartbeatReply(state, self.timeline, seen.lost, seen.epoch, seen.complete, seen.reason)  # type: ignore[arg-type]

    def heartbeat_again(self, number: int, replica: str, tokens: Sequence[str], seen: object) -> object:
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

    def open_epoch(self, epoch: str, version: int, timeline: str, rendezvous: object, seen: object) -> object:
        self.expire()
        self.require_timeline(timeline)
        if self.epoch_now is None or self.epoch_now.id != epoch:
            if epoch in self.epochs:
                self.refuse(Fenced)
            self.epochs.add(epoch)
            did = {replica: "asked" for replica in self.members if self.takes_part(replica)}
            self.epoch_now = Announced(epoch, version, timeline, "announced", did)
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
            for member in self.members.values():
                member.timeline = ""
        return self._view()

    def verify(self, replica: str, epoch: str, logprobs: list[float], seen: object) -> RefitVerdict:
        self.expire()
        newest = self.require_epoch(epoch, "transfer")
        self.require_member(newest, replica, "acknowledged", "verified")
        if len(logprobs) != len(newest.logprobs):
            self.refuse(InvalidCall)
        difference = max(abs(ours - theirs) for ours, theirs in zip(newest.logprobs, logprobs, strict=True))
        if difference > newest.tolerance:
            newest.did[replica] = "refused"
            self.members[replica].timeline = ""
            return RefitVerdict(False, difference)
        newest.did[replica] = "verified"
        self.members[replica].version, self.members[replica].timeline = newest.version, self.timeline
        return RefitVerdict(True, difference)

    def refuse_epoch(self, replica: str, epoch: str, reason: str, seen: object) -> None:
        self.expire()
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
        limits = self.limits
        ahead = limits.ahead_steps
        if limits.staleness_policy == "ordered" or ahead is None:
            ahead = limits.max_age
        prompts = limits.prompts_per_step
        return (version + ahead + 1) * prompts - prompts * self.next_step - len(self.in_flight())

    def _room_for_probe(self) -> int:
        """Train groups up to the one that is to be a broken environment's probe, which admission must not keep out."""
        queue = sorted(self.train("queued"), key=_order)
        for place, held in enumerate(queue, 1):
            if self.environment(held.group.env_name).broken is not None:
                return place if self.may_generate(held.group.env_name) else 0
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
        member.answer = seen
        self._lease(member, replica, most, seen)
        member.together = len(self.held_by(replica))
        return seen

    def _lease(self, member: Member, replica: str, most: int, seen: list[Lease]) -> None:
        version, left = member.version, list(seen)
        suspects = sorted((h for h in self.groups.values() if h.cohort is not None), key=_ticket)
        if self.held_by(replica):
            if member.cohort or (suspects and self._drains(replica, suspects[0])):
                assert not left, (
                    f"{replica} was given {[lease.group.id for lease in left]}, and has to be empty for suspects"
                )
                return
        else:
            member.cohort = bool(suspects)
        if member.cohort:
            self._lease_cohort(suspects, replica, most, left)
            return
        orphans = sorted((h for h in self.groups.values() if h.orphaned and not h.overdue(self.now)), key=_ticket)
        for held in orphans[:most]:
            assert left, f"{replica} could go on with {held.id}, and was not given it"
            self._hand_on(held, replica, left.pop(0))
            most -= 1
        for lane in ("validation", "train"):
            queue = sorted((h for h in self.groups.values() if (h.lane, h.state) == (lane, "queued")), key=_order)
            room = most
            if lane == "train":
                admitted = self.room(version)
                room = 0 if self.refill else min(most, admitted if admitted > 0 else self._room_for_probe())
            for held in queue[:room]:
                if not self.may_generate(held.group.env_name) or not self.fits(held):
                    break
                assert left, f"{replica} could have {held.id}, and was not given it"
                self._grant(held, replica, version, left.pop(0))
                environment = self.environment(held.group.env_name)
                if environment.broken is not None:
                    environment.group, environment.asked = held.id, environment.probes
                most -= 1
        assert not left, f"{replica} was given {[lease.group.id for lease in left]} against admission, memory or order"

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

    def _drains(self, replica: str, first: Held) -> bool:
        """Whether the replica, which holds groups, gets no more until it has none: the lowest ticket is a suspect, and no other drains."""
        if first.lane == "train" and self.line()[0] is not first:
            return False
        if self.draining != replica and self.healthy(self.draining):
            return False
        self.draining = replica
        return True

    def _lease_cohort(self, suspects: list[Held], replica: str, most: int, left: list[Lease]) -> None:
        """As many, lowest tickets first, as each of them allows."""
        chosen: list[Held] = []
        for held in suspects:
            most = min(most, held.cohort or 1)
            if len(chosen) >= most:
                break
            chosen.append(held)
        assert [lease.group.id for lease in left] == [held.id for held in chosen], "another cohort of suspects"
        for held, lease in zip(chosen, left, strict=True):
            held.deadline, held.cohort = self.now + milliseconds(self.limits.group_deadline_s), None
            self._hand_on(held, replica, lease)
        self.draining = ""

    def _grant(self, held: Held, replica: str, version: int, lease: Lease) -> None:
        held.attempt += 1
        held.leased = self.now
        held.deadline = self.now + milliseconds(self.limits.group_deadline_s)
        self._check_lease(held, version, lease)
        assert (lease.count, lease.missing, lease.prefixes) == (self.started(held), tuple(range(lease.count)), {})
        if held.lane == "train":
            assert lease.ticket > self.last_ticket, "tickets are taken in order"
            self.last_ticket = held.ticket = lease.ticket
        else:
            held.ticket = -1
            assert lease.ticket == -1
        held.state, held.replica, held.count = "open", replica, lease.count

    def _hand_on(self, held: Held, replica: str, lease: Lease) -> None:
        """The group goes on where it was: what could not be trained any more starts over."""
        if held.lane == "train":
            for piece in held.pieces.values():
                # over age; what an abandoned timeline wrote is not
                if not self._trainable(piece.trajectory) and piece.trajectory.newest_version <= self.next_step:
                    self.meters.add("expired", piece, self.next_step)
            held.pieces = {i: p for i, p in held.pieces.items() if self._trainable(p.trajectory)}
            held.saved = {i: prefix for i, prefix in held.saved.items() if self._trainable(prefix)}
        self._check_lease(held, self.members[replica].version, lease)
        missing = [i for i in range(held.count) if i not in held.pieces and i not in held.dropped]
        assert (lease.count, list(lease.missing), lease.ticket) == (held.count, missing, held.ticket)
        prefixes = {index: prefix.encode() for index, prefix in lease.prefixes.items()}
        assert prefixes == {index: prefix.encode() for index, prefix in held.saved.items()}
        held.replica = replica

    def _trainable(self, trajectory: Trajectory) -> bool:
        return self.lawful(trajectory.oldest_version, trajectory.newest_version)

    def _check_lease(self, held: Held, version: int, lease: Lease) -> None:
        assert (lease.group.encode(), lease.attempt, lease.version) == (held.group.encode(), held.attempt, version)
        assert (lease.timeline, lease.incarnation) == (self.timeline, self.incarnation)
        assert lease.token not in self.tokens, "a token is never used twice"
        self.tokens.add(lease.token)
        held.token, held.lease_end = lease.token, min(self.now + milliseconds(self.limits.lease_s), held.deadline)
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
        self.require_timeline(lease.timeline)
        if lease.incarnation != self.incarnation:
            self.refuse(WrongTimeline)
        return self.held_lease(lease.group.id, lease.token)

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
        for fence, places in fences.items():
            self.expire(fills=True)
            for place in places:
                if fence != (self.timeline, self.incarnation):
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
        held.dropped.add(index)
        self.meters.trajectories["failed"] += 1
        held.saved.pop(index, None)
        if held.generated:
            held.state = "scoring"
        return True


def _ticket(held: Held) -> tuple[int, str]:
    return -1 if held.ticket is None else held.ticket, held.id


def _order(held: Held) -> int:
    return held.group.order
