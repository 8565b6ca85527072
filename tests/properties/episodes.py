"""The model's part of runners and episodes."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import EpisodeTooLarge, Fenced, InvalidCall, LeaseLost, Surplus, WrongTimeline
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Call
from headrace.replay import Lease, RunnerReply
from tests.properties.fleet import Fleet, Taker
from tests.properties.model import milliseconds
from tests.properties.records import Held, Member, Piece
from tests.properties.scoring import MOST_RESCORED

CHARGED = ("FAILED", "TIMED_OUT")
FREED = (*CHARGED, "NOT_STARTED", "INTERRUPTED")
# Counts of an episode: beginnings before this one, attempts used, interruptions since it last ended by itself.
NEVER = (0, 0, 0)


def holder(runner: str) -> str:
    """What groups call it."""
    return f"runner {runner}"


class Episodes(Fleet):
    # -- runners

    def waiting_episodes(self) -> int:
        """Groups that wait for a runner: those that lost theirs, of validation, passed over, or the first in the queue."""
        first = self.queue("train")[:1]
        waiting = [held for held in self.groups.values() if held.orphaned or held.cohort is not None or held.passed]
        return sum(held.episodes for held in (*waiting, *self.queue("validation"), *first))

    def register_runner(self, runner: str, info: object, seen: object, incarnation: str | None = None) -> None:
        self.expire()
        if incarnation not in (None, self.incarnation):
            self.refuse(WrongTimeline)
        name = holder(runner)
        if name in self.used or (name in self.runners and self.runners[name].dead):
            self.refuse(Fenced)
        if name not in self.runners:
            self.runners[name] = Member(self.now + milliseconds(self.limits.replica_dead_s))

    def deregister_runner(self, runner: str, died: bool, seen: object) -> None:
        self.expire()
        name = holder(runner)
        if member := self.runners.get(name):
            member.together = len(self.held_by(name))
            self.take_back(name, member, died=died)
            del self.runners[name]
            self.used.add(name)

    def runner_heartbeat(
        self, runner: str, tokens: Sequence[str], progress: Sequence[int] = (), *, seen: RunnerReply
    ) -> RunnerReply:
        self.expire()
        name = holder(runner)
        surplus: list[tuple[str, int]] = []
        assert set(seen.complete) <= set(seen.lost) <= set(tokens)
        for token, reported in zip(tokens, progress or [0] * len(tokens), strict=True):
            held = next((held for held in self.groups.values() if held.token == token), None)
            if not self.is_alive(name) or held is None or held.overdue(self.now):
                assert token in seen.lost, f"{token} is void, and the heartbeat of {runner} is not told"
            elif held.state == "open" and held.replica == name:
                assert token not in seen.lost, (
                    f"{token} is valid, and the heartbeat of {runner} is told that it is lost"
                )
                self.heard(held, reported)
            elif held.surplus:
                assert token in seen.complete, f"{held.id} is complete, and what is generated under {token} is surplus"
            if held is not None and token in seen.complete:
                surplus += [(token, i) for i in range(held.count) if i not in held.pieces and i not in held.dropped]
        if self.is_alive(name):
            self.runners[name].due = self.now + milliseconds(self.limits.replica_dead_s)
            self.runners[name].together = len(self.held_by(name))
        return RunnerReply(self.is_alive(name), self.timeline, seen.lost, seen.complete, tuple(surplus))

    def runner_heartbeat_again(
        self, number: int, runner: str, tokens: Sequence[str], progress: Sequence[int] = (), *, seen: object
    ) -> object:
        """It renews nothing."""
        self.expire()
        return seen

    def versions_held(self) -> set[int]:
        """Of the weights that can answer the calls of episodes."""
        return {member.version for id_, member in self.members.items() if self.healthy(id_) and self.may_work(member)}

    def lease_episodes(self, runner: str, slots: int, validation_slots: int, seen: list[Lease]) -> list[Lease]:
        self.expire(fills=True)
        name = holder(runner)
        member = self.runners.get(name)
        if member:
            member.leased, member.answer = self.call_number, None
        if member is None or not self.is_alive(name):
            self.refuse(Fenced)
        assert isinstance(seen, list), seen
        if versions := self.versions_held():
            free = {"train": slots, "validation": validation_slots}
            self.lease_to(Taker(name, member, min(versions), versions, 256, free, "episodes"), seen)
        else:
            assert not seen, "leased without a replica that could answer"
            member.answer, member.together = seen, len(self.held_by(name))
        return seen

    def lease_episodes_again(
        self, number: int, runner: str, slots: int, validation_slots: int, seen: list[Lease]
    ) -> list[Lease]:
        """The newest is answered as before; nothing more is granted."""
        member = self.runners.get(holder(runner))
        if member is None or number > member.leased:  # the buffer has not seen it
            return self.lease_episodes(runner, slots, validation_slots, seen)
        self.expire(fills=True)
        if number < member.leased or member.answer is None:
            self.refuse(Fenced)
        assert {lease.token for lease in seen} <= {lease.token for lease in member.answer}
        return seen

    # -- episodes

    def _require_episode(self, lease: Lease, index: int, newest: int) -> Held:
        held = self.groups.get(lease.group.id)
        if held is None or held.token != lease.token or held.overdue(self.now):
            self.refuse(LeaseLost)
        if held.state != "open":
            self.refuse(Surplus)
        if index >= held.count or newest > self.next_step:
            self.refuse(InvalidCall)
        tries = held.tries.get(index, NEVER)[0]
        if lease.tries.get(index, 0) != tries:
            self.refuse(LeaseLost)
        return held

    def append(
        self,
        lease: Lease,
        index: int,
        number: int,
        nonce: str,
        call: Call,
        timeline: str | None = None,
        *,
        seen: object,
    ) -> None:
        self.expire(fills=True)
        if self.is_foreign(lease, timeline):
            self.refuse(WrongTimeline)
        newest = max(span.version for span in call.spans)
        held = self._require_episode(lease, index, newest)
        if index in held.pieces or index in held.dropped:
            self.refuse(Surplus)
        calls = held.calls.get(index, [])
        if number < len(calls):
            if (calls[number][0], calls[number][1].encode()) != (nonce, call.encode()):
                self.refuse(InvalidCall)
            return
        if not self.descends(timeline or lease.timeline, newest):
            self.refuse(InvalidCall)
        size = len(call.encode()) + sum(len(each.encode()) for _, each in calls)
        if number > len(calls) or call.parent >= number:
            self.refuse(InvalidCall)
        if size > self.limits.max_episode_bytes:
            self.refuse(EpisodeTooLarge)
        held.calls[index] = [*calls, (nonce, call)]
        self.progress(held)

    def finish(
        self, lease: Lease, index: int, trajectory: AnyTrajectory | None, score: Score | None, seen: object
    ) -> dict[int, int] | None:
        """Returns how often each episode was begun before, if this one begins anew."""
        self.expire(fills=True)
        if self.is_foreign(lease):
            self.refuse(WrongTimeline)
        held = self.groups.get(lease.group.id)
        if held is None and lease.group.lane == "train" and lease.group.order in self.ended - self.failures:
            return None  # filtered since
        said = lease.tries.get(index, 0)
        again = {**lease.tries, index: said + 1}
        if held is not None and held.token == lease.token:
            if index in held.pieces or index in held.dropped:
                return None
            if score is not None and score.status in FREED and said < held.tries.get(index, NEVER)[0]:
                return again if held.state == "open" else None
        held = self._require_episode(lease, index, trajectory.newest_version if trajectory else 0)
        if trajectory is None:
            assert score is not None
            return again if self._free(held, index, score) else None
        appended = [span.version for _, call in held.calls.get(index, []) for span in call.spans]
        newest = trajectory.newest_version
        if newest > max(appended, default=0) and not self.descends(lease.timeline, newest):
            self.refuse(InvalidCall)
        if len(trajectory.encode()) > self.limits.max_episode_bytes:
            self.refuse(EpisodeTooLarge)
        self._take_in(held, index, trajectory, score)
        return None

    def _free(self, held: Held, index: int, score: Score) -> bool:
        """Whether it begins anew."""
        tries, failures, interrupted = held.tries.get(index, NEVER)
        interrupted = 0 if score.status in CHARGED else interrupted + (score.status == "INTERRUPTED")
        charged = score.status in CHARGED or (score.status == "INTERRUPTED" and interrupted > self.limits.max_attempts)
        failures += charged
        if score.status not in FREED:
            self.end(held, "failed")
        elif charged and failures >= self.limits.max_attempts:
            if len(held.dropped) >= held.count - held.group.n:
                self.end(held, "failed")
            else:
                self.do_without(held, index)
        else:
            held.calls.pop(index, None)
            held.tries[index] = (tries + 1, failures, interrupted)
            if score.status != "NOT_STARTED":  # nothing happened
                self.progress(held)
            return True
        return False

    def _take_in(self, held: Held, index: int, trajectory: AnyTrajectory, score: Score | None) -> None:
        if (
            score is not None
            and held.scored
            and "" not in (held.build[1], score.build)
            and held.build[1] != score.build
        ):
            held.rebuilt += 1
            if held.rebuilt > MOST_RESCORED:
                self.end(held, "failed")
            else:
                self.requeue(held, "build", counted=False)
            return
        before = held.build[0] if held.scored else -1
        piece = Piece(trajectory, len(trajectory.encode()), self.now, self.now - held.leased)
        held.pieces[index] = piece
        held.calls.pop(index, None)
        self.progress(held)
        if score is not None:
            piece.attempts, piece.token, piece.reward = 1, held.token, score.reward
            held.build = before, score.build or (held.build[1] if held.scored else "")
            self.settle(held)
        if held.state == "open" and held.generated:
            held.state = "scoring"
        if score is not None:
            self.count_scored(held.group.env_name, [(held.id, index)])
