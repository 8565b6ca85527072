"""From a problem to the group that asks for it: chat template, tokens, stop ids and sampling."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np

from headrace.config import Config
from headrace.config.policy import Generation
from headrace.errors import ConfigError
from headrace.trajectory import Group, Int32, Lane, Sampling
from services.trainer.data.problems import Problem


class Prompter:
    """Makes groups with the policy's tokenizer (a transformers tokenizer with a chat template).

    Raises `ConfigError` if the tokenizer has no chat template, and for a prompt that is longer than
    `data.max_input_seq_length`, or that fills `policy.max_total_sequence_length`.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"policy.model_name {config.policy.model_name}: its tokenizer has no chat template; "
                "name one that has by policy.tokenizer.name"
            )
        self._config = config
        self._tokenizer = tokenizer
        generation = config.policy.generation
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._stop_token_ids = tuple(dict.fromkeys([*end, *generation.stop_token_ids]))
        self._sampling = Sampling(
            temperature=generation.temperature,
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            stop_strings=tuple(generation.stop_strings),
            top_k=generation.top_k,
            top_p=generation.top_p,
        )
        self._val_sampling = _for_validation(self._sampling, generation)

    def train_group(self, problem: Problem, order: int, epoch: int) -> Group:
        n = self._config.algorithm.num_generations_per_prompt
        name = f"e{epoch}-train-{problem.index}"
        return self._group(problem, name, "train", order, n, self._sampling)

    def validation_group(self, problem: Problem, version: int, position: int) -> Group:
        """The group that asks weights of `version` for `problem`, which is at `position` of that validation."""
        n = self._config.algorithm.val_num_generations_per_prompt
        name = f"v{version}-validation-{problem.index}"
        return self._group(problem, name, "validation", position, n, self._val_sampling)

    def _group(self, problem: Problem, name: str, lane: Lane, order: int, n: int, sampling: Sampling) -> Group:
        tokens, context = self._tokens(problem), self._config.policy.max_total_sequence_length
        return Group(
            id=name,
            lane=lane,
            order=order,
            task_name=problem.task_name,
            env_name=problem.env_name,
            messages=problem.messages,
            prompt_token_ids=tokens,
            extra_env_info=problem.extra_env_info,
            dataset_index=problem.index,
            n=n,
            sampling=dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, context - tokens.size)),
        )

    def fits(self, problem: Problem) -> bool:
        """Whether a group could be made that asks for `problem`."""
        # no text has more tokens than bytes: most problems are seen to fit without being tokenized
        if len(json.dumps(problem.messages).encode()) + self._overhead * len(problem.messages) <= self._room:
            return True
        return self._misfit(problem, len(self._encode(problem))) is None

    @functools.cached_property
    def _overhead(self) -> int:
        """Tokens that the template adds to a message, or more."""
        return len(self._encode(Problem(0, ({"role": "user", "content": "."},), {}, "", "")))

    @property
    def _room(self) -> int:
        """Tokens of the longest prompt."""
        context, limit = self._config.policy.max_total_sequence_length - 1, self._config.data.max_input_seq_length
        return context if limit is None else min(context, limit)

    def _tokens(self, problem: Problem) -> Int32:
        ids = self._encode(problem)
        if misfit := self._misfit(problem, len(ids)):
            raise ConfigError(misfit)
        return np.asarray(ids, dtype=np.int32)

    def _encode(self, problem: Problem) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(problem.messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self._config.policy.tokenizer.chat_template_kwargs,
        )
        return ids

    def _misfit(self, problem: Problem, length: int) -> str | None:
        """Why a prompt of `length` tokens can't be asked, if so."""
        policy, limit = self._config.policy, self._config.data.max_input_seq_length
        where = f"the prompt of {problem.task_name} problem {problem.index} has {length} tokens"
        remedy = "raise it, leave the problem out, or leave all such out by data.overlong_prompts=leave_out"
        if limit is not None and length > limit:
            return f"{where}, more than data.max_input_seq_length {limit}; {remedy}"
        if length >= policy.max_total_sequence_length:
            return (
                f"{where}, and policy.max_total_sequence_length {policy.max_total_sequence_length} leaves no room for a "
                f"completion; {remedy}"
            )
        return None


def _for_validation(sampling: Sampling, generation: Generation) -> Sampling:
    """`sampling` with what `val_*` keys say instead, where they say something."""
    changes: dict[str, Any] = {}
    if generation.val_temperature is not None:
        changes["temperature"] = generation.val_temperature
    if generation.val_top_p is not None:
        changes["top_p"] = generation.val_top_p
    if generation.val_top_k is not None:
        changes["top_k"] = generation.val_top_k if generation.val_top_k > 0 else None
    return dataclasses.replace(sampling, **changes)
