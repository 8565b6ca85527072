"""The policy: a Hugging Face causal language model that says how likely each counted token was.

Weights are float32 whatever `policy.precision` says: a step at a usual learning rate is smaller than bfloat16 resolves, so
bfloat16 is only what matrices are multiplied in (autocast). The model stays in evaluation mode: dropout would make two
passes over the same weights disagree, and the ratio of the loss compares exactly those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from headrace.config import Config
from headrace.errors import ServiceError
from services.trainer.batch import MicroBatch


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device; CUDA is the process's current one. Raises `ServiceError` without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ServiceError(
            "trainer.device cuda: torch sees no GPU here; set trainer.device=cpu or install a CUDA build"
        )
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def load_tokenizer(config: Config) -> Any:
    """The run's tokenizer. Raises `ServiceError` where there is none."""
    key = "policy.tokenizer.name" if config.policy.tokenizer.name else "policy.model_name"
    name = config.policy.tokenizer.name or config.policy.model_name
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _cannot_load(key, name, "a tokenizer", error) from error


class Policy:
    """A model on this rank's device, sharded by FSDP2 where `torch.distributed` has more than one rank.

    With several ranks every method is a collective: all ranks call it alike.
    """

    def __init__(self, config: Config, folder: Path | None = None, *, trainable: bool = True) -> None:
        """Load the weights in `folder`, or those `policy.model_name` names. Raises `ServiceError` if they can't be."""
        self.device = choose_device(config.trainer.device)
        self._bfloat16 = config.policy.precision == "bfloat16"
        self.model = _load(config, folder).eval().requires_grad_(trainable)
        self._positions: Tensor | None = None
        head = self.model.get_output_embeddings()
        if head is None:
            raise ServiceError(
                f"policy.model_name {config.policy.model_name!r}: {type(self.model).__name__} has no vocabulary projection "
                "that can be told from the rest of it; give a causal language model that has"
            )
        head.register_forward_pre_hook(self._pick)
        if dist.is_initialized() and dist.get_world_size() > 1:
            _shard(self.model, self.device)
        else:
            self.model.to(self.device)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def logprobs(self, batch: MicroBatch, temperature: float = 1.0) -> Tensor:
        """Log-probabilities [N] float32 of the counted tokens, of logits divided by `temperature`.

        Only the positions that predict a counted token go through the vocabulary projection.
        """
        self._positions = batch.positions
        try:
            with self._precision():
                logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
        finally:
            self._positions = None
        logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        return -nn.functional.cross_entropy(logits, batch.targets, reduction="none")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, in float32, by its name in a Hugging Face checkpoint; a tied head is left out."""
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach()
            yield from self._as_saved(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and full shapes in the order of `weights`; gathers nothing."""
        for name, parameter in self.model.named_parameters():
            for saved, tensor in self._as_saved(name, torch.empty(parameter.shape, device="meta")):
                yield saved, tuple(tensor.shape)

    def save(self, folder: Path) -> None:
        """Write config and safetensors to `folder` from rank 0, as `from_pretrained` reads them."""
        keep = not dist.is_initialized() or dist.get_rank() == 0
        whole: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach()
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if keep:
                whole[name] = full.cpu()
        if keep:
            self.model.save_pretrained(folder, state_dict=whole)

    def _as_saved(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What one parameter is called in a checkpoint; some architectures fuse several saved tensors into one."""
        if not self.model._weight_conversions:
            yield name, tensor
            return
        yield from revert_weight_conversion(self.model, {name: tensor}).items()

    def _pick(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Pass on [N, hidden] of [B, S, hidden]: a hook, because what surrounds the head differs between architectures."""
        if self._positions is None:
            return None
        return (args[0].flatten(0, 1).index_select(0, self._positions),)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16)


def _load(config: Config, folder: Path | None) -> Any:
    name = str(folder) if folder else config.policy.model_name
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise _cannot_load("policy.model_name", name, "a causal language model", error) from error
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and config.policy.max_total_sequence_length > context:
        raise ServiceError(
            f"policy.max_total_sequence_length {config.policy.max_total_sequence_length} is more than the {context} "
            f"positions of {name!r}; set it to {context} or less"
        )
    return model


def _shard(model: nn.Module, device: torch.device) -> None:
    """One FSDP2 unit a decoder layer, and one for the rest, so that a tied embedding and head stay together."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    layers = set(model._no_split_modules or ())  # type: ignore[arg-type]
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _cannot_load(key: str, name: str, what: str, error: Exception) -> ServiceError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ServiceError(
        f"{key} {name!r}: can't load {what} ({reason}); give a directory with config.json, tokenizer and "
        "safetensors files, or the name of a model that can be downloaded or is in HF_HOME"
    )
