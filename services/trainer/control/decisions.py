"""Decides what the trainer does next. `decide` is a pure function of `LoopState`, so every turn of the loop can be tested without running
it.

The order of actions matters:

- The snapshot of a version, for a checkpoint or to be kept in memory, is taken before the fleet gets its weights, and written meanwhile.
- The fleet gets a version before that version is validated or trained on, and before it is copied for replicas that pull it.
- A validation of older weights ends before they are replaced; one beside training keeps them on replicas of its own, and holds up only the
  run's end.
- While `reserve` has no batch, and before a validation, replicas that are not at this version are refitted: late joiners, a fleet that died
  and came back, and those that validated older weights.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace.base.backoff import pause_after
from headrace.config import Config
from headrace.replay import End, Replica, Reservation, Waiting

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
# Prompts that must have ended before `run.max_failed_share` is checked.
JUDGED = 100


class Action(enum.Enum):
    STOP = "stop"
    CHECKPOINT = "checkpoint"
    SNAPSHOT = "snapshot"
    REFIT = "refit"
    OFFER = "offer"
    AWAIT_VALIDATION = "await validation"
    ABANDON_VALIDATION = "abandon validation"
    VALIDATE = "validate"
    SKIP_VALIDATION = "skip validation"
    RESERVE = "reserve"
    TRAIN = "train"
    WAIT = "wait"
    FINISH = "finish"
    FAIL = "fail"
    CONDEMN = "condemn"  # FAIL because of failed groups, whose reasons are added


@dataclasses.dataclass(frozen=True)
class Decision:
    action: Action
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The parts of the configuration that steer the loop. Periods are in versions, deadlines in seconds."""

    last_version: int  # 0: the run only evaluates
    save_period: int | None  # None: no checkpoints
    must_save_by_s: float | None  # after the loop's start
    val_period: int | None  # None: nothing to validate on
    val_start_at: int
    val_at_start: bool
    val_at_end: bool
    fleet_deadline_s: float
    validation_deadline_s: float
    max_failed_share: float

    @classmethod
    def of(cls, config: Config, *, can_validate: bool) -> Plan:
        return cls(
            last_version=config.max_num_steps,
            save_period=config.checkpointing.save_period if config.checkpointing.enabled else None,
            must_save_by_s=config.checkpointing.must_save_by_s if config.checkpointing.enabled else None,
            val_period=config.algorithm.val_period if can_validate else None,
            val_start_at=config.algorithm.val_start_at,
            val_at_start=config.algorithm.validates_at_start,
            val_at_end=config.algorithm.val_at_end,
            fleet_deadline_s=config.trainer.fleet_deadline_s,
            # a run that only evaluates has nothing else to wait for
            validation_deadline_s=config.trainer.validation_deadline_s if config.max_num_steps else math.inf,
            max_failed_share=config.run.max_failed_share,
        )

    def validates(self, version: int, *, final: bool) -> bool:
        """Return whether the weights of `version` are evaluated on the held-out prompts."""
        if self.val_period is None:
            return False
        if final and self.val_at_end:
            return True
        if version == 0:
            return self.val_at_start
        return self.val_period > 0 and version % self.val_period == 0 and version >= self.val_start_at

    def saves(self, version: int, *, final: bool) -> bool:
        """Return whether a checkpoint of `version` is published. Version 0 is the initial model and needs none."""
        return self.save_period is not None and version > 0 and (final or version % self.save_period == 0)

    def must_save_now(self, elapsed_s: float, step_s: float) -> bool:
        """Return whether another step that takes as long as the last one would end after `must_save_by_s`."""
        return self.must_save_by_s is not None and elapsed_s + step_s >= self.must_save_by_s


