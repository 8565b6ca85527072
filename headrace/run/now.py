"""`now.json`: the state of a run that is up, at most about a second old. Its trainer writes it, and pages read it.

It is a view: nothing in a run depends on it. Fields that nobody knows are absent. Times are Unix seconds.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.base.files import read_json, write_json
from headrace.config import Config

NOW = "now.json"  # in the run's folder


class ReplicaNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rollout replica. `holding` counts the groups that it generates. `reason` is why it is quarantined, or leases no training groups.
    `logprob_error` is how far its log-probabilities are from the trainer's.

    The others are what its own page says. `queue`: the sequences in its engine or before it; of these the engine computes `running`, and
    has no room for `waiting`. `kv_use`: the share of the KV cache that running sequences hold. In the last seconds: `tokens_per_s` that it
    sampled, `preemptions_per_s`, when a sequence lost its KV cache to others, and `prefix_hits`, the share of the tokens of prompts that
    were in the prefix cache."""

    id: str
    state: str
    version: int
    holding: int
    seen_s_ago: float
    address: str | None = None
    device: str | None = None
    reason: str | None = None
    logprob_error: float | None = None
    tokens_per_s: float | None = None
    queue: int | None = None
    kv_use: float | None = None
    running: int | None = None
    waiting: int | None = None
    preemptions_per_s: float | None = None
    prefix_hits: float | None = None


class RunnerNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A runner of episodes. `holding` counts the groups that it plays."""

    id: str
    alive: bool
    holding: int
    seen_s_ago: float
    address: str | None = None


class EnvironmentNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """An environment. Trajectories: `waiting` for it, `in_hand` of it, and the most that it takes, `capacity`. `broken`: its breaker is
    open; `trouble` is then `broken`, or `unavailable` if it starts nothing, and `message` says why. Of the scores of the last minute, half
    took no longer than `p50_s`, and 99 of 100 no longer than `p99_s`.
    """

    name: str
    waiting: int
    in_hand: int
    broken: bool
    message: str | None = None
    trouble: str | None = None
    capacity: int | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    scored_per_s: float | None = None
    build: str | None = None


class Now(msgspec.Struct, frozen=True):
    """The state of a run at `time`. `counts` are its training groups by state, and `validation` those of its validation lane. The trainer
    reserves `next_step`; the newest checkpoint is of version `committed`, -1 if there is none. `closed`: no more prompts will come.
    `waits` are sentences: what the run waits for."""

    time: float
    next_step: int
    committed: int
    closed: bool
    counts: dict[str, int]
    validation: dict[str, int]
    replicas: list[ReplicaNow]
    runners: list[RunnerNow]
    environments: list[EnvironmentNow]
    waits: list[str]


def write(folder: Path, now: Now) -> None:
    """Replace the file. Raises `OSError`."""
    write_json(folder / NOW, now)


def read(folder: Path) -> Now | None:
    """Return the last known state of the run in `folder`; None if no trainer has written one. Raises `CodecError` for a damaged file."""
    return read_json(folder / NOW, Now)


def count_replicas(config: Config, now: Now | None) -> int:
    """Return how many replicas a run has: those that are up, or else those that `headrace up` starts."""
    up = 0 if now is None else sum(replica.state not in ("DEAD", "QUARANTINED") for replica in now.replicas)
    return up or config.rollout.replicas
