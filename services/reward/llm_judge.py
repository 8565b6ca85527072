"""`llm_judge`: language models judge a completion by a rubric, over the OpenAI API.

The prompt and completion are data to this process and to the judge: they stand between unguessable marks, and nothing in them is evaluated.
A valid answer is a score on the scale, with a reason. Any other answer is not a verdict.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import NamedTuple

from headrace.config.environments import LLMJudgeConfig
from headrace.env.environment import Sample
from headrace.records.score import Score
from headrace_services.reward.environment_build import compute_build
from headrace_services.reward.environments.base import score_truncated
from headrace_services.reward.hosted import Hosted
from headrace_services.reward.judge.asking import Judges, Late, NotNow, VerdictStore
from headrace_services.reward.judge.comparison import in_order, pairs_with
from headrace_services.reward.judge.questions import Question, ask_about, ask_to_compare, reference_of
from headrace_services.reward.judge.template import JudgeTemplate, TemplateFails, check_template
from headrace_services.reward.judge.verdicts import (
    SAID,
    NoVerdict,
    Scale,
    Verdict,
    compute_agreement,
    compute_reward,
)

# Characters of all reasons that the metadata of a score keeps.
_MOST_REASONS = 3000


_TIE = 0.5


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
    """

    def __init__(self, name: str, env: LLMJudgeConfig, store: VerdictStore) -> None:
        """Create the environment. Raises `ConfigError` for a judge's file or a template that can't be used."""
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

    async def score(self, sample: Sample) -> float | Score:
        if (found := score_truncated(self.env, sample)) is not None:
            return found
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
