"""The policy: a Hugging Face causal language model that says how likely each of the policy's tokens was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import Config
from headrace.errors import ServiceError
from services.trainer.network import backbone
from services.trainer.network.projection import CausalRoot, TokenValues, Warp
from services.trainer.network.rows.attention import prepare_attention
from services.trainer.network.rows.build import Rows


def load_tokenizer(config: Config) -> Any:
    """The run's tokenizer. Raises `ServiceError` where there is none."""
    key = "policy.tokenizer.name" if config.policy.tokenizer.name else "policy.model_name"
    return tokenizer_of(key, config.policy.tokenizer.name or config.policy.model_name)


def tokenizer_of(key: str, name: str) -> Any:
    """The tokenizer of the model or directory that `key` names. Raises `ServiceError` where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise backbone.cannot_load(key, name, "a tokenizer", error) from error


class Policy:
    """A model on this rank's device, sharded by FSDP2 where `torch.distributed` has more than one rank.

    `model` is the transformers model: what it trains and saves. With several ranks every method is a collective: all ranks
    call it alike, with rows of their own.
    """

    def __init__(
        self,
        config: Config,
        folder: Path | None = None,
        *,
        trainable: bool = True,
        other: tuple[str, str] | None = None,
    ) -> None:
        """Load the weights in `folder`, or those `policy.model_name` names, or of an `other` model: a key of the configuration and
        the name that it gives.

        Raises `ServiceError` if they can't be loaded, or the model can't take the rows that `policy` asks for.
        """
        self.device = backbone.choose_device(config.trainer.device)
        self._config = config
        key, name = other or ("policy.model_name", str(folder) if folder else config.policy.model_name)
        self.model = backbone.load_model(
            AutoModelForCausalLM,
            config,
            key,
            name,
            "a causal language model",
            {} if other else config.policy.hf_config_overrides,
        )
        self.model.requires_grad_(trainable)
        if config.policy.freeze_moe_router:
            backbone.freeze_routers(self.model)
        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            raise ServiceError(
                f"{key} {name!r}: {type(self.model).__name__} has no vocabulary projection "
                "that can be told from the rest of it; give a causal language model that has"
            )
        prepare_attention(self.model, config.policy, self.device)
        self._root = CausalRoot(self.model, config.policy.logprob_chunk_size)
        recompute = trainable and config.policy.activation_checkpointing
        backbone.place(self._root, self.model, self.device, recompute=recompute)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def logprobs(self, rows: Rows, warp: Warp, *, entropy: bool = False) -> TokenValues:
        """What is known of the N policy tokens of `rows` (on `device`) under `warp`.

        Only the places before a policy token go through the vocabulary projection, `policy.logprob_chunk_size` of them at a time.
        """
        with backbone.autocast(self._config.policy.precision, self.device):
            curr, unfiltered, *rest = self._root(rows, warp, entropy)
        return TokenValues(curr, unfiltered if warp.filters else None, rest[0] if rest else None)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, in float32, by its name in a Hugging Face checkpoint; a tied head is left out."""
        return backbone.whole_weights(self.model)

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and full shapes in the order of `weights`; gathers nothing."""
        return backbone.weight_shapes(self.model)

    def save(self, folder: Path) -> None:
        """Write config and safetensors to `folder` from rank 0, as `from_pretrained` reads them."""
        backbone.save_model(self.model, folder)
