"""The backbone that policy and value model share: a transformers model on this rank's device, and its hidden states before each token.

A **root** module wraps the transformers model. Its forward does everything that needs weights: backbone, choice of positions, head. It is
FSDP2's outermost unit. So one forward gathers embedding and head once, however many chunks the head is applied in, and ranks with unequal
rows enter the same collectives.

Weights are always float32, because a step at a usual learning rate is smaller than bfloat16 can resolve. With `policy.precision: bfloat16`
FSDP2 gathers each layer in bfloat16 and computes all of it in bfloat16, on several ranks and on a single GPU. A single rank on CPUs
multiplies matrices in bfloat16 instead (autocast); that keeps a bfloat16 copy of every matrix, and leaves experts in float32. Models stay
in evaluation mode: with dropout two passes over the same weights would disagree, and the loss compares exactly those.

With several ranks no rank ever holds a whole model. It is made on the meta device and sharded there, and each rank reads its own part of
the safetensors files. transformers converts what it reads as it does in `from_pretrained` (prefixes, experts that one tensor holds and
another format does not), and reads only this rank's rows of a sharded parameter.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from headrace.base.errors import ServiceError
from headrace.base.model_files import problem_of_weights
from headrace.base.model_name import is_no_hub_name
from headrace.config import Config

from ...refit.state_watch import StateWatch
from ..distributed.host_copies import host_copies, saved_tensors
from ..distributed.ranks import is_first_rank, several_ranks
from ..distributed.sharding import (
    end_pass,
    find_shard,
    full_tensor,
    reduce_gradients,
    shard,
    shards_alone,
)
from .adapter import Adapter
from .attention import attention_arguments, caps_attention
from .packing import PackedRows

# Writes the copy of a model to a folder. Any thread may call it.
Write = Callable[[Path], None]
# The size of a safetensors file. A single tensor may exceed it.
SHARD_SIZE = "50GB"
# The largest relative error of a number that is rounded to bfloat16.
ROUNDING = torch.finfo(torch.bfloat16).eps / 2
# How many versions of one function torch may compile; beyond that it would run uncompiled code. There are versions for passes with and
# without gradients, for one row and several, for one place and several, and for each kind of model.
VERSIONS = 64


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`, which is the process's current GPU. Raises `ServiceError` for `cuda` without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ServiceError(
            "trainer.device cuda: torch sees no GPU here; set trainer.device=cpu or install a CUDA build"
        )
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def compile_layers(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Have torch compile each layer when it is first called. Raises `ServiceError` without the compiler that torch needs for this device.

    The layers are alike, so the code of the first serves all of them. Lengths and numbers of rows are variables in it, so rows of other
    lengths need no new code. `tree_attention` is not compiled.
    """
    variable, usual = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
    compiler = os.environ.get(variable, usual)
    if shutil.which(compiler) is None:
        raise ServiceError(
            f"policy.torch_compile true: torch needs the compiler {compiler!r}, which is not installed; install it (apt-get install "
            f"{usual} python3-dev), name another in {variable}, or set the key to false"
        )
    torch._dynamo.config.recompile_limit = VERSIONS
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def load_model(
    auto: Any, config: Config, key: str, name: str, what: str, overrides: Mapping[str, Any] | None = None
) -> Any:
    """Load `auto.from_pretrained(name)` in float32 and evaluation mode, with `overrides` of its configuration. With several ranks it is on
    the meta device, for `PlacedModel` to fill. Errors name `key`, the configuration key that gave the name, and `what`, the kind of model
    that it should be.

    Raises `ServiceError` if it can't be loaded, if its files lack a weight, if its configuration lacks the key of an override, or if its
    context is shorter than `policy.max_total_sequence_length`.
    """
    if several_ranks():
        model = load_on_meta(auto, key, name, what, overrides)
    else:
        with _loading(key, name, what):
            model, found = auto.from_pretrained(
                name, dtype=torch.float32, output_loading_info=True, **_settings(name, overrides)
            )
        refuse_missing(name, model, [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])])
    text = model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and config.policy.max_total_sequence_length > context:
        raise ServiceError(
            f"policy.max_total_sequence_length {config.policy.max_total_sequence_length} is more than the {context} "
            f"positions of {name!r}; set it to {context} or less, or give max_position_embeddings in policy.hf_config_overrides beside the "
            "rope_parameters that extend them"
        )
    if caps_attention(text) and text._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")  # SDPA ignores the cap without a word
    return model.eval()


