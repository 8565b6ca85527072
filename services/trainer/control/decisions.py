"""What the trainer does next: a pure function of where it stands, so that every turn of the loop can be tested without one.

The order is the law here. A checkpoint is published before the fleet gets its weights; the fleet gets a version before it is
validated or trained on; a validation of older weights is waited for before they are replaced; and while `reserve` has nothing,
replicas that are not at this version (late joiners, a fleet that died and came back) are refitted.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from headrace.config import Config
from headrace.replay import End, Replica, Reservation, Waiting

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


class Action(enum.Enum):
    STOP = "stop"
    CHECKPOINT = "checkpoint"
    REFIT = "refit"
    AWAIT_VALIDATION = "await validation"
    ABANDON_VALIDATION = "abandon validation"
    VALIDATE = "validate"
    RESERVE = "reserve"
    TRAIN = "train"
    WAIT = "wait"
    FINISH = "finish"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True)
class Decision:
    action: Action
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The parts of the configuration that steer the loop. Periods count versions; deadlines are seconds."""

    last_version: int
    save_period: int | None  # None: no checkpoints
    must_save_by_s: float | None  # after the loop's start
    val_period: int | None  # None: nothing to validate on
    val_start_at: int
    val_at_start: bool
    val_at_end: bool
    fleet_deadline_s: float
    validation_deadline_s: float

    @classmethod
    def of(cls, config: Config, *, can_validate: bool) -> Plan:
        return cls(
            last_version=config.algorithm.max_num_steps,
            save_period=config.checkpointing.save_period if config.checkpointing.enabled else None,
            must_save_by_s=config.checkpointing.must_save_by_s if config.checkpointing.enabled else None,
            val_period=config.algorithm.val_period if can_validate else None,
            val_start_at=config.algorithm.val_start_at,
            val_at_start=config.algorithm.val_at_start,
            val_at_end=config.algorithm.val_at_end,
            fleet_deadline_s=config.trainer.fleet_deadline_s,
            validation_deadline_s=config.trainer.validation_deadline_s,
        )

    def validates(self, version: int, *, final: bool) -> bool:
        """Whether the weights of `version` are to be evaluated on the held-out prompts."""
        if self.val_period is None:
            return False
        if final and self.val_at_end:
            return True
        if version == 0:
            return self.val_at_start
        return self.val_period > 0 and version % self.val_period == 0 and version >= self.val_start_at

    def saves(self, version: int, *, final: bool) -> bool:
        """Whether a checkpoint of `version` is to be published. Version 0 is the initial model and needs none."""
        return self.save_period is not None and version > 0 and (final or version % self.save_period == 0)

    def runs_out(self, elapsed_s: float, step_s: float) -> bool:
        """Whether another step, if it takes as long as the last one, would end after `must_save_by_s`."""
        return self.must_save_by_s is not None and elapsed_s + step_s >= self.must_save_by_s


@dataclasses.dataclass(frozen=True)
class RunningValidation:
    """A validation that has not got all its results. `awaited_since`: when the loop began to wait for it, if it has."""

    version: int
    awaited_since: float | None


@dataclasses.dataclass(frozen=True)
class View:
    """Where the trainer stands. Times are seconds of one monotonic clock.

    `offered`: a refit to this version has been carried out. `reply`: what `reserve` last said, None if it has to be asked
    again. `reached`: a validation has reached what ends the run. `runs_out`: the time by which a checkpoint must be saved
    would pass in the next step, and none has been saved for it. `healthy_at`: when a verified replica was last seen (or the
    wait for one began). `behind_due`: a replica that is not at this version may be tried now.
    """

    now: float
    stop: bool
    version: int
    saved: bool
    offered: bool
    validated: bool
    validation: RunningValidation | None
    members: int
    healthy: int
    behind_due: bool
    healthy_at: float
    reply: Reservation | Waiting | End | None
    reached: bool = False
    runs_out: bool = False


def decide(plan: Plan, view: View) -> Decision:
    """The next thing to do."""
    if view.stop:
        return Decision(Action.STOP)
    final = view.version >= plan.last_version or isinstance(view.reply, End) or view.reached
    if plan.saves(view.version, final=final or view.runs_out) and not view.saved:
        return Decision(Action.CHECKPOINT)
    due = plan.validates(view.version, final=final) and not view.validated
    if not view.offered and (due or not final) and view.members:
        return _await_validation(plan, view) or Decision(Action.REFIT)
    if due:
        if not view.healthy:
            return _await_fleet(plan, view)
        return _await_validation(plan, view) or Decision(Action.VALIDATE)
    if final:
        return _await_validation(plan, view) or Decision(Action.FINISH)
    if view.reply is None:
        return Decision(Action.RESERVE)
    if isinstance(view.reply, Reservation):
        return Decision(Action.TRAIN)
    return _await_fleet(plan, view)


def _await_fleet(plan: Plan, view: View) -> Decision:
    if view.behind_due:
        return Decision(Action.REFIT)
    if not view.healthy and view.now - view.healthy_at >= plan.fleet_deadline_s:
        return Decision(
            Action.FAIL,
            f"no verified rollout replica for {plan.fleet_deadline_s:g} s (trainer.fleet_deadline_s) at step "
            f"{view.version}; {view.members} registered: look at the rollout logs, start a replica, and start the trainer again",
        )
    return Decision(Action.WAIT)


def _await_validation(plan: Plan, view: View) -> Decision | None:
    """What a running validation asks for before the fleet may get other weights or the run may end; None: nothing."""
    running = view.validation
    if running is None:
        return None
    if not view.healthy:
        if running.version == view.version:
            return _await_fleet(plan, view)
        return Decision(Action.ABANDON_VALIDATION, "no verified replica is left that holds its weights")
    if running.awaited_since is not None and view.now - running.awaited_since >= plan.validation_deadline_s:
        return Decision(
            Action.ABANDON_VALIDATION,
            f"not complete {plan.validation_deadline_s:g} s (trainer.validation_deadline_s) after it was waited for",
        )
    return Decision(Action.AWAIT_VALIDATION)


@dataclasses.dataclass(frozen=True)
class Retry:
    """A replica that was offered the weights `tries` times without becoming verified; not again before `at`."""

    tries: int
    at: float


def is_verified(replica: Replica, version: int, timeline: str) -> bool:
    return replica.state == "HEALTHY" and replica.version == version and replica.timeline == timeline


def count_verified(fleet: Iterable[Replica], version: int, timeline: str) -> int:
    return sum(is_verified(replica, version, timeline) for replica in fleet)


def alive(fleet: Iterable[Replica]) -> list[Replica]:
    return [replica for replica in fleet if replica.state != "DEAD"]


def behind(fleet: Iterable[Replica], version: int, timeline: str) -> list[str]:
    """Ids of the living replicas that do not hold these weights verified."""
    return [replica.id for replica in alive(fleet) if not is_verified(replica, version, timeline)]


def any_due(behind_ids: Iterable[str], retries: Mapping[str, Retry], now: float) -> bool:
    return any(id_ not in retries or retries[id_].at <= now for id_ in behind_ids)


def after_refit(behind_ids: Iterable[str], retries: Mapping[str, Retry], now: float) -> dict[str, Retry]:
    """Back-off per replica, doubling from `FIRST_RETRY_S` to `LAST_RETRY_S`, so that one that always refuses does not pause
    the others again and again. A replica that got verified, or is gone, is forgotten."""
    renewed = {}
    for id_ in behind_ids:
        tries = retries[id_].tries + 1 if id_ in retries else 1
        renewed[id_] = Retry(tries, now + min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** (tries - 1)))
    return renewed
