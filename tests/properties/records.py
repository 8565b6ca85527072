"""What the model remembers of a group, a trajectory, a replica and an epoch."""

from __future__ import annotations

import collections
import dataclasses

from headrace.records.trajectory import AnyTrajectory, Call, Group, Trajectory
from headrace.replay import Lease

# A group takes part in admission (the `O` of the design) in these states.
IN_FLIGHT = ("open", "scoring", "ready")
# A trajectory that is held at all is held in these.
HOLDING = ("scoring", "ready", "reserved", "trained", "evaluated")


# Of a group that waits for a holder: later than any time.
NEVER = 1 << 60


@dataclasses.dataclass
class Piece:
    """A pushed trajectory. It waits and may be taken from `since` on, is with a scorer until `deadline`, or has its `reward`."""

    trajectory: AnyTrajectory
    size: int  # bytes
    since: int
    latency: int  # from lease to push
    attempts: int = 0
    alone: bool = False  # its environment died with it
    taken_as: int = 0  # the event of its newest take
    failed_at: int | None = None  # the event when it first failed, or was first INVALID
    was_invalid: bool = False
    token: str | None = None
    deadline: int = 0
    reward: float | None = None

    @property
    def waits(self) -> bool:
        return self.token is None and self.reward is None

    @property
    def taken(self) -> bool:
        return self.token is not None and self.reward is None

    def overdue(self, now: int) -> bool:
        return self.taken and self.deadline <= now

    @property
    def oldest(self) -> int:
        return self.trajectory.oldest_version


@dataclasses.dataclass
class Held:
    """A group that the buffer knows."""

    group: Group
    worst: int  # bytes that one of its trajectories may take
    validation: int = 0  # the version that it evaluates
    # who leases it: `episodes` runners, `validators` the replicas that validate; None: any replica
    kind: str | None = None
    passed: bool = (
        False  # queued, but with its place in line and its bytes: groups of the other kind behind it were leased
    )
    count: int = 0  # trajectories started under its newest lease
    dropped: set[int] = dataclasses.field(default_factory=set)  # those of them that failed for good
    surplus: bool = False  # complete without some that may still be generated
    state: str = "queued"
    attempt: int = 0
    failures: int = 0
    ticket: float | None = None  # its place in line, by the model's own numbers
    number: int = -1  # what the buffer calls it
    token: str | None = None
    replica: str = ""  # or `runner <id>`
    version: int = 0  # the oldest weights that its lease allows
    leased: int = 0
    lease_end: int = 0
    deadline: int = 0
    moved: int = 0  # when it progressed last
    progress: int = 0  # the highest that its holder has reported under this lease
    cohort: int | None = None  # its replica died: with how many at most, itself included, it is leased again
    pieces: dict[int, Piece] = dataclasses.field(default_factory=dict)
    saved: dict[int, Trajectory] = dataclasses.field(default_factory=dict)  # what was begun of others
    calls: dict[int, list[tuple[str, Call]]] = dataclasses.field(
        default_factory=dict
    )  # of episodes, each with its nonce
    tries: dict[int, tuple[int, int, int]] = dataclasses.field(
        default_factory=dict
    )  # times that they began before, and failed
    rebuilt: int = 0  # times that it was generated again, because another build scored
    step: int | None = None  # reserved or trained for it, or kept for it by a rewind
    evicted: bool = False
    metered: bool = False  # as trained
    build: tuple[int, str] = (
        -1,
        "",
    )  # of the environment that its scores are of, and when the newest of these was taken
    rescored: int = 0  # times that another build took over

    @property
    def id(self) -> str:
        return self.group.id

    @property
    def lane(self) -> str:
        return self.group.lane

    @property
    def episodes(self) -> bool:
        return self.kind == "episodes"

    @property
    def orphaned(self) -> bool:
        """Its lease was lost, and it waits for a replica that goes on with it."""
        return self.state == "open" and self.token is None and self.cohort is None

    def overdue(self, now: int) -> bool:
        """Its lease is over, or its deadline passed, whether or not a call has looked at it since."""
        return self.state == "open" and self.lease_end <= now

    @property
    def pinned(self) -> bool:
        return self.state == "ready" and self.step is not None

    @property
    def generated(self) -> bool:
        """Nothing more will come under this lease."""
        return len(self.pieces) + len(self.dropped) == self.count

    @property
    def scored(self) -> dict[int, Piece]:
        return {index: piece for index, piece in self.pieces.items() if piece.reward is not None}

    @property
    def unscored(self) -> dict[int, Piece]:
        return {index: piece for index, piece in self.pieces.items() if piece.reward is None}

    def start_over(self) -> None:
        """Nothing of this attempt is kept."""
        self.token, self.step, self.evicted, self.surplus, self.metered = None, None, False, False, False
        self.pieces, self.dropped, self.saved, self.replica, self.cohort = {}, set(), {}, "", None
        self.calls, self.tries, self.passed = {}, {}, False
        self.rescored = 0

    @property
    def oldest(self) -> int:
        return min(piece.oldest for piece in self.pieces.values())

    @property
    def newest(self) -> int:
        return max(piece.trajectory.newest_version for piece in self.pieces.values())

    @property
    def bytes(self) -> int:
        """What it counts for in the run's memory: its worst case while leased, then what came."""
        if self.state == "open" or self.passed:
            return self.worst * self.count
        return sum(piece.size for piece in self.pieces.values()) if self.state in HOLDING else 0


