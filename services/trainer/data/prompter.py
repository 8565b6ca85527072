"""From a problem to the group that asks for it: chat template, tokens, stop ids and sampling."""

from __future__ import annotations

import dataclasses
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

    def _tokens(self, problem: Problem) -> Int32:
        ids = self._tokenizer.apply_chat_template(
            list(problem.messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self._config.policy.tokenizer.chat_template_kwargs,
        )
        policy, limit = self._config.policy, self._config.data.max_input_seq_length
        where = f"the prompt of {problem.task_name} problem {problem.index} has {len(ids)} tokens"
        if limit is not None and len(ids) > limit:
            raise ConfigError(
                f"{where}, more than data.max_input_seq_length {limit}; raise it or leave the problem out"
            )
        if len(ids) >= policy.max_total_sequence_length:
            raise ConfigError(
                f"{where}, and policy.max_total_sequence_length {policy.max_total_sequence_length} leaves no room for a "
                "completion; raise it or leave the problem out"
            )
        return np.asarray(ids, dtype=np.int32)


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
