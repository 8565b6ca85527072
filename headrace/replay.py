"""Async client of the replay buffer: each method is one call of a server-side function (`services/replay/functions/`).

The buffer's state machine and its seven laws live in Redis, so whoever calls gets the same answer; this module encodes
arguments, decodes replies and turns refusals into the types of `headrace.errors`. Payloads are values of their own, written
before the function that makes them visible: a function moves ids, never megabytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

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


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where the run stands.

    `timeline` and `incarnation` are nonces (random hex). `next_step` is the step the next `reserve` must name; `committed`
    the newest published checkpoint's version (-1 before the first); `enqueued` the highest `order` taken so far (-1: none).
    """

    run_id: str
    timeline: str
    incarnation: str
    next_step: int
    committed: int
    enqueued: int
    closed: bool
    counts: dict[str, int]  # groups by GroupState, train lane


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
    """`lost` are tokens of the caller that are no longer valid: abort their generations. `epoch` is the newest, if any."""

    state: ReplicaState
    timeline: str
    lost: tuple[str, ...]
    epoch: Epoch | None


@dataclasses.dataclass(frozen=True)
class ScoringJob:
    group: Group
    trajectory: Trajectory
    token: str  # fences `score`, as a lease's token fences `push`
    scoring_attempt: int


@dataclasses.dataclass(frozen=True)
class ReservedTrajectory:
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
    """Batch of step `step`: `P` complete groups in ticket order, n trajectories each in index order."""

    step: int
    groups: tuple[str, ...]
    trajectories: tuple[ReservedTrajectory, ...]


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


