"""Forms that older releases of NeMo RL gave some sections, written as the newer ones have them.

Each function takes the whole file and changes it; what it moved is returned as (key there, key now), for the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Moved = tuple[str, str]

# data sets that used to bring their own validation
_OWN_VALIDATION: dict[str, dict[str, Any]] = {
    "OpenMathInstruct-2": {},  # a twentieth of itself
    "DeepScaler": {"dataset_name": "AIME2024", "repeat": 16},
    "DAPOMath17K": {"dataset_name": "DAPOMathAIME2024"},
}
_OF_EACH_SOURCE = ("input_key", "output_key", "chat_key", "prompt_file", "system_prompt_file", "processor", "env_name")


def modernise(values: dict[str, Any]) -> list[Moved]:
    """All of it, in place."""
    return [*_automodel(values), *_flat_data(values)]


def _automodel(values: dict[str, Any]) -> Iterator[Moved]:
    """`dtensor_cfg` was renamed to `automodel_cfg`, with the same keys."""
    for section in ("policy", "value"):
        model = values.get(section)
        if isinstance(model, dict) and isinstance(model.get("dtensor_cfg"), dict):
            newer = model.get("automodel_cfg")
            model["automodel_cfg"] = model.pop("dtensor_cfg") | (newer if isinstance(newer, dict) else {})
            yield f"{section}.dtensor_cfg", f"{section}.automodel_cfg"


def _flat_data(values: dict[str, Any]) -> Iterator[Moved]:
    """One data set used to stand in `data` itself; its validation came with it, or from `val_data_path`."""
    data = values.get("data")
    if not isinstance(data, dict) or "train" in data or not {"dataset_name", "train_data_path"} & data.keys():
        return
    name = data.pop("dataset_name", None)
    default = {key: data.pop(key) for key in _OF_EACH_SOURCE if key in data}
    train = {} if name is None else {"dataset_name": name}
    validation = dict(_OWN_VALIDATION.get(name or "", {}))
    for theirs, ours in (("data_path", "data_path"), ("split", "split")):
        for source, prefix in ((train, "train_"), (validation, "val_")):
            value = data.pop(prefix + theirs, None)
            if value is not None:
                source[ours] = value
                yield f"data.{prefix}{theirs}", f"data.{'train' if source is train else 'validation'}.{ours}"
    if "split" in data:
        train.setdefault("split", data.pop("split"))
    if name == "OpenMathInstruct-2":
        train["split_validation_size"] = 0.05
    if validation and "dataset_name" not in validation and name is not None:
        validation["dataset_name"] = name
    data["train"] = train
    data["validation"] = validation or None
    # the math environment and its processor were the only ones
    data["default"] = {"env_name": "math"} | default
    yield "data.dataset_name", "data.train.dataset_name"
    yield from ((f"data.{key}", f"data.default.{key}") for key in default)
