"""How calls reach the buffer: once, twice, late, or on behalf of a trainer that does not know that it was replaced."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from headrace.base.errors import HeadraceError
from tests.properties.setting import Setting
from tests.properties.world import World

REPLICAS = 3
ENVIRONMENTS = ("math", "code")

some = st.integers(0, 3)
# Of ten calls: seven arrive once, one twice, one twice on the wire (its first reply is lost), one later.
deliveries = st.sampled_from(["once"] * 7 + ["again", "echo", "later"])
promptly = st.sampled_from(["once"] * 5 + ["again", "echo"])
# A call that makes something new each time it comes.
new_each_time = st.sampled_from(["once"] * 6 + ["echo"])
# Most calls are of the present; some of a trainer that does not know that it was replaced.
lateness = st.sampled_from([0] * 8 + [1, 2])


class Caller(RuleBasedStateMachine):
    url: str
    runs = itertools.count()
    found: Callable[[str], object] = staticmethod(
        lambda _: None
    )  # is told each failure at once: it may take minutes to shrink

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.names = itertools.count()
        self.replicas = [f"replica-{which}" for which in range(REPLICAS)]
        self.held_back: list[tuple[Any, ...]] = []
        self.timelines: list[str] = []
        self.world: World | None = None
        self.broken = False

    def begin(self, setting: Setting) -> None:
        self.setting = setting
        self.world = World(self.url, f"run-{next(self.runs)}-{self.name()}")
        self.run(self.world.open(setting.limits()))
        self.timelines.append(self.model.timeline)

    def run(self, call: Any) -> Any:
        try:
            return self.runner.run(call)
        except BaseException:
            self.broken = True
            self.found(traceback.format_exc())
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

    def env_name(self, order: int) -> str:
        return ENVIRONMENTS[order % self.setting.environments]

    @property
    def all_environments(self) -> tuple[str, ...]:
        return ENVIRONMENTS[: self.setting.environments]

    def replica(self, which: int) -> str:
        return self.replicas[which % REPLICAS]

    def enter(self, which: int, how: str = "once") -> None:
        """The replica registers; under a new name if it has left or died, or is quarantined."""
        name = self.replica(which)
        if name in self.model.used or (name in self.model.members and not self.model.takes_part(name)):
            self.replicas[which % REPLICAS] = f"replica-{which % REPLICAS}-{self.name()}"
        self.call("register", self.replica(which), {}, how=how)

    def timeline(self, late: int) -> str:
        return self.timelines[-1 - late % len(self.timelines)]

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

    @rule(what=st.sampled_from(["a little", "just before the next", "the next", "a lease", "a deadline", "all"]))
    def time_passes(self, what: str) -> None:
        assert self.world
        due = self.model.next_due() or self.model.now + 1000
        to_next = due - self.model.now
        steps = {"a little": 700, "just before the next": to_next - 1, "the next": to_next, "a lease": 10_000}
        self.run(self.world.pass_time(steps.get(what, 25_000 if what == "a deadline" else 60_000)))

    @rule(by=st.sampled_from([-600_000, 600_000, -3_000, 5_100, -1, 3_600_000]))
    def the_servers_clock_jumps(self, by: int) -> None:
        """Another server with another clock takes over, somebody sets it, or the server was frozen."""
        assert self.world
        self.run(self.world.jump(by))

    @rule(
        room=st.sampled_from([-1, 100, 1000, None]), refused=st.sampled_from([0, 50, 500, 40_000]), sheds=st.booleans()
    )
    def memory_is_short(self, room: int | None, refused: int, sheds: bool) -> None:
        """A client reports that it was refused; the replay service looks."""
        assert self.world
        self.run(self.world.has_room(room))
        self.call("make_room", refused, sheds)

    @rule(room=st.sampled_from([0, 1, 3]), attempts=st.integers(1, 3), retain=st.integers(0, 2))
    def the_service_starts_again(self, room: int, attempts: int, retain: int) -> None:
        assert self.world
        changed = dataclasses.replace(self.setting, room=room, attempts=attempts, retain=retain)
        self.run(self.world.limit(changed.limits()))
