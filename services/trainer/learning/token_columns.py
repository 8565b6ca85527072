"""What a step did with each token, for people: columns of the batch that passes of the optimizer steps compute anyway.

Nothing is computed a second time, so a column says what the loss used. The columns of a micro-batch stay on its device until the optimizer
step is taken: a single copy from a GPU, because each copy waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.run.samples import MaskReason

from ..distributed.ranks import Ranks
from ..network.policy_model import PolicyOutput
from .batch import Batch, Float32, Float64, Int, Int8

# The columns that are summed over the passes and divided by the number of optimizer steps, as the metrics `loss` and `critic/loss` are. Of
# the others the last pass is kept.
AVERAGED = ("token_losses", "token_loss_gradients", "token_value_losses")


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A micro-batch's paths, its columns [n], and the gradients that reached its log-probabilities, if they are wanted."""

    paths: Sequence[int]
    columns: Mapping[str, Tensor]
    gradients: list[Tensor] | None


class TokenColumns:
    """Takes notes of a model's passes in the `optimizer_steps` of a step, and writes them to the columns of `batch`.

    A token has one pass in each epoch.
    """

    def __init__(self, batch: Batch, ranks: Ranks, optimizer_steps: int) -> None:
        self._batch, self._ranks, self._optimizer_steps = batch, ranks, optimizer_steps
        self._passes: list[_Pass] = []

    def note(self, paths: Sequence[int], columns: Mapping[str, Tensor]) -> None:
        """Take note of the columns of a pass over these paths."""
        self._passes.append(_Pass(paths, columns, None))

    def note_policy(
        self, paths: Sequence[int], output: PolicyOutput, columns: Mapping[str, Tensor], *, gradients: bool
    ) -> None:
        """Take note of a pass of the policy, before its backward pass; and with `gradients`, of the `token_loss_gradients`."""
        found: list[Tensor] = []
        if gradients:
            for logprobs in (output.logprobs, output.unfiltered):
                if logprobs is not None:
                    logprobs.register_hook(found.append)
        columns = {"policy_logprobs": output.logprobs.detach(), **columns}
        self._passes.append(_Pass(paths, columns, found if gradients else None))

    def write(self) -> None:
        """Write what was noted since the last call: once an optimizer step is taken."""
        passes, self._passes = self._passes, []
        if not passes:
            return
        tables = []
        for one in passes:
            columns = dict(one.columns)
            if one.gradients is not None:
                none = torch.zeros_like(one.columns["policy_logprobs"])
                columns["token_loss_gradients"] = torch.stack([none, *one.gradients]).sum(0) / self._ranks.size
            tables.append(torch.stack([values.float() for values in columns.values()]))
        found = torch.cat(tables, dim=1).cpu().numpy()
        tokens = self._batch.tokens_of_paths([path for one in passes for path in one.paths])
        for name, values in zip(columns, found, strict=True):
            self._write(name, tokens, values)

    def _write(self, name: str, tokens: Int, values: Float32) -> None:
        if name == "mask_reasons":
            assert self._batch.mask_reasons is not None
            self._batch.mask_reasons[tokens] = values
            return
        column = getattr(self._batch, name)
        if column is None:
            column = np.full(self._batch.trajectory.size, np.nan, np.float32)
            setattr(self._batch, name, column)
        if name in AVERAGED:
            values = values / self._optimizer_steps + np.where(np.isnan(column[tokens]), 0.0, column[tokens])
        column[tokens] = values


def find_mask_reasons(batch: Batch, given: Float64, untruncated: Float64) -> Int8:
    """Return the `MaskReason` [N] int8 of tokens that leave the whole loss. `given` [B] are the multipliers that the batch came with, and
    `untruncated` those after overlong filtering."""
    of_trajectory = np.select(
        [given == 0, untruncated == 0, batch.multipliers == 0],
        [MaskReason.ZERO_MULTIPLIER, MaskReason.OVERLONG, MaskReason.LOGPROB_ERROR],
        MaskReason.COUNTED,
    )
    reasons = np.where(batch.mask, of_trajectory[batch.trajectory], MaskReason.OVER_AGE)
    return reasons.astype(np.int8)
