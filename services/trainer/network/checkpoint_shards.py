"""Models of several ranks: made on the meta device, and filled from safetensors files of which each rank reads its own part.

transformers converts what it reads as it does in `from_pretrained` (prefixes, experts that one tensor holds and another format does not),
and reads of a sharded parameter only the rows of this rank.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from headrace.errors import ServiceError
from headrace_services.trainer.distributed import place_of


def on_meta(auto: Any, name: str, *, dtype: torch.dtype, config: Any = None) -> Any:
    """What `auto.from_pretrained` makes of the same arguments, on the meta device. Raises `OSError` and `ValueError` as that does."""
    with torch.device("meta"):
        model = auto.from_config(config or AutoConfig.from_pretrained(name), dtype=dtype)
    if model.can_generate():
        with contextlib.suppress(OSError):  # a model need have none
            model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def fill(model: Any, device: torch.device) -> None:
    """Read this rank's part of the sharded `model`, made by `on_meta`, to `device`.

    Raises `ServiceError` if it has no safetensors files, or they can't be read or lack one of its weights, or a rank would hold no expert.
    """
    name = model.name_or_path
    conversions = get_model_conversion_mapping(model)
    if any(isinstance(conversion, WeightConverter) for conversion in conversions):
        _check_experts(model)
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in _files(name)]
            tensors = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118  # no mapping
            settings = LoadStateDictConfig(
                pretrained_model_name_or_path=name,
                dtype=model.dtype,
                device_map={"": device},
                weight_mapping=conversions,
            )
            info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
            # ties what is tied, and computes what is in no file, such as the frequencies of positions
            type(model)._finalize_model_loading(model, settings, info)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ServiceError(f"{name!r}: its weights can't be read into {type(model).__name__} ({error})") from error
    if missing := sorted({*info.missing_keys, *(key for key, *_ in info.mismatched_keys)}):
        raise ServiceError(
            f"{name!r}: {type(model).__name__} has {len(missing)} weights that its files lack, or hold in another shape: "
            f"{', '.join(missing[:3])}; with several ranks nothing is made up for them"
        )
    model.eval()


def _check_experts(model: Any) -> None:
    """Raise `ServiceError` if a rank would hold no expert of those that the files hold one by one: transformers can't read none."""
    for parameter in model.parameters():
        ranks = place_of(parameter).count
        if parameter.dim() == 3 and -(-len(parameter) // -(-len(parameter) // ranks)) < ranks:
            raise ServiceError(
                f"{model.name_or_path!r}: its {len(parameter)} experts, sharded by equal numbers over {ranks} ranks, leave some of them "
                "without one; take a number of ranks that divides them, or set trainer.shard_within_host true"
            )


def _files(name: str) -> list[str]:
    """The safetensors files of directory or model `name`; those of the hub are downloaded."""

    def found(file: str) -> str | None:
        path: str | None = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        return path

    if (whole := found(SAFE_WEIGHTS_NAME)) is not None:
        return [whole]
    index = found(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise ServiceError(
            f"{name!r} has no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}, of which each rank could read its part; save it as "
            "safetensors, or train it with one rank"
        )
    parts = sorted(set(json.loads(Path(index).read_bytes())["weight_map"].values()))
    return [str(path) for path in map(found, parts) if path is not None]
