"""The batch of a trainer step: one rank's trajectories, in columns.

A batch is made once, from the buffer's records. Passes through the models and estimators add columns. Losses, estimators, metrics, lineage
and samples read them. The columns contain only policy tokens, so nothing depends on padding, packing or the split into micro-batches.

A model's input is the paths of the trajectories (`EpisodeTrajectory.paths`). A path is never divided. The paths of a trajectory may be in
different micro-batches of the same mini-batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.base.errors import ServiceError
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Float32, Trajectory, decode_trajectory
from headrace.replay import ReservedTrajectory

from ..distributed.host_copies import on_device
from ..distributed.ranks import Ranks

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int = npt.NDArray[np.intp]
Int8 = npt.NDArray[np.int8]


_BY_TRAJECTORY = {"places", "groups", "rewards", "multipliers"}


class _Shared(msgspec.Struct, array_like=True):
    """A `Batch` encoded for another rank. `columns` has the dtype and the bytes of each."""

    size: int
    trajectories: list[bytes]
    scores: list[bytes]
    columns: dict[str, tuple[str, bytes]]


@dataclasses.dataclass
class Batch:
    """B trajectories with N policy tokens, one trajectory after the other, each path by path. `size` is the number of trajectories of all
    ranks.

    Per trajectory: `trajectories` and `scores`, the buffer's records. [B]:
    - `places` in the whole batch (groups one after the other)
    - `groups`, the places of their groups
    - `rewards` (float64), the environments' own, which the step scales and shapes
    - `multipliers` (float64), the weights in the loss; 0 for a trajectory that has left the loss

    Per policy token, [N]:
    - `trajectory`, the trajectory that it belongs to (0 to B - 1, ascending)
    - `rollout_logprobs` (float32) of the behaviour policy
    - `mask` (bool), False where a token is over age
    - `ages` (float32), how many versions the weights that sampled it are behind those of the step

    Columns [N] that a step adds; None until then, or if the configuration doesn't need them:
    - `old_logprobs` (float32), the trainer's at the start of the step; -inf where top-k or top-p leaves a token out, NaN in a trajectory
      that needed no pass
    - `old_logprobs_unfiltered` (float32), the same before top-k and top-p
    - `ref_logprobs` of the reference policy, `teacher_logprobs` of the teacher, `values` of the value model before each token (all float32)
    - `advantages`, and `returns` for the value model (float64)

    Columns [N] of what the optimizer steps did with each token (`token_columns`), for people; only if the samples of the step are
    written. docs/metrics.md defines them. `mask_reasons` (int8) are of `MaskReason`. The others are float32, NaN where nothing was
    computed.
    """

    size: int
    trajectories: tuple[AnyTrajectory, ...]
    scores: tuple[Score, ...]
    places: Int
    groups: Int
    rewards: Float64
    multipliers: Float64
    trajectory: Int
    rollout_logprobs: Float32
    mask: Bool
    ages: Float32
    old_logprobs: Float32 | None = None
    old_logprobs_unfiltered: Float32 | None = None
    ref_logprobs: Float32 | None = None
    teacher_logprobs: Float32 | None = None
    values: Float32 | None = None
    advantages: Float64 | None = None
    returns: Float64 | None = None
    mask_reasons: Int8 | None = None
    policy_logprobs: Float32 | None = None
    ratios: Float32 | None = None
    clipped: Float32 | None = None
    importance_weights: Float32 | None = None
    raw_importance_weights: Float32 | None = None
    entropies: Float32 | None = None
    token_losses: Float32 | None = None
    token_loss_gradients: Float32 | None = None
    token_value_losses: Float32 | None = None

    @classmethod
    def of(
        cls,
        trajectories: Sequence[AnyTrajectory],
        scores: Sequence[Score],
        *,
        places: Sequence[int],
        groups: Sequence[int],
        multipliers: Sequence[float],
        step: int,
        max_age: int,
        size: int | None = None,
    ) -> Batch:
        """Make a batch of scored trajectories for `step`. They are the whole batch unless `size` is given.

        Tokens over `max_age` don't count. Most age policies allow none.
        """
        lengths = [trajectory.length for trajectory in trajectories]
        paths = [path for trajectory in trajectories for path in trajectory.paths()]
        versions = np.zeros(sum(path.loss_mask.size for path in paths), np.float32)
        begin = 0
        for path in paths:
            for span in path.spans:
                versions[begin + span.start : begin + span.end] = span.version
            begin += path.loss_mask.size
        own = np.concatenate([np.empty(0, np.uint8), *(path.loss_mask for path in paths)]) != 0
        sampled = np.concatenate([np.empty(0, np.float32), *(path.logprobs for path in paths)])
        ages = (step - versions[own]).astype(np.float32)
        return cls(
            size=len(trajectories) if size is None else size,
            trajectories=tuple(trajectories),
            scores=tuple(scores),
            places=np.array(places, dtype=np.intp),
            groups=np.array(groups, dtype=np.intp),
            rewards=np.array([score.reward for score in scores], dtype=np.float64),
            multipliers=np.array(multipliers, dtype=np.float64),
            trajectory=np.repeat(np.arange(len(trajectories)), lengths),
            rollout_logprobs=sampled[own],
            mask=ages <= max_age,
            ages=ages,
        )

    def encode(self) -> bytes:
        """Encode all of it in msgpack, for another rank."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        columns = {name: column for name, column in fields.items() if isinstance(column, np.ndarray)}
        shared = _Shared(
            self.size,
            [trajectory.encode() for trajectory in self.trajectories],
            [score.encode() for score in self.scores],
            {name: (column.dtype.str, column.tobytes()) for name, column in columns.items()},
        )
        return msgspec.msgpack.encode(shared)

    @classmethod
    def decode(cls, data: bytes) -> Batch:
        """Decode what `encode` wrote. Columns that no step has added are None."""
        shared = msgspec.msgpack.decode(data, type=_Shared)
        return cls(
            size=shared.size,
            trajectories=tuple(map(decode_trajectory, shared.trajectories)),
            scores=tuple(map(Score.decode, shared.scores)),
            **{name: np.frombuffer(column, np.dtype(dtype)) for name, (dtype, column) in shared.columns.items()},
        )

    def __len__(self) -> int:
        """Return B, the number of this rank's trajectories."""
        return self.places.size

    @functools.cached_property
    def lengths(self) -> Int:
        """[B]: policy tokens of each trajectory."""
        return np.bincount(self.trajectory, minlength=len(self))

    @functools.cached_property
    def _owned(self) -> list[tuple[int, Trajectory]]:
        return [(i, path) for i, trajectory in enumerate(self.trajectories) for path in trajectory.paths()]

    @functools.cached_property
    def paths(self) -> tuple[Trajectory, ...]:
        """The model's input: the paths of each trajectory, one trajectory after the other."""
        return tuple(path for _, path in self._owned)

    @functools.cached_property
    def owners(self) -> Int:
        """[paths]: the trajectory that each path belongs to."""
        return np.array([i for i, _ in self._owned], dtype=np.intp)

    @functools.cached_property
    def _owner_edges(self) -> list[int]:
        """[B + 1]: where each trajectory's paths begin, and where the last one's end."""
        return np.searchsorted(self.owners, np.arange(len(self) + 1)).tolist()

    @functools.cached_property
    def _path_edges(self) -> Int:
        """[paths + 1]: where each path's tokens begin among the N, and where the last one's end."""
        return np.cumsum([0, *(path.length for path in self.paths)], dtype=np.intp)

    @functools.cached_property
    def _ends(self) -> Int:
        """[B]: the end of each trajectory's tokens among the N."""
        return np.cumsum(self.lengths)

    @property
    def truncated(self) -> Bool:
        """[B]: whether a limit of the run ended it."""
        return np.array([t.truncated for t in self.trajectories], dtype=np.bool_)

    @property
    def to_go(self) -> Int:
        """[N]: the number of policy tokens that follow in the same trajectory."""
        return self._ends[self.trajectory] - 1 - np.arange(self.trajectory.size)

    def name(self, i: int) -> str:
        """The name of trajectory `i` in errors."""
        return f"trajectory {self.trajectories[i].group_id!r}[{self.trajectories[i].index}]"

    def span_of(self, i: int) -> slice:
        """Return where the policy tokens of trajectory `i` are among the N."""
        return slice(self._ends[i] - self.lengths[i], self._ends[i])

    def tokens_of(self, indices: Sequence[int]) -> Int:
        """Return the indices among the N of the policy tokens of these trajectories, one trajectory after the other."""
        spans = map(self.span_of, indices)
        return np.concatenate([np.empty(0, np.intp), *(np.arange(span.start, span.stop) for span in spans)])

    def tokens_of_paths(self, indices: Sequence[int]) -> Int:
        """Return the indices among the N of the policy tokens of these paths, one path after the other."""
        edges = self._path_edges
        return np.concatenate([np.empty(0, np.intp), *(np.arange(edges[p], edges[p + 1]) for p in indices)])

    def paths_of(self, indices: Sequence[int]) -> list[int]:
        """Return the indices of the paths of these trajectories, one trajectory after the other."""
        edges = self._owner_edges
        return [path for i in indices for path in range(edges[i], edges[i + 1])]

    def per_token(self, of_batch: Float64) -> Float64:
        """Spread values [size] of the whole batch over this rank's tokens [N]: each token gets its trajectory's value."""
        return of_batch[self.places][self.trajectory]

    def sums(self, tokens: npt.ArrayLike) -> Float64:
        """Return [B]: the sum of values [N] over each trajectory's tokens."""
        return np.bincount(self.trajectory, tokens, len(self)).astype(np.float64)

    def split(self, tokens: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Split values [N] by trajectory."""
        return np.split(tokens, self._ends[:-1]) if len(self) else []

    def over_completion(self, i: int, values: npt.NDArray[Any] | None) -> Float32:
        """Spread a column [N] over the completion [T] of trajectory `i` (an episode's is `EpisodeTrajectory.flat`): its values at policy
        tokens, NaN elsewhere. Without a column all are NaN."""
        trajectory = self.trajectories[i]
        whole = np.full(trajectory.flat().loss_mask.size, np.nan, dtype=np.float32)
        if values is not None:
            whole[trajectory.places] = values[self.span_of(i)]
        return whole

    def of_all_ranks(self, rows: Float64, ranks: Ranks) -> Float64:
        """A collective. Gather every rank's rows [B, ...] into those of the whole batch, [size, ...], in its order.

        Each row is summed only with zeros. So every rank gets the same bits however the batch is shared out, and results computed from them
        are the same for any number of ranks.
        """
        table = np.zeros((self.size, *rows.shape[1:]))
        table[self.places] = rows
        return ranks.sum_array(table)

    def take(self, indices: Sequence[int]) -> Batch:
        """Return the trajectories at `indices`, in that order, with all their columns."""
        chosen, tokens = np.array(indices, dtype=np.intp), self.tokens_of(indices)
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, values in columns.items():
            if isinstance(values, tuple):
                columns[name] = tuple(values[i] for i in indices)
            elif isinstance(values, np.ndarray):
                columns[name] = values[chosen if name in _BY_TRAJECTORY else tokens]
        columns["trajectory"] = np.repeat(np.arange(len(indices)), self.lengths[chosen])
        return Batch(**columns)

    def mini_batches(self, size: int) -> list[list[int]]:
        """Return this rank's trajectories in each mini-batch. The whole batch is cut by place into mini-batches of `size`, so a
        trajectory's optimizer step depends only on the batch."""
        shares: list[list[int]] = [[] for _ in range(-(-self.size // size) or 1)]
        for i, place in enumerate(self.places):
            shares[place // size].append(i)
        return shares

    def mean_advantages(self) -> list[float]:
        """Return [B]: the mean advantage over each trajectory's tokens. It is bit-exact where all are equal, and 0 without tokens."""
        assert self.advantages is not None
        return [
            float(own[0]) + float((own - own[0]).mean()) if own.size else 0.0 for own in self.split(self.advantages)
        ]

    def branches(self, i: int) -> bool:
        """Return whether trajectory `i` has more than one path."""
        return len(self.paths_of([i])) > 1

    def find_problem(self, i: int, vocabulary: int, longest: int) -> str | None:
        """Return why a model of `vocabulary` ids can't train on trajectory `i`, in sequences of at most `longest` tokens; None if it
        can."""
        score = self.scores[i]
        for path in (self.paths[p] for p in self.paths_of([i])):
            prompt, completion = path.prompt_token_ids, path.completion_token_ids
            if prompt.size == 0 or completion.size == 0:
                return (
                    f"a prompt of {prompt.size} and a completion of {completion.size} tokens; each needs at least one"
                )
            if not np.isfinite(path.logprobs[path.loss_mask != 0]).all():
                return "a behaviour log-probability is not finite"
            if prompt.size + completion.size > longest:
                return f"{prompt.size + completion.size} tokens, more than policy.max_total_sequence_length {longest}"
            for ids in (prompt, completion):
                if ids.min() < 0 or ids.max() >= vocabulary:
                    return f"a token id outside the model's vocabulary of {vocabulary}"
        if not np.isfinite([self.rewards[i], *score.components.values()]).all():
            return f"its reward is {self.rewards[i]}, of {dict(score.components)}"
        if not (np.isfinite(self.multipliers[i]) and self.multipliers[i] >= 0):
            return f"its loss multiplier is {self.multipliers[i]}"
        return None


def gather(batch: Batch, ranks: Ranks) -> Batch:
    """A collective. Return the whole batch with all its columns, in its order, on rank 0, and their own part on the other ranks."""
    if ranks.size == 1:
        return batch
    shares = ranks.gather(batch.encode(), bytes)
    if len(shares) == 1:
        return batch
    parts = [Batch.decode(share) for share in shares]
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(Batch):
        values = [getattr(part, field.name) for part in parts]
        match values[0]:
            case tuple():
                columns[field.name] = tuple(item for value in values for item in value)
            case np.ndarray():
                columns[field.name] = np.concatenate(values)
            case constant:  # the size, and columns that no rank has
                columns[field.name] = constant
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    columns["trajectory"] = np.concatenate([part.trajectory + at for part, at in zip(parts, offsets, strict=False)])
    whole = Batch(**columns)
    return whole.take(np.argsort(whole.places).tolist())


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The columns of one micro-batch as tensors, for the loss: n tokens of b trajectories, in the order of its paths.

    Per token [n]: `trajectory` int64, the place of its trajectory among the b; `rollout_logprobs`, `old_logprobs`, `ref_logprobs`,
    `values`, `returns`, `advantages` and `ages` float32 as in `Batch`; `mask` float32, 1 where the token counts and 0 where it is over age
    (such a token still enters sums over its whole trajectory). Per trajectory [b] float32: `multipliers`, `rewards`.

    The paths of an episode may be in several micro-batches. Two more columns [b] correct for that. `elsewhere` is the number of the
    trajectory's counted tokens that are in other micro-batches: a mean over the whole trajectory divides by the tokens here plus these.
    `share` is the share of the trajectory's policy tokens that are here: a count of trajectories counts it by this share in each
    micro-batch, so that the shares add up to 1. Both are None if every trajectory of the batch has one path.
    """

    trajectory: Tensor
    mask: Tensor
    ages: Tensor
    multipliers: Tensor
    rewards: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    elsewhere: Tensor | None = None
    share: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, indices: Sequence[int], device: torch.device) -> MicroBatch:
        """Make the columns of the paths at `indices`, on `device`."""
        tokens = batch.tokens_of_paths(indices)
        own = list(dict.fromkeys(batch.owners[list(indices)].tolist()))
        place = np.zeros(len(batch), np.int64)
        place[own] = np.arange(len(own))
        trajectory = place[batch.trajectory[tokens]]

        def column(values: npt.NDArray[Any]) -> Tensor:
            return on_device(torch.from_numpy(values.astype(np.float32)), device)

        def optional(values: npt.NDArray[Any] | None) -> Tensor | None:
            return None if values is None else column(values[tokens])

        elsewhere = share = None
        if len(batch.paths) > len(batch):
            whole = batch.tokens_of(own)
            counts = np.bincount(place[batch.trajectory[whole]], batch.mask[whole], len(own))
            here = np.bincount(trajectory, minlength=len(own))
            missing = counts - np.bincount(trajectory, batch.mask[tokens], len(own))
            elsewhere = on_device(torch.from_numpy(missing), device)
            share = on_device(torch.from_numpy(here / batch.lengths[own]), device)
        assert batch.advantages is not None
        return cls(
            trajectory=on_device(torch.from_numpy(trajectory), device),
            mask=column(batch.mask[tokens]),
            ages=column(batch.ages[tokens]),
            multipliers=column(batch.multipliers[own]),
            rewards=column(batch.rewards[own]),
            advantages=column(batch.advantages[tokens]),
            rollout_logprobs=column(batch.rollout_logprobs[tokens]),
            old_logprobs=optional(batch.old_logprobs),
            ref_logprobs=optional(batch.ref_logprobs),
            values=optional(batch.values),
            returns=optional(batch.returns),
            elsewhere=elsewhere,
            share=share,
        )


@dataclasses.dataclass(frozen=True)
class GlobalCounts:
    """The divisors of losses and metrics: counts over all micro-batches and ranks of one optimizer step.

    `tokens` is T, the sum of mask times multiplier. `sequences` is N, the sum of the multipliers of trajectories with at least one policy
    token. `positive_tokens` is T over the trajectories whose reward is above 0.
    """

    tokens: float
    sequences: float
    positive_tokens: float

    @classmethod
    def of(cls, batch: Batch, mini_batches: Sequence[Sequence[int]], ranks: Ranks) -> list[GlobalCounts]:
        """A collective. Return the counts of each mini-batch, over all ranks."""
        counted, lengths = batch.sums(batch.mask) * batch.multipliers, batch.lengths
        own: list[float] = []
        for mini_batch in mini_batches:
            here = [i for i in mini_batch if lengths[i]]
            own.append(float(sum(counted[i] for i in here)))
            own.append(float(sum(batch.multipliers[i] for i in here)))
            own.append(float(sum(counted[i] for i in here if batch.rewards[i] > 0)))
        whole = iter(ranks.sum(own))
        return [cls(*three) for three in zip(whole, whole, whole, strict=True)]


class BatchRejected(ServiceError):
    """Raised when the batch can't be trained on: a part of it can't be decoded, breaks a law, or is not an input of this model. No step was
    taken. `groups` has the problem of each group, by id."""

    def __init__(self, groups: dict[str, str]) -> None:
        super().__init__("; ".join(groups.values()))
        self.groups = groups


def reject_any(found: dict[str, str], ranks: Ranks) -> None:
    """A collective: raise `BatchRejected` on every rank if any rank `found` a group (by id) that can't be trained on."""
    whole = {group: why for of_rank in ranks.all_gather(found, dict[str, str]) for group, why in of_rank.items()}
    if whole:
        raise BatchRejected(whole)


def check_invariants(
    reserved: ReservedTrajectory, trajectory: AnyTrajectory, score: Score, *, step: int, max_age: int, policy: str
) -> str | None:
    """Check laws 2, 3 and 7 on what was read from the buffer, where it is used. Returns the violation, or None.

    Under the age policy `mask`, law 2 applies to each token that enters the loss.
    """
    where = f"step {step}: trajectory {reserved.group_id!r}[{reserved.index}]"
    if (trajectory.group_id, trajectory.index) != (reserved.group_id, reserved.index):
        return f"{where} was reserved, {trajectory.group_id!r:.80}[{trajectory.index}] was read (law 3)"
    if policy != "mask" and step - trajectory.oldest_version > max_age:
        return f"{where} has tokens of version {trajectory.oldest_version}, older than {max_age} steps (law 2)"
    if trajectory.newest_version > step:
        return f"{where} has tokens of version {trajectory.newest_version}, which is newer than these weights (law 2)"
    if score.status != "SCORED" or score.reward != reserved.reward:
        return f"{where} was reserved with reward {reserved.reward}, but its score is {score.status} {score.reward} (law 7)"
    return None
