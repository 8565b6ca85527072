"""`reward_model`: the output of a sequence-classification model of transformers, which has its own process and device."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Sequence

import msgspec

from headrace.base.errors import ServiceError
from headrace.base.tasks import cancel
from headrace.config.environments import RewardModelConfig
from headrace.env.environment import Sample
from headrace.records.score import Score

from .child_process import ChildProcess
from .environments.base import score_truncated
from .hosted import Hosted
from .model_process import Answer, Conversation, ModelSpecification

_ANSWERS = msgspec.msgpack.Decoder(list[Answer])


class ModelProcess(ChildProcess):
    """The process of a model. It needs the user's environment variables to find the model's files and the device."""

    what = "the process of a reward model"
    program: Sequence[str] = ("-P", "-m", "headrace_services.reward.model_process")
    start_timeout_s = 1800.0  # tens of gigabytes, over a network

    def environ(self) -> dict[str, str]:
        return dict(os.environ)


class RewardModel(Hosted):
    """Rewards a completion with the model's single logit for the prompt and the completion."""

    concurrency = 1  # calls at a time; a call is one forward pass
    patience_s = 60.0  # how long a start waits for the model; `headrace up` waits at most two minutes for a service

    def __init__(self, name: str, env: RewardModelConfig) -> None:
        self.name = name
        self.env = env
        self.max_batch_size = env.batch_size
        self.description = f"reward model {env.model_name}"
        self._process = ModelProcess(ModelSpecification(name, env.model_dump(mode="json")))
        self._restart: asyncio.Task[None] | None = None

    @property
    def build(self) -> str:
        """The build that the model's process reports, or "" until the model is loaded."""
        return self._process.started.builds.get(self.name, "")

    async def start(self) -> None:
        """Load the model. A slow load continues in the background. Raises `ServiceError` with the reason if the model can't be loaded."""
        loading = asyncio.create_task(self._process.start())
        await asyncio.wait([loading], timeout=self.patience_s)
        if loading.done():
            loading.result()
        else:
            self._restart = asyncio.create_task(self._go_on(loading))

    def problem(self) -> str | None:
        if self._process.alive:
            return None
        return self._process.problem or f"the model {self.env.model_name} is being loaded"

    async def score_batch(self, samples: Sequence[Sample]) -> list[Score]:
        if (problem := self.problem()) is not None:  # without the process there is no build, so not even a quick score
            self._start_again()
            return [Score("NOT_STARTED", message=problem)] * len(samples)
        found = {
            place: score
            for place, sample in enumerate(samples)
            if (score := score_truncated(self.env, sample)) is not None
        }
        places = [place for place in range(len(samples)) if place not in found]
        if places:
            asked = [samples[place] for place in places]
            found |= dict(zip(places, await self._scores(asked), strict=True))
        return [found[place] for place in range(len(samples))]

    async def _scores(self, samples: Sequence[Sample]) -> list[Score]:
        asked = [Conversation(list(sample.messages), sample.completion) for sample in samples]
        try:
            answers = _ANSWERS.decode(await self._process.ask(msgspec.msgpack.encode(asked)))
        except (asyncio.IncompleteReadError, OSError) as error:
            reason = await self._process.exit_reason(error)
            await self._process.kill()
            self._start_again()
            return [Score("INTERRUPTED", message=f"the process of the model died: {reason}")] * len(samples)
        except asyncio.CancelledError:  # it is late, and its answer would be mistaken for that of the next call
            await self._process.kill()
            self._start_again()
            raise
        return [
            Score("INVALID", message=f"prompt and completion have {answer}")
            if isinstance(answer, str)
            else _score(answer)
            for answer in answers
        ]

    async def aclose(self) -> None:
        if self._restart is not None:
            await cancel([self._restart])
        await self._process.kill()

    async def _go_on(self, loading: asyncio.Task[None]) -> None:
        with contextlib.suppress(ServiceError):
            await loading
        await self._process.restart()  # returns at once if the model is loaded

    def _start_again(self) -> None:
        if self._restart is None or self._restart.done():
            self._restart = asyncio.create_task(self._process.restart())


def _score(reward: float) -> Score:
    """Return the score for a reward. Law 7: a number that is not finite is not a reward."""
    if not math.isfinite(reward):
        return Score("FAILED", message=f"the model returned {reward}, not a finite number")
    return Score("SCORED", reward=reward)
