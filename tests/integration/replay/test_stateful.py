"""Random interleavings of every operation, against what the laws say of their outcome."""

from __future__ import annotations

import asyncio
import contextlib

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.errors import Fenced
from headrace.replay import End, Lease, Limits, ReplayClient, Reservation, ScoringJob
from headrace.replay.wire import open_redis
from headrace.trajectory import Score
from tests.integration.replay.helpers import make_group, make_trajectory, nonce, refit

PROMPTS, AGE = 2, 1


class Buffer(RuleBasedStateMachine):
    """A trainer, two replicas and a scorer that stop, repeat themselves, act late, and start again at any moment."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.leases: list[Lease] = []
        self.jobs: list[ScoringJob] = []
        self.order = 0
        self.version = 0  # of the trainer's weights
        self.reserved: dict[int, tuple[str, ...]] = {}  # in the history of the surviving weights
        self.committed = 0
        self.closed = False

    @initialize()
    def open(self) -> None:
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.replay = ReplayClient(open_redis(self.url), f"stateful-{nonce()}")
        limits = Limits(PROMPTS, 2, AGE, "ordered", 2, 2, 60.0, 60.0, 60.0, 60.0, 2**30)
        self.timeline = (await self.replay.open_run(limits)).timeline
        self.replicas = [nonce(), nonce()]
        for replica in self.replicas:
            await self.replay.register(replica, {})
        await refit(self.replay, 0, self.replicas)

    @precondition(lambda self: not self.closed)
    @rule(count=st.integers(1, 3))
    def enqueue(self, count: int) -> None:
        # overlaps what was taken before: idempotent
        groups = [make_group(order) for order in range(max(0, self.order - 1), self.order + count)]
        self.order += count
        self.runner.run(self.replay.enqueue(groups, self.timeline))

    @rule(which=st.integers(0, 1), most=st.integers(1, 3))
    def lease(self, which: int, most: int) -> None:
        with contextlib.suppress(Fenced):  # not verified since the last rewind
            self.leases += self.runner.run(self.replay.lease(self.replicas[which], most))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), index=st.integers(0, 1))
    def push(self, data: st.DataObject, index: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self._late(self.replay.push(lease, make_trajectory(lease, index)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), failed=st.booleans())
    def release(self, data: st.DataObject, failed: bool) -> None:
        self._late(self.replay.release(data.draw(st.sampled_from(self.leases)), "why not", failed=failed))

    @rule(most=st.integers(1, 4))
    def take(self, most: int) -> None:
        self.jobs += self.runner.run(self.replay.take_scoring("scorer", most))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), status=st.sampled_from(["SCORED"] * 6 + ["FAILED", "INVALID"]))
    def score(self, data: st.DataObject, status: str) -> None:
        reward = 1.0 if status == "SCORED" else None
        job = data.draw(st.sampled_from(self.jobs))
        self._late(self.replay.score(job, Score(status, reward, message="no")))  # type: ignore[arg-type]

    @rule()
    def finish_everything(self) -> None:
        """Replicas and the scorer catch up, so that runs get far."""
        for lease in self.leases:
            for index in range(2):
                self._late(self.replay.push(lease, make_trajectory(lease, index)))
        self.runner.run(self.replay.release_scoring())
        for job in self.runner.run(self.replay.take_scoring("scorer", 64)):
            self._late(self.replay.score(job, Score("SCORED", 1.0)))
        self.leases, self.jobs = [], []

    @rule()
    def reserve(self) -> None:
        batch = self.runner.run(self.replay.reserve(self.version, self.timeline))
        if isinstance(batch, Reservation):
            self._check(batch)
            assert self.runner.run(self.replay.reserve(self.version, self.timeline)) == batch
            self.reserved[self.version] = batch.groups
            self.version += 1
        elif isinstance(batch, End):
            assert self.closed

    @rule(which=st.sampled_from([(0,), (1,), (0, 1)]))
    def refit(self, which: tuple[int, ...]) -> None:
        self.runner.run(refit(self.replay, self.version, [self.replicas[i] for i in which]))

    @rule()
    def commit(self) -> None:
        self.runner.run(self.replay.commit(self.version, self.timeline))
        self.committed = self.version

    @precondition(lambda self: self.order > 6)
    @rule()
    def close(self) -> None:
        self.runner.run(self.replay.close(self.timeline))
        self.closed = True

    @rule(back=st.integers(0, 3))
    def crash_and_rewind(self, back: int) -> None:
        before = dict(self.reserved)
        self.version = max(self.committed, self.version - back)
        self.reserved = {step: ids for step, ids in self.reserved.items() if step < self.version}
        self.timeline, self.closed = nonce(), False
        for _ in range(2):
            state = self.runner.run(self.replay.rewind(self.version, self.timeline))
        self.committed = self.version
        assert (state.next_step, state.closed) == (self.version, False)
        if self.version in before:  # law 5: step c always survives whole
            batch = self.runner.run(self.replay.reserve(self.version, self.timeline))
            assert isinstance(batch, Reservation)
            assert batch.groups == before[self.version]
            self._check(batch)
            self.reserved[self.version] = batch.groups
            self.version += 1

    @invariant()
    def law_1_nothing_is_lost(self) -> None:
        counts = self.runner.run(self.replay.state()).counts if hasattr(self, "timeline") else {}
        assert sum(counts.values()) == (self.runner.run(self.replay.state()).enqueued + 1 if counts else 0)
        assert all(count >= 0 for count in counts.values())
        assert counts.get("trained", 0) == PROMPTS * self.committed
        trained = [group for ids in self.reserved.values() for group in ids]
        assert len(trained) == len(set(trained))

    def _check(self, batch: Reservation) -> None:
        """Laws 2 and 3."""
        assert len(batch.groups) == PROMPTS
        assert [(t.group_id, t.index) for t in batch.trajectories] == [(g, i) for g in batch.groups for i in range(2)]
        for trajectory in batch.trajectories:
            assert batch.step - AGE <= trajectory.oldest_version <= trajectory.newest_version <= batch.step
            assert trajectory.reward == 1.0
        self.runner.run(self.replay.read([t.key for t in batch.trajectories]))

    def _late(self, call) -> None:  # type: ignore[no-untyped-def]
        """Law 4: who acts late is refused, and that is all."""
        with contextlib.suppress(Fenced):
            self.runner.run(call)

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            stats = self.runner.run(self.replay.stats())
            if not any(stats["counts"]["train"].get(state) for state in ("open", "scoring", "ready", "reserved")):
                assert stats["bytes"] == 0
            self.runner.run(self.replay.aclose())
        self.runner.close()


def test_random_interleavings_keep_the_laws(redis_url: str) -> None:
    machine = type("BufferOnServer", (Buffer,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
