"""`reasoning_gym`: any procedural task of reasoning-gym, scored by the task's own rule."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from headrace.config.data import EnvConfig
from headrace.environment import Sample
from headrace.tagged_json import from_json
from headrace.trajectory import Score
from headrace_services.reward.environments import BuiltInEnvironment, extract_answer


class ReasoningGym(BuiltInEnvironment):
    """`extra_env_info` is `{"task": name, "entry": {"question", "answer", "metadata"}}`, the entry as `tagged_json.to_json`
    writes it, and `"task_config": {…}` where the entry was generated with one: some tasks score by their arguments.

    The reward is the task's `score_answer` of what `extract` takes from the completion: 0 to 1. With `threshold` it is 1
    at or above it, else 0. A completion without such an answer is scored as the task scores no answer at all.
    """

    def __init__(self, name: str, env: EnvConfig) -> None:
        super().__init__(name, env)
        self.build = f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"
        self.description = f"{len(DATASETS)} procedural tasks"
        self._task = functools.lru_cache(maxsize=256)(_make_task)

    def judge(self, sample: Sample) -> float | Score:
        info = sample.extra_env_info
        task, entry, config = info.get("task"), info.get("entry"), info.get("task_config", {})
        if not isinstance(task, str) or task not in DATASETS:
            return Score("INVALID", message=f"extra_env_info.task is {task!r:.80}, not a task of {self.build}")
        if not isinstance(entry, dict) or not {"question", "answer", "metadata"} <= entry.keys():
            return Score(
                "INVALID", message="extra_env_info.entry must hold question, answer and metadata of the problem"
            )
        if not isinstance(config, dict):
            return Score("INVALID", message=f"extra_env_info.task_config is {config!r:.80}, not arguments of the task")
        try:
            dataset = self._task(task, json.dumps(config, sort_keys=True))
        except (TypeError, ValueError, AssertionError) as error:
            return Score("INVALID", message=f"extra_env_info.task_config {config!r:.80} is refused by {task}: {error}")
        answer = extract_answer(sample.completion, self.env.extract)
        score = float(dataset.score_answer(answer, from_json(entry)))
        reward = score if self.env.threshold is None else float(score >= self.env.threshold)
        return Score("SCORED", reward=reward, components={"score_answer": score}, metadata={"answer": answer})


def _make_task(task: str, config: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(config))
