"""The records of the replay buffer's calls: plain data, no I/O.

The buffer's functions answer with msgpack maps of these fields (`services/replay/functions/`), so most records are decoded directly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.base.errors import CodecError
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Group, Trajectory

ReplicaState = Literal["HEALTHY", "STALE", "LOADING", "DEAD", "QUARANTINED"]


# The next two are dataclasses, because they are configuration and not replies.
@dataclasses.dataclass(frozen=True)
class EnvironmentLimits:
    """The limits of an environment: its breaker opens at this `failure_share` of its last results, and the run then waits for it this long.
    `episodes` is the kind of its groups."""

    failure_share: float = 0.5
    give_up_after_s: float | None = None
    episodes: bool = False  # runners lease its groups, not replicas


@dataclasses.dataclass(frozen=True)
class Limits:
    """The run's settings for the state machine. Times are in seconds on the server's clock.

    The functions take each under its own name, except those of dynamic sampling (`arguments`). The Lua file that enforces it declares it
    there (`limit` in _run.lua). A limit with the name of a key of `replay` has that key's value.
    """

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
    ahead_steps: int | None = None  # for `drop` and `mask`; None means max_age
    redundant: int = 0  # trajectories started beyond n; the first n scored complete a group
    # dynamic sampling: groups whose rewards, clamped to the bounds, are all equal are filtered; or those whose reward components are all
    # equal, each component on its own
    filter_equal: bool = False
    filter_components: bool = False  # needs filter_equal
    reward_min: float | None = None
    reward_max: float | None = None
    max_scored_per_step: int = 0  # groups scored since the last batch beyond which `reserve` refuses; 0 is no limit
    retain_steps: int = 0  # newest committed steps whose payloads are kept
    # the most bytes of the appended calls, and of the record; a lease of n episodes counts 2 n times as many
    max_episode_bytes: int = 4 << 20
    # by name; others have the defaults
    environments: Mapping[str, EnvironmentLimits] = dataclasses.field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Return the limits as `open_run` takes them: by their names, with times in milliseconds. Those of dynamic sampling are one."""
        values = {**vars(self), "filter": self._filter()}
        for name in ("filter_equal", "filter_components", "reward_min", "reward_max"):
            del values[name]
        values["ahead_steps"] = self.max_age if self.ahead_steps is None else self.ahead_steps
        values["environments"] = {
            name: {
                "failure_share": float(env.failure_share),
                "episodes": env.episodes,
                "give_up_ms": None if env.give_up_after_s is None else _milliseconds(env.give_up_after_s),
            }
            for name, env in self.environments.items()
        }
        times = {name: _milliseconds(values.pop(name)) for name in [*values] if name.endswith("_s")}
        return values | {f"{name.removesuffix('_s')}_ms": time for name, time in times.items()}

    def _filter(self) -> str:
        """Return what the functions filter by (_filter.lua)."""
        if not self.filter_equal:
            return ""
        low = -math.inf if self.reward_min is None else self.reward_min
        high = math.inf if self.reward_max is None else self.reward_max
        return f"{low} {high}{' components' if self.filter_components else ''}"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


class RunState(msgspec.Struct, frozen=True):
    """The state of the run.

    `timeline` and `incarnation` are nonces (random hex). `next_step` is the step that the next `reserve` must name; `committed` the newest
    published checkpoint's version (-1 before the first); `enqueued` the highest `order` taken so far (-1: none). `refill`: prompts up to
    `enqueued` are missing (neither trained nor held) until the trainer has enqueued them again and called `refilled`. `wanted`: the number
    of prompts that the trainer must enqueue again because their failed groups are retried. `timelines`: those that the weights descend
    from, each with the version it began at, oldest first. `episodes`: the number of groups that wait for a runner to lease them;
    `alive_runners`: the number of live runners. `validation`: the version whose validation groups it holds, -1 if none.
    """

    run_id: str
    timeline: str
    incarnation: str
    next_step: int
    committed: int
    enqueued: int
    closed: bool
    counts: dict[str, int] = {}  # groups by GroupState, train lane
    refill: bool = False
    wanted: int = 0
    timelines: tuple[tuple[str, int], ...] = ()
    episodes: int = 0
    alive_runners: int = 0
    validation: int = -1

    def find_timeline(self, version: int) -> str | None:
        """Return the timeline on which the weights of `version` > 0 were made; None if the buffer does not know it."""
        return next((timeline for timeline, start in reversed(self.timelines) if start < version), None)


