"""The flow control of `Attach`: no order of events, and no peer, has more out than the capacity; nothing of it is lost."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.base.errors import CodecError
from headrace.env.flow import Flow


class Stream(RuleBasedStateMachine):
    """A hub and a process as they should be, and what is on its way between them."""

    @initialize(capacity=st.integers(1, 9))
    def start(self, capacity: int) -> None:
        self.hub, self.process = Flow(capacity), Flow(capacity)
        self.to_process: deque[tuple[str, int]] = deque()
        self.to_hub: deque[tuple[str, int]] = deque()
        self.at_work: dict[str, int] = {}
        self.hanging = 0  # threads whose piece is answered
        self.sent = self.answered = 0
        self.grant()

    def grant(self) -> None:
        amount = self.process.room(sum(self.at_work.values()) + self.hanging)
        if amount:
            self.process.grant(amount)
            self.to_hub.append(("credit", amount))

    @precondition(lambda self: self.hub.credit)
    @rule(data=st.data())
    def hub_sends(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, self.hub.credit))
        self.sent += 1
        self.hub.send(str(self.sent), size)
        self.to_process.append((str(self.sent), size))

    @precondition(lambda self: self.to_process)
    @rule()
    def process_reads(self) -> None:
        work_id, size = self.to_process.popleft()
        self.process.send(work_id, size)
        self.at_work[work_id] = size

    @precondition(lambda self: self.at_work)
    @rule(data=st.data())
    def process_answers(self, data: st.DataObject) -> None:
        """In time, late, or because it was withdrawn."""
        work_id = data.draw(st.sampled_from(sorted(self.at_work)))
        size = self.at_work.pop(work_id)
        self.hanging += data.draw(st.integers(0, size))
        assert self.process.answer(work_id)
        self.to_hub.append((work_id, 0))
        self.grant()

    @precondition(lambda self: self.hanging)
    @rule()
    def a_thread_ends(self) -> None:
        self.hanging -= 1
        self.grant()

    @precondition(lambda self: self.to_hub)
    @rule()
    def hub_reads(self) -> None:
        what, amount = self.to_hub.popleft()
        if what == "credit":
            self.hub.grant(amount)
        else:
            assert self.hub.answer(what)
            self.answered += 1

    @invariant()
    def nobody_has_too_much(self) -> None:
        if hasattr(self, "hub"):
            for flow in (self.hub, self.process):
                assert flow.credit + flow.held <= flow.capacity
            assert sum(self.at_work.values()) + self.hanging <= self.process.capacity

    def teardown(self) -> None:
        """When all has come to rest, every piece was answered once and the hub has the whole capacity again."""
        if not hasattr(self, "hub"):
            return
        while self.to_process:
            self.process_reads()
        for work_id in list(self.at_work):
            del self.at_work[work_id]
            assert self.process.answer(work_id)
            self.to_hub.append((work_id, 0))
        self.hanging = 0
        self.grant()
        while self.to_hub:
            self.hub_reads()
        assert (self.hub.credit, self.hub.held, self.answered) == (self.hub.capacity, 0, self.sent)


TestStream = Stream.TestCase

WORK = st.sampled_from(["a", "b", "c"])
SIZE = st.integers(-2, 12)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), SIZE), st.tuples(st.just("send"), WORK, SIZE), st.tuples(st.just("answer"), WORK)
    )
)


@given(st.integers(1, 9), EVENTS)
def test_a_peer_that_breaks_the_rules_is_told_and_changes_nothing(capacity: int, events: list[tuple[str, ...]]) -> None:
    flow = Flow(capacity)
    for name, *arguments in events:
        before = flow.credit, flow.held, flow.pieces
        try:
            changed = getattr(flow, name)(*arguments) is not False
        except CodecError:
            changed = False
        assert ((flow.credit, flow.held, flow.pieces) != before) == changed
        assert 0 <= flow.credit <= flow.credit + flow.held <= capacity


def test_a_piece_returns_its_credit_once() -> None:
    flow = Flow(4)
    flow.grant(4)
    flow.send("a", 3)
    with pytest.raises(CodecError, match=r"credit of 1.*overdraft.*capacity 4"):
        flow.grant(1)
    assert (flow.answer("a"), flow.answer("a"), flow.answer("unknown")) == (True, False, False)
    flow.grant(3)
    with pytest.raises(CodecError, match="overdraft"):
        flow.grant(1)
    with pytest.raises(CodecError, match=r"'b' of 5.*overdraft"):
        flow.send("b", 5)
