"""How many replicas a running pipeline wants: the signal by which a fleet is scaled.

`decide` is called again and again with what the buffer shows (`Look`), and with its own answer before (`Wanted`). It reads the trainer's
pace, not the length of a queue: the buffer lets only so many groups be in flight, whatever the fleet (docs/architecture.md, Admission).

- *Up*: the trainer waited for generation through a tenth or more of its newest steps. It gets as many replicas as keep pace with it
  (`balance.enough_replicas`). Waits for scores don't count.
- *Down*, by one, or by a little more than a tenth: for three steps in a row it hardly waited, a whole batch lies finished, and nothing that
  may be generated waits.
- *Not back and forth*: a number with which the trainer once waited is not tried again. Nor are more replicas after some that did not make
  steps faster: they are given back, because stragglers or the age bound hold the trainer up (`headrace plan balance` tells which). Both is
  forgotten once steps take a quarter longer.

Only a new step of the trainer is evidence. So a trainer that is paused, saves, validates or is gone changes nothing. Steps during which the
fleet changed are none either: their waits are those of the fleet before. There is never more than a replica for each group that may be in
flight, at least one while work is left, and none is wanted once the last groups are trained.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.run.balance import enough_replicas
from headrace.run.findings import TOTAL
from headrace.run.headlines import follows_start

# The share of its time that a trainer waits from which it gets more replicas, and below which it may have fewer.
WAITED, CALM = 0.1, 0.03
# Steps that have to agree before there are more, and before there are fewer.
_TO_RAISE, _TO_LOWER = 2, 3
# The newest steps that are averaged, and those that are kept.
_STEPS, MOST_STEPS = 5, 8
# More replicas help if steps become faster by more than this share of their time.
_HELPS = 0.05
# What was learnt with steps of some length holds until they are longer by this factor.
_CHANGED = 1.25


class StepTime(NamedTuple):
    """A trained step: the seconds that it took, and those in which the trainer waited for generation."""

    step: int
    total_s: float
    waited_s: float


@dataclasses.dataclass(frozen=True)
class Look:
    """What the buffer shows. `replicas` are those that may lease. Training groups: `open` are being generated, `waiting` could be but
    are leased by nobody, `finished` are scored or wait for their scores, `training` are trained and not yet in a checkpoint, and `admitted`
    are the most that may be in flight. `validating`: groups of validations that are not evaluated yet. `closed`: no more prompts will come.
    `steps` are the newest steps, in order."""

    replicas: int
    open: int
    waiting: int
    finished: int
    admitted: int
    prompts: int
    training: int = 0
    validating: int = 0
    closed: bool = False
    steps: Sequence[StepTime] = ()


@dataclasses.dataclass(frozen=True)
class Tried:
    """A number of replicas that was tried, and the seconds of a step then."""

    replicas: int = 0
    step_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The number of replicas that are wanted, and what the next decision has to know.

    That is the newest step `seen`; the step after which the fleet came to have `fleet` replicas; how many steps in a row were `calm`; from
    which number it was `raised`; with which it was `too_few`; and which was `enough`, because more did not make steps faster.
    """

    replicas: int
    seen: int = -1
    fleet: int = 0
    changed: int = -1
    calm: int = 0
    raised: Tried = Tried()
    too_few: Tried = Tried()
    enough: Tried = Tried()


def read_look(stats: Mapping[str, Any], steps: Sequence[StepTime], steps_ahead: int) -> Look:
    """Return what the buffer's statistics (`InspectionClient.stats`) show of a run whose generation may run so many steps ahead."""
    train, validation = (stats["counts"][lane] for lane in ("train", "validation"))
    fleet = [replica for replica in stats["replicas"] if replica["state"] in ("HEALTHY", "STALE")]
    version = max((replica["version"] for replica in fleet), default=-1)
    prompts, next_step = stats["prompts_per_step"], stats["next_step"]
    # without a replica that has weights, what the next one may lease
    room = (max(version, next_step - 1) + steps_ahead + 1 - next_step) * prompts - stats["line"]
    return Look(
        replicas=len(fleet),
        open=train.get("open", 0),
        waiting=min(train.get("queued", 0), max(0, room)),
        finished=train.get("scoring", 0) + train.get("ready", 0),
        admitted=(steps_ahead + 1) * prompts,
        prompts=prompts,
        training=train.get("reserved", 0),
        validating=sum(validation.get(state, 0) for state in ("queued", "open", "scoring")),
        closed=stats["closed"] and not train.get("queued", 0),
        steps=steps,
    )


