"""From a problem to the group that asks for it: chat template, tokens, stop ids and sampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.trajectory import Group, Int32, Lane, Sampling
from services.trainer.data.problems import Problem


class Prompter:
    """Makes groups with the policy's tokenizer (a transformers tokenizer with a chat template).

    Raises `ConfigError` if the tokenizer has no chat template, and for a prompt that is longer than
    `data.max_input_seq_length`, or than what `policy.max_total_sequence_length` leaves beside the new tokens.
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
        self._val_temperature = (
            generation.temperature if generation.val_temperature is None else generation.val_temperature
        )

    def train_group(self, problem: Problem, order: int, epoch: int) -> Group:
        n = self._config.algorithm.num_generations_per_prompt
        name = f"e{epoch}-train-{problem.index}"
        return self._group(problem, name, "train", order, n, self._config.policy.generation.temperature)

    def validation_group(self, problem: Problem, version: int, position: int) -> Group:
        """The group that asks weights of `version` once for `problem`, which is at `position` of that validation."""
        name = f"v{version}-validation-{problem.index}"
        return self._group(problem, name, "validation", position, 1, self._val_temperature)

    def _group(self, problem: Problem, name: str, lane: Lane, order: int, n: int, temperature: float) -> Group:
        generation = self._config.policy.generation
        return Group(
            id=name,
            lane=lane,
            order=order,
            task_name=problem.task_name,
            env_name=problem.env_name,
            messages=problem.messages,
            prompt_token_ids=self._tokens(problem),
            extra_env_info=problem.extra_env_info,
            dataset_index=problem.index,
            n=n,
            sampling=Sampling(
                temperature=temperature,
                max_new_tokens=generation.max_new_tokens,
                stop_token_ids=self._stop_token_ids,
                stop_strings=tuple(generation.stop_strings),
            ),
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
        room = policy.max_total_sequence_length - policy.generation.max_new_tokens
        where = f"the prompt of {problem.task_name} problem {problem.index} has {len(ids)} tokens"
        if limit is not None and len(ids) > limit:
            raise ConfigError(
                f"{where}, more than data.max_input_seq_length {limit}; raise it or leave the problem out"
            )
        if len(ids) > room:
            raise ConfigError(
                f"{where}, and policy.max_total_sequence_length {policy.max_total_sequence_length} leaves {room} beside "
                f"policy.generation.max_new_tokens {policy.generation.max_new_tokens}; raise the one or lower the other"
            )
        return np.asarray(ids, dtype=np.int32)
