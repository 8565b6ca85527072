"""`llm_judge`: language models judge a completion by a rubric, over the OpenAI API.

The prompt and completion are data to this process and to the judge: they stand between unguessable marks, and nothing in them is evaluated.
A valid answer is a score on the scale, with a reason. Any other answer is not a verdict.
"""

from __future__ import annotations

import asyncio
import itertools

from headrace.config.environments import LLMJudgeConfig
from headrace.env.environment import Sample
from headrace.env.judge_template import JudgeTemplate, TemplateFails, check_template
from headrace.records.score import Score
from headrace_services.reward.environment_build import compute_build
from headrace_services.reward.environments.base import score_truncated
from headrace_services.reward.hosted import Hosted
from headrace_services.reward.judge.asking import Judges, Late, NotNow, VerdictStore
from headrace_services.reward.judge.questions import Question, ask_about
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
        template = None
        if env.template is not None:
            check_template(f"env.{name}.template", env.template, env.rubric, env.scale)
            template = JudgeTemplate(env.template)
        self.judges = Judges(name, env, template, store)
        self._scale = Scale(*env.scale)
        # each verdict that a completion needs: the place of its judge, and which of the judge's samples it is
        self._panel = list(itertools.product(range(len(env.judges)), range(env.samples)))

    async def score(self, sample: Sample) -> float | Score:
        if (found := score_truncated(self.env, sample)) is not None:
            return found
        question = self._question(sample)
        answers = await asyncio.gather(
            *(self.judges.ask(place, number, question) for place, number in self._panel), return_exceptions=True
        )
        for (place, _), answer in zip(self._panel, answers, strict=True):
            if isinstance(answer, BaseException):
                return self._failure(place, answer)
        return self._whole([answer for answer in answers if isinstance(answer, Verdict)])

    def awaited(self, sample: Sample) -> str:
        question = self._question(sample)
        asked = [place for place, number in self._panel if self.judges.is_asked(place, number, question)]
        return ", ".join(map(self.judges.name, dict.fromkeys(asked)))

    async def aclose(self) -> None:
        await self.judges.aclose()

    def _question(self, sample: Sample) -> Question:
        return ask_about(sample, columns=self.env.template is not None)

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

    def _whole(self, verdicts: list[Verdict]) -> Score:
        worth = [self._scale.worth(verdict.scores[0]) for verdict in verdicts]
        count = self.env.samples
        kept = min(SAID, _MOST_REASONS // len(verdicts))
        components, metadata = compute_agreement(worth, self.env), {}
        for place in range(len(self.env.judges)):
            mine = slice(place * count, (place + 1) * count)
            components[f"judge_{place}"] = sum(worth[mine]) / count
            reasons = [verdict.reason[:kept] for verdict in verdicts[mine]]
            metadata[f"judge_{place}"] = reasons if count > 1 else reasons[0]
        return Score("SCORED", compute_reward(worth, self.env), components, metadata)