def load_on_meta(auto: Any, key: str, name: str, what: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """Make the model that `load_model` loads on the meta device, from its configuration alone. Raises `ServiceError` if it can't be
    made."""
    with _loading(key, name, what):
        config = _settings(name, overrides).get("config") or AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = auto.from_config(config, dtype=torch.float32)
        if model.can_generate():
            with contextlib.suppress(OSError):  # a model may have none
                model.generation_config = GenerationConfig.from_pretrained(name)
        return model


@contextlib.contextmanager
def _loading(key: str, name: str, what: str) -> Iterator[None]:
    try:
        yield
    except ServiceError:
        raise
    except Exception as error:  # transformers, tokenizers and safetensors raise errors of any type
        raise cannot_load(key, name, what, error) from error


def _settings(name: str, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the model's configuration with `overrides`, as an argument of `from_pretrained`; no argument without overrides."""
    if not overrides:
        return {}
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


class PlacedModel:
    """A root on this rank's device, sharded as `distributed.shard` does, and the precision in which it is computed."""

    def __init__(
        self,
        root: nn.Module,
        model: Any,
        config: Config,
        device: torch.device,
        precision: str,
        *,
        in_float32: Sequence[nn.Module] = (),
        adapter: Adapter | None = None,
    ) -> None:
        """Move `root`, which contains `model`, to `device`. With several ranks shard it, layer by layer, and fill all of it but its
        `adapter`. The modules `in_float32` are computed in float32, whatever the precision.

        With activation checkpointing, a layer of a trained model keeps only its input for the backward pass. Raises `ServiceError` for a
        model whose layers are not known, for one that can't be filled, and without the compiler that `policy.torch_compile` needs.
        """
        names = set(model._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
        asked = [key for key in ("activation_checkpointing", "torch_compile") if getattr(config.policy, key)]
        if trained and asked and not layers:
            raise ServiceError(
                f"policy.{asked[0]} true: {type(model).__name__} does not declare which of its modules are layers; set it to "
                "false"
            )
        if config.policy.torch_compile:
            compile_layers(layers, device)
        if trained and config.policy.recomputes(device.type):
            drops = adapter is not None and config.policy.lora_cfg.drops
            for layer in layers:
                # transformers' own setting works only in training mode, which would enable dropout
                layer.forward = functools.partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=drops
                )
        bfloat16 = precision == "bfloat16"
        shard(
            root,
            layers,
            device,
            within_host=config.trainer.shard_within_host,
            bfloat16=bfloat16,
            in_float32=in_float32,
        )
        if several_ranks():
            with adapter.taken_off() if adapter else contextlib.nullcontext():
                fill(model, device)
        self._root, self._device = root, device
        self._in_bfloat16 = bfloat16 and (several_ranks() or shards_alone(device, bfloat16=bfloat16))
        self._autocast = bfloat16 and not self._in_bfloat16
        routed = any(hasattr(module, "experts") for module in model.modules())
        self._model, self._layers, self._routed = model, layers, routed
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        self._once_a_step = several_ranks() and reduces_once(
            config.trainer.reduce_gradients, sum(parameter.numel() for parameter in trained), memory
        )

    def __call__(self, *arguments: Any) -> Any:
        """Call the root with `arguments`."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            output = self._root(*arguments)
        if not torch.is_grad_enabled():
            end_pass(self._root)
        return output

    @property
    def can_round(self) -> bool:
        """Whether `rounded` has an effect that can be compared: the model's layers are known, and no rounding sends a token to other
        experts."""
        return bool(self._layers) and not self._routed

    def watch(self, length: int) -> StateWatch | None:
        """Return what can watch the states between the layers in a pass of `length` tokens; None for a model whose layers are not
        known."""
        return StateWatch(self._layers, self._model.base_model, length) if self._layers else None

    @contextlib.contextmanager
    def rounded(self) -> Iterator[None]:
        """In the context, the model computes in bfloat16, and the states after its embedding and after each layer have a random error as
        large as that of rounding: as another honest implementation would. (A model that is sharded in bfloat16 can't be computed in
        float32, to compare with that.)"""
        random, autocast = torch.Generator().manual_seed(0), self._autocast

        def err(module: nn.Module, arguments: Any, output: Any) -> Any:
            states = output if isinstance(output, Tensor) else output[0]
            error = (2 * torch.rand(states.shape, generator=random) - 1).to(states.device) * ROUNDING
            states = (states.float() * (1 + error)).to(states.dtype)
            return states if isinstance(output, Tensor) else (states, *output[1:])

        with contextlib.ExitStack() as stack:
            for module in (self._model.get_input_embeddings(), *self._layers):
                stack.callback(module.register_forward_hook(err).remove)
            self._autocast = not self._in_bfloat16
            try:
                yield
            finally:
                self._autocast = autocast

    def expect_backward(self, *, last: bool) -> None:
        """Call this before a backward pass, with whether it is the `last` one of an optimizer step. Until after the last one, gradients of
        several ranks may be incomplete."""
        reduce_gradients(self._root, "everywhere" if last else "never" if self._once_a_step else "within_host")


def reduces_once(choice: str, parameters: int, memory: int | None) -> bool:
    """Return whether the gradients of so many `parameters` are summed over the ranks once per optimizer step. `choice` is
    `trainer.reduce_gradients`, `memory` a GPU's, None on a CPU."""
    return choice == "step" or (choice == "auto" and (memory is None or 4 * parameters <= memory / 8))


def hidden_states_before(backbone: nn.Module, packed: PackedRows) -> Tensor:
    """Return the hidden states [N, H] of the backbone's last layer at the position before each policy token.

    They depend on the prompt and the completion up to that token, but not on the token itself. A vocabulary projection predicts the token
    from them; a value head gives the value before it.
    """
    output = backbone(input_ids=packed.input_ids, use_cache=False, **attention_arguments(backbone, packed))
    return output.last_hidden_state.flatten(0, 1).index_select(0, packed.before)


def full_parameters(
    model: Any, adapter: Adapter | None = None, gathered_in: torch.dtype = torch.float32, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """A collective. Yield every parameter once, unsharded, by default `merged` with its adapter. Without an adapter, sharded ones are
    gathered in the dtype `gathered_in`."""
    if adapter is not None:
        yield from adapter.weights(merged=merged)
        return
    for name, tensor in saved_tensors(model):
        yield name, full_tensor(tensor.detach(), gathered_in)


def snapshot_model(model: Any, adapter: Adapter | None = None) -> Write:
    """A collective. Copy the weights, merged with the adapter, to rank 0's host memory.

    The result is not a collective and does not use `model`. On rank 0 it writes config and safetensors in the format of `from_pretrained`;
    elsewhere it does nothing.
    """
    keep = is_first_rank()
    whole = host_copies(full_parameters(model, adapter), keep=keep)
    if not keep:
        return lambda folder: None
    if model._weight_conversions:
        with adapter.taken_off() if adapter else contextlib.nullcontext():
            whole = revert_weight_conversion(model, whole)
    describe = description(model)

    def write(folder: Path) -> None:
        describe(folder)
        split = split_torch_state_dict_into_shards(whole, max_shard_size=SHARD_SIZE)
        for name, tensors in split.filename_to_tensors.items():
            shard = {tensor: whole[tensor].contiguous() for tensor in tensors}
            save_file(shard, folder / name, metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))

    return write


def description(model: Any) -> Write:
    """Copy what a checkpoint has beside the model's weights. The result writes it: its configuration, and how it generates."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard gives its class another name
    config.dtype = "float32"
    generation = copy.deepcopy(model.generation_config) if model.can_generate() else None

    def write(folder: Path) -> None:
        config.save_pretrained(folder)
        if generation is not None:
            # as the model's own is, also if `save_pretrained` would refuse it: many have a temperature without sampling
            generation.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])

    return write


def cannot_load(key: str, name: str, what: str, error: Exception) -> ServiceError:
    """Return the error for a model, or part of one, that a library could not load."""
    lines = str(error).strip().splitlines()
    reason = "the directory does not exist" if is_no_hub_name(name) and not Path(name).is_dir() else ""
    if not reason and isinstance(error, OSError | ValueError) and lines:
        reason = lines[0]
    reason = reason or ": ".join([type(error).__name__, *lines[:1]])
    return ServiceError(
        f"{key} {name!r}: can't load {what} ({reason}); give a directory with config.json, tokenizer and "
        "safetensors files, or the name of a model that can be downloaded or is in HF_HOME"
    )


# -- models of several ranks --------------------------------------------------------------------------------------------


def fill(model: Any, device: torch.device) -> None:
    """Read this rank's part of the sharded `model`, made by `load_on_meta`, to `device`.

    Raises `ServiceError` if it has no safetensors files, if they can't be read or lack one of its weights, or if a rank would hold no
    expert.
    """
    name = model.name_or_path
    conversions = get_model_conversion_mapping(model)
    if any(isinstance(conversion, WeightConverter) for conversion in conversions):
        _check_experts(model)
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in _files(name)]
            tensors = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118  # not a mapping
            settings = LoadStateDictConfig(
                pretrained_model_name_or_path=name,
                dtype=model.dtype,
                device_map={"": device},
                weight_mapping=conversions,
            )
            info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
            # ties weights, and computes what no file has, such as the frequencies of positions
            type(model)._finalize_model_loading(model, settings, info)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ServiceError(f"{name!r}: its weights can't be read into {type(model).__name__} ({error})") from error
    refuse_missing(name, model, [*info.missing_keys, *(key for key, *_ in info.mismatched_keys)])
    model.eval()


def refuse_missing(name: str, model: Any, keys: Iterable[str]) -> None:
    """Raise `ServiceError` if there are `keys`: weights of `model` that the files of `name` lack."""
    if (problem := problem_of_weights(type(model).__name__, keys)) is not None:
        raise ServiceError(
            f"{name!r}: {problem}. Save the model again with all of them under these names, or correct its config.json "
            "(tie_word_embeddings, architectures)"
        )


def _check_experts(model: Any) -> None:
    """Raise `ServiceError` if a rank would hold none of the experts that the files have one by one. transformers can't read an empty
    part."""
    for parameter in model.parameters():
        ranks = find_shard(parameter).count
        if parameter.dim() == 3 and -(-len(parameter) // -(-len(parameter) // ranks)) < ranks:
            raise ServiceError(
                f"{model.name_or_path!r}: its {len(parameter)} experts, sharded in equal numbers over {ranks} ranks, leave some ranks "
                "without one; use a number of ranks that divides them, or set trainer.shard_within_host true"
            )


def _files(name: str) -> list[str]:
    """Return the safetensors files of directory or model `name`. Those on the Hugging Face Hub are downloaded."""

    def found(file: str) -> str | None:
        path: str | None = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        return path

    if (whole := found(SAFE_WEIGHTS_NAME)) is not None:
        return [whole]
    index = found(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise ServiceError(
            f"{name!r} has no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}, from which each rank could read its part; save it as "
            "safetensors, or train it with one rank"
        )
    parts = sorted(set(json.loads(Path(index).read_bytes())["weight_map"].values()))
    files = {part: found(part) for part in parts}
    if missing := [part for part, path in files.items() if path is None]:
        raise ServiceError(
            f"{name!r}: its {SAFE_WEIGHTS_INDEX_NAME} names {missing[0]}, which is missing; download it again"
        )
    return [path for path in files.values() if path is not None]
