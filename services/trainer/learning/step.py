"""One trainer step: rewards, passes without gradients, advantages, optimizer steps.

With several ranks it is a collective, and the numbers are those of a single rank with all trajectories. Except for an adapter's dropout, no
random numbers are drawn: a trajectory's optimizer step follows from its place in the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.base.errors import ServiceError
from headrace.config.loss import Clip, LossConfig

from ..distributed.ranks import Ranks
from ..network.packing import PackedRows, Packing, Rows, Work, pack, plan
from ..network.policy_model import LogitsWarper, PolicyModel
from ..network.value_model import ValueModel
from .algorithms import estimate_advantages, needs_unfiltered, required_passes
from .algorithms.statistics import all_equal
from .batch import Batch, Float32, GlobalCounts, MicroBatch, reject_any
from .learner import Learner
from .losses import LossParts, explained_variance, policy_loss, value_loss
from .losses.terms import divergences
from .optimizer import ModelOptimizer
from .rewards import (
    mask_by_logprob_error,
    mask_truncated,
    scale_rewards,
    shape_rewards,
)
from .token_columns import TokenColumns, find_mask_reasons

# The narrowest clip that `off_policy_tokens` uses: GSPO clips the ratios of whole sequences, far more narrowly.
USUAL_CLIP = Clip(1 - 0.2, 1 + 0.2)

LossOf = Callable[[PackedRows, MicroBatch, GlobalCounts], LossParts]


def train_step(learner: Learner, batch: Batch) -> dict[str, float]:
    """Take one trainer step on the trajectories of all ranks; `batch` holds this rank's. Returns metrics of the whole batch.

    Adds the columns that the step computes to `batch`. Metrics are means over the optimizer steps. Those of the value model have the names
    `critic/<name>`. Sets `learner.seconds`, the durations of the step's parts on this rank, and `learner.work`, what training the policy
    computed on all ranks.

    Raises `BatchRejected` naming the trajectories that can't be trained on, and `ServiceError` naming those whose loss or gradient is not
    finite. Weights, optimizers and counters are then unchanged. If that happens after the first optimizer step of a trainer step, the
    weights belong to no version: the learner is then `broken`, its rank refuses it, and the run resumes from its last checkpoint.
    """
    config, ranks, policy, value = learner.config, learner.ranks, learner.policy, learner.value
    algorithm, step = config.algorithm, learner.version
    warper = learner.warper
    mini_batches, epochs = batch.mini_batches(config.policy_batch), algorithm.policy_epochs(step)
    seconds = learner.seconds = {}
    learner.work = None
    _check(learner, batch)

    # 1. Rewards, scaled and shaped.
    scaled = scale_rewards(batch.rewards, algorithm.reward_scaling)
    shaping = algorithm.reward_shaping
    batch.rewards = shape_rewards(scaled, batch.lengths, batch.truncated, shaping, config.max_response_length)
    rewards = batch.of_all_ranks(np.stack([scaled, batch.rewards], axis=1), ranks)
    groups = rewards[:, 1].reshape(-1, algorithm.num_generations_per_prompt)
    metrics = {
        "reward": float(groups.mean()),
        "reward_std": float(groups.std()),
        "groups_without_spread": float(all_equal(groups).mean()),
    }
    if shaping.enabled:
        metrics["unshaped_total_reward"] = float(rewards[:, 0].mean())

    # 2. Passes without gradients, as far as required.
    passes = required_passes(config, optimizer_steps=epochs * len(mini_batches))
    inference = Packing.of(config.policy, training=False)

    def compute_logprobs(model: PolicyModel, warper: LogitsWarper) -> Float32:
        return _forward(batch, inference, ranks, model.device, lambda packed: model.forward(packed, warper).logprobs)

    with _timed(seconds, "policy_and_reference_logprobs") if passes else contextlib.nullcontext():
        if "old" in passes:
            batch.old_logprobs = compute_logprobs(policy, warper)
            if warper.filters and needs_unfiltered(config):
                batch.old_logprobs_unfiltered = compute_logprobs(policy, warper.unfiltered)
        if learner.reference is not None:
            with learner.reference.without_adapter():
                batch.ref_logprobs = compute_logprobs(learner.reference, warper.unfiltered)
        if learner.teacher is not None:
            batch.teacher_logprobs = compute_logprobs(learner.teacher, warper.unfiltered)
        if value is not None:
            batch.values = _forward(batch, learner.value_packing, ranks, value.device, value.forward)

    # 3. Which trajectories leave the loss, and the advantages of all.
    given = batch.multipliers
    batch.multipliers = untruncated = mask_truncated(given, batch.truncated, algorithm.overlong_filtering)
    if batch.old_logprobs is not None:
        metrics |= mask_by_logprob_error(batch, algorithm.seq_logprob_error_threshold, ranks)
    metrics |= estimate_advantages(config, batch, ranks)
    sampled = config.logger.keep_step_data != 0
    if sampled:
        batch.mask_reasons = find_mask_reasons(batch, given, untruncated)

    # 4. Optimizer steps: of the value model, then of the policy.
    taken: list[OptimizerStep] = []

    def optimize(
        optimizer: ModelOptimizer,
        mini_batches: Sequence[Sequence[int]],
        epochs: int,
        packing: Packing,
        model: PolicyModel | ValueModel,
        loss_of: LossOf,
        after_step: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Take an optimizer step on each mini-batch, in each epoch, and call `after_step`. Returns their combined metrics."""
        first, counts_of = len(taken), GlobalCounts.of(batch, mini_batches, ranks)

        def backward(micro_batches: Sequence[Rows], counts: GlobalCounts) -> OptimizerStep:
            parts = []
            padded = _pad_micro_batches(micro_batches, ranks)
            for place, rows in enumerate(padded, start=1):
                ranks.progress.mark()
                model.placed.expect_backward(last=place == len(padded))
                packed = pack(batch.paths, rows, packing).to(model.device)
                part = loss_of(packed, MicroBatch.of(batch, packed.indices, model.device), counts)
                (part.loss * ranks.size).backward()  # FSDP averages over ranks; the loss is a sum
                parts.append(part)
            return OptimizerStep.of(parts, optimizer, ranks)

        for epoch in range(epochs):
            for mini_batch, counts in zip(mini_batches, counts_of, strict=True):
                weighted = [i for i in mini_batch if batch.multipliers[i] > 0]  # the others add nothing to the loss
                now = backward(plan(batch.paths, packing, batch.paths_of(weighted)), counts)
                if not now.is_finite:
                    optimizer.zero_grad()
                    # one backward pass per trajectory shows which of them cause it
                    causes = []
                    for rank, names in enumerate(ranks.all_gather([batch.name(i) for i in weighted], list[str])):
                        for turn, name in enumerate(names):
                            own = batch.paths_of([weighted[turn]]) if rank == ranks.rank else []
                            alone = backward(plan(batch.paths, packing, own), counts)
                            optimizer.zero_grad()
                            causes += [] if alone.is_finite else [name]
                    raise _not_finite(learner, optimizer.section, now, causes, len(taken))
                optimizer.step(now.grad_norm)  # clips
                taken.append(now)
                after_step()
            if algorithm.schedule_counts_epochs or epoch == epochs - 1:
                optimizer.rate.advance()
        return _summary(taken[first:])

    if value is not None and learner.value_optimizer is not None:
        value_batches = batch.mini_batches(config.value_batch)
        of_values = TokenColumns(batch, ranks, algorithm.value_epochs * len(value_batches))

        def loss_of_values(packed: PackedRows, tokens: MicroBatch, counts: GlobalCounts) -> LossParts:
            parts = value_loss(config.value_loss_fn, value.forward(packed), tokens, counts, columns=sampled)
            if sampled:
                of_values.note(packed.indices, parts.columns)
            return parts

        with _timed(seconds, "value_training"):
            found = optimize(
                learner.value_optimizer,
                value_batches,
                algorithm.value_epochs,
                learner.value_packing,
                value,
                loss_of_values,
                of_values.write,
            )
        found["explained_var"] = explained_variance(found)
        metrics |= {f"critic/{name}": number for name, number in found.items()}

    if epochs:
        columns = TokenColumns(batch, ranks, epochs * len(mini_batches))
        work = Work()

        def loss_of_policy(packed: PackedRows, tokens: MicroBatch, counts: GlobalCounts) -> LossParts:
            nonlocal work
            work += packed.work
            output = policy.forward(packed, warper, entropy=True)
            parts = policy_loss(config.loss_fn, output, tokens, counts, columns=sampled)
            if sampled or tokens.old_logprobs is None:
                columns.note_policy(packed.indices, output, parts.columns, gradients=sampled)
            return parts

        packing = Packing.of(config.policy, training=True)
        if config.policy.lora_cfg.drops:
            torch.manual_seed(zlib.crc32(repr((algorithm.seed, step, ranks.rank)).encode()))
        with _timed(seconds, "policy_training"):
            metrics |= optimize(
                learner.policy_optimizer, mini_batches, epochs, packing, policy, loss_of_policy, columns.write
            )
        learner.work = Work(*ranks.sum(dataclasses.astuple(work)))
        if batch.old_logprobs is None:  # the forward pass of the only optimizer step computed them
            batch.old_logprobs = batch.policy_logprobs

    metrics |= _agreement(config.loss_fn, batch, ranks)
    counts_of = GlobalCounts.of(batch, mini_batches, ranks)
    metrics["global_valid_toks"] = sum(counts.tokens for counts in counts_of)
    metrics["global_valid_seqs"] = sum(counts.sequences for counts in counts_of)
    learner.counters.current_step += 1
    learner.counters.consumed_samples += batch.size
    learner.counters.total_valid_tokens += round(metrics["global_valid_toks"])
    return metrics | dataclasses.asdict(learner.counters)


