"""What replicas do, and what the trainer does for them: membership, refits, leases, trajectories."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
from hypothesis.stateful import precondition, rule

from headrace.records.trajectory import Trajectory
from headrace.replay import Lease
from headrace.replay.leases import CARRIED_BYTES
from tests.properties.caller import REPLICAS, Caller, deliveries, lateness, new_each_time, some
from tests.support.buffer import make_trajectory

# What holders report of their leases: often as much as before.
progresses = st.sampled_from([0, 0, 1, 1, 2, 3])
# The trainer's log-probabilities of the probe.
PROBE = [-1.0, -2.0]


class RolloutRules(Caller):
    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[str] = []
        self.offers: list[str] = []
        self.leases: list[Lease] = []

    # -- weights

    @rule(which=st.integers(1, 7))
    def refit_replicas(self, which: int) -> None:
        self.refit([i for i in range(REPLICAS) if which >> i & 1])

    def refit(self, which: list[int]) -> None:
        """A whole epoch at the trainer's version."""
        epoch, timeline = self.name(), self.model.timeline
        for i in which:
            if not self.model.takes_part(self.replica(i)):
                self.enter(i)
        self.epochs.append(epoch)
        self.call("open_epoch", epoch, self.model.next_step, timeline, {})
        for i in which:
            self.call("acknowledge", self.replica(i), epoch)
        self.call("begin_epoch", epoch, {}, PROBE, 1e-3)
        for i in which:
            self.call("verify", self.replica(i), epoch, PROBE)
        self.call("end_epoch", epoch, False)

    @rule(back=st.sampled_from([0, 0, 0, 1]), late=lateness, how=deliveries)
    def open_epoch(self, back: int, late: int, how: str) -> None:
        self.epochs.append(self.name())
        self.call("open_epoch", self.epochs[-1], max(0, self.model.next_step - back), self.timeline(late), {}, how=how)

    @rule(
        step=st.sampled_from(["acknowledge", "begin", "verify", "mismatch", "short", "refuse", "done", "aborted"]),
        which=some,
        old=lateness,
        how=deliveries,
    )
    def go_on_with_epoch(self, step: str, which: int, old: int, how: str) -> None:
        epoch, replica = self.epochs[-1 - old % len(self.epochs)], self.replica(which)
        calls: dict[str, tuple[Any, ...]] = {
            "acknowledge": ("acknowledge", replica, epoch),
            "begin": ("begin_epoch", epoch, {}, PROBE, 1e-3),
            "verify": ("verify", replica, epoch, [-1.0, -1.9995]),
            "mismatch": ("verify", replica, epoch, [0.0, -2.0]),
            "short": ("verify", replica, epoch, PROBE[:1]),
            "refuse": ("refuse", replica, epoch, "no"),
            "done": ("end_epoch", epoch, False),
            "aborted": ("end_epoch", epoch, True),
        }
        self.call(*calls[step], how=how)

    @rule(back=st.sampled_from([0, 0, 0, 1, 2]), late=lateness, how=deliveries)
    def offer(self, back: int, late: int, how: str) -> None:
        self.offers.append(self.name())
        version = max(0, self.model.next_step - back)
        self.call("offer", self.offers[-1], version, self.timeline(late), {}, PROBE, 1e-3, 1e-3, how=how)

    @rule(which=some, new=st.booleans(), back=st.sampled_from([0, 0, 1]))
    def pull(self, which: int, new: bool, back: int) -> None:
        """A replica pulls a version; a `new` one if this one takes part in epochs."""
        if new and not self.model.pulls(self.replica(which)):
            self.replicas[which % REPLICAS] = f"replica-{which % REPLICAS}-{self.name()}"
        self.call("register_puller", self.replica(which), {})
        self.offer(back, 0, "once")
        self.call("verify", self.replica(which), self.offers[-1], PROBE)

    @precondition(lambda self: self.offers)
    @rule(step=st.sampled_from(["verify", "mismatch", "short", "refuse"]), which=some, old=lateness, how=deliveries)
    def report_what_was_pulled(self, step: str, which: int, old: int, how: str) -> None:
        offer, replica = self.offers[-1 - old % len(self.offers)], self.replica(which)
        if step == "refuse":
            self.call("refuse", replica, offer, "no", how=how)
        else:
            probe = {"verify": [-1.0, -1.9995], "mismatch": [0.0, -2.0], "short": PROBE[:1]}[step]
            self.call("verify", replica, offer, probe, how=how)

    # -- replicas

    @rule(which=some, new=st.booleans(), loading=st.booleans(), how=deliveries)
    def register(self, which: int, new: bool, loading: bool, how: str) -> None:
        if new:
            self.enter(which, how)
        else:
            self.call("register", self.replica(which), {}, loading, how=how)

    @rule(which=some, how=deliveries)
    def register_puller(self, which: int, how: str) -> None:
        self.call("register_puller", self.replica(which), {}, how=how)

    @rule(which=some, died=st.booleans(), how=deliveries)
    def deregister(self, which: int, died: bool, how: str) -> None:
        self.call("deregister", self.replica(which), died, how=how)

    @rule(which=some, late=lateness, how=deliveries)
    def quarantine(self, which: int, late: int, how: str) -> None:
        self.call("quarantine", self.replica(which), self.timeline(late), "it stands apart", how=how)

    @rule(which=some, newest=st.integers(0, 4), progress=progresses, how=deliveries)
    def heartbeat(self, which: int, newest: int, progress: int, how: str) -> None:
        tokens = [lease.token for lease in self.leases[len(self.leases) - newest :]]
        self.call("heartbeat", self.replica(which), tokens, [progress] * len(tokens), how=how)

    @rule(progress=progresses)
    def all_heartbeats(self, progress: int) -> None:
        for which in range(REPLICAS):
            tokens = [lease.token for lease in self.leases[-6:]]
            self.call("heartbeat", self.replica(which), tokens, [progress] * len(tokens))

    @rule(which=some, most=st.integers(1, 4), how=new_each_time)
    def lease(self, which: int, most: int, how: str) -> None:
        self.leases += self.call("lease", self.replica(which), most, how=how) or []

    @rule(most=st.sampled_from([2, 16]))
    def all_lease(self, most: int) -> None:
        """Who gets less than it asks for waits, and has its share of what comes later."""
        for which in range(REPLICAS):
            self.lease(which, most, "once")

    def trajectory(self, lease: Lease, index: int, versions: str, length: int = 4) -> Trajectory:
        """No two are of the same tokens, and every third is too large to travel in the call. `versions`: of the lease; with a refit in its
        middle; older than they may be."""
        first = lease.version - (versions == "old")
        span = {"plain": [lease.version], "refit": [lease.version, lease.version + 1]}.get(versions, [max(0, first)])
        plain = make_trajectory(lease, index, span, length)
        number = int(self.name(), 16)
        return msgspec.structs.replace(
            plain,
            completion_token_ids=np.full_like(plain.completion_token_ids, number),
            text="7" if number % 3 else "7" * CARRIED_BYTES,
        )

    @precondition(lambda self: self.leases)
    @rule(
        which=st.integers(0, 6),
        index=st.sampled_from([0, 0, 1, 1, 2, 3]),
        versions=st.sampled_from(["plain"] * 4 + ["refit", "old"]),
        how=deliveries,
    )
    def push(self, which: int, index: int, versions: str, how: str) -> None:
        lease = self.leases[-1 - which % len(self.leases)]
        self.call("push_many", [(lease, self.trajectory(lease, index, versions))], how=how)

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