class Ended(msgspec.Struct, frozen=True):
    """Train groups that ended without being trained: the numbers of `failed` and `filtered` ones, `bitmap` over the orders of both, and
    `failures` over those of failed ones (the most significant bit of the first byte is order 0). `retries`: how often a group was retried,
    by order."""

    failed: int = 0
    filtered: int = 0
    bitmap: bytes = b""
    failures: bytes = b""
    retries: dict[int, int] = {}

    def failed_orders(self) -> list[int]:
        return [8 * i + bit for i, byte in enumerate(self.failures) for bit in range(8) if byte & 128 >> bit]

    def without(self, orders: Iterable[int]) -> Ended:
        """Return a copy without the failures of groups of these orders, which have been retried."""
        bitmap, failures, failed = bytearray(self.bitmap), bytearray(self.failures), self.failed
        for order in set(orders):
            byte, bit = order // 8, 128 >> order % 8
            if byte < len(failures) and failures[byte] & bit:
                failures[byte] ^= bit
                bitmap[byte] ^= bit
                failed -= 1
        return msgspec.structs.replace(self, failed=failed, bitmap=bytes(bitmap), failures=bytes(failures))


class Lease(msgspec.Struct, frozen=True):
    """The right to generate one attempt at a group, until `expires_in_s` from now unless renewed by `heartbeat`."""

    group: Group
    token: str
    attempt: int
    ticket: int  # place in line; -1 in the validation lane
    # verified version of the replica when the lease was granted; for episodes the lowest of all replicas, or what a validation evaluates
    version: int
    timeline: str
    incarnation: str
    expires_in_s: float
    count: int  # trajectories of the group, with indices from 0: the first n of them that are scored are the group
    missing: tuple[int, ...]  # indices to generate: the others are pushed, or were given up
    # saved prefixes of these, by index, which another replica has sampled and this one continues
    prefixes: Mapping[int, Trajectory] = {}
    tries: Mapping[int, int] = {}  # how often each episode was begun before, by index; zeros are left out


class Epoch(msgspec.Struct, frozen=True):
    """A membership epoch of the weight channel.

    `announced`: members are asked to acknowledge. `transfer`: the acknowledged set is final, ranks are fixed (trainer rank 0, `members[i]`
    rank i + 1) and the collective runs. `done` / `aborted`: over. `rendezvous` is opaque to the buffer: what the trainer tells its members
    (address, group id, manifest, probe), as msgpack types; or the raw bytes if they are not msgpack.
    """

    id: str
    version: int
    timeline: str
    state: Literal["announced", "transfer", "done", "aborted"]
    members: tuple[str, ...]
    acknowledged: tuple[str, ...]
    verified: tuple[str, ...]  # members whose probe agreed
    refused: dict[str, str]  # member -> why it did not complete, as it reported
    rendezvous: Any
    interrupted: tuple[str, ...] = ()  # members in `refused` whose collective failed through no fault of theirs


class Replica(msgspec.Struct, frozen=True):
    """A registered rollout replica. `version` is the verified one, -1 if none; `reason` is why it is quarantined; `logprob_error` is the
    mean of exp(|rollout - old|) over its tokens in the newest step that trained on any. One that `pulls` takes its weights from the store,
    and is in no epoch; `unreached` is why others that pull did not reach it, lately. One that `validates` beside training keeps its
    version, and generates for the validation alone."""

    id: str
    state: ReplicaState
    version: int
    timeline: str
    info: dict[str, str | int | float | bool]  # host, pid, url, device, …, for display (`decode_info`)
    leases: int
    seen_s_ago: float
    reason: str = ""
    logprob_error: float | None = None
    pulls: bool = False
    validates: bool = False
    unreached: str = ""

    @property
    def takes_part(self) -> bool:
        """Whether the replica is asked to join epochs, unless it pulls, and may hold leases: it is not LOADING, DEAD or QUARANTINED."""
        return self.state in ("HEALTHY", "STALE")


class Runner(msgspec.Struct, frozen=True):
    """A registered runner, which leases episodes."""

    id: str
    alive: bool
    leases: int
    seen_s_ago: float
    info: dict[str, str | int | float | bool]  # for display (`decode_info`)