def _agreement(config: LossConfig, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """A collective. Return how far trainer and behaviour policy are apart, beyond what the loss measures; nothing if no pass computed the
    trainer's log-probabilities.

    `off_policy_tokens` is the share of tokens beyond the clip of the policy term (`USUAL_CLIP` if that is wider or the term has none).
    `on_policy_…` are means over the tokens of trajectories that the current weights sampled; absent without any.
    """
    if batch.old_logprobs is None:
        return {}
    counted = batch.mask & np.isfinite(batch.old_logprobs)
    clip = config.policy_term.clip or USUAL_CLIP
    low, high = min(clip.low, USUAL_CLIP.low), max(clip.high, USUAL_CLIP.high)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp((batch.old_logprobs - batch.rollout_logprobs).astype(np.float64))
    far = counted & ((ratio < low) | (ratio > high))
    on_policy = counted & (batch.sums(batch.ages) == 0)[batch.trajectory]
    old, rollout = torch.from_numpy(batch.old_logprobs[on_policy]), torch.from_numpy(batch.rollout_logprobs[on_policy])
    found = divergences(config, old, rollout, torch.ones_like(old))
    names = ("token_mult_prob_error", "gen_kl_error")
    # fsum: whatever the order of the trajectories
    own = [counted.sum(), far.sum(), on_policy.sum(), *(math.fsum(found[name].tolist()) for name in names)]
    tokens, far_tokens, on_policy_tokens, *sums = ranks.sum([float(number) for number in own])
    metrics = {"off_policy_tokens": far_tokens / tokens} if tokens else {}
    if on_policy_tokens:
        metrics |= {f"on_policy_{name}": total / on_policy_tokens for name, total in zip(names, sums, strict=True)}
    return metrics


@dataclasses.dataclass(frozen=True)
class OptimizerStep:
    """The outcome of an optimizer step over all ranks: metrics of its loss, the 2-norm of its gradients before clipping, and its learning
    rate."""

    sums: Mapping[str, float]
    minima: Mapping[str, float]
    maxima: Mapping[str, float]
    grad_norm: float
    lr: float

    @classmethod
    def of(cls, parts: Sequence[LossParts], optimizer: ModelOptimizer, ranks: Ranks) -> OptimizerStep:
        """A collective. Make the outcome after the backward passes of this rank's micro-batches, whose losses are `parts`."""

        def combined(of_parts: Sequence[Mapping[str, Tensor]], how: Callable[[Tensor], Tensor]) -> dict[str, float]:
            names = sorted(of_parts[0])
            # [micro-batches, names], on the loss's device, which is synchronized only once, after the last micro-batch
            table = torch.stack([torch.stack([part[name].detach() for name in names]) for part in of_parts])
            return dict(zip(names, how(table).tolist(), strict=True))

        own = (
            combined([part.sums for part in parts], lambda table: table.sum(0)),
            combined([part.minima for part in parts], lambda table: table.amin(0)),
            combined([part.maxima for part in parts], lambda table: table.amax(0)),
        )
        return cls(*ranks.combine(*own), optimizer.grad_norm(), optimizer.rate.value)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.sums["loss"]) and math.isfinite(self.grad_norm)


