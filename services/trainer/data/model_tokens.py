"""What a model's files say of token ids: how many it knows, and which end an answer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

from headrace.config import Config
from headrace.errors import ConfigError, ServiceError


@dataclasses.dataclass(frozen=True)
class ModelTokens:
    """The token ids of the run's model. Everything that needs to know an end token takes it from here: the engine, sessions of episodes,
    and the generation configuration of checkpoints.

    `vocabulary` is the number of rows of its embedding (None: unknown). `ends` are the tokenizer's end token, those of the model's
    `generation_config.json`, at which an engine stops too, and `policy.generation.stop_token_ids`, in this order.
    """

    ends: tuple[int, ...]
    vocabulary: int | None = None

    @classmethod
    def of(cls, config: Config, tokenizer: Any, ends: Iterable[int] = (), vocabulary: int | None = None) -> ModelTokens:
        """Combine the end tokens. Raises `ConfigError` if nothing ends an answer."""
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        generation = config.policy.generation
        found = tuple(dict.fromkeys([*own, *ends, *generation.stop_token_ids]))
        if not found and not generation.stop_strings:
            key, name = config.tokenizer
            raise ConfigError(
                f"{key} {name}: neither its tokenizer nor generation_config.json of policy.model_name names an end token, so every "
                "completion would be cut off at policy.generation.max_new_tokens; set policy.generation.stop_token_ids or stop_strings"
            )
        return cls(found, vocabulary)

    @classmethod
    def load(cls, config: Config, tokenizer: Any) -> ModelTokens:
        """Read the files of `policy.model_name`. Raises `ServiceError` if they can't be read, `ConfigError` as `of` and `check` do."""
        from transformers import AutoConfig, GenerationConfig

        name = config.policy.model_name
        overrides = copy.deepcopy(dict(config.policy.hf_config_overrides))
        try:
            model = AutoConfig.from_pretrained(name, **overrides)
        except (OSError, ValueError) as error:
            raise ServiceError(f"policy.model_name {name!r}: its config.json can't be read ({error})") from error
        try:
            generation = GenerationConfig.from_pretrained(name)
        except OSError:  # a model need not have one: then, as for the engine, its config.json says it
            generation = GenerationConfig.from_model_config(model)
        ends = generation.eos_token_id
        listed = [] if ends is None else [ends] if isinstance(ends, int) else ends
        tokens = cls.of(config, tokenizer, listed, model.get_text_config().vocab_size)
        tokens.check(tokens.ends, tokenizer, "the list of the run's end tokens")
        return tokens

    def check(self, ids: Iterable[int], tokenizer: Any, what: str) -> None:
        """Raise `ConfigError` if one of the `ids` of `what` is not a row of the model's embedding."""
        if self.vocabulary is not None and (largest := max(ids, default=0)) >= self.vocabulary:
            raise ConfigError(
                f"{what} has token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), and the embedding of policy.model_name has "
                f"{self.vocabulary} rows, 0 to {self.vocabulary - 1}: the tokenizer has tokens that were added without the model; give the "
                "model's own tokenizer, or resize its embedding (transformers: resize_token_embeddings)"
            )
