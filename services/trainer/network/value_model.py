"""The value model: a transformers backbone with a linear head that predicts, before each policy token, the reward still to come.

The value V_t of a token is read at the position before it. It depends on what precedes the token, never on the token itself, in inference
and in the loss alike. A critic that saw the action would bias the gradient.

The head starts at 0, so no random number is drawn, and an untrained critic does not influence the advantages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from headrace.config import Config

from ..distributed.host_copies import host_copies
from ..distributed.ranks import is_first_rank
from ..distributed.sharding import full_tensor
from . import backbone
from .attention import prepare_attention
from .packing import PackedRows

HEAD = "value_head.safetensors"


class ValueRoot(nn.Module):
    """Backbone and linear head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, packed: PackedRows) -> Tensor:
        hidden = backbone.hidden_states_before(self.model, packed)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden.float())[:, 0]
        return values


class ValueModel:
    """A value model on this rank's device. With several ranks it is sharded by FSDP2, and every method is a collective.

    `root` has all its weights.
    """

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        """Load `folder`, which `snapshot` wrote, or the model of `value.model_name`.

        Raises `ServiceError` if it can't be loaded, or if the model can't process the rows that `policy` configures.
        """
        self.device = backbone.choose_device(config.trainer.device)
        key = "value.model_name" if config.value.model_name else "policy.model_name"
        name = str(folder) if folder else config.value.model_name or config.policy.model_name
        what = "the backbone of a value model"
        model = backbone.load_model(AutoModel, config, key, name, what, config.value.hf_config_overrides)
        if config.value.freeze_moe_router:
            backbone.freeze_routers(model)
        prepare_attention(model, config.policy)
        self.root = ValueRoot(model)
        head = Path(name) / HEAD
        if folder or head.is_file():
            try:
                self.root.head.load_state_dict(load_file(head))
            except (OSError, RuntimeError, SafetensorError) as error:
                raise backbone.cannot_load(key, name, "the head of a value model", error) from error
        precision = config.value.precision or config.policy.precision
        self.placed = backbone.PlacedModel(
            self.root, model, config, self.device, precision, in_float32=[self.root.head]
        )

    @property
    def vocab_size(self) -> int:
        return int(self.root.model.config.get_text_config().vocab_size)

    def forward(self, packed: PackedRows) -> Tensor:
        """Return values [N] float32, one before each policy token of `packed`, on this device."""
        values: Tensor = self.placed(packed)
        return values

    def snapshot(self) -> backbone.Write:
        """Copy the weights as `PolicyModel.snapshot` does. The backbone is written in the format of `AutoModel.from_pretrained`, and the
        head beside it."""
        write_model = backbone.snapshot_model(self.root.model)
        parameters = self.root.head.named_parameters()
        head = host_copies(((name, full_tensor(parameter)) for name, parameter in parameters), keep=is_first_rank())

        def write(folder: Path) -> None:
            write_model(folder)
            if head:
                save_file(head, folder / HEAD)

        return write
