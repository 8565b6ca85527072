"""Everyone who calls the buffer, doing anything at any moment: a trainer, replicas, scorers, and the network between.

Numbers that choose among what there is count from the newest, so that a shrunk example speaks of the newest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.errors import HeadraceError
from headrace.replay import End, Ended, Lease, Limits, Reservation, ScoringJob
from headrace.replay.trainer import worst_case_bytes
from headrace.trajectory import Group, Score, Trajectory
from tests.integration.replay.helpers import make_group, make_trajectory
from tests.properties.world import World

REPLICAS = 3
LEASE_S, SCORING_S, DEADLINE_S, DEAD_S = 10.0, 15.0, 25.0, 20.0
PROMPT_TOKENS, NEW_TOKENS = 4, 16  # of `make_group`

some = st.integers(0, 3)
# Of ten calls: seven arrive once, one twice, one twice on the wire (its first reply is lost), one later.
deliveries = st.sampled_from(["once"] * 7 + ["again", "echo", "later"])
promptly = st.sampled_from(["once"] * 5 + ["again", "echo"])
# Most calls are of the present; some of a trainer that does not know that it was replaced.
lateness = st.sampled_from([0] * 8 + [1, 2])
rewards = st.sampled_from([1.0, 0.0, 0.5, 2.0, -1.0])


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run is configured with. `room`: groups whose worst case fits into memory; 0 is no bound that matters."""

    policy: str = "ordered"
    prompts: int = 2
    n: int = 2
    age: int = 1
    ahead: int = 1
    attempts: int = 2
    scoring_attempts: int = 2
    room: int = 0
    retain: int = 0
    filter: bool = False
    max_scored: int = 0
    redundant: int = 0

    def limits(self) -> Limits:
        worst = worst_case_bytes(self.n + self.redundant, PROMPT_TOKENS, NEW_TOKENS)
        return Limits(
            prompts_per_step=self.prompts,
            generations_per_prompt=self.n,
            max_age=self.age,
            staleness_policy=self.policy,
            max_attempts=self.attempts,
            max_scoring_attempts=self.scoring_attempts,
            lease_s=LEASE_S,
            group_deadline_s=DEADLINE_S,
            scoring_deadline_s=SCORING_S,
            replica_dead_s=DEAD_S,
            max_bytes=worst * self.room if self.room else 2**40,
            ahead_steps=self.age + self.ahead,
            redundant=self.redundant,
            filter_equal=self.filter,
            reward_min=0.0,
            reward_max=1.0,
            max_scored_per_step=self.max_scored,
            retain_steps=self.retain,
        )


settings_of_runs = st.builds(
    Setting,
    policy=st.sampled_from(["ordered", "drop", "mask"]),
    prompts=st.integers(1, 3),
    n=st.integers(1, 3),
    age=st.integers(0, 2),
    ahead=st.integers(0, 2),
    attempts=st.integers(1, 3),
    scoring_attempts=st.integers(1, 3),
    room=st.sampled_from([0, 0, 0, 1, 2, 4]),
    retain=st.integers(0, 2),
    filter=st.booleans(),
    max_scored=st.sampled_from([0, 0, 2, 4]),
    redundant=st.sampled_from([0, 0, 1, 2]),
)