class ReplayClient:
    """One connection pool to the buffer of one run. Safe for concurrent use by tasks of one event loop.

    Every method raises `ReplayUnavailable` when the server can't be reached (after redis-py's own retries), `InvalidCall` on
    arguments no correct caller sends, and the `Fenced` family (law 4) where stated.
    """

    @classmethod
    async def connect(cls, url: str, run_id: str | None = None, timeout_s: float = 30.0) -> ReplayClient:
        """Connect, waiting up to `timeout_s` for server, function library and run. `run_id` None takes the server's current run.

        Raises `ReplayUnavailable` with the remedy: unreachable, older than 7.0, no such run.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError

    # -- the run ---------------------------------------------------------------------------------------------------------

    async def open_run(self, limits: Limits) -> RunState:
        """Make the run if it is not there, else give it these limits. Called by the replay service; makes it the current run."""
        raise NotImplementedError

    async def state(self) -> RunState:
        raise NotImplementedError

    async def stats(self) -> dict[str, Any]:
        """Everything people look at: RunState fields, counts by lane and state, refusals by code, bytes, ages, replicas, scoring line."""
        raise NotImplementedError

    # -- the trainer -----------------------------------------------------------------------------------------------------

    async def rewind(self, version: int, timeline: str) -> RunState:
        """The trainer goes on from checkpoint `version` on the new `timeline` (a nonce of the caller: a repeat is a no-op).

        Commits reserved steps < version, reopens steps >= version for `reserve` unchanged where all trajectories survive, voids
        all leases, drops the validation lane, discards every trajectory with a token newer than `version`, marks every replica STALE.
        """
        raise NotImplementedError

    async def restore(self, version: int, timeline: str, incarnation: str, enqueued: int) -> RunState:
        """The store lost writes: install a new incarnation that knows of nothing but checkpoint `version`, and of the prompts up to
        order `enqueued` as already taken. The caller enqueues again (with `refill`) those among them that its ledger does not hold.
        """
        raise NotImplementedError

    async def enqueue(self, groups: Sequence[Group], timeline: str, refill: bool = False) -> int:
        """Append to the queue of each group's lane; returns how many were new. A group at or below `enqueued` order, or known
        by id, is not new (idempotent). `refill` takes groups at or below `enqueued` that are not known by id."""
        raise NotImplementedError

    async def close(self, timeline: str) -> None:
        """No more training prompts will come (idempotent); a rewind opens the queue again."""
        raise NotImplementedError

    async def reserve(self, step: int, timeline: str) -> Reservation | Waiting | End:
        """Laws 2, 3 and 5: the batch of `step`, which must be `next_step` (repeating the last reserve gives the same batch).

        Raises `WrongStep`, `WrongTimeline`.
        """
        raise NotImplementedError

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when something that `reserve` waits for may have changed, or after `timeout_s`."""
        raise NotImplementedError

    async def read(self, keys: Sequence[str]) -> list[tuple[Trajectory, Score]]:
        """Payloads and scores of reserved trajectories, in the order of `keys` (`ReservedTrajectory.key`)."""
        raise NotImplementedError

    async def read_groups(self, ids: Sequence[str]) -> list[Group]:
        raise NotImplementedError

    async def commit(self, version: int, timeline: str) -> None:
        """Checkpoint `version` is published: steps < version are trained for good and their payloads freed (idempotent)."""
        raise NotImplementedError

    async def evaluated(self, ids: Sequence[str]) -> tuple[list[Evaluated], dict[str, str], int]:
        """Of these validation groups: (those evaluated, reasons of those failed, number still pending)."""
        raise NotImplementedError

    async def drop_validation(self, timeline: str) -> None:
        """Forget every group of the validation lane, leased or not, with its payloads."""
        raise NotImplementedError

    # -- rollout replicas ------------------------------------------------------------------------------------------------

    async def register(self, replica: str, info: Mapping[str, Any]) -> None:
        """Enter the fleet as STALE. `replica` is a nonce made at process start: a restarted replica is a new one."""
        raise NotImplementedError

    async def deregister(self, replica: str) -> None:
        """Leave the fleet; leases still held are requeued at once, without costing an attempt."""
        raise NotImplementedError

    async def heartbeat(self, replica: str, tokens: Sequence[str]) -> HeartbeatReply:
        """Renew the replica and these leases (never past a group's absolute deadline, law 6). A DEAD or unknown replica is told so."""
        raise NotImplementedError

    async def wait_work(self, timeout_s: float) -> None:
        """Return when a lease may be had or an epoch changed, or after `timeout_s`."""
        raise NotImplementedError

    async def lease(self, replica: str, max_groups: int) -> list[Lease]:
        """Up to `max_groups` groups: validation first, then training prompts as admission allows. Empty: wait.

        Raises `NotVerified` unless the replica is HEALTHY.
        """
        raise NotImplementedError

    async def push(self, lease: Lease, trajectory: Trajectory) -> None:
        """Hand in one finished trajectory (law 3: index not yet pushed, 0 <= index < n). Pushing the same index again under the same
        token is a no-op. Raises `LeaseLost`, `WrongTimeline`, `InvalidCall`; a refused push leaves nothing behind."""
        raise NotImplementedError

    async def release(self, lease: Lease, reason: str, *, failed: bool) -> None:
        """Give the group back: `failed` counts an attempt (after `max_attempts` the group ends as failed with `reason`),
        otherwise (shutdown, refit) it does not."""
        raise NotImplementedError

    async def reject(self, lease: Lease, reason: str) -> None:
        """The group can never succeed (prompt longer than the context, …): it ends as failed with `reason`, without further attempts."""
        raise NotImplementedError

    # -- scoring ---------------------------------------------------------------------------------------------------------

    async def take_scoring(self, scorer: str, max_trajectories: int) -> list[ScoringJob]:
        """Pushed trajectories waiting for a score, oldest first, until `scoring_deadline_s` from now."""
        raise NotImplementedError

    async def wait_scoring(self, timeout_s: float) -> None:
        raise NotImplementedError

    async def score(self, job: ScoringJob, score: Score) -> None:
        """Write a score back. `SCORED` counts towards the group's completeness. Law 7: `FAILED` and `TIMED_OUT` are tried again up to
        `max_scoring_attempts` and then fail the group with the message; `INVALID` fails it at once."""
        raise NotImplementedError

    # -- the weight channel ----------------------------------------------------------------------------------------------

    async def replicas(self) -> list[Replica]:
        raise NotImplementedError

    async def open_epoch(self, epoch: str, version: int, timeline: str, rendezvous: Mapping[str, Any]) -> Epoch:
        """Announce epoch `epoch` (a nonce) to every replica that is not DEAD; ends any epoch before it. Raises `WrongTimeline`."""
        raise NotImplementedError

    async def acknowledge(self, replica: str, epoch: str) -> None:
        """The replica is able to take part. Raises `Fenced` if the epoch is no longer announced."""
        raise NotImplementedError

    async def begin_epoch(self, epoch: str, rendezvous: Mapping[str, Any]) -> Epoch:
        """announced -> transfer with the members that acknowledged; replicas left out become STALE."""
        raise NotImplementedError

    async def verify(self, replica: str, epoch: str, difference: float, tolerance: float) -> bool:
        """The only way to HEALTHY: the probe's largest |log-probability difference| under the epoch's weights, in nats.
        False (and STALE, with the figure as reason) unless difference <= tolerance."""
        raise NotImplementedError

    async def refuse(self, replica: str, epoch: str, reason: str) -> None:
        """The replica could not complete the epoch: it is STALE, for this reason."""
        raise NotImplementedError

    async def end_epoch(self, epoch: str, *, aborted: bool) -> Epoch:
        """transfer -> done or aborted. Members that did not verify are STALE."""
        raise NotImplementedError

    async def epoch(self) -> Epoch | None:
        """The newest epoch."""
        raise NotImplementedError

    async def wait_epoch(self, timeout_s: float) -> None:
        """Return when an acknowledgement, a verification or a membership may have changed, or after `timeout_s`."""
        raise NotImplementedError

    # -- for people ------------------------------------------------------------------------------------------------------

    async def publish_metrics(
        self, kind: Literal["train", "validation"], step: int, metrics: Mapping[str, float]
    ) -> None:
        """Append a step's metrics to the run's metric stream, which live views follow."""
        raise NotImplementedError

    async def metrics(self, after: str = "0", count: int = 1000) -> list[tuple[str, str, int, dict[str, float]]]:
        """Entries after id `after`: (id, kind, step, metrics)."""
        raise NotImplementedError
