"""What the agents service decides, as pure functions: which replica a call goes to, and how an episode ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from headrace.config.agents import OnLimit
from headrace.trajectory import Score


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A replica, with the calls that this service has with it."""

    id: str
    healthy: bool
    timeline: str
    version: int
    calls: int = 0


def choose(
    candidates: Iterable[Candidate], timeline: str, min_version: int, parent: str | None, refused: set[str]
) -> str | None:
    """The replica that samples a call: the one that sampled its parent, whose cache holds the path, else the least loaded. It is HEALTHY,
    on the lease's timeline, with weights no older than the lease's, and has not `refused` the call; None if there is none."""
    fit = [
        each
        for each in candidates
        if each.healthy and each.timeline == timeline and each.version >= min_version and each.id not in refused
    ]
    if any(each.id == parent for each in fit):
        return parent
    return min(fit, key=lambda each: (each.calls, each.id)).id if fit else None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an episode came to its end. `score` is what its program came to; `hung` names the clock that ended it, if one did. `limit` says
    which limit of the run the program met last, if it met one: it `refused` a call, or cut the last answer off. `trained` of the calls are
    trained, on `paths` paths."""

    score: Score | None
    hung: str | None
    limit: str | None
    refused: bool
    trained: int
    paths: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """What is handed to the buffer: the trajectory or none, and the score, or None if a grader has to give it."""

    with_trajectory: bool
    score: Score | None


def finish(ended: Outcome, *, on_limit: OnLimit, branches: Literal["allow", "refuse"], graded: bool) -> Finish:
    """Law 7: an episode that can't be trained, or of which nobody knows what it is worth, is a failure with its reason."""
    score = _score(ended, on_limit, graded=graded)
    if isinstance(score, Score) and score.status != "SCORED":
        return Finish(False, score)
    if not ended.trained:
        return Finish(False, _failed("the program was given no answer of the policy that is trained"))
    if branches == "refuse" and ended.paths > 1:
        return Finish(
            False,
            _failed(
                f"the episode has {ended.paths} paths, but agents.branches is refuse: it changed its history, or went on twice from one"
            ),
        )
    return Finish(True, score)


# No attempt of the program: it never began, was lost with its process, or can't be played at all.
_NOT_PLAYED = ("NOT_STARTED", "INTERRUPTED", "INVALID")


def _score(ended: Outcome, on_limit: OnLimit, *, graded: bool) -> Score | None:
    """The score to hand in; None leaves it to the grader."""
    said = ended.score
    if said is not None and said.status in _NOT_PLAYED:
        return said
    played_out = ended.hung is None and (said is None or said.status == "SCORED")
    # a program that raises or hangs after it was refused a call was stopped; after an answer that was cut off it has failed
    stopped = ended.limit is not None and (ended.refused or played_out)
    if stopped and on_limit != "grade":
        if on_limit == "fail":
            return _failed(f"a limit ended the episode (agents.on_limit fail): {ended.limit}")
        # of no build, as no environment gave it: law 3 lets it go with the siblings' scores, whose build is the program's or the grader's
        return Score("SCORED", on_limit, metadata={"headrace": f"agents.on_limit: {ended.limit}"})
    if graded and (played_out or stopped):  # what a limit stopped is graded for what there is by then
        return None
    if ended.hung is not None:
        return Score("TIMED_OUT", message=ended.hung)
    return said or _failed("the program said no reward, and env.<name>.grader names nobody who does")


def _failed(message: str) -> Score:
    return Score("FAILED", message=message)
