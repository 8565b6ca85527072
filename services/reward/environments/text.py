"""`regex`, `format`, `length`, `repetition`: score how a completion is written. They are meant as parts of a reward: see `combine`."""

from __future__ import annotations

import re

from headrace.config.environments import FormatConfig, LengthConfig, RegexConfig, RepetitionConfig
from headrace.env.environment import Sample
from headrace.records.score import Score

from .base import SandboxedEnvironment, extract_answer, shorten_answer


class Regex(SandboxedEnvironment[RegexConfig]):
    """Rewards 1 if `pattern` is found in what `extract` takes from the completion, else 0."""

    def __init__(self, name: str, env: RegexConfig) -> None:
        super().__init__(name, env)
        self.description = f"whether {env.pattern!r:.80} is found"
        self._pattern = re.compile(env.pattern)

    def judge(self, sample: Sample) -> float | Score:
        answer = extract_answer(sample.completion, self.env.extract)
        found = None if answer is None else self._pattern.search(answer)
        return Score("SCORED", reward=float(found is not None), metadata={"found": shorten_answer(found and found[0])})


class Format(SandboxedEnvironment[FormatConfig]):
    """Rewards 1 if the completion consists of `tags`, each opened and closed once and in this order, with only blanks between and around
    them, else 0."""

    def __init__(self, name: str, env: FormatConfig) -> None:
        super().__init__(name, env)
        self.description = " ".join(f"<{tag}>…</{tag}>" for tag in env.tags)

    def judge(self, sample: Sample) -> float | Score:
        rest = sample.completion.strip()
        for tag in self.env.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if (sample.completion.count(opening), sample.completion.count(closing)) != (1, 1):
                return 0.0
            _, closed, after = rest.partition(closing)
            if not (rest.startswith(opening) and closed):
                return 0.0
            rest = after.lstrip()
        return float(not rest)


class Length(SandboxedEnvironment[LengthConfig]):
    """Rewards 1 if the completion has `min_tokens` to `max_tokens` tokens. Outside that range the reward falls to 0 within
    `fade_tokens`."""

    def __init__(self, name: str, env: LengthConfig) -> None:
        super().__init__(name, env)
        most = "" if env.max_tokens is None else env.max_tokens
        self.description = f"tokens, {env.min_tokens} to {most}"

    def quick_score(self, sample: Sample) -> Score | None:
        return super().quick_score(sample) or self.judge(sample)

    def judge(self, sample: Sample) -> Score:
        tokens, env = len(sample.completion_token_ids), self.env
        most = tokens if env.max_tokens is None else env.max_tokens
        outside = max(env.min_tokens - tokens, tokens - most, 0)
        reward = max(0.0, 1.0 - outside / env.fade_tokens) if env.fade_tokens else float(not outside)
        return Score("SCORED", reward=reward, metadata={"tokens": tokens})


class Repetition(SandboxedEnvironment[RepetitionConfig]):
    """Rewards the share of distinct runs of `ngram` tokens: 1 if no run occurs twice, near 0 if the completion goes round in circles. A
    completion shorter than `ngram` repeats nothing."""

    def __init__(self, name: str, env: RepetitionConfig) -> None:
        super().__init__(name, env)
        self.description = f"share of distinct runs of {env.ngram} tokens"

    def judge(self, sample: Sample) -> float | Score:
        tokens, size = sample.completion_token_ids, self.env.ngram
        runs = len(tokens) - size + 1
        if runs < 1:
            return 1.0
        return len({tokens[place : place + size] for place in range(runs)}) / runs