@dataclasses.dataclass
class EnvironmentModel:
    """An environment: its results, and its breaker, which is open if it is `broken` (since when)."""

    results: int = 0
    works: int = 0  # of all that it scored, the newest take
    not_started: int = 0
    failing: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)  # by the number of the result
    sent_alone: tuple[str, int] | None = None
    since: int | None = None
    broken: int | None = None
    kind: str = ""
    probes: int = 0
    probe_at: int = 0
    group: str | None = None  # the newest that was leased to be the probe
    asked: int = 0  # `probes` then
    repaired: int = 0  # the event when a probe other than of a new group closed the breaker

    def close(self) -> None:
        self.broken, self.kind, self.results, self.not_started, self.probes = None, "", 0, 0, 0
        self.group, self.asked = None, 0


@dataclasses.dataclass
class Member:
    """A registered replica or runner. `due`: when it is dead for want of a heartbeat; if dead, when it is forgotten."""

    due: int
    dead: bool = False
    quarantined: bool = False
    loading: bool = False
    version: int = -1
    timeline: str = ""  # on which it was verified; '' is STALE
    pulls: bool = False  # its weights, so that no epoch is for it
    tried: int = -1  # the newest version that it pulled, and verified or refused
    leased: int = 0  # its newest `lease`, by the number of the call
    answer: list[Lease] | None = None  # to that; None if it was refused
    cohort: bool = False  # what it holds, if anything, are suspects
    waits: bool = False  # a replica that got less than it asked for
    together: int = 0  # groups that it held when it was heard of last, by a heartbeat or a lease


@dataclasses.dataclass
class Announced:
    """A membership epoch. `did`: what each member did of asked, acknowledged, verified, refused, left out. In transfer it has the trainer's
    log-probabilities of the probe, and how far others may be from them."""

    id: str
    version: int
    timeline: str
    state: str
    did: dict[str, str]
    logprobs: list[float] = dataclasses.field(default_factory=list)
    tolerance: float = 0.0


@dataclasses.dataclass
class Offered:
    """A version that replicas may pull, and what proves it."""

    version: int
    logprobs: list[float]
    tolerance: float


class Meters:
    """What was metered: at each moment how many trajectories, and of those known the values of each quantity."""

    def __init__(self) -> None:
        self.trajectories: collections.Counter[str] = collections.Counter()
        self.values: dict[tuple[str, str], list[float]] = collections.defaultdict(list)

    def add(self, moment: str, piece: Piece, step: int) -> None:
        self.trajectories[moment] += 1
        self.values[moment, "length"].append(piece.trajectory.length)
        self.values[moment, "latency"].append(piece.latency / 1000)
        self.values[moment, "age"].append(max(0, step - piece.oldest))
        if piece.reward is not None:
            self.values[moment, "reward"].append(piece.reward)