def follow_steps(before: Sequence[StepTime], entries: Iterable[tuple[str, int, Mapping[str, float]]]) -> list[StepTime]:
    """Return the newest steps, from those before and from new entries of the stream of metrics: kind, step and metrics of each. A step that
    is trained again after a rewind replaces those from it on. The first step after a start tells of the start, and is left out."""
    steps = list(before)
    for kind, step, metrics in entries:
        if kind != "train":
            continue
        steps = [each for each in steps if each.step < step]
        if TOTAL in metrics and not follows_start(metrics):
            steps.append(StepTime(step, metrics[TOTAL], metrics.get("timing/train/wait_for_generation", 0.0)))
    return steps[-MOST_STEPS:]


def decide(look: Look, before: Wanted | None = None, least: int = 0, most: int | None = None) -> Wanted:
    """Return how many replicas are wanted, from `least` to `most`. The same arguments give the same answer."""
    newest = look.steps[-1].step if look.steps else -1
    if before is None:
        before = Wanted(max(1, look.replicas), newest, look.replicas, newest)
    if newest < before.seen:  # a rewind took back the steps that were seen
        before = dataclasses.replace(before, seen=newest, changed=newest, calm=0)
    if look.replicas != before.fleet:
        before = dataclasses.replace(before, fleet=look.replicas, changed=newest, calm=0)
    wanted = _follow(look, before) if newest > before.seen else before
    left = look.open + look.waiting + look.validating
    # without any replica the trainer would not go on for long, and its last weights may be validated
    least_needed = min(1, left + look.finished + look.training)
    useful = max(left, least_needed) if look.closed else look.admitted + look.validating
    bounded = min(max(wanted.replicas, least_needed), useful, useful if most is None else most)
    return dataclasses.replace(wanted, replicas=max(least, bounded), seen=newest)


def _follow(look: Look, before: Wanted) -> Wanted:
    """Return what a new step of the trainer changes."""
    newest, fleet = look.steps[-1], before.fleet
    is_calm = (
        newest.waited_s < CALM * newest.total_s
        and look.finished >= look.prompts
        and not look.waiting
        and not look.validating
    )
    found = dataclasses.replace(before, calm=before.calm + 1 if is_calm else 0)
    # the step during which the fleet changed is not one of its steps
    settled = [step for step in look.steps if step.step > before.changed + 1][-_STEPS:]
    if not fleet or len(settled) < _TO_RAISE:
        return found
    step_s = statistics.fmean(step.total_s for step in settled)
    waited_s = statistics.fmean(step.waited_s for step in settled)
    if waited_s >= WAITED * step_s:
        return _raise(found, step_s, waited_s)
    # more than a tenth: a HorizontalPodAutoscaler follows no smaller change
    fewer = fleet - 1 - fleet // 10
    is_known = fewer <= before.too_few.replicas and step_s < _CHANGED * before.too_few.step_s
    # `fleet` may be less than what is wanted for good: an autoscaler has its own bound
    if found.calm >= _TO_LOWER and 1 < fleet <= before.replicas and not is_known:
        return dataclasses.replace(found, replicas=fewer, calm=0, raised=Tried())
    return found


def _raise(before: Wanted, step_s: float, waited_s: float) -> Wanted:
    """Return what a fleet wants with which the trainer waits."""
    fleet, raised, enough = before.fleet, before.raised, before.enough
    if 0 < raised.replicas < fleet and step_s > raised.step_s * (1 - _HELPS):
        # stragglers or the age bound hold up the trainer, and not the number of replicas
        return dataclasses.replace(before, replicas=raised.replicas, raised=Tried(), enough=raised)
    if fleet >= enough.replicas > 0 and step_s < _CHANGED * enough.step_s:
        return before
    found = before if fleet < before.too_few.replicas else dataclasses.replace(before, too_few=Tried(fleet, step_s))
    needed = enough_replicas(fleet, step_s, waited_s)
    if needed > before.replicas:
        found = dataclasses.replace(found, replicas=needed, raised=Tried(fleet, step_s))
    return found