def _summary(steps: Sequence[OptimizerStep]) -> dict[str, float]:
    """Combine the metrics of several optimizer steps: means, the smallest of minima and the largest of maxima. Minima and maxima are -1 if
    no token counted, as in NeMo RL."""
    metrics = {name: sum(step.sums[name] for step in steps) / len(steps) for name in steps[0].sums}
    extremes = {name: min(step.minima[name] for step in steps) for name in steps[0].minima}
    extremes |= {name: max(step.maxima[name] for step in steps) for name in steps[0].maxima}
    metrics |= {name: value if math.isfinite(value) else -1.0 for name, value in extremes.items()}
    metrics["grad_norm"] = sum(step.grad_norm for step in steps) / len(steps)
    metrics["lr"] = sum(step.lr for step in steps) / len(steps)
    return metrics


def _forward(
    batch: Batch, packing: Packing, ranks: Ranks, device: torch.device, compute: Callable[[PackedRows], Tensor]
) -> Float32:
    """A collective. Return the values [N] that `compute` returns for the batch's policy tokens, without gradients."""
    indices: list[int] = []
    values: list[Tensor] = []
    for rows in _pad_micro_batches(plan(batch.paths, packing), ranks):
        ranks.progress.mark()
        packed = pack(batch.paths, rows, packing).to(device)
        with torch.no_grad():
            values.append(compute(packed))
        indices += packed.indices
    found = np.zeros(batch.trajectory.size, np.float32)
    # a single copy from the GPU, because each copy waits for it
    found[batch.tokens_of_paths(indices)] = torch.cat(values).cpu().numpy()
    return found


