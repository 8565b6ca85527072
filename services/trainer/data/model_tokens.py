"""What a model's files say of token ids: how many it knows, and which end an answer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError, ServiceError
from headrace.config import Config


@dataclasses.dataclass(frozen=True)
class ModelTokens:
    """The token ids of the run's model. Everything that needs to know an end token takes it from here: the engine, sessions of episodes,
    and the generation configuration of checkpoints.

    `vocabulary` is the number of rows of its embedding. `ends` are the tokenizer's end token, those of the model's
    `generation_config.json`, at which an engine stops too, and `policy.generation.stop_token_ids`, in this order. `excluded` are the
    tokens of `policy.generation.bad_words`.
    """

    ends: tuple[int, ...]
    vocabulary: int
    excluded: tuple[int, ...] = ()

    @classmethod
    def load(cls, config: Config, tokenizer: Any) -> ModelTokens:
        """Read the files of `policy.model_name`. Raises `ServiceError` if they can't be read; `ConfigError` if nothing ends an answer, and
        for an end token that the model does not know."""
        from transformers import AutoConfig, GenerationConfig
        from transformers.utils import GENERATION_CONFIG_NAME

        name, generation = config.policy.model_name, config.policy.generation
        overrides = copy.deepcopy(dict(config.policy.hf_config_overrides))
        try:
            model = AutoConfig.from_pretrained(name, **overrides)
        except (OSError, ValueError) as error:
            raise ServiceError(f"policy.model_name {name!r}: its config.json can't be read ({error})") from error
        try:
            found = GenerationConfig.from_pretrained(name).eos_token_id
        except (OSError, TypeError) as error:  # it is no JSON, no object
            file = Path(name) / GENERATION_CONFIG_NAME
            if file.exists():
                raise ServiceError(f"policy.model_name {name!r}: {file} can't be read ({error})") from error
            # a model need not have one: then, as for the engine, its config.json says it
            found = GenerationConfig.from_model_config(model).eos_token_id
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        listed = [] if found is None else found if isinstance(found, list) else [found]
        ends = tuple(dict.fromkeys([*own, *listed, *generation.stop_token_ids]))
        if not ends and not generation.stop_strings:
            key, named = config.tokenizer
            raise ConfigError(
                f"{key} {named}: neither its tokenizer nor generation_config.json of policy.model_name names an end token, so every "
                "completion would be cut off at policy.generation.max_new_tokens; set policy.generation.stop_token_ids or stop_strings"
            )
        excluded = tuple(dict.fromkeys(id for word in generation.bad_words for id in _find_excluded(word, tokenizer)))
        tokens = cls(ends, model.get_text_config().vocab_size, excluded)
        for end in ends:
            if type(end) is not int or not 0 <= end < tokens.vocabulary:
                raise ConfigError(
                    f"the run's end tokens {list(ends)} have {end!r}, which is no token of policy.model_name {name!r} (0 to "
                    f"{tokens.vocabulary - 1}); correct eos_token_id in its generation_config.json or config.json, the tokenizer, or "
                    "policy.generation.stop_token_ids"
                )
        if never := sorted({*ends} & {*excluded}):
            raise ConfigError(
                f"policy.generation.bad_words has {tokenizer.convert_ids_to_tokens(never[0])!r}, which ends an answer; leave it out there"
            )
        tokens.check(excluded, tokenizer, "policy.generation.bad_words")
        return tokens

    def check(self, ids: Iterable[int], tokenizer: Any, what: str) -> None:
        """Raise `ConfigError` if one of the `ids` of `what` is not a row of the model's embedding."""
        if (largest := max(ids, default=0)) >= self.vocabulary:
            raise ConfigError(
                f"{what} has token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), and the embedding of policy.model_name has "
                f"{self.vocabulary} rows, 0 to {self.vocabulary - 1}: the tokenizer has tokens that were added without the model; give the "
                "model's own tokenizer, or resize its embedding (transformers: resize_token_embeddings)"
            )


def _find_excluded(word: str, tokenizer: Any) -> Iterator[int]:
    """Yield the tokens that vLLM excludes for a bad word: the word as it stands, and after a space, if that is another token.

    Raises `ConfigError` for a word of several tokens. Its last token would be excluded after the others only, so that the training logits
    of a token would depend on the tokens before it.
    """
    alone, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
    if len(alone) != 1:
        raise ConfigError(
            f"policy.generation.bad_words has {word!r}, which is {len(alone)} tokens of the tokenizer; only words of one token can be "
            "excluded, so leave it out, or let the reward penalise it"
        )
    yield alone[0]
    if len(spaced) == 1 and spaced != alone:
        yield spaced[0]