class Everyone(RuleBasedStateMachine):
    url: str
    runs = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.names = itertools.count()
        self.made: list[Group] = []
        self.validation: list[Group] = []
        self.leases: list[Lease] = []
        self.jobs: list[ScoringJob] = []
        self.epochs: list[str] = []
        self.pushed: list[tuple[Lease, Trajectory]] = []
        self.held_back: list[tuple[Any, ...]] = []
        self.saved = Ended()
        self.world: World | None = None
        self.broken = False

    @initialize(setting=settings_of_runs)
    def open(self, setting: Setting) -> None:
        self.setting = setting
        self.world = World(self.url, f"run-{next(self.runs)}-{self.name()}")
        self.run(self.world.open(setting.limits()))
        self.timelines = [self.model.timeline]
        self.refit([0, 1])

    # -- how calls are made

    def run(self, call: Any) -> Any:
        try:
            return self.runner.run(call)
        except BaseException:
            self.broken = True
            raise

    @property
    def model(self) -> Any:
        assert self.world
        return self.world.model

    @property
    def calls(self) -> int:
        """Made so far."""
        return self.world.calls if self.world else 0

    def name(self) -> str:
        return f"{next(self.names):06x}"

    def call(self, name: str, *args: Any, how: str = "once") -> Any:
        """Deliver a call; None if it is held back for later, or refused."""
        assert self.world
        if how == "later":
            self.held_back.append((name, *args))
            return None
        if how == "again":
            self.run(self.world.call(name, *args))
        seen = self.run(self.world.call(name, *args, echo=how == "echo"))
        return None if isinstance(seen, HeadraceError) else seen

    @precondition(lambda self: self.held_back)
    @rule(which=st.integers(0, 30))
    def what_was_held_back_arrives(self, which: int) -> None:
        self.call(*self.held_back.pop(which % len(self.held_back)))

    @precondition(lambda self: self.world and self.world.delivered)
    @rule(which=st.integers(0, 40))
    def an_earlier_call_arrives_again(self, which: int) -> None:
        assert self.world
        self.run(self.world.deliver_again(which))

    def replica(self, which: int) -> str:
        return f"replica-{which % REPLICAS}"

    def timeline(self, late: int) -> str:
        return self.timelines[-1 - late % len(self.timelines)]

    # -- the trainer

    @rule(count=st.integers(1, 4), overlap=st.sampled_from([0, 0, 1, 2, -1]), late=lateness, how=promptly)
    def enqueue(self, count: int, overlap: int, late: int, how: str) -> None:
        # a trainer takes up prompts where the buffer says it stands
        first = max(0, self.model.enqueued + 1 - overlap)
        for order in range(len(self.made), first + count):
            self.made.append(make_group(order, n=self.setting.n))
        self.call("enqueue", self.made[first : first + count], self.timeline(late), False, how=how)

    @rule(count=st.integers(1, 2), new=st.booleans(), late=lateness, how=promptly)
    def enqueue_validation(self, count: int, new: bool, late: int, how: str) -> None:
        if new or not self.validation:
            for _ in range(count):
                order = len(self.validation)
                self.validation.append(make_group(order, n=self.setting.n, lane="validation"))
        self.call("enqueue", self.validation[-count:], self.timeline(late), False, how=how)

    @precondition(lambda self: self.model.refill)
    @rule(finish=st.booleans(), how=promptly)
    def refill(self, finish: bool, how: str) -> None:
        """Those that are neither in the ledger nor, the trainer hopes, in the buffer."""
        assert self.world
        trained = {group for ids in self.world.ledger.values() for group in ids}
        missing = [g for g in self.made[: self.model.enqueued + 1] if g.id not in trained]
        timeline = self.model.timeline
        for start in range(0, len(missing), 60):
            self.call("enqueue", missing[start : start + 60], timeline, True, how=how)
        if finish:
            self.call("refilled", timeline, how=how)

    @precondition(lambda self: not self.model.refill and len(self.made) > 4)
    @rule(late=lateness, how=promptly)
    def close(self, late: int, how: str) -> None:
        self.call("close", self.timeline(late), how=how)

    @rule(
        off=st.sampled_from([0] * 8 + [-1, 1]),
        late=lateness,
        how=st.sampled_from(["once", "once", "once", "again", "later"]),
    )
    def reserve(self, off: int, late: int, how: str) -> None:
        self.call("reserve", max(0, self.model.next_step + off), self.timeline(late), how=how)

    @rule(off=st.sampled_from([0] * 6 + [1, -1, -2]), late=lateness, how=deliveries)
    def commit(self, off: int, late: int, how: str) -> None:
        if off == 0:
            self.saved = self.call("ended") or self.saved
        self.call("commit", max(0, self.model.next_step + off), self.timeline(late), how=how)

    @rule(back=st.integers(-1, 3), how=promptly)
    def rewind(self, back: int, how: str) -> None:
        assert self.world
        version = max(0, self.model.next_step - back)
        whole = [held for held in self.model.of_step(version, "reserved", "trained") if not held.evicted]
        batch = self.world.ledger.get(version)
        self.timelines.append(self.name())
        state = self.call("rewind", version, self.timelines[-1], how=how)
        if state is None:
            self.timelines.pop()
        elif batch and len(whole) == len(batch) and all(held.newest <= version for held in whole):
            # law 5: the step that follows the checkpoint is handed out unchanged
            again = self.call("reserve", version, self.timelines[-1])
            assert isinstance(again, Reservation)
            assert again.groups == batch

    @rule(back=st.integers(0, 3), how=promptly)
    def restore(self, back: int, how: str) -> None:
        self.timelines.append(self.name())
        version = max(0, self.model.next_step - back)
        self.call("restore", version, self.timelines[-1], self.name(), self.model.enqueued, self.saved, how=how)

    @rule(late=lateness, how=deliveries)
    def drop_validation(self, late: int, how: str) -> None:
        self.call("drop_validation", self.timeline(late), how=how)

    @precondition(lambda self: self.validation)
    @rule(count=st.integers(1, 3))
    def look_at_validation(self, count: int) -> None:
        self.call("evaluated", [group.id for group in self.validation[-count:]])

    # -- weights

    @rule(which=st.integers(1, 7))
    def refit_replicas(self, which: int) -> None:
        self.refit([i for i in range(REPLICAS) if which >> i & 1])

    def refit(self, which: list[int]) -> None:
        """A whole epoch at the trainer's version."""
        epoch, timeline = self.name(), self.model.timeline
        for i in which:
            if self.model.state_of(self.replica(i)) == "DEAD":
                self.call("register", self.replica(i), {})
        self.epochs.append(epoch)
        self.call("open_epoch", epoch, self.model.next_step, timeline, {})
        for i in which:
            self.call("acknowledge", self.replica(i), epoch)
        self.call("begin_epoch", epoch, {})
        for i in which:
            self.call("verify", self.replica(i), epoch, 1e-6, 1e-3)
        self.call("end_epoch", epoch, False)

    @rule(back=st.sampled_from([0, 0, 0, 1]), late=lateness, how=deliveries)
    def open_epoch(self, back: int, late: int, how: str) -> None:
        self.epochs.append(self.name())
        self.call("open_epoch", self.epochs[-1], max(0, self.model.next_step - back), self.timeline(late), {}, how=how)

    @rule(
        step=st.sampled_from(["acknowledge", "begin", "verify", "mismatch", "refuse", "done", "aborted"]),
        which=some,
        old=lateness,
        how=deliveries,
    )
    def go_on_with_epoch(self, step: str, which: int, old: int, how: str) -> None:
        epoch, replica = self.epochs[-1 - old % len(self.epochs)], self.replica(which)
        calls: dict[str, tuple[Any, ...]] = {
            "acknowledge": ("acknowledge", replica, epoch),
            "begin": ("begin_epoch", epoch, {}),
            "verify": ("verify", replica, epoch, 1e-6, 1e-3),
            "mismatch": ("verify", replica, epoch, 1.0, 1e-3),
            "refuse": ("refuse", replica, epoch, "no"),
            "done": ("end_epoch", epoch, False),
            "aborted": ("end_epoch", epoch, True),
        }
        self.call(*calls[step], how=how)

    # -- replicas

    @rule(which=some, how=deliveries)
    def register(self, which: int, how: str) -> None:
        self.call("register", self.replica(which), {}, how=how)

    @rule(which=some, how=deliveries)
    def deregister(self, which: int, how: str) -> None:
        self.call("deregister", self.replica(which), how=how)

    @rule(which=some, newest=st.integers(0, 4))
    def heartbeat(self, which: int, newest: int) -> None:
        tokens = [lease.token for lease in self.leases[len(self.leases) - newest :]]
        self.call("heartbeat", self.replica(which), tokens)

    @rule()
    def all_heartbeats(self) -> None:
        for which in range(REPLICAS):
            self.call("heartbeat", self.replica(which), [lease.token for lease in self.leases[-6:]])

    @rule(which=some, most=st.integers(1, 4))
    def lease(self, which: int, most: int) -> None:
        self.leases += self.call("lease", self.replica(which), most) or []

    def trajectory(self, lease: Lease, index: int, versions: str, length: int = 4) -> Trajectory:
        """No two are of the same tokens. `versions`: of the lease; with a refit in its middle; older than they may be."""
        first = lease.version - (versions == "old")
        span = {"plain": [lease.version], "refit": [lease.version, lease.version + 1]}.get(versions, [max(0, first)])
        plain = make_trajectory(lease, index, span, length)
        tokens = np.full_like(plain.completion_token_ids, int(self.name(), 16))
        return dataclasses.replace(plain, completion_token_ids=tokens)

    @precondition(lambda self: self.leases)
    @rule(
        which=st.integers(0, 6),
        index=st.sampled_from([0, 0, 1, 1, 2, 3]),
        versions=st.sampled_from(["plain"] * 4 + ["refit", "old"]),
        how=deliveries,
    )
    def push(self, which: int, index: int, versions: str, how: str) -> None:
        lease = self.leases[-1 - which % len(self.leases)]
        self.pushed.append((lease, self.trajectory(lease, index, versions)))
        self.call("push_many", [self.pushed[-1]], how=how)

    @precondition(lambda self: self.leases)
    @rule(
        count=st.integers(1, 4),
        skip=st.integers(0, 2),
        versions=st.sampled_from(["plain", "plain", "refit"]),
        how=deliveries,
    )
    def push_whole_groups(self, count: int, skip: int, versions: str, how: str) -> None:
        items = [
            (lease, self.trajectory(lease, index, versions))
            for lease in self.leases[-count:]
            for index in range(skip if count == 1 else 0, lease.count)
        ]
        self.call("push_many", items, how=how)

    @precondition(lambda self: self.leases)
    @rule(
        which=st.integers(0, 6),
        why=st.sampled_from(["returned", "failed", "returned", "failed", "rejected"]),
        how=deliveries,
    )
    def give_back(self, which: int, why: str, how: str) -> None:
        lease = self.leases[-1 - which % len(self.leases)]
        if why == "rejected":
            self.call("reject", lease, "too long", how=how)
        else:
            self.call("release", lease, "why not", why == "failed", how=how)

    @precondition(lambda self: self.leases)
    @rule(
        newest=st.integers(1, 2),
        length=st.integers(1, 3),
        versions=st.sampled_from(["plain", "plain", "refit", "old"]),
        how=deliveries,
    )
    def save(self, newest: int, length: int, versions: str, how: str) -> None:
        """What replicas have begun."""
        items = [
            (lease, self.trajectory(lease, index, versions, length))
            for lease in self.leases[-newest:]
            for index in range(lease.count)
        ]
        self.call("save_many", items, how=how)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 6), index=some, how=deliveries)
    def abandon(self, which: int, index: int, how: str) -> None:
        self.call("abandon", self.leases[-1 - which % len(self.leases)], index, "no", how=how)

    # -- scorers

    @rule(most=st.sampled_from([1, 2, 3, 8]))
    def take_scoring(self, most: int) -> None:
        self.jobs += self.call("take_scoring", "scorer", most) or []

    @precondition(lambda self: self.jobs)
    @rule(
        newest=st.integers(1, 6),
        status=st.sampled_from(["SCORED"] * 5 + ["FAILED", "TIMED_OUT", "INVALID"]),
        reward=rewards,
        how=deliveries,
    )
    def score(self, newest: int, status: str, reward: float, how: str) -> None:
        """One of the newest, unless it is a reward: then a few."""
        jobs = self.jobs[-newest:] if status == "SCORED" else [self.jobs[-1 - newest % len(self.jobs)]]
        self.call("score_many", [(job, self.score_of(job, status, reward)) for job in jobs], how=how)

    def score_of(self, job: ScoringJob, status: str, reward: float) -> Score:
        if status == "SCORED":
            return Score("SCORED", reward)
        return Score(status, message="no")  # type: ignore[arg-type]

    @rule(how=deliveries)
    def release_scoring(self, how: str) -> None:
        self.call("release_scoring", how=how)

    @rule(differ=st.booleans())
    def finish_everything(self, differ: bool) -> None:
        """Replicas and scorers catch up, so that runs get far."""
        open_tokens = {held.token for held in self.model.groups.values() if held.state == "open"}
        items = [
            (lease, self.trajectory(lease, index, "plain"))
            for lease in self.leases
            if lease.token in open_tokens
            for index in range(lease.count)
        ]
        if items:
            self.call("push_many", items)
        self.call("release_scoring")
        while jobs := self.call("take_scoring", "scorer", 64):
            scores = [Score("SCORED", float(job.trajectory.index if differ else 1)) for job in jobs]
            self.call("score_many", list(zip(jobs, scores, strict=True)))

    @rule(
        groups=st.integers(1, 4),
        versions=st.sampled_from(["plain", "plain", "refit", "old"]),
        differ=st.sampled_from([True, True, False]),
        until=st.sampled_from(["leased", "pushed", "taken", "scored", "trained", "trained", "trained"]),
    )
    def a_round(self, groups: int, versions: str, differ: bool, until: str) -> None:
        """What the pipeline does when nothing goes wrong, as far as it comes."""
        if not self.model.closed:
            self.enqueue(groups, 0, 0, "once")
        if (
            not self.model.healthy(self.replica(0))
            or self.model.members[self.replica(0)].version < self.model.next_step
        ):
            self.refit([0])
        leases = self.call("lease", self.replica(0), 8) or []
        self.leases += leases
        items = [(lease, self.trajectory(lease, index, versions)) for lease in leases for index in lease.missing]
        if items and until != "leased":
            self.call("push_many", items)
        if until == "taken":
            self.take_scoring(8)
        if until in ("scored", "trained"):
            self.finish_everything(differ)
        if until == "trained":
            self.call("reserve", self.model.next_step, self.model.timeline)

    # -- time, and the service

    @rule(what=st.sampled_from(["a little", "just before the next", "the next", "a lease", "a deadline", "all"]))
    def time_passes(self, what: str) -> None:
        assert self.world
        due = self.model.next_due() or self.model.now + 1000
        to_next = due - self.model.now
        steps = {"a little": 700, "just before the next": to_next - 1, "the next": to_next, "a lease": 10_000}
        self.run(self.world.pass_time(steps.get(what, 25_000 if what == "a deadline" else 60_000)))

    @rule(room=st.sampled_from([0, 1, 3]), attempts=st.integers(1, 3), retain=st.integers(0, 2))
    def the_service_starts_again(self, room: int, attempts: int, retain: int) -> None:
        assert self.world
        changed = dataclasses.replace(self.setting, room=room, attempts=attempts, retain=retain)
        self.run(self.world.limit(changed.limits()))

    # -- the end

    def teardown(self) -> None:
        try:
            if self.world and not self.broken:
                self.drain()
        finally:
            if self.world:
                self.run(self.world.client.aclose())
            self.runner.close()

    def drain(self) -> None:
        """Everything is handed in, trained and committed: then every group has ended once, and no byte is left (law 1)."""
        assert self.world
        model = self.model
        self.run(self.world.compare_all())
        if model.closed:
            self.timelines.append(self.name())
            self.call("rewind", model.next_step, self.timelines[-1])
        self.run(self.world.limit(dataclasses.replace(self.setting, room=0, retain=0, max_scored=0).limits()))
        if model.refill:
            self.refill(True, "once")
        self.call("close", model.timeline)
        for _ in range(400):
            self.refit([0])
            self.finish_everything(True)
            while leases := self.call("lease", self.replica(0), 8):
                self.leases += leases
                self.finish_everything(True)
            if isinstance(self.call("reserve", model.next_step, model.timeline), End):
                break
        else:
            raise AssertionError("the run does not come to its end")
        self.call("commit", model.next_step, model.timeline)
        self.call("drop_validation", model.timeline)
        self.run(self.world.compare_all())
        counts = model.count("train")
        assert set(counts) <= {"trained", "filtered", "failed", "unused"}
        assert sum(counts.values()) == model.enqueued + 1
        assert model.bytes == 0
