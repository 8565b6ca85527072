"""The decisions of the agents service, as pure functions: which replica samples a call, and how an episode ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from headrace.config.agents import OnLimit
from headrace.records.score import Score
from headrace.replay import Replica


def choose(
    replicas: Iterable[Replica], calls: Mapping[str, int], min_version: int, parent: str | None, refused: set[str]
) -> str | None:
    """Return the replica that samples a call, or None if no replica can. `calls` are those of this service that each works on.

    The replica must be HEALTHY, with weights no older than the lease's, and must not have `refused` the call. The one that sampled the
    parent comes first, because its cache holds the path; else the least loaded one is taken.
    """
    fit = [each.id for each in replicas if each.state == "HEALTHY" and each.version >= min_version]
    fit = [name for name in fit if name not in refused]
    return parent if parent in fit else min(fit, key=lambda name: (calls[name], name), default=None)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an episode ended. `score` is the program's result. `hung` names the clock that ended it, if one did. `limit` is the last limit of
    the run that the program met, if any: the limit `refused` a call, or cut off the last answer. `trained` counts the trained calls, and
    `paths` their paths."""

    score: Score | None
    hung: str | None
    limit: str | None
    refused: bool
    trained: int
    paths: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """What the buffer gets: whether the trajectory, and the score. A score of None is left to a grader."""

    with_trajectory: bool
    score: Score | None


def finish(ended: Outcome, *, on_limit: OnLimit, branches: Literal["allow", "refuse"], graded: bool) -> Finish:
    """Decide what to hand in. Law 7: an episode that can't be trained or has no reward fails with a reason."""
    score = _score(ended, on_limit, graded=graded)
    if isinstance(score, Score) and score.status != "SCORED":
        return Finish(False, score)
    if not ended.trained:
        return Finish(False, _failure("the program received no trained answer of the policy"))
    if branches == "refuse" and ended.paths > 1:
        return Finish(
            False,
            _failure(
                f"the episode has {ended.paths} paths, but agents.branches is refuse: it changed its history or branched from it"
            ),
        )
    return Finish(True, score)


# The program was not played: it never started, was lost with its process, or can't be played at all.
_NOT_PLAYED = ("NOT_STARTED", "INTERRUPTED", "INVALID")


def _score(ended: Outcome, on_limit: OnLimit, *, graded: bool) -> Score | None:
    """Return the score to hand in, or None to leave it to the grader."""
    score = ended.score
    if score is not None and score.status in _NOT_PLAYED:
        return score
    played_out = ended.hung is None and (score is None or score.status == "SCORED")
    # a limit stopped a program that raises or hangs after a refused call; after an answer that was cut off, the program itself failed
    stopped = ended.limit is not None and (ended.refused or played_out)
    if stopped and on_limit != "grade":
        if on_limit == "fail":
            return _failure(f"a limit ended the episode (agents.on_limit fail): {ended.limit}")
        # it has no build, as no environment gave it; law 3 accepts it beside scores of any build
        return Score("SCORED", on_limit, metadata={"headrace": f"agents.on_limit: {ended.limit}"})
    if graded and (played_out or stopped):  # an episode that a limit stopped is graded as it is
        return None
    if ended.hung is not None:
        return Score("TIMED_OUT", message=ended.hung)
    return score or _failure("the program returned no reward, and env.<name>.grader is not set")


def _failure(message: str) -> Score:
    return Score("FAILED", message=message)
