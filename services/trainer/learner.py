"""The learner: samples in, one AdamW step of the clipped policy-gradient loss, new weights out.

Torch only: no queue, no network but `torch.distributed`. One `Learner` a rank; with several ranks every method is a
collective that all of them call alike, and the numbers are those of one rank holding all samples.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from headrace.config import Config
from headrace.errors import ServiceError
from headrace.trajectory import Float32, Int32
from services.trainer import batch as batches
from services.trainer.batch import Sample
from services.trainer.checkpoint import cannot_write
from services.trainer.loss import EXTREMES, MEANS, LossParts, TokenLogprobs, clipped_policy_loss
from services.trainer.policy import Policy, load_tokenizer
from services.trainer.projection import Warp
from services.trainer.rows import Layout, MicroBatch, TokenSequence, build, join, plan

__all__ = ["Learner", "Sample"]

logger = logging.getLogger(__name__)


class Learner:
    """Policy, optimizer and, for a KL penalty above 0, a frozen reference policy.

    `version` counts optimizer steps from the initial model; `tokenizer` is the run's.
    """

    def __init__(self, config: Config, checkpoint: Path | None = None) -> None:
        """Start from the initial model, or go on from `checkpoint`, a folder that `save` wrote.

        Raises `ServiceError` for a model or checkpoint that can't be loaded.
        """
        if config.trainer.num_threads is not None:
            torch.set_num_threads(config.trainer.num_threads)
        self._config = config
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.version = 0
        self.tokenizer = load_tokenizer(config)
        self._layout = Layout.of(config.policy, training=True)
        self._warp = Warp.of(config.policy.generation)
        self._policy = Policy(config, checkpoint / "policy" if checkpoint else None)
        penalised = config.loss_fn.reference_policy_kl_penalty > 0
        self._reference = Policy(config, trainable=False) if penalised else None
        arguments = config.policy.optimizer.kwargs
        self._optimizer = torch.optim.AdamW(
            self._policy.model.parameters(), **{**arguments.model_dump(), "fused": not arguments.foreach}
        )
        if checkpoint:
            self._load_training_state(checkpoint / "training")

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: token ids lie in [0, vocab_size)."""
        return self._policy.vocab_size

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step on the samples of all ranks; returns global metrics.

        Raises `ServiceError` naming rank and sample index, with weights, optimizer and `version` as they were, for samples
        that can't be trained on and for a loss or gradient that is not finite.
        """
        metrics = self._gradients(samples)
        self._clip(metrics["grad_norm"])
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        return metrics

    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """The metrics that `step` would return; weights, optimizer and `version` stay as they are. Raises as `step` does."""
        metrics = self._gradients(samples)
        self._optimizer.zero_grad()
        return metrics

    def probe(self, token_ids: Int32) -> Float32:
        """Log-probabilities [L - 1] of `token_ids[1:]` given what precedes each, at temperature 1, under the weights as they are."""
        whole = TokenSequence(token_ids[:1], token_ids[1:], np.ones(token_ids.size - 1, np.uint8))
        rows = build([whole], MicroBatch((((0,),),)), self._layout).to(self._policy.device)
        with torch.no_grad():
            return self._policy.logprobs(rows, Warp()).curr.cpu().numpy()

    def weight_metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name in a Hugging Face checkpoint, dtype and full shape of every weight, in the order of `iter_weights`."""
        return [(name, "float32", shape) for name, shape in self._policy.weight_shapes()]

    def iter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, one at a time; all ranks must run the iterator to its end."""
        return self._policy.weights()

    def save(self, folder: Path) -> None:
        """Write `policy/` (a Hugging Face checkpoint with its tokenizer) and `training/` (version and optimizer) into `folder`.

        `folder` exists and is shared by the ranks. There is no random state: a step draws no numbers. Raises `ServiceError`
        on every rank where any of them can't write.
        """
        try:
            self._policy.save(folder / "policy")
            if self._rank == 0:
                self.tokenizer.save_pretrained(folder / "policy")
            problems = []
        except (OSError, SafetensorError) as error:
            problems = [str(cannot_write(folder, error))]
        self._refuse(problems)
        state: dict[str, object] = {"version": self.version}
        # asking an optimizer that never stepped for its state counts as a step
        if self._config.checkpointing.save_optimizer and self._optimizer.state:
            state["optimizer"] = get_optimizer_state_dict(self._policy.model, self._optimizer)
        try:
            dcp.save(state, checkpoint_id=folder / "training", no_dist=not dist.is_initialized())
        except dcp.CheckpointException as error:
            raise cannot_write(folder, _cause(error)) from error

    def _load_training_state(self, folder: Path) -> None:
        reader = dcp.FileSystemReader(folder)
        try:
            saved = reader.read_metadata().state_dict_metadata
            state: dict[str, object] = {"version": 0}
            if any(key.startswith("optimizer.") for key in saved):
                state["optimizer"] = get_optimizer_state_dict(self._policy.model, self._optimizer)
            else:
                logger.warning(
                    "%s holds no optimizer state (checkpointing.save_optimizer): moments start from zero", folder
                )
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
        except (OSError, EOFError, pickle.UnpicklingError, dcp.CheckpointException) as error:
            raise ServiceError(
                f"checkpoint {folder.parent}: its training state can't be read ({_cause(error)!r}); remove this checkpoint "
                "to go on from an earlier one"
            ) from error
        self.version = int(state["version"])  # type: ignore[call-overload]
        if "optimizer" in state:
            set_optimizer_state_dict(self._policy.model, self._optimizer, state["optimizer"])  # type: ignore[arg-type]
            for group in self._optimizer.param_groups:  # the configuration may have changed since
                group.update(self._config.policy.optimizer.kwargs.model_dump(exclude={"fused", "foreach"}))

    def _gradients(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Gradients of the loss on every parameter, not clipped; the metrics of the step they are for."""
        self._refuse(self._problems(samples))
        tokens, valid = self._totals([sum(s.weight for s in samples), sum(s.loss_multiplier for s in samples)])
        means, extremes = self._accumulate(samples, tokens)
        norm = self._gradient_norm()
        if not (math.isfinite(means["loss"]) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise self._diagnosis(samples, means["loss"], norm, tokens)
        lr = self._optimizer.param_groups[0]["lr"]
        counts = {"total_valid_tokens": tokens, "num_valid_samples": valid}
        return {**means, **extremes, "grad_norm": norm, "lr": lr, **counts}

    def _accumulate(self, samples: Sequence[Sample], tokens: float) -> tuple[dict[str, float], dict[str, float]]:
        """Gradients of the global loss on every parameter; global means and extremes."""
        sequences = [sample.tokens for sample in samples if sample.weight > 0]
        counted = [sample for sample in samples if sample.weight > 0]
        own = plan(sequences, self._layout)
        # every pass is a collective under FSDP: ranks with fewer micro-batches keep pace with empty ones
        rounds = int(self._reduce(torch.tensor([float(len(own))]), dist.ReduceOp.MAX)[0])
        parts = [
            self._backward(counted, own[i] if i < len(own) else MicroBatch(), tokens) for i in range(max(rounds, 1))
        ]
        means = self._reduce(torch.stack([p.means for p in parts]).sum(0), dist.ReduceOp.SUM)
        extremes = torch.stack([p.extremes for p in parts])
        low = self._reduce(extremes[:, 0::2].amin(0), dist.ReduceOp.MIN).tolist()
        high = self._reduce(extremes[:, 1::2].amax(0), dist.ReduceOp.MAX).tolist()
        values = [x for pair in zip(low, high, strict=True) for x in pair]
        # -1 where no token counted, as in NeMo RL
        finite = [x if tokens > 0 else -1.0 for x in values]
        return dict(zip(MEANS, means.tolist(), strict=True)), dict(zip(EXTREMES, finite, strict=True))

    def _backward(self, samples: Sequence[Sample], batch: MicroBatch, tokens: float) -> LossParts:
        """Add the gradients of one micro-batch."""
        loss_fn = self._config.loss_fn
        rows = build([sample.tokens for sample in samples], batch, self._layout).to(self._policy.device)
        gen, advantages, mask = (
            torch.from_numpy(join(batch, arrays)).float().to(self._policy.device)
            for arrays in (
                [s.behaviour_logprobs[s.loss_mask > 0] for s in samples],
                [np.full(s.tokens.policy_tokens, s.advantage) for s in samples],
                [np.full(s.tokens.policy_tokens, s.loss_multiplier) for s in samples],
            )
        )
        ref = None
        if self._reference:
            with torch.no_grad():
                ref = self._reference.logprobs(rows, self._warp.unfiltered).curr
        curr = self._policy.logprobs(rows, self._warp).curr
        # one optimizer step a batch: the log-probabilities at the start of the step are those of this very pass
        start = curr.detach()
        prev = gen if loss_fn.prev_logprobs_source == "generation" else start
        logprobs = TokenLogprobs(curr, prev, gen, ref, start)
        parts = clipped_policy_loss(loss_fn, logprobs, advantages, mask, tokens)
        (parts.loss * self._ranks).backward()  # FSDP averages over ranks; the loss is a sum
        return parts

    def _gradient_norm(self) -> float:
        gradients = [p.grad for p in self._policy.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _clip(self, norm: float) -> None:
        limit = self._config.policy.max_grad_norm
        torch.nn.utils.clip_grads_with_norm_(self._policy.model.parameters(), limit, torch.tensor(norm))

    def _problems(self, samples: Sequence[Sample]) -> list[str]:
        longest = self._config.policy.max_total_sequence_length
        problems = []
        for index, sample in enumerate(samples):
            problem = batches.problem_with(sample)
            if problem is None and sample.length > longest:
                problem = f"{sample.length} tokens, more than policy.max_total_sequence_length {longest}"
            if problem is None and not _in_vocabulary(sample, self.vocab_size):
                problem = f"a token id outside the model's vocabulary of {self.vocab_size}"
            if problem is not None:
                problems.append(
                    f"step {self.version}: sample {index} of rank {self._rank}: {problem}; no step was taken"
                )
        return problems

    def _refuse(self, problems: list[str]) -> None:
        """Raise on every rank what any rank found: one that went on alone would wait for the others for ever."""
        everyone = [problems]
        if self._ranks > 1:
            everyone = [[] for _ in range(self._ranks)]
            dist.all_gather_object(everyone, problems)
        found = [problem for one in everyone for problem in one]
        if found:
            raise ServiceError("; ".join(found))

    def _diagnosis(self, samples: Sequence[Sample], loss: float, norm: float, tokens: float) -> ServiceError:
        """Find out which samples do it, one backward pass each."""
        counts = [int(n) for n in self._share([float(len(samples))])[:, 0]]
        guilty = []
        for rank, count in enumerate(counts):
            for index in range(count):
                batch = MicroBatch((((index,),),)) if rank == self._rank else MicroBatch()
                parts = self._backward(samples, batch, tokens)
                alone = float(self._reduce(parts.loss.detach().double(), dist.ReduceOp.SUM))
                if not (math.isfinite(alone) and math.isfinite(self._gradient_norm())):
                    guilty.append(f"sample {index} of rank {rank}")
                self._optimizer.zero_grad()
        return ServiceError(
            f"step {self.version}: loss {loss} and gradient norm {norm} are not both finite, because of "
            f"{', '.join(guilty) or 'no sample alone'}; no optimizer step was taken. Look at these trajectories' "
            "log-probabilities, or lower policy.optimizer.kwargs.lr and start again from the last checkpoint"
        )

    def _totals(self, values: list[float]) -> list[float]:
        total: list[float] = self._reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM).tolist()
        return total

    def _share(self, values: list[float]) -> np.ndarray:
        """[ranks, len(values)]: everyone's values."""
        table = torch.zeros(self._ranks, len(values), dtype=torch.float64)
        table[self._rank] = torch.tensor(values, dtype=torch.float64)
        return self._reduce(table, dist.ReduceOp.SUM).numpy()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """`values` combined over the ranks, on the CPU."""
        if self._ranks > 1:
            values = values.to(self._policy.device)
            dist.all_reduce(values, op=operation)
        return values.cpu()


def _cause(error: BaseException) -> BaseException:
    """What went wrong on the first rank where it did."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def _in_vocabulary(sample: Sample, size: int) -> bool:
    ids = np.concatenate([sample.prompt_token_ids, sample.completion_token_ids])
    return bool(ids.min() >= 0 and ids.max() < size)
