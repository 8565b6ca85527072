"""`llm_judge`: language models judge a completion by a rubric, over the OpenAI API.

The prompt and completion are data to this process and to the judge: they stand between unguessable marks, and nothing in them is evaluated.
A valid answer is a score on the scale, with a reason. Any other answer is not a verdict.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.base.errors import ConfigError
from headrace.base.files import atomic_write
from headrace.base.tasks import cancel
from headrace.config.environments import LLMJudgeConfig
from headrace.env.environment import Sample
from headrace.env.kit.example_samples import read_labels
from headrace.env.source_build import digest_texts
from headrace.records.score import Score

from .environment_build import compute_build
from .environments.base import score_truncated
from .hosted import Hosted
from .judge.asking import Judges, Late, NotNow, VerdictStore
from .judge.calibration import (
    Calibration,
    Judged,
    find_refusal,
    fit_monotone,
    make_samples,
    measure,
    measure_order,
)
from .judge.comparison import in_order, pairs_with
from .judge.questions import Question, ask_about, ask_to_compare, reference_of
from .judge.template import JudgeTemplate, TemplateFails, check_template
from .judge.verdicts import SAID, NoVerdict, Scale, Verdict, compute_agreement, compute_reward

_log = logging.getLogger("headrace.reward")
# Characters of all reasons that the metadata of a score keeps.
_MOST_REASONS = 3000
_TIE = 0.5
_PAUSE_S = 5.0  # before judges that could not be asked for a calibration are asked again


class _Asked(NamedTuple):
    """A verdict that a completion needs: the place of the judge, which of its samples it is, what is asked, and the place of the completion
    in that."""

    place: int
    number: int
    question: Question
    at: int


class LLMJudge(Hosted):
    """Asks language models for verdicts, `samples` of each. If there is an `extra_env_info.answer`, the judges see it as the reference
    answer.

    Each score is mapped from `scale` to 0 to 1. With `threshold` it then counts as 1 at or above the threshold, else as 0. The reward is
    what all verdicts give by `vote`. Law 7: unless every one is there, there is no reward.

    With `calibration` the judges first judge completions that people have scored. Until that is done, they judge nothing else.
    """

    patience_s = 30.0  # how long a start waits for the calibration, of the two minutes that `headrace up` waits

    def __init__(self, name: str, env: LLMJudgeConfig, store: VerdictStore, report: Path | None = None) -> None:
        """Create the environment. `report` is the file for its calibration. Raises `ConfigError` for a file or a template that can't be
        used."""
        self.name = name
        self.env = env
        self.concurrency = env.concurrency
        self.build = compute_build(env)
        self.description = f"{len(env.judges)} judges: {', '.join(judge.model for judge in env.judges)}"
        self.whole_groups = env.compare in ("group", "pairs")
        check_template(name, env)
        template = None if env.template is None else JudgeTemplate(env.template)
        self.judges = Judges(name, env, template, store)
        self._scale = Scale(*env.scale)
        self._labels = [] if env.calibration is None else read_labels(Path(env.calibration), env.scale)
        self._report = report
        self._calibrating: asyncio.Task[None] | None = None
        self._waits = f"env.{name}.calibration is not judged yet"
        self._measures: dict[str, float | None] = {}
        self._corners: tuple[list[float], list[float]] | None = None

    async def start(self) -> None:
        """Calibrate the judges. What takes long goes on in the background. Raises `ConfigError` if they don't agree with people."""
        if self._labels:
            self._calibrating = asyncio.create_task(self._calibrate())
            await asyncio.wait([self._calibrating], timeout=self.patience_s)
            if self._calibrating.done():
                self._calibrating.result()

    def problem(self) -> str | None:
        if not self._labels:
            return None
        if self._calibrating is None or not self._calibrating.done():
            return self._waits
        error = self._calibrating.exception()
        return None if error is None else str(error)

    async def score(self, sample: Sample) -> float | Score:
        if (problem := self.problem()) is not None:
            return Score("NOT_STARTED", message=problem)
        if (found := score_truncated(self.env, sample)) is not None:
            return found
        score = await self._judge(sample)
        if score.reward is None or not self._measures:
            return score
        reward = score.reward if self._corners is None else float(np.interp(score.reward, *self._corners))
        return msgspec.structs.replace(score, reward=reward, metadata={**score.metadata, "calibration": self._measures})

    async def calibrate(self) -> Calibration:
        """Return what the judges give to the completions that people have scored."""
        room = asyncio.Semaphore(self.env.concurrency)
        samples = make_samples(self._labels)

        async def judge(sample: Sample) -> Score:
            async with room:
                return await self._judge(sample)

        scores = await asyncio.gather(*map(judge, samples))
        groups = list(dict.fromkeys(sample.group_id for sample in samples))
        judged = [
            Judged(
                groups.index(sample.group_id),
                sample.completion,
                self._scale.worth(label.score),
                score.status,
                score.reward,
                score.components,
                score.metadata,
                score.message,
            )
            for sample, label, score in zip(samples, self._labels, scores, strict=True)
        ]
        order = measure_order(await self._both_orders(samples, room))
        return Calibration(judged, measure(judged, self.env.compare), order)

    async def _calibrate(self) -> None:
        """Calibrate, as soon as the judges can be asked about everything. Raises `ConfigError` if they may not be used."""
        key = f"env.{self.name}.calibration"
        while True:
            found = await self.calibrate()
            waiting = [each for each in found.judged if each.status in ("NOT_STARTED", "TIMED_OUT")]
            if not waiting:
                break
            waits = f"{key}: {len(waiting)} of {len(found.judged)} completions are not judged yet: {waiting[0].message}"
            if waits != self._waits:
                _log.warning("%s", waits)
            self._waits = waits
            await asyncio.sleep(_PAUSE_S)
        if self._report is not None:
            with atomic_write(self._report) as path:
                path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        _log.info("%s: %s %s", key, json.dumps(found.measures), json.dumps(found.order))
        if (refusal := find_refusal(found, self.name, self.env)) is not None:
            raise ConfigError(f"{key} {self.env.calibration}: {refusal}")
        self._measures = found.measures.get("reward", {})
        if self.env.map_to_people:
            self._corners = fit_monotone(found.judged)
            self.build = compute_build(self.env, f"as people {digest_texts([json.dumps(self._corners)])}")

    async def _both_orders(self, samples: Sequence[Sample], room: asyncio.Semaphore) -> list[tuple[Verdict, Verdict]]:
        """Return the verdicts on the pairs of these samples, each with that on the same pair in the other order."""
        pairs = {
            (each.place, each.number, each.question.text): each
            for sample in samples
            if self._problem(sample) is None
            for each in self._asked(sample)
            if each.question.kind == "pair"
        }

        async def both(asked: _Asked) -> list[Verdict]:
            async with room:
                questions = asked.question, asked.question.turned
                return [await self.judges.ask(asked.place, asked.number, question) for question in questions]

        found = await asyncio.gather(*map(both, pairs.values()), return_exceptions=True)
        return [(each[0], each[1]) for each in found if isinstance(each, list)]

    async def _judge(self, sample: Sample) -> Score:
        if (problem := self._problem(sample)) is not None:
            return Score("INVALID", message=problem)
        asked = self._asked(sample)
        answers = await asyncio.gather(
            *(self.judges.ask(each.place, each.number, each.question) for each in asked), return_exceptions=True
        )
        for each, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                return self._failure(each.place, answer)
        verdicts = [answer for answer in answers if isinstance(answer, Verdict)]
        return self._whole(list(zip(asked, verdicts, strict=True)))

    def awaited(self, sample: Sample) -> str:
        asked = [] if self._problem(sample) is not None else self._asked(sample)
        places = [each.place for each in asked if self.judges.is_asked(each.place, each.number, each.question)]
        return ", ".join(map(self.judges.name, dict.fromkeys(places)))

    async def aclose(self) -> None:
        if self._calibrating is not None:
            await cancel([self._calibrating])
        await self.judges.aclose()

    def _problem(self, sample: Sample) -> str | None:
        """Return why the sample can't be judged, or None."""
        compare, group = self.env.compare, sample.group_completions
        if self.whole_groups and sample.completion not in group.values():
            return f"env.{self.name}.compare {compare} needs the completions of the whole group, and this one was sent without them"
        has_others = compare != "reference" and len(group) > 1
        if compare in ("pairs", "reference") and not has_others and reference_of(sample) is None:
            return (
                f"env.{self.name}.compare {compare}: there is nothing to compare the completion with; give the row a reference answer"
                + (", or ask for at least two completions of a prompt" if compare == "pairs" else "")
            )
        return None

    def _asked(self, sample: Sample) -> list[_Asked]:
        """Return all verdicts that the completion needs."""
        asked = []
        for number in range(self.env.samples):
            shown = self._shown(sample, number)
            asked += [_Asked(place, number, *each) for place in range(len(self.env.judges)) for each in shown]
        return asked

    def _shown(self, sample: Sample, number: int) -> list[tuple[Question, int]]:
        """Return what a judge is asked for its sample `number`, each with the place of the completion in it."""
        columns, own = self.env.template is not None, sample.completion
        if self.env.compare is None:
            return [(ask_about(sample, columns=columns), 0)]
        others = list(sample.group_completions.values())
        if self.env.compare == "reference" or (self.env.compare == "pairs" and len(others) == 1):
            others = [own, reference_of(sample) or ""]
        order = in_order(sample.group_id, number, others)
        if self.env.compare == "group":
            return [(ask_to_compare(sample, "group", order, columns=columns), order.index(own))]
        return [
            (ask_to_compare(sample, "pair", pair, columns=columns), pair.index(own))
            for pair in pairs_with(order, own, self.env.opponents)
        ]

    def _worth(self, asked: _Asked, verdict: Verdict) -> float:
        """Return what a verdict gives the completion, from 0 to 1."""
        if asked.question.kind == "pair":  # the verdict is on the first of the two
            return 1 - verdict.scores[0] if asked.at else verdict.scores[0]
        return self._scale.worth(verdict.scores[asked.at])

    def _failure(self, place: int, error: BaseException) -> Score:
        """Return the score for a verdict that is not there. Raises errors that are no judge's."""
        if isinstance(error, TemplateFails):
            return Score("INVALID", message=f"env.{self.name}.template: {error}")
        message = f"{self.judges.name(place)}: {error}"
        if isinstance(error, NotNow):
            return Score("NOT_STARTED", message=message)
        if isinstance(error, Late):
            return Score("TIMED_OUT", message=message)
        if isinstance(error, NoVerdict):
            return Score("FAILED", message=message)
        raise error

    def _whole(self, given: list[tuple[_Asked, Verdict]]) -> Score:
        """Return the score for all verdicts on a completion. One that is compared only with its equals ties with them."""
        worth: list[float] = []
        components: dict[str, float] = {}
        metadata: dict[str, object] = {}
        kept = min(SAID, _MOST_REASONS // max(1, len(given)))
        for place in range(len(self.env.judges)):
            mine = [each for each in given if each[0].place == place]
            values = [
                statistics.fmean([self._worth(*each) for each in mine if each[0].number == number] or [_TIE])
                for number in range(self.env.samples)
            ]
            worth += values
            components[f"judge_{place}"] = statistics.fmean(values)
            reasons = [verdict.reason[:kept] for _, verdict in mine]
            metadata[f"judge_{place}"] = reasons[0] if len(reasons) == 1 else reasons
        components |= compute_agreement(worth, self.env)
        return Score("SCORED", compute_reward(worth, self.env), components, metadata)


def calibrate(name: str, env: LLMJudgeConfig) -> tuple[dict[str, Any], str | None]:
    """Return a calibration of the judges of `env.<name>`, as JSON, and why they may not be used after it (None: they may)."""

    async def judge() -> tuple[Calibration, str | None]:
        judges = LLMJudge(name, env, VerdictStore(None))
        try:
            found = await judges.calibrate()
            return found, find_refusal(found, name, env)
        finally:
            await judges.aclose()

    found, refusal = asyncio.run(judge())
    return msgspec.to_builtins(found), refusal