def _pad_micro_batches(own: Sequence[Rows], ranks: Ranks) -> list[Rows]:
    """A collective. Pad this rank's micro-batches with empty ones, so that all ranks have the same number, at least one. Under FSDP2 every
    pass is a collective."""
    rounds = max(1, int(ranks.max(len(own))))
    return [*own, *[()] * (rounds - len(own))]


def _check(learner: Learner, batch: Batch) -> None:
    """A collective. Raise `BatchRejected` on every rank for a trajectory that can't be trained on, and `ServiceError` for incomplete
    groups. Raise `ValueError` for a batch that was trained already, because its columns are those of that step."""
    if batch.advantages is not None:
        raise ValueError("this batch has been through a trainer step already; make a new one with Batch.of")
    generations = learner.config.algorithm.num_generations_per_prompt
    longest, chained = learner.config.policy.max_total_sequence_length, learner.config.needs_one_path
    vocabulary = learner.policy.vocab_size  # reading it from the model's configuration costs as much as a check
    found: dict[str, str] = {}
    for i, trajectory in enumerate(batch.trajectories):
        problem = batch.find_problem(i, vocabulary, longest)
        if problem is None and chained is not None and batch.branches(i):
            problem = f"an episode with branches, but {chained} needs a single path (set agents.branches: refuse)"
        if problem is not None:
            found[trajectory.group_id] = f"step {learner.version}: {batch.name(i)}: {problem}; no step was taken"
    reject_any(found, learner.ranks)
    if batch.size == 0 or batch.size % generations:
        raise ServiceError(
            f"a batch of {batch.size} trajectories does not consist of groups of num_generations_per_prompt {generations} (law 3)"
        )


def _not_finite(learner: Learner, model: str, now: OptimizerStep, causes: Sequence[str], taken: int) -> ServiceError:
    """Make the error of an optimizer step that can't be taken. If `taken` others of the same trainer step were, mark the learner broken."""
    problem = (
        f"step {learner.version}: loss {now.sums['loss']} and gradient norm {now.grad_norm} of the {model} model are not both finite, "
        f"because of {', '.join(causes) or 'no single trajectory'}; no step was taken with them. Look at these trajectories' "
        f"log-probabilities, or lower {model}.optimizer.kwargs.lr and start again from the last checkpoint"
    )
    if taken:
        learner.broken = problem = (
            f"{problem}. {taken} optimizer steps of this step were taken before, so these weights belong to no version"
        )
    return ServiceError(problem)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - began