@dataclasses.dataclass(frozen=True)
class LoopState:
    """The input of a decision. Times are seconds of one monotonic clock.

    The weights:
    - `saved`: a checkpoint of this version is published or being written.
    - `refitted`: a refit to this version has been carried out, successful or not.
    - `validated`: a validation of this version has begun.
    - `validating`: the version under validation while results are missing. `awaited_since`: when the loop began to wait for it, if it has.
    - `validators`: how many of its replicas hold its weights, if it runs beside training; None if it doesn't, or there is none.
    - `target_reached`: a validation reached `stop_at_validation_threshold`.
    - `snapshot_due`: the run takes snapshots, has neither this version nor a checkpoint of it, and nothing is being written.
    - `must_save`: another step would end after `checkpoint_must_save_by`, and no checkpoint has been saved for that yet.

    The fleet:
    - `members` counts the replicas that take part (neither DEAD nor `quarantined`), `healthy` those among them with verified weights.
    - `healthy_at`: when a healthy or loading replica was last seen, or the wait for one began.
    - `refit_due`: some replica that is not at this version may be refitted now.
    - `offer_due`: some replica pulls, this version was not sent to the store, and nothing else is being sent.

    The buffer:
    - `reply`: the last answer of `reserve`; None if it must be called again.
    - `counts`: the run's training groups by state.
    - `episodes`: groups that wait for a runner. `runners` counts live runners. `runner_at`: when one was last seen, or none was needed.
    """

    now: float
    stop: bool
    version: int
    saved: bool
    refitted: bool
    validated: bool
    validating: int | None
    awaited_since: float | None
    members: int
    healthy: int
    healthy_at: float
    refit_due: bool
    reply: Reservation | Waiting | End | None
    validators: int | None = None
    target_reached: bool = False
    must_save: bool = False
    snapshot_due: bool = False
    quarantined: int = 0
    offer_due: bool = False
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    episodes: int = 0
    runners: int = 0
    runner_at: float = 0.0


def decide(plan: Plan, state: LoopState) -> Decision:
    """Return the next action of the loop."""
    if state.stop:
        # so that nothing has to be trained again
        unsaved = plan.saves(state.version, final=True) and not state.saved
        return Decision(Action.CHECKPOINT if unsaved else Action.STOP)
    if reason := too_many_failed(plan, state.counts):
        return Decision(Action.CONDEMN, reason)
    final = is_final(plan, state)
    if plan.saves(state.version, final=final or state.must_save) and not state.saved:
        return Decision(Action.CHECKPOINT)
    if state.snapshot_due:
        return Decision(Action.SNAPSHOT)
    is_beside = state.validators is not None and not final
    if is_beside and (reason := _has_to_end(state)):
        return Decision(Action.ABANDON_VALIDATION, reason)
    awaited = None if is_beside else _await_validation(plan, state)
    validation_due = plan.validates(state.version, final=final) and not state.validated
    if not state.refitted and (validation_due or not final) and state.members:
        return awaited or Decision(Action.REFIT)
    if state.offer_due and (validation_due or not final):
        return Decision(Action.OFFER)
    if validation_due and is_beside:
        return Decision(Action.SKIP_VALIDATION)
    if validation_due:
        if not state.healthy:
            return _await_fleet(plan, state)
        # law 2: one that validated older weights beside training still holds those, and would take part
        return awaited or Decision(Action.REFIT if state.refit_due else Action.VALIDATE)
    if final:
        return awaited or _finish(plan, state)
    if state.reply is None:
        return Decision(Action.RESERVE)
    if isinstance(state.reply, Reservation):
        return Decision(Action.TRAIN)
    return _await_fleet(plan, state)


def is_final(plan: Plan, state: LoopState) -> bool:
    """Return whether nothing more is trained."""
    return state.version >= plan.last_version or isinstance(state.reply, End) or state.target_reached


def waits_for(decision: Decision, state: LoopState) -> str:
    """Return what the loop waits for if it carries out `decision`, as the end of a sentence; empty if it is at work."""
    if decision.action is Action.AWAIT_VALIDATION:
        return f"the validation of version {state.validating}, before the run ends or the replicas get the next weights"
    if decision.action is not Action.WAIT:
        return ""
    if not state.healthy:
        return f"a replica with verified weights of version {state.version}: {state.members} are registered"
    if state.episodes and not state.runners:
        return f"a runner: {state.episodes} groups of episodes"
    missing = "scores" if share_in_scoring(state.counts) > 0.5 else "generation"
    if isinstance(state.reply, Waiting):
        return f"{missing}: {state.reply.ready} of the {state.reply.needed} groups of step {state.version} are ready"
    return missing


