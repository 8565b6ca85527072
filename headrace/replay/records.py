"""What the replay buffer's calls take and give: plain records, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.trajectory import Group, Score, Trajectory

ReplicaState = Literal["HEALTHY", "STALE", "DEAD"]
GroupState = Literal[
    "queued", "open", "scoring", "ready", "reserved", "trained", "filtered", "failed", "evaluated", "unused"
]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the run's configuration says to the state machine. Times in seconds, counted on the server's clock."""

    prompts_per_step: int
    generations_per_prompt: int
    max_age: int
    staleness_policy: str
    max_attempts: int
    max_scoring_attempts: int
    lease_s: float
    group_deadline_s: float
    scoring_deadline_s: float
    replica_dead_s: float
    max_bytes: int
    ahead_steps: int | None = None  # of `drop` and `mask`; None takes max_age
    redundant: int = 0  # trajectories started beyond n; the first n scored complete a group
    filter_equal: bool = False  # dynamic sampling: filter groups whose rewards, clamped to the next two, are all equal
    filter_components: bool = False  # with it: whose reward components are, each by itself
    reward_min: float | None = None
    reward_max: float | None = None
    max_scored_per_step: int = 0  # groups scored since the last batch past which `reserve` refuses; 0 is no limit
    retain_steps: int = 0  # newest committed steps whose payloads stay


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where the run stands.

    `timeline` and `incarnation` are nonces (random hex). `next_step` is the step the next `reserve` must name; `committed`
    the newest published checkpoint's version (-1 before the first); `enqueued` the highest `order` taken so far (-1: none).
    `refill`: prompts up to `enqueued` are missing, neither trained nor held, until the trainer has enqueued them again and said
    `refilled`. `timelines`: those the weights descend from, each with the version it began at, oldest first.
    """

    run_id: str
    timeline: str
    incarnation: str
    next_step: int
    committed: int
    enqueued: int
    closed: bool
    counts: dict[str, int]  # groups by GroupState, train lane
    refill: bool = False
    timelines: tuple[tuple[str, int], ...] = ()

    def timeline_of(self, version: int) -> str | None:
        """The timeline on which the weights of `version` > 0 were made; None if the buffer does not know it."""
        return next((timeline for timeline, start in reversed(self.timelines) if start < version), None)


@dataclasses.dataclass(frozen=True)
class Ended:
    """Train groups that ended without being trained: `failed` and `filtered` of them, `bitmap` over the orders of both (the most
    significant bit of the first byte is order 0)."""

    failed: int = 0
    filtered: int = 0
    bitmap: bytes = b""


@dataclasses.dataclass(frozen=True)
class Lease:
    """The right to generate one attempt at a group, until `expires_in_s` from now unless renewed by `heartbeat`."""

    group: Group
    token: str
    attempt: int
    ticket: int  # place in line; -1 in the validation lane
    version: int  # verified version of the replica when the lease was granted
    timeline: str
    incarnation: str
    expires_in_s: float
    count: int  # trajectories of the group, with indices from 0: the first n of them that are scored are the group
    missing: tuple[int, ...]  # indices to generate: the others are in, or can't be had
    # what another replica has sampled of those, cut off where it was saved; to be gone on from
    prefixes: Mapping[int, Trajectory] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """A membership epoch of the weight channel.

    `announced`: members are asked to acknowledge. `transfer`: the acknowledged set is final, ranks are fixed (trainer rank 0,
    `members[i]` rank i + 1) and the collective runs. `done` / `aborted`: over. `rendezvous` is opaque to the buffer: what the
    trainer tells its members (address, group id, manifest, probe), as msgpack types.
    """

    id: str
    version: int
    timeline: str
    state: Literal["announced", "transfer", "done", "aborted"]
    members: tuple[str, ...]
    acknowledged: tuple[str, ...]
    verified: tuple[str, ...]  # members whose probe agreed
    refused: dict[str, str]  # member -> why it did not complete (its own words)
    rendezvous: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Replica:
    """A registered rollout replica. `version` is the verified one, -1 if none."""

    id: str
    state: ReplicaState
    version: int
    timeline: str
    info: dict[str, Any]  # host, pid, url, device, …: for people
    leases: int
    seen_s_ago: float


@dataclasses.dataclass(frozen=True)
class HeartbeatReply:
    """`lost` are tokens of the caller that are no longer valid: abort their generations. Of these, `complete` are of groups that have
    their n trajectories. `epoch` is the newest, if any."""

    state: ReplicaState
    timeline: str
    lost: tuple[str, ...]
    epoch: Epoch | None
    complete: tuple[str, ...] = ()


# Structs, as a trajectory is: these too come by the thousand.
class ScoringJob(msgspec.Struct, frozen=True):
    group: Group
    trajectory: Trajectory
    token: str  # fences `score`, as a lease's token fences `push`
    scoring_attempt: int


class ReservedTrajectory(msgspec.Struct, frozen=True):
    """What rank 0 plans with: kilobytes, not payloads. `key` reads the payload."""

    group_id: str
    index: int
    key: str
    reward: float
    length: int
    oldest_version: int
    newest_version: int


@dataclasses.dataclass(frozen=True)
class Reservation:
    """Batch of step `step`: `P` complete groups in ticket order, n trajectories each in index order (which indices is for chance to say).

    `scored` groups got all their scores since the batch before, `filtered` of them by dynamic sampling (they are in no batch).
    """

    step: int
    groups: tuple[str, ...]
    trajectories: tuple[ReservedTrajectory, ...]
    scored: int = dataclasses.field(default=0, compare=False)
    filtered: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class Waiting:
    """`reserve` can't be served yet. `ready` of `needed` lowest tickets are ready."""

    ready: int
    needed: int


@dataclasses.dataclass(frozen=True)
class End:
    """The queue is closed and fewer than `P` groups are left; they became `unused`."""

    unused: int


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A finished validation group: trajectories in index order with their scores."""

    group: Group
    trajectories: tuple[tuple[Trajectory, Score], ...]


@dataclasses.dataclass(frozen=True)
class HeldGroup:
    """A group as the buffer holds it, for people: `step` it is kept for, reserved for or was trained at, the trajectories pushed so far
    in index order, with their scores once they have one."""

    group: Group
    state: str
    step: int | None
    reason: str
    trajectories: tuple[tuple[Trajectory, Score | None], ...]
