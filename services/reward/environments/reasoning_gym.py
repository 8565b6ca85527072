"""`reasoning_gym`: the procedural tasks of reasoning-gym, each scored by its own rule."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import reasoning_gym

from headrace.base.errors import ConfigError
from headrace.base.tagged_json import from_json
from headrace.config.data import DataSourceConfig
from headrace.config.environments import ReasoningGymConfig
from headrace.env.environment import Sample
from headrace.records.score import Score

from ..environment_build import read_version
from .base import SandboxedEnvironment, extract_answer, shorten_answer
from .gym_answers import TASKS, acceptable, sound


class ReasoningGym(SandboxedEnvironment[ReasoningGymConfig]):
    """Scores the tasks of reasoning-gym.

    `extra_env_info` is `{"task": name, "entry": {"question", "answer", "metadata"}}`, with the entry as `tagged_json.to_json` writes it. If
    the entry was generated with a `"task_config": {…}`, that is included too, because some tasks score by their arguments.

    The reward is the task's `score_answer` for what `extract` takes from the completion: 0 to 1. With `threshold` it is 1 at or above the
    threshold, else 0. A completion without such an answer gets the task's score for no answer. So does one whose answer the task's rule may
    not see (`gym_answers`) or can't read.
    """

    def __init__(self, name: str, env: ReasoningGymConfig) -> None:
        self._package = read_version("reasoning-gym")
        super().__init__(name, env, self._package, read_version("sympy"))
        self.description = f"{len(TASKS)} procedural tasks"
        self._task = functools.lru_cache(maxsize=256)(_make_task)

    def prepare(self, sources: Sequence[DataSourceConfig]) -> None:
        for source in sources:
            if source.dataset_name != "reasoning_gym":
                continue
            if source.task is None or source.task not in TASKS:
                raise ConfigError(
                    f"env.{self.name} can't score the task {source.task!r} of reasoning_gym: its rule is not known to read answers safely; "
                    f"use one of {', '.join(sorted(TASKS))}"
                )
            try:
                self._task(source.task, json.dumps(source.task_config, sort_keys=True))
            except (TypeError, ValueError, AssertionError) as error:
                raise ConfigError(
                    f"env.{self.name}: {self._package} refuses task_config {source.task_config} of {source.task}: {error}"
                ) from error

    def judge(self, sample: Sample) -> float | Score:
        info = sample.extra_env_info
        task, entry, config = info.get("task"), info.get("entry"), info.get("task_config", {})
        if not isinstance(task, str) or task not in TASKS:
            return Score(
                "INVALID", message=f"extra_env_info.task is {task!r:.80}, not a task that {self.name} can score"
            )
        if not isinstance(entry, dict) or not {"question", "answer", "metadata"} <= entry.keys():
            return Score(
                "INVALID", message="extra_env_info.entry must hold question, answer and metadata of the problem"
            )
        if not isinstance(config, dict) or "data_file" in config:  # one task reads a file of that name
            return Score("INVALID", message=f"extra_env_info.task_config is {config!r:.80}, not arguments of the task")
        if not sound(task, from_json(entry)):
            return Score("INVALID", message=f"extra_env_info.entry is not a problem that {task} would write")
        try:
            dataset = self._task(task, json.dumps(config, sort_keys=True))
        except (TypeError, ValueError, AssertionError) as error:
            return Score("INVALID", message=f"{task} refuses extra_env_info.task_config {config!r:.80}: {error}")
        found = extract_answer(sample.completion, self.env.extract)
        answer = found if found is not None and acceptable(task, found, from_json(entry)) else None
        metadata: dict[str, Any] = {"answer": shorten_answer(found)}
        if found is not None and answer is None:
            metadata["rule"] = f"not an answer that {task} may read"
        try:
            score = float(dataset.score_answer(answer, from_json(entry)))
        except MemoryError:
            raise
        except Exception as error:  # rules raise any kind of error for text that they can't read
            if answer is None:
                raise
            # law 7: if this raises too, the problem is at fault
            dataset.score_answer(from_json(entry)["answer"], from_json(entry))
            score = float(dataset.score_answer(None, from_json(entry)))
            metadata["rule"] = f"{task} can't read the answer: {error!r:.200}"
        reward = score if self.env.threshold is None else float(score >= self.env.threshold)
        return Score("SCORED", reward=reward, components={"score_answer": score}, metadata=metadata)


def _make_task(task: str, config: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(config))