def too_many_failed(plan: Plan, counts: Mapping[str, int]) -> str | None:
    """Return why the run fails if more than `max_failed_share` of its prompts failed, once `JUDGED` have ended; else None."""
    failed = counts.get("failed", 0)
    ended = failed + sum(counts.get(state, 0) for state in ("filtered", "reserved", "trained"))
    if ended < JUDGED or failed <= plan.max_failed_share * ended:
        return None
    return (
        f"{failed} of the {ended} prompts that ended have failed, more than run.max_failed_share {plan.max_failed_share:g}: fix the "
        "cause, and start again after `headrace groups retry --all --run RUN`, or raise it"
    )


def share_in_scoring(counts: Mapping[str, int]) -> float:
    """Return the share of a wait for the batch that is for scores and not for generation.

    It is the share of groups in scoring among the groups in flight that aren't ready. Slow scoring makes groups pile up there, and
    admission then stops generation.
    """
    scoring, generating = counts.get("scoring", 0), counts.get("open", 0)
    return scoring / (scoring + generating) if scoring else 0.0


def _finish(plan: Plan, state: LoopState) -> Decision:
    """End the run. It has failed if nothing was trained in its whole history, unless it only evaluates or a validation at its start reached
    the target."""
    if state.version or state.target_reached or not plan.last_version:
        return Decision(Action.FINISH)
    what = ", ".join(f"{count} {name}" for name, count in state.counts.items() if count) or "none"
    return Decision(Action.CONDEMN, f"the run has ended and nothing was trained; its prompts: {what}")


def _await_fleet(plan: Plan, state: LoopState) -> Decision:
    if state.refit_due:
        return Decision(Action.REFIT)
    if not state.healthy and state.now - state.healthy_at >= plan.fleet_deadline_s:
        return Decision(
            Action.FAIL,
            f"no verified rollout replica for {plan.fleet_deadline_s:g} s (trainer.fleet_deadline_s) at step "
            f"{state.version}; {state.members} registered, {state.quarantined} more quarantined: look at the rollout logs, start a "
            "replica, and start the trainer again",
        )
    return _miss_runners(plan, state) or Decision(Action.WAIT)


def _miss_runners(plan: Plan, state: LoopState) -> Decision | None:
    """Fail a run that has waited too long for a runner of its episodes; else return None."""
    if state.runners or not state.episodes or state.now - state.runner_at < plan.fleet_deadline_s:
        return None
    return Decision(
        Action.FAIL,
        f"no runner for {plan.fleet_deadline_s:g} s (trainer.fleet_deadline_s) at step {state.version}, and {state.episodes} groups of "
        "episodes wait for one: look at the logs of `headrace agents`, start one, and start the trainer again",
    )


def _has_to_end(state: LoopState) -> str | None:
    """Return why a validation beside training can't go on; None if it can."""
    if not state.validators:
        return "no verified replica holds its weights any more"
    if state.refitted and not state.healthy:
        return "no other replica is verified, so training needs those that validate"
    return None


def _await_validation(plan: Plan, state: LoopState) -> Decision | None:
    """Return the action that a running validation needs before the fleet gets other weights or the run ends; None if it needs none."""
    if state.validating is None:
        return None
    if not (state.healthy if state.validators is None else state.validators):
        if state.validating == state.version and state.validators is None:
            return _await_fleet(plan, state)
        return Decision(Action.ABANDON_VALIDATION, "no verified replica holds its weights any more")
    if state.awaited_since is not None and state.now - state.awaited_since >= plan.validation_deadline_s:
        return Decision(
            Action.ABANDON_VALIDATION,
            f"not complete {plan.validation_deadline_s:g} s (trainer.validation_deadline_s) after the loop began to wait for it",
        )
    return _miss_runners(plan, state) or Decision(Action.AWAIT_VALIDATION)