class RefitVerdict(msgspec.Struct, frozen=True):
    """Whether a replica's log-probabilities of the probe verified its weights, their largest and mean difference from the trainer's, in
    nats, and the most that was allowed of each."""

    verified: bool
    difference: float
    mean: float
    tolerance: float
    mean_tolerance: float


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The answer to a heartbeat. `lost` are the caller's lease tokens that are no longer valid: abort their generations. `complete` are
    those of them whose groups have their n trajectories. `epoch` is the newest, if any. `reason` is why the caller is quarantined.
    `descends`: the run's weights descend from those that the caller has verified, or are these."""

    state: ReplicaState
    timeline: str
    lost: tuple[str, ...]
    epoch: Epoch | None
    complete: tuple[str, ...] = ()
    reason: str = ""
    descends: bool = False


class RunnerReply(msgspec.Struct, frozen=True):
    """The answer to a runner's heartbeat. A runner that is not `alive` must register under a new name. `lost` are the caller's lease tokens
    that are no longer valid: end their episodes. `complete` are those of them whose groups have their n trajectories, and `surplus` the
    token and index of each of their episodes that has not ended."""

    alive: bool
    timeline: str
    lost: tuple[str, ...]
    complete: tuple[str, ...]
    surplus: tuple[tuple[str, int], ...]


class EnvironmentState(msgspec.Struct, frozen=True):
    """The state of an environment.

    Trajectories: `waiting` for it; `alone`, those among them that are sent alone because its process died with them; `taken` by a scorer;
    `failing` among its last results. If its breaker is open (`broken`): `kind` is FAILING, NOT_STARTED if it starts nothing, or BUILDS if
    several builds score its groups in turn; `message` and `traceback` are of the failure that opened the breaker, or of the newest probe;
    `probes` failed in a row, and the next is due in `probe_in_s`.
    """

    name: str
    waiting: int
    alone: int
    taken: int
    failing: int
    broken: bool
    kind: str = ""
    message: str = ""
    traceback: str = ""
    broken_s: float = 0.0
    probes: int = 0
    probe_in_s: float = 0.0

    @property
    def trouble(self) -> str:
        """What it is if its breaker is open."""
        return trouble_of(self.kind)


def trouble_of(kind: str) -> str:
    """Return what an environment is whose breaker is open for this `kind` of reason."""
    return "unavailable" if kind == "NOT_STARTED" else "broken"


class ScoringJob(msgspec.Struct, frozen=True):
    group: Group
    trajectory: AnyTrajectory
    token: str  # fences `score`, as a lease's token fences `push`
    scoring_attempt: int
    waited_s: float = 0.0  # how long it waited to be taken


class ReservedTrajectory(msgspec.Struct, frozen=True):
    """A reserved trajectory without its payload, for rank 0 to plan with. `key` is the key of the payload."""

    group_id: str
    index: int
    key: str
    reward: float
    length: int
    oldest_version: int
    newest_version: int


