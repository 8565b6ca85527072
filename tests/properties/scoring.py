"""The model's part of environments: what waits for each, what a failure costs, and when a breaker opens and closes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from headrace.base.errors import Fenced, LeaseLost, ReplayError
from headrace.records.score import Score
from headrace.replay import ScoringJob
from tests.properties.model import Core
from tests.properties.records import EnvironmentModel, Held, Piece

# Of the last results, and the first that tell; the functions under test have the same (clock.py).
WINDOW, FIRST = 6, 3
NOTHING_BEGUN = 3
MOST_RESCORED = 1
FAILED_PROBES = 3
Place = tuple[str, int]


def pause(who: str, tries: int) -> int:
    """Milliseconds until another try."""
    whole = min(500 * 2 ** (tries - 1), 10_000)
    jitter = int(hashlib.sha1(f"{who} {tries}".encode()).hexdigest()[:4], 16) / 65536
    return int(whole * (1 - jitter / 2))


class Scoring(Core):
    answer: frozenset[str] | set[str] = frozenset()  # tokens of the newest `take_scoring`
    events = 0  # takes, first failures and repairs, in their order

    # -- what is taken

    def take_scoring(self, room: Mapping[str, int], seen: list[ScoringJob]) -> list[ScoringJob]:
        """Of each environment those that may be taken the longest, in any order among equals; suspects and probes alone."""
        self.expire()
        self.newest["take"], self.answer = self.call_number, {job.token for job in seen}
        self.events += 1
        left = list(seen)
        for name, most in room.items():
            waiting = {place: piece for place, piece in self.waiting(name).items() if piece.since <= self.now}
            count, suspects, alone = self._allowance(name, most, waiting)
            waiting = {place: piece for place, piece in waiting.items() if piece.alone == suspects}
            waiting = self._untried(name, waiting) or waiting
            chosen = [job for job in left if job.group.env_name == name]
            left = [job for job in left if job.group.env_name != name]
            self._take(chosen, waiting, min(count, len(waiting)))
            if alone and chosen:
                self.environment(name).sent_alone = (chosen[0].group.id, chosen[0].trajectory.index)
        assert not left, "trajectories of an environment that was not asked for"
        self.tokens |= {job.token for job in seen}
        return seen

    def take_scoring_again(self, number: int, room: Mapping[str, int], seen: list[ScoringJob]) -> list[ScoringJob]:
        """The newest is answered as before; nothing more is taken."""
        self.expire()
        if number < self.newest["take"]:
            self.refuse(Fenced)
        assert {job.token for job in seen} <= self.answer
        return seen

    def _allowance(self, name: str, most: int, waiting: Mapping[Place, Piece]) -> tuple[int, bool, bool]:
        """How many may be taken; whether of the suspects; whether to be sent alone."""
        environment, taken = self.environment(name), self.taken(name)
        suspects = [piece.since for piece in waiting.values() if piece.alone]
        others = [piece.since for piece in waiting.values() if not piece.alone]
        if environment.broken is None and not suspects:
            if environment.sent_alone in taken:
                return 0, False, False
            environment.sent_alone = None
            return most, False, False
        if taken or (environment.broken is not None and self.now < environment.probe_at):
            return 0, False, False
        if self._untried(name, waiting):
            return 1, False, True
        first = bool(suspects) and min(suspects) <= min(others, default=min(suspects))
        return 1, environment.broken is None or first, True

    def _untried(self, name: str, waiting: Mapping[Place, Piece]) -> dict[Place, Piece]:
        """Of a broken environment, the first trajectory of the group leased to be its probe that waits and has not failed."""
        group = self.environment(name).group if self.environment(name).broken is not None else None
        places = [
            place
            for place, piece in waiting.items()
            if place[0] == group and not piece.alone and piece.failed_at is None
        ]
        return {place: waiting[place] for place in sorted(places)[:1]}

    def _take(self, chosen: Sequence[ScoringJob], waiting: Mapping[Place, Piece], count: int) -> None:
        places = [(job.group.id, job.trajectory.index) for job in chosen]
        assert len(set(places)) == len(places) == count, (places, list(waiting))
        assert set(places) <= set(waiting), "a trajectory was handed to a scorer that does not wait for one"
        since = [waiting[place].since for place in places]
        assert since == sorted(since)
        assert all(piece.since >= since[-1] for place, piece in waiting.items() if since and place not in places)
        for job, place in zip(chosen, places, strict=True):
            piece = waiting[place]
            piece.attempts += 1
            piece.taken_as = self.events
            assert job.scoring_attempt == piece.attempts
            assert job.trajectory.encode() == piece.trajectory.encode(), "another trajectory's payload"
            assert job.group.encode() == self.groups[place[0]].group.encode()
            assert job.token not in self.tokens, "a token is never used twice"
            piece.token, piece.deadline = job.token, self.now + round(self.limits.scoring_deadline_s * 1000)

    def renew_scoring(self, jobs: Sequence[ScoringJob], seen: object) -> list[ScoringJob]:
        self.expire()
        self.newest["renew"] = self.call_number
        return self._renew(jobs, renews=True)

    def renew_scoring_again(self, number: int, jobs: Sequence[ScoringJob], seen: object) -> list[ScoringJob]:
        """It renews nothing."""
        self.expire()
        return self._renew(jobs, renews=False)

    def _renew(self, jobs: Sequence[ScoringJob], *, renews: bool) -> list[ScoringJob]:
        lost = []
        for job in jobs:
            held = self.groups.get(job.group.id)
            piece = held.pieces.get(job.trajectory.index) if held else None
            if piece is None or not piece.taken or piece.token != job.token or piece.overdue(self.now):
                lost.append(job)
            elif renews:
                piece.deadline = self.now + round(self.limits.scoring_deadline_s * 1000)
        return lost

    def release_scoring(self, seen: object) -> None:
        self.expire()
        self.newest["take"] = self.newest["renew"] = self.call_number
        self.void_scoring()

    def release_scoring_again(self, number: int, seen: object) -> None:
        """It releases nothing."""
        self.expire()

    def void_scoring(self) -> None:
        for held in self.groups.values():
            for index, piece in held.pieces.items():
                if piece.taken:
                    self.void(held, index)

    # -- results

    def score_many(self, items: Sequence[tuple[ScoringJob, Score]], seen: object) -> list[ReplayError | None]:
        """First what says again what is scored, then the scores, then the failures, then what was not begun: the scores tell a broken
        environment from what it can't score, and may end the group."""
        self.expire()
        answers: dict[int, ReplayError | None] = {}
        accepted: list[int] = []
        for place, (job, _) in enumerate(items):  # before any of them counts, as they came
            answers[place] = None if self._known(job) else self._objection_to(job)
            if not self._known(job) and answers[place] is None:
                accepted.append(place)
        scored = {place for place in accepted if items[place][1].status == "SCORED"}
        taken_as = {
            (job.group.id, job.trajectory.index): piece.taken_as for job, _ in items if (piece := self._piece(job))
        }
        members: dict[str, list[Place]] = {}
        turns: dict[str, list[Place]] = {}
        for group in dict.fromkeys(job.group.id for job, _ in items):
            mine = [place for place in sorted(scored) if items[place][0].group.id == group]
            others, too_often = self._settle_build([items[place] for place in mine])
            for place in mine:
                if items[place][0].trajectory.index in others:
                    answers[place] = self.refusal(LeaseLost(""))
                else:
                    answers[place] = self._reward(*items[place], turns if too_often else members)
        beside = {name: max(taken_as[place] for place in places) for name, places in members.items()}
        for name, places in members.items():
            self.count_scored(name, places, beside[name])
        for name, places in turns.items():
            self._take_turns(name, places)
        rest = [place for place in accepted if place not in scored]
        for name in dict.fromkeys(items[place][0].group.env_name for place in rest):
            mine = [place for place in rest if items[place][0].group.env_name == name]
            mine.sort(key=lambda place: self._turn(items, place))
            begun = [place for place in mine if items[place][1].status != "NOT_STARTED"]
            for place in begun:
                answers[place] = self._fail(*items[place], beside.get(name))
            idle = [place for place in mine if place not in begun]
            still = [place for place in idle if self._piece(items[place][0])]
            for place in idle:
                answers[place] = None if place in still else self.refusal(LeaseLost(""))
            if still:
                self._not_started(
                    name, [items[place][0] for place in still], bool(begun) or name in beside or name in turns
                )
        return [answers[place] for place in range(len(items))]

    def _turn(self, items: Sequence[tuple[ScoringJob, Score]], place: int) -> tuple[int, int]:
        groups = list(dict.fromkeys(job.group.id for job, _ in items))
        return groups.index(items[place][0].group.id), place

    def _piece(self, job: ScoringJob) -> Piece | None:
        held = self.groups.get(job.group.id)
        piece = held.pieces.get(job.trajectory.index) if held else None
        return piece if piece is not None and piece.token == job.token else None

    def _known(self, job: ScoringJob) -> bool:
        piece = self._piece(job)
        return piece is not None and piece.reward is not None

    def _objection_to(self, job: ScoringJob) -> ReplayError | None:
        piece = self._piece(job)
        return self.refusal(LeaseLost("")) if piece is None or piece.overdue(self.now) else None

    def _settle_build(self, items: Sequence[tuple[ScoringJob, Score]]) -> tuple[set[int], bool]:
        """Of scores of one group: the indices of those that are not of the build that scores it; and whether that has changed too often.
        It is the build of what was taken last."""
        if not items:
            return set(), False
        held = self.groups[items[0][0].group.id]
        taken, build = before = held.build if held.scored else (-1, "")
        for job, score in items:
            number = int(job.token.split("/")[0].rpartition("-")[2])
            if number >= taken:
                taken, build = number, score.build
        others = {job.trajectory.index for job, score in items if score.build != build}
        for index in others:
            self.void(held, index)
        changes = bool(held.scored) and before[1] not in ("", build)  # scores of no build go with any
        if changes:
            sent_alone = self.environment(held.group.env_name).sent_alone
            for index, piece in held.scored.items():
                piece.reward = None
                # one whose environment had died with it was scored since, and is a suspect no longer
                self.void(held, index, alone=piece.alone and sent_alone == (held.id, index))
            held.rescored += 1
        held.build = taken, build
        return others, changes and held.rescored > MOST_RESCORED

    def _take_turns(self, name: str, places: Sequence[Place]) -> None:
        if self.environment(name).broken is None:
            self._break(name, "BUILDS")
        elif self.environment(name).sent_alone in places:
            self._renew_breaker(name)

    def _reward(self, job: ScoringJob, score: Score, members: dict[str, list[Place]]) -> ReplayError | None:
        piece = self._piece(job)
        if piece is None:  # the group was completed by others of the call
            return self.refusal(LeaseLost(""))
        piece.reward = score.reward
        members.setdefault(job.group.env_name, []).append((job.group.id, job.trajectory.index))
        self.settle(self.groups[job.group.id])
        return None

    def count_scored(self, name: str, places: Sequence[Place], newest: int = 0) -> None:
        """They were scored, the last taken of them as `newest`."""
        environment = self.environment(name)
        if environment.broken is not None and (environment.kind == "NOT_STARTED" or environment.sent_alone in places):
            group, index = environment.sent_alone or ("", 0)
            held = self.groups.get(group)
            piece = held.pieces.get(index) if held else None
            if group != environment.group or (piece is not None and piece.failed_at is not None):
                self.events += 1
                environment.repaired = self.events
            environment.close()
        environment.failing = {place: at for place, at in environment.failing.items() if place not in places}
        environment.results += len(places)
        environment.not_started = 0
        environment.works = max(environment.works, newest)

    def settle(self, held: Held) -> None:
        """The group may be complete."""
        raise NotImplementedError

    def _fail(self, job: ScoringJob, score: Score, beside: int | None) -> ReplayError | None:
        piece = self._piece(job)
        if piece is None:  # another score of the call has ended the group
            return self.refusal(LeaseLost(""))
        held, index = self.groups[job.group.id], job.trajectory.index
        place = (held.id, index)
        if score.status == "UNSENDABLE":
            self.drop(held, index)
            return None
        environment = self.environment(job.group.env_name)
        was_alone = environment.sent_alone == place
        suspect = True if score.status == "INTERRUPTED" else None
        environment.not_started = 0
        if environment.broken is not None and environment.kind == "NOT_STARTED":
            environment.close()
        if environment.broken is not None and was_alone:
            self._renew_breaker(job.group.env_name)
        if score.status == "INTERRUPTED" and not was_alone:
            self.void(held, index, alone=True)
            return None
        self._first_failure(environment, piece, score, beside)
        broken = environment.broken is not None
        if broken and not (suspect and self._is_left_with_killers(job.group.env_name)):
            self.void(held, index, alone=suspect)
        elif not broken and self._judge(held, index, score):
            self._break(job.group.env_name, "FAILING")
            self.void(held, index, alone=suspect)
        elif self._used_up(environment, piece, score):
            self.drop(held, index)
        else:
            delay = pause(f"{held.id}:{index}", piece.attempts)
            piece.token, piece.since, piece.alone = None, self.now + delay, suspect or piece.alone
        return None

    def _is_left_with_killers(self, name: str) -> bool:
        """Nothing will be sent to the environment but what killed it, of which one is with it."""
        coming = [
            held
            for held in self.groups.values()
            if held.state == "open"
            or (held.state == "queued" and (held.lane != "train" or held.passed or held.group.env_name == name))
        ]
        others = [piece for piece in self.waiting(name).values() if not piece.alone]
        return self.closed and not coming and not self.wanted and not others and len(self.taken(name)) == 1

    def _first_failure(self, environment: EnvironmentModel, piece: Piece, score: Score, beside: int | None) -> None:
        """The first INVALID begins anew, and so does what failed before the environment was repaired."""
        first, invalid = piece.failed_at, score.status == "INVALID"
        if first is None or (invalid and not piece.was_invalid) or first <= environment.repaired:
            self.events += 1
            piece.failed_at = self.events if beside is None or beside < piece.taken_as else beside
            piece.was_invalid = invalid

    def _is_own(self, environment: EnvironmentModel, piece: Piece) -> bool:
        """Whether others were scored that were taken after it first failed."""
        return environment.works >= (piece.failed_at or 0)

    def _used_up(self, environment: EnvironmentModel, piece: Piece, score: Score) -> bool:
        """Perhaps it is the environment's failure, and then it gets twice the attempts."""
        most = self.limits.max_scoring_attempts
        if not self._is_own(environment, piece):
            return piece.attempts >= 2 * most
        return score.status == "INVALID" or piece.attempts >= most

    def _judge(self, held: Held, index: int, score: Score) -> bool:
        """Whether the environment's breaker opens for this failure."""
        environment, piece, place = self.environment(held.group.env_name), held.pieces[index], (held.id, index)
        if place not in environment.failing:
            environment.results += 1
            environment.failing[place] = environment.results
        recent = environment.results - WINDOW
        environment.failing = {place: number for place, number in environment.failing.items() if number > recent}
        if self._is_own(environment, piece):
            return False
        seen = min(environment.results, WINDOW)
        settings = self.limits.environments.get(held.group.env_name)
        share = settings.failure_share if settings else 0.5
        used_up = self._used_up(environment, piece, score)
        if used_up and self._fails_with_others(environment, held, piece):
            return True
        tells = seen >= FIRST or used_up
        return tells and len(environment.failing) > share * seen

    def _fails_with_others(self, environment: EnvironmentModel, held: Held, piece: Piece) -> bool:
        """One of another group fails as well, and none was scored that was taken since either began to."""
        others = [
            self.groups[id_].pieces.get(index)
            for id_, index in environment.failing
            if id_ != held.id and id_ in self.groups
        ]
        failing = [each for each in others if each is not None and each.failed_at is not None]
        return not self._is_own(environment, piece) and any(not self._is_own(environment, each) for each in failing)

    def _not_started(self, name: str, jobs: Sequence[ScoringJob], begun: bool) -> None:
        """What it did not begin costs nothing; when that happens again and again, it is broken."""
        environment, tries = self.environment(name), 1
        broken = environment.broken is not None
        if not broken and not begun:
            environment.not_started += 1
            tries = environment.not_started
            if tries >= NOTHING_BEGUN:
                self._break(name, "NOT_STARTED")
        for job in jobs:
            place = (job.group.id, job.trajectory.index)
            if broken and environment.sent_alone == place:
                self._renew_breaker(name)
            self.void(self.groups[place[0]], place[1], 0 if broken else pause(f"{place[0]}:{place[1]}", tries))

    # -- breakers

    def _break(self, name: str, kind: str) -> None:
        environment = self.environment(name)
        for group, index in environment.failing:
            held = self.groups.get(group)
            piece = held.pieces.get(index) if held else None
            if piece is not None:
                piece.attempts = int(piece.token is not None)
        environment.failing = {}
        if environment.since is None or environment.results >= WINDOW:
            environment.since = self.now
        environment.broken, environment.kind, environment.probes = environment.since, kind, 0
        environment.probe_at = self.now + pause(name, 1)

    def _renew_breaker(self, name: str) -> None:
        environment = self.environment(name)
        environment.probes += 1
        environment.probe_at = self.now + pause(name, environment.probes + 1)

    def may_generate(self, name: str) -> bool:
        """Of a broken environment, only the group that is to be its probe: where there is nothing else to be sent, or too many probes have
        failed since one was asked for, and no other one is being generated or still to be tried."""
        environment = self.environment(name)
        if environment.broken is None:
            return True
        enough = environment.kind == "FAILING" and environment.probes >= max(FAILED_PROBES, 2 * environment.asked)
        if (self.waiting(name) or self.taken(name)) and not enough:
            return False
        probe = self.groups.get(environment.group or "")
        if probe is None or probe.state not in ("open", "scoring"):
            return True
        return probe.state == "scoring" and any(piece.failed_at is not None for piece in probe.pieces.values())