@dataclasses.dataclass(frozen=True)
class Backoff:
    """The pause of a replica that was sent the weights `tries` times without becoming verified. It is not tried again before `until`."""

    tries: int
    until: float


def is_verified(replica: Replica, version: int, timeline: str) -> bool:
    return replica.state == "HEALTHY" and replica.version == version and replica.timeline == timeline


def count_verified(fleet: Iterable[Replica], version: int, timeline: str) -> int:
    return sum(is_verified(replica, version, timeline) for replica in fleet)


def may_work(fleet: Iterable[Replica], oldest: int, timeline: str) -> bool:
    """Return whether a replica that pulls holds verified weights that work may begin under: of version `oldest` or later."""
    held = (replica for replica in fleet if replica.pulls and replica.state == "HEALTHY")
    return any(replica.timeline == timeline and replica.version >= oldest for replica in held)


def alive(fleet: Iterable[Replica]) -> list[Replica]:
    """Return the replicas that the trainer waits for."""
    return [replica for replica in fleet if replica.takes_part]


def is_loading(fleet: Iterable[Replica]) -> bool:
    """Return whether some replica is still loading its engine."""
    return any(replica.state == "LOADING" for replica in fleet)


def behind(fleet: Iterable[Replica], version: int, timeline: str) -> list[str]:
    """Return the ids of the live replicas that are sent the weights and have not verified these; those that validate others are not."""
    there = (replica for replica in alive(fleet) if not (replica.pulls or replica.validates))
    return [replica.id for replica in there if not is_verified(replica, version, timeline)]


def choose_validators(
    fleet: Iterable[Replica], chosen: Collection[str], wanted: int, version: int, timeline: str
) -> list[str]:
    """Return the replicas that are to validate `version` beside training, so that with those `chosen` before `wanted` do: those with the
    fewest leases. At least one that holds the version goes on training. One that pulls is never chosen: it takes newer weights by
    itself."""
    verified = [each for each in fleet if is_verified(each, version, timeline) and not each.pulls]
    others = sorted((each for each in verified if each.id not in chosen), key=lambda each: (each.leases, each.id))
    lacking = wanted - (len(verified) - len(others))
    return [replica.id for replica in others[: max(0, min(lacking, len(others) - 1))]]


def refit_due(behind_ids: Iterable[str], backoffs: Mapping[str, Backoff], now: float) -> bool:
    return any(id_ not in backoffs or backoffs[id_].until <= now for id_ in behind_ids)


def next_backoffs(behind_ids: Iterable[str], backoffs: Mapping[str, Backoff], now: float) -> dict[str, Backoff]:
    """Return the backoffs after a refit, by replica id.

    They double from `FIRST_BACKOFF_S` to `LAST_BACKOFF_S`, so that a replica that always refuses does not keep the trainer sending. A
    replica that became verified, or is gone, is dropped.
    """
    renewed = {}
    for id_ in behind_ids:
        tries = backoffs[id_].tries + 1 if id_ in backoffs else 1
        renewed[id_] = Backoff(tries, now + pause_after(tries, FIRST_BACKOFF_S, LAST_BACKOFF_S))
    return renewed


def next_streaks(streaks: Mapping[str, int], well: Iterable[str], ill: Iterable[str]) -> dict[str, int]:
    """Return how many times in a row each replica failed, after one more look at those that did `well` or `ill`."""
    others = {id_: times for id_, times in streaks.items() if id_ not in set(well)}
    return others | {id_: streaks.get(id_, 0) + 1 for id_ in ill}


def is_hopeless(
    fleet: Sequence[Replica], failed_refits: Mapping[str, int], expected: int, quarantine_after: int | None
) -> bool:
    """Return whether every replica of a complete fleet, of at least `expected`, has failed `quarantine_after` refits in a row. (The last
    replica is never quarantined, and would be tried until the fleet's deadline.)"""
    present = [replica for replica in fleet if replica.takes_part or replica.state == "QUARANTINED"]
    return (
        quarantine_after is not None
        and len(present) >= expected
        and not is_loading(fleet)
        and all(failed_refits.get(replica.id, 0) >= quarantine_after for replica in alive(fleet))
    )
