"""The backbone that policy and value model share: a transformers model on this rank's device, and its hidden states before each token.

Around the transformers model is a **root** module, whose forward does everything that needs
weights: backbone, choice of positions, head. It is FSDP2's outermost unit, so one forward gathers embedding and
head once, however many chunks the head is applied in, and ranks with unequal rows enter the same collectives.

Weights are always float32, because a step at a usual learning rate is smaller than bfloat16 can resolve; `policy.precision: bfloat16`
only multiplies matrices in bfloat16 (autocast). Models stay in evaluation mode: dropout would make two passes over
the same weights disagree, and the loss compares exactly those.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from headrace.config import Config
from headrace.errors import ServiceError
from headrace_services.trainer.distributed import full_tensor, is_first_rank, shard
from headrace_services.trainer.network.attention import attention_arguments
from headrace_services.trainer.network.packing import PackedRows


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device; CUDA is the process's current one. Raises `ServiceError` without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ServiceError(
            "trainer.device cuda: torch sees no GPU here; set trainer.device=cpu or install a CUDA build"
        )
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def load_model(
    auto: Any, config: Config, key: str, name: str, what: str, overrides: Mapping[str, Any] | None = None
) -> Any:
    """Load `auto.from_pretrained(name)` in float32 and evaluation mode, with `overrides` of its configuration. For errors: `key` is the
    configuration key that gave the name, `what` the kind of model that it should be.

    Raises `ServiceError` if it can't be loaded, if its configuration has no such key as an override names, or if its context is shorter
    than `policy.max_total_sequence_length`.
    """
    try:
        settings = _settings(name, overrides) if overrides else {}
        model = auto.from_pretrained(name, dtype=torch.float32, **settings)
    except (OSError, ValueError) as error:
        raise cannot_load(key, name, what, error) from error
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and config.policy.max_total_sequence_length > context:
        raise ServiceError(
            f"policy.max_total_sequence_length {config.policy.max_total_sequence_length} is more than the {context} "
            f"positions of {name!r}; set it to {context} or less"
        )
    return model.eval()


def _settings(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration with `overrides`, as an argument of `from_pretrained`."""
    settings, unknown = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **copy.deepcopy(dict(overrides)))
    if unknown:
        raise ServiceError(
            f"hf_config_overrides: the configuration of {name!r} has no {', '.join(sorted(unknown))}; leave it out"
        )
    return {"config": settings}


def freeze_routers(model: nn.Module) -> None:
    """Exclude the routers of a mixture of experts (the module `gate` or `router` beside each `experts`) from training."""
    for module in model.modules():
        if hasattr(module, "experts"):
            for name in ("gate", "router"):
                router = getattr(module, name, None)
                if isinstance(router, nn.Module):
                    router.requires_grad_(False)


def place(root: nn.Module, model: Any, device: torch.device, *, recompute: bool) -> None:
    """Move `root`, which holds `model`, to `device`; with several ranks shard it, layer by layer.

    With `recompute` a layer keeps only its input for the backward pass. Raises `ServiceError` for a model whose layers are not known.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if recompute:
        if not layers:
            raise ServiceError(
                f"policy.activation_checkpointing true: {type(model).__name__} does not say which of its modules are "
                "layers; set it to false"
            )
        for layer in layers:
            # transformers' own switch works only in training mode, which would turn on dropout
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    shard(root, layers, device)


def hidden_states_before(backbone: nn.Module, packed: PackedRows) -> Tensor:
    """Hidden states [N, H] of the backbone's last layer at the position before each policy token.

    They depend on the prompt and the completion up to that token, but not on the token itself: a vocabulary
    projection predicts it from them, a value head gives the value before it.
    """
    output = backbone(input_ids=packed.input_ids, use_cache=False, **attention_arguments(backbone, packed))
    return output.last_hidden_state.flatten(0, 1).index_select(0, packed.before)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a forward pass runs in `precision`, as configured."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def iter_full_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight once, unsharded, with its name in a Hugging Face checkpoint; a tied head is left out. A collective."""
    for name, parameter in model.named_parameters():
        yield from _as_saved(model, name, full_tensor(parameter.detach()))


def weight_shapes(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and full shapes in the order of `iter_full_weights`; gathers nothing."""
    for name, parameter in model.named_parameters():
        for saved, tensor in _as_saved(model, name, torch.empty(parameter.shape, device="meta")):
            yield saved, tuple(tensor.shape)


def save_model(model: Any, folder: Path) -> None:
    """Write config and safetensors to `folder` from rank 0, as `from_pretrained` reads them. A collective."""
    keep = is_first_rank()
    whole: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = full_tensor(parameter.detach())
        if keep:
            whole[name] = tensor.cpu()
    if keep:
        model.save_pretrained(folder, state_dict=whole)


def cannot_load(key: str, name: str, what: str, error: Exception) -> ServiceError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ServiceError(
        f"{key} {name!r}: can't load {what} ({reason}); give a directory with config.json, tokenizer and "
        "safetensors files, or the name of a model that can be downloaded or is in HF_HOME"
    )


def _as_saved(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter under its name in a checkpoint; where an architecture fuses several saved tensors into one, each of those."""
    if not model._weight_conversions:
        yield name, tensor
        return
    yield from revert_weight_conversion(model, {name: tensor}).items()