class Reservation(msgspec.Struct, frozen=True, eq=False):
    """The batch of `step`: `P` complete groups in ticket order, each with n trajectories in index order (any n under over-sampling).

    `scored` groups got all their scores since the previous batch; dynamic sampling filtered `filtered` of them (they are in no batch).
    `attempts` has the attempt of each group.
    """

    step: int
    groups: tuple[str, ...]
    trajectories: tuple[ReservedTrajectory, ...]
    scored: int = 0
    filtered: int = 0
    attempts: tuple[int, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Whether both are the same batch, regardless of `scored` and `filtered`."""
        if not isinstance(other, Reservation):
            return NotImplemented
        return (self.step, self.groups, self.trajectories) == (other.step, other.groups, other.trajectories)


class Waiting(msgspec.Struct, frozen=True, tag_field="reply", tag="waiting"):
    """The answer of `reserve` while the batch is incomplete: `ready` of the `needed` lowest tickets are ready."""

    ready: int
    needed: int


class End(msgspec.Struct, frozen=True, tag_field="reply", tag="end"):
    """The answer of `reserve` when the queue is closed and fewer than `P` groups are left; they became `unused`."""

    unused: int


class Evaluated(msgspec.Struct, frozen=True):
    """A finished validation group: trajectories in index order with their scores."""

    group: Group
    trajectories: tuple[tuple[AnyTrajectory, Score], ...]


class HeldGroup(msgspec.Struct, frozen=True):
    """A group in the buffer. `step` is the step that it is kept or reserved for, or was trained at. `trajectories` are those pushed so far,
    in index order, with their scores if they have one."""

    group: Group
    state: str
    step: int | None
    reason: str
    trajectories: tuple[tuple[AnyTrajectory, Score | None], ...]


class _BatchGroup(msgspec.Struct, frozen=True):
    id: str
    attempt: int
    indices: list[int]
    pushed: list[str]  # `<nonce> <length> <oldest version> <newest version> <ms from lease to push>` (_group.lua)
    rewards: list[str]


class BatchReply(msgspec.Struct, frozen=True, tag_field="reply", tag="batch"):
    """A reservation in the form of the buffer's answer (_steps.lua)."""

    step: int
    payload_prefix: str
    groups: list[_BatchGroup]
    scored: int
    filtered: int

    def reservation(self) -> Reservation:
        return Reservation(
            step=self.step,
            groups=tuple(group.id for group in self.groups),
            attempts=tuple(group.attempt for group in self.groups),
            trajectories=tuple(self._trajectories()),
            scored=self.scored,
            filtered=self.filtered,
        )

    def _trajectories(self) -> Iterator[ReservedTrajectory]:
        prefix = self.payload_prefix
        for group in self.groups:
            group_id = group.id
            for index, pushed, reward in zip(group.indices, group.pushed, group.rewards, strict=True):
                nonce, length, oldest, newest, _ = pushed.split(" ")
                yield ReservedTrajectory(
                    group_id, index, prefix + nonce, float(reward), int(length), int(oldest), int(newest)
                )


decode_run_state = msgspec.msgpack.Decoder(RunState).decode
decode_reserve = msgspec.msgpack.Decoder(BatchReply | Waiting | End).decode
_decode = msgspec.msgpack.Decoder().decode


def unpack(data: bytes) -> Any:
    """Unpack the value that a caller of the buffer has packed. Raises `CodecError` for bytes that are not msgpack."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"the buffer's value is not msgpack: {error}") from error


_decode_info = msgspec.msgpack.Decoder(dict[str, str | int | float | bool]).decode


def decode_info(data: bytes) -> dict[str, str | int | float | bool]:
    """Return the description that a replica or runner registered. If it was stored by an earlier build and can't be read, return only the
    reason (`unreadable`)."""
    try:
        info = _decode_info(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {"unreadable": str(error)}
    not_finite = [name for name, value in info.items() if isinstance(value, float) and not math.isfinite(value)]
    return {"unreadable": f"{', '.join(not_finite)}: not a finite number"} if not_finite else info


def decode_epoch(reply: Sequence[bytes]) -> Epoch:
    """Return the epoch in a reply of `hr_epoch` and similar functions: its fields, then its rendezvous."""
    fields, rendezvous = unpack(reply[0]), reply[1]
    with contextlib.suppress(CodecError):  # the members then refuse the epoch
        rendezvous = unpack(reply[1])
    announced = fields["state"] == "announced"
    did = dict(pairs(fields["members"]))
    words = {member: what.partition(" ") for member, what in did.items()}
    return Epoch(
        id=fields["id"],
        version=fields["version"],
        timeline=fields["timeline"],
        state=fields["state"],
        members=tuple(sorted(m for m, what in did.items() if announced or what not in ("asked", "left out"))),
        acknowledged=tuple(sorted(m for m, what in did.items() if what in ("acknowledged", "verified"))),
        verified=tuple(sorted(m for m, what in did.items() if what == "verified")),
        refused={m: why for m, (what, _, why) in words.items() if what in ("refused", "interrupted")},
        interrupted=tuple(sorted(m for m, (what, _, _) in words.items() if what == "interrupted")),
        rendezvous=rendezvous,
    )


def select_fields(score: Score) -> dict[str, Any]:
    """Return the fields of a score that the buffer reads, besides its record (_score.lua)."""
    if score.reward is None:
        return {"status": score.status}
    return {"status": score.status, "reward": float(score.reward), "build": score.build}


def score_key(payload_key: str) -> str:
    prefix, _, nonce = payload_key.rpartition(":p:")
    return f"{prefix}:s:{nonce}"


def pairs(flat: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(*[iter(flat)] * 2, strict=True)
