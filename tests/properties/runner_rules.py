"""What runners do: membership, leases of episodes, calls, and how episodes end."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import numpy as np
from hypothesis.stateful import precondition, rule

from headrace.records.score import Score, Status
from headrace.records.trajectory import AnyTrajectory, Call, EpisodeTrajectory, Span
from headrace.replay import Lease
from tests.properties.caller import deliveries, new_each_time, some
from tests.properties.rollout_rules import RolloutRules, progresses
from tests.properties.scorer_rules import Said, builds, rewards
from tests.support.buffer import make_call, make_trajectory

RUNNERS = 2
ends = st.sampled_from(
    ["SCORED"] * 6 + ["graded"] + ["FAILED", "FAILED", "TIMED_OUT", "NOT_STARTED", "INTERRUPTED", "INVALID"]
)
BEGINNINGS: tuple[Status | None, ...] = (None, "FAILED", None, "INTERRUPTED", "TIMED_OUT")
builds_or_none = st.one_of(builds, st.just(""))  # of a score that a limit of the run gave
endings = st.lists(st.tuples(ends, rewards, builds_or_none), min_size=1, max_size=8)
# Bytes of a call's text: three of the last kind are more than an episode may have.
sizes = st.sampled_from([0, 0, 100, 15_000])


class RunnerRules(RolloutRules):
    def __init__(self) -> None:
        super().__init__()
        self.runners = [f"runner-{which}" for which in range(RUNNERS)]
        self.episodes: list[Lease] = []  # the leases, as each was answered last

    def runner_id(self, which: int) -> str:
        return self.runners[which % RUNNERS]

    def enter_runner(self, which: int, how: str = "once") -> None:
        """It registers; under a new name if it has left or died."""
        name = f"runner {self.runner_id(which)}"
        if name in self.model.used or (name in self.model.runners and not self.model.is_alive(name)):
            self.runners[which % RUNNERS] = f"runner-{which % RUNNERS}-{self.name()}"
        self.call("register_runner", self.runner_id(which), {}, how=how)

    def be_there(self, which: int) -> str:
        """It registers, if it has to."""
        if not self.model.is_alive(f"runner {self.runner_id(which)}"):
            self.enter_runner(which)
        return self.runner_id(which)

    def lease_some_episodes(self, which: int, slots: int, validation_slots: int = 4, how: str = "once") -> list[Lease]:
        leases: list[Lease] = self.call("lease_episodes", self.runner_id(which), slots, validation_slots, how=how) or []
        self.episodes += leases
        return leases

    def begin_episodes(self, leases: list[Lease]) -> None:
        """Their programs make a call; in some the first ends without a score, and begins anew."""
        for lease in leases:
            if lease.missing:
                first, how = lease.missing[0], BEGINNINGS[int(self.name(), 16) % len(BEGINNINGS)]
                self.call("append", lease, first, 0, self.name(), self.policy_call(lease, -1, 100))
                if how:
                    self.end_episode(lease, first, (how, 0.0, ""))
                    again = self.newest_lease(lease.token)
                    self.call("append", again, first, 0, self.name(), self.policy_call(lease, -1, 0))

    @rule(which=some, new=st.booleans(), how=deliveries)
    def register_runner(self, which: int, new: bool, how: str) -> None:
        if new:
            self.enter_runner(which, how)
        else:
            self.call("register_runner", self.runner_id(which), {}, how=how)

    @rule(which=some, died=st.booleans(), how=deliveries)
    def deregister_runner(self, which: int, died: bool, how: str) -> None:
        self.call("deregister_runner", self.runner_id(which), died, how=how)

    @rule(which=some, newest=st.integers(0, 4), progress=progresses, how=deliveries)
    def runner_heartbeat(self, which: int, newest: int, progress: int, how: str) -> None:
        tokens = [lease.token for lease in self.episodes[len(self.episodes) - newest :]]
        self.call("runner_heartbeat", self.runner_id(which), tokens, [progress] * len(tokens), how=how)

    @rule(
        which=some,
        slots=st.sampled_from([0, 1, 2, 3, 5, 8, 16]),
        validation_slots=st.sampled_from([0, 1, 2, 8]),
        how=new_each_time,
    )
    def lease_episodes(self, which: int, slots: int, validation_slots: int, how: str) -> None:
        self.lease_some_episodes(which, slots, validation_slots, how)

    @precondition(lambda self: self.episodes)
    @rule(
        which=st.integers(0, 4),
        index=some,
        off=st.sampled_from([0] * 6 + [-1, 1]),
        parent=st.sampled_from([-1, -1, 0, 1, 3]),
        size=sizes,
        newer=st.sampled_from([0, 0, 0, 1]),
        late=st.sampled_from([None, None, 0, 0, 1, 2]),
        how=deliveries,
    )
    def append(
        self, which: int, index: int, off: int, parent: int, size: int, newer: int, late: int | None, how: str
    ) -> None:
        """The next call, or another, of one of the newest episodes; by weights of this timeline, or of another."""
        lease = self.episodes[-1 - which % len(self.episodes)]
        held = self.model.groups.get(lease.group.id)
        number = max(0, len(held.calls.get(index, ()) if held else ()) + off)
        call = self.policy_call(lease, parent, size, newer)
        timeline = None if late is None else self.timeline(late)
        self.call("append", lease, index, number, self.name(), call, timeline, how=how)

    def policy_call(self, lease: Lease, parent: int, size: int, newer: int = 0) -> Call:
        answer = {"role": "assistant", "content": "a" * size + self.name()}
        return msgspec.structs.replace(make_call(parent, max(0, lease.version) + newer), answer=answer)

    @precondition(lambda self: self.episodes)
    @rule(count=st.integers(1, 2), calls=st.integers(1, 2), size=sizes)
    def programs_are_at_work(self, count: int, calls: int, size: int) -> None:
        """Each with some calls more."""
        for lease in self.episodes[-count:]:
            for index in range(lease.count):
                for _ in range(calls):
                    held = self.model.groups.get(lease.group.id)
                    number = len(held.calls.get(index, ()) if held else ())
                    call = self.policy_call(lease, number - 1, size)
                    self.call("append", lease, index, number, self.name(), call, self.model.timeline)

    @precondition(lambda self: self.episodes)
    @rule(
        which=st.integers(0, 4),
        index=some,
        end=ends,
        reward=rewards,
        build=builds_or_none,
        large=st.sampled_from([False, False, False, True]),
        calls=st.integers(1, 4),
        newer=st.sampled_from([0, 0, 0, 1, 2]),
        how=deliveries,
    )
    def finish(
        self, which: int, index: int, end: str, reward: float, build: str, large: bool, calls: int, newer: int, how: str
    ) -> None:
        lease = self.episodes[-1 - which % len(self.episodes)]
        record = self.episode(lease, index, large=large, calls=calls, newer=newer)
        self.end_episode(lease, index, (end, reward, build), record=record, how=how)

    def end_episode(
        self, lease: Lease, index: int, said: Said, *, record: AnyTrajectory | None = None, how: str = "once"
    ) -> None:
        end, reward, build = said
        trajectory = (record or self.episode(lease, index)) if end in ("SCORED", "graded") else None
        score = Score("SCORED", reward, build=build) if end == "SCORED" else Score(end, message="no")
        again = self.call("finish", lease, index, trajectory, None if end == "graded" else score, how=how)
        if again:  # the program begins anew under it; who does not know of it is refused
            self.episodes.append(again)

    def newest_lease(self, token: str) -> Lease:
        return next(lease for lease in reversed(self.episodes) if lease.token == token)

    @precondition(lambda self: self.episodes)
    @rule(which=st.integers(0, 4), why=st.sampled_from(["returned", "returned", "failed", "rejected"]), how=deliveries)
    def give_episodes_back(self, which: int, why: str, how: str) -> None:
        lease = self.episodes[-1 - which % len(self.episodes)]
        if why == "rejected":
            self.call("reject", lease, "no such task", how=how)
        else:
            self.call("release", lease, "why not", why == "failed", how=how)

    def episode(
        self, lease: Lease, index: int, *, large: bool = False, calls: int = 1, newer: int = 0
    ) -> AnyTrajectory:
        """No two are of the same tokens. `large`: more bytes than an episode may have. Of several calls, the second is not trained and of
        the oldest weights there are; `newer`: by how many versions the last is newer than the lease."""
        version, tokens = max(0, lease.version), int(self.name(), 16)
        if calls == 1:
            plain = make_trajectory(lease, index, [version])
            completion = np.full_like(plain.completion_token_ids, tokens)
            return msgspec.structs.replace(plain, completion_token_ids=completion, text="7" * (45_000 if large else 1))
        made = []
        for number in range(calls):
            parent = (
                number - 1 if number != 2 else -1 + tokens % 2
            )  # the third is a root, or another answer to the first
            last, trained = number == calls - 1, number != 1
            call = self.policy_call(lease, parent, 45_000 if large and last else 0, newer if last and trained else 0)
            made.append(call if trained else msgspec.structs.replace(call, trained=False, spans=_spans(call, 0)))
        return EpisodeTrajectory(lease.group.id, lease.attempt, index, tuple(made), False, "runner")

    def finish_episodes(self, differ: bool) -> None:
        """Those of every lease that is still held, with a reward or for a grader."""
        newest = {lease.token: lease for lease in self.episodes}
        for held in list(self.model.groups.values()):
            if held.state != "open" or not held.episodes or held.token not in newest:
                continue
            lease = newest[held.token]
            tries = {index: tries for index, (tries, *_) in held.tries.items()}
            for index in [index for index in self.model.missing(held) if held.state == "open"]:
                build = "" if index % 2 else (held.scored and held.build[1]) or "first"
                score = Score("SCORED", float(index + (not differ)), build=build)
                graded = held.group.order % 3 == 1
                known = msgspec.structs.replace(lease, tries=tries)
                self.call(
                    "finish", known, index, self.episode(lease, index, calls=1 + index % 4), None if graded else score
                )


def _spans(call: Call, version: int) -> tuple[Span, ...]:
    return (Span(version, 0, call.completion_token_ids.size),)
