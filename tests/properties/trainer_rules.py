"""What a trainer does: prompts, batches, checkpoints, rewinds, validation."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from headrace.records.trajectory import Group
from headrace.replay import Ended, Reservation
from headrace.replay.base_client import WRITTEN
from tests.properties.caller import REPLICAS, Caller, deliveries, lateness, promptly
from tests.support.buffer import make_group


class TrainerRules(Caller):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[Group] = []
        self.validation: list[Group] = []
        self.saved = Ended()

    @rule(count=st.integers(1, 4), overlap=st.sampled_from([0, 0, 1, 2, -1]), late=lateness, how=promptly)
    def enqueue(self, count: int, overlap: int, late: int, how: str) -> None:
        # a trainer takes up prompts where the buffer says it stands
        first = max(0, self.model.enqueued + 1 - overlap)
        for order in range(len(self.made), first + count):
            self.made.append(make_group(order, n=self.setting.n, env_name=self.env_name(order)))
        self.call("enqueue", self.made[first : first + count], self.timeline(late), False, how=how)

    @rule(
        count=st.integers(1, 2),
        new=st.booleans(),
        version=st.sampled_from([0, 0, 0, 1, -1]),
        late=lateness,
        how=st.sampled_from(["once"] * 5 + ["again", "echo", "later"]),
    )
    def enqueue_validation(self, count: int, new: bool, version: int, late: int, how: str) -> None:
        if new or not self.validation:
            for _ in range(count):
                order = len(self.validation)
                env_name = self.env_name(order)
                self.validation.append(make_group(order, n=self.setting.n, lane="validation", env_name=env_name))
        version = max(0, self.model.validation + version)
        self.call("enqueue", self.validation[-count:], self.timeline(late), False, version, how=how)

    @precondition(lambda self: self.model.refill)
    @rule(finish=st.booleans(), how=promptly, lost=st.sampled_from([0, 0, 1, 2]))
    def refill(self, finish: bool, how: str, lost: int = 0) -> None:
        """Those that are neither in the ledger nor, the trainer hopes, in the buffer. The server lost the first of them."""
        assert self.world
        trained = {group for ids in self.world.ledger.values() for group in ids}
        missing = [g for g in self.made[: self.model.enqueued + 1] if g.id not in trained]
        missing = missing[lost:]
        timeline = self.model.timeline
        for start in range(0, len(missing), WRITTEN):  # each is one call to the server
            self.call("enqueue", missing[start : start + WRITTEN], timeline, True, how=how)
        if finish:
            self.call("end_refill", timeline, how=how)

    @precondition(lambda self: self.model.failures)
    @rule(most=st.integers(1, 4), stale=st.sampled_from([0, 0, 0, 1]), how=deliveries)
    def retry(self, most: int, stale: int, how: str) -> None:
        """`stale`: a call that speaks of another failure than the last."""
        orders = sorted(self.model.failures)[-most:]
        self.call("retry", {order: self.model.retries[order] + stale for order in orders}, how=how)

    @precondition(lambda self: self.model.wanted)
    @rule(how=deliveries)
    def supply(self, how: str) -> None:
        self.call("read_ended")
        groups = [self.made[order] for order in sorted(self.model.wanted)]
        self.call("enqueue", groups, self.model.timeline, True, how=how)

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

    @rule(
        off=st.sampled_from([0] * 6 + [1, -1, -2]),
        named=st.sampled_from(["all", "all", "none", "another", "fewer"]),
        late=lateness,
        how=deliveries,
    )
    def commit(self, off: int, named: str, late: int, how: str) -> None:
        """`named`: the groups that the trainer says it trained on."""
        if off == 0:
            self.saved = self.call("read_ended") or self.saved
        version = max(0, self.model.next_step + off)
        trained = self.model.uncommitted(version) if named != "none" else {}
        if named == "another" and trained:
            trained[max(trained)] = [*trained[max(trained)][1:], "another"]
        if named == "fewer" and trained:
            del trained[min(trained)]
        self.call("commit", version, self.timeline(late), trained, how=how)

    @rule(
        off=st.sampled_from([0] * 6 + [1, -1]),
        which=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        stale=st.sampled_from([0] * 6 + [1, -1]),
        late=lateness,
        how=deliveries,
    )
    def reject_step(self, off: int, which: list[int], stale: int, late: int, how: str) -> None:
        """The trainer finds that some groups of its newest batch break a law. `stale`: it names another attempt."""
        step = self.model.next_step - 1 + off
        batch = self.model.of_step(step, "reserved", "trained")
        if step < 0 or not batch:
            return
        chosen = [batch[place % len(batch)] for place in which]
        attempts = {held.id: max(1, held.attempt + stale) for held in chosen}
        self.call("reject_step", step, self.timeline(late), self.name(), attempts, "law 7", how=how)

    @rule(back=st.sampled_from([0, 0, 0, 1, 1, 2, 3, -1]), how=promptly)
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
            if self.model.refill:
                self.refill(True, "once")
            again = self.call("reserve", version, self.timelines[-1])
            assert isinstance(again, Reservation)
            assert again.groups == batch

    @rule(back=st.sampled_from([0, 0, 1, 2]), how=promptly)
    def restore(self, back: int, how: str) -> None:
        self.timelines.append(self.name())
        version = max(0, self.model.next_step - back)
        # a trainer knows what was retried since its checkpoint
        ended = self.saved.without(set(self.saved.failed_orders()) - self.model.failures)
        self.call("restore", version, self.timelines[-1], self.name(), self.model.enqueued, ended, how=how)

    @rule(further=st.sampled_from([0, 1, 1, 2]), late=lateness, how=deliveries)
    def drop_validation(self, further: int, late: int, how: str) -> None:
        # a trainer validates no weights that it has not made
        before = min(self.model.validation + further, self.model.next_step + 1)
        self.call("drop_validation", self.timeline(late), before, how=how)

    @rule(which=st.integers(1, 7), count=st.integers(0, 3), off=st.sampled_from([0, 0, 0, 1, -1]), how=deliveries)
    def name_validators(self, which: int, count: int, off: int, how: str) -> None:
        """For the weights of the first of them, or for others. Then the validation has groups."""
        named = [self.replica(i) for i in range(REPLICAS) if which >> i & 1]
        member = self.model.members.get(named[0])
        version = max(0, member.version + off if member else 0)
        self.call("drop_validation", self.model.timeline, version, named, how=how)
        if count:
            self.enqueue_validation(count, True, max(0, version - self.model.validation), 0, "once")

    @precondition(lambda self: self.validation)
    @rule(count=st.integers(1, 3))
    def look_at_validation(self, count: int) -> None:
        self.call("read_evaluated", [group.id for group in self.validation[-count:]])
