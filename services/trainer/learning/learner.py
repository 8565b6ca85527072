"""The state of a trainer rank: the models, their optimizers and the run's counters. `step.train_step` trains it.

There is one `Learner` per rank. With several ranks every method is a collective. Weights leave the rank only between trainer steps, so a
step is visible from outside completely or not at all. A step that fails half-way leaves the learner `broken`, and its rank refuses every
command that needs it. A copy of weights and moments from the start of each step would take three times the model's memory, only to save a
process that has to end anyway.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from headrace.base.errors import ServiceError
from headrace.config import Config, threads
from headrace.records.trajectory import Float32, Int32
from headrace.run.checkpoints import cannot_write_checkpoint

from ...refit import states
from ...refit.probe import ROUNDING_MULTIPLE, is_exact, only_rounds
from ..data.model_tokens import ModelTokens
from ..distributed.ranks import Ranks, place_on_host
from ..network.backbone import Write, choose_device, description
from ..network.packing import PackedRows, Packing, Work
from ..network.policy_model import (
    LogitsWarper,
    PolicyModel,
    check_vocabulary,
    load_teacher,
    load_tokenizer,
)
from ..network.value_model import ValueModel
from .algorithms import required_passes
from .optimizer import ModelOptimizer, load_training, snapshot_training

log = logging.getLogger(__name__)

TRAINING = "training"  # the folder of a checkpoint for counters and moments


@dataclasses.dataclass
class Counters:
    """The run's counters: trainer steps taken (the weight version), trajectories trained on, and tokens that counted in the policy's
    loss, each since the initial model."""

    current_step: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0


class Learner:
    """The policy and its optimizer; and if required, a frozen reference policy, a teacher, and a value model with its optimizer. With an
    adapter, the reference is the policy itself without it.

    `counters` and `tokenizer` are the run's, and `warper` is how its tokens are sampled. `seconds` are the durations of the parts of the
    newest step on this rank. `work` is what training the policy computed in that step on all ranks; None if it was not trained. `broken` is
    the reason why the learner can't continue, or None.
    """

    def __init__(self, config: Config, checkpoint: Path | None = None, ranks: Ranks | None = None) -> None:
        """Start from the initial models, or continue from `checkpoint`, a folder that `snapshot` wrote.

        Raises `ServiceError` for a model or checkpoint that can't be loaded.
        """
        on_cpu = choose_device(config.trainer.device).type == "cpu"
        planned = threads.of(config, threads.usable_cores(), os.environ, trains=on_cpu, generates=on_cpu)
        if planned.trainer is not None:
            torch.set_num_threads(planned.trainer)
        # an image may have enabled TF32 (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE); its errors are as large as those of a wrong refit
        torch.set_float32_matmul_precision("highest")
        passes, value = required_passes(config, optimizer_steps=1), config.value
        self.config = config
        self.ranks = ranks or Ranks()
        self.tokenizer = load_tokenizer(config)
        self.policy = PolicyModel(config, checkpoint / "policy" if checkpoint else None)
        # what generates with a checkpoint ends where the run did
        tokens = ModelTokens.load(config, self.tokenizer)
        self.policy.model.generation_config.eos_token_id = list(tokens.ends) or None
        self.warper = LogitsWarper.of(config.policy.generation, tokens.excluded)
        self.policy_optimizer = ModelOptimizer(
            self.policy.model, config.policy.optimizer, config.policy.scheduler, config.policy.max_grad_norm, "policy"
        )
        self.reference: PolicyModel | None = None
        if "ref" in passes:
            self.reference = self.policy if self.policy.adapter else PolicyModel(config, trainable=False)
        self.teacher = load_teacher(config, self.policy.vocab_size, self.tokenizer) if "teacher" in passes else None
        self.value: ValueModel | None = None
        self.value_optimizer: ModelOptimizer | None = None
        if "values" in passes:
            self.value = ValueModel(config, checkpoint / "value" if checkpoint else None)
            if "value.model_name" in config.models:  # else it is the policy's
                check_vocabulary(config, "value.model_name", self.value.vocab_size, self.policy.vocab_size)
            self.value_optimizer = ModelOptimizer(
                self.value.root, value.optimizer, value.scheduler, value.max_grad_norm, "value"
            )
        self.broken: str | None = None
        self.seconds: dict[str, float] = {}
        self.work: Work | None = None
        self.counters = self._load(checkpoint / TRAINING) if checkpoint else Counters()

    @property
    def version(self) -> int:
        """The weight version: the number of trainer steps since the initial model."""
        return self.counters.current_step

    @property
    def value_packing(self) -> Packing:
        """The packing of the value model: the policy's, except for the size of a micro-batch."""
        packing, size = Packing.of(self.config.policy, training=True), self.config.value.train_micro_batch_size
        return packing if packing.paths is None or size is None else dataclasses.replace(packing, paths=size)

    def probe(self, token_ids: Int32) -> Float32:
        """Return log-probabilities [L - 1] of `token_ids[1:]`, each given the tokens before it, at temperature 1, under the current
        weights."""
        with torch.no_grad():
            rows = PackedRows.of_tokens(token_ids).to(self.policy.device)
            return self.policy.forward(rows, LogitsWarper()).logprobs.cpu().numpy()

    def probe_rounded(self, token_ids: Int32) -> Float32 | None:
        """Return what `probe` does, but with an error as large as that of rounding to bfloat16 after each layer; None for a model in which
        the effect of that is unknown (`PlacedModel.rounded`)."""
        if not self.policy.placed.can_round:
            return None
        with self.policy.placed.rounded():
            return self.probe(token_ids)

    def probe_states(self, token_ids: Int32) -> states.StateReference | None:
        """Return the states between the model's layers in `probe`, and how much those of an honest replica may differ; None for a model
        whose layers are not known."""
        own = self._watched(token_ids)
        if own is None:
            return None
        bounds = np.full(len(own), states.EXACT if is_exact(self.config) else states.NOT_KNOWN, dtype=np.float32)
        if only_rounds(self.config) and self.policy.placed.can_round:
            with self.policy.placed.rounded():
                rounded = self._watched(token_ids)
            if rounded is None:
                return None
            changed = [states.apart(*pair) for pair in zip(rounded, own, strict=True)]
            bounds = (ROUNDING_MULTIPLE * np.maximum.accumulate(changed)).astype(np.float32)
        return states.StateReference(own.flatten(), bounds)

    def _watched(self, token_ids: Int32) -> Float32 | None:
        """Return the sketches [points, places * DIRECTIONS] of a pass."""
        watch = self.policy.placed.watch(token_ids.size)
        if watch is None:
            return None
        with watch.watching():
            self.probe(token_ids)
        if watch.problem is not None:
            log.warning(
                "replicas can't say which layer differs: the trainer's own can't be watched (%s)", watch.problem
            )
            return None
        return np.array([readings[0] for readings in watch.sketches], dtype=np.float32)

    def snapshot(self) -> Write:
        """Copy what this rank writes of a checkpoint to host memory: `policy/` (a Hugging Face checkpoint with its tokenizer and adapter),
        `value/` if there is a value model, and `training/`. The copy is complete once this returns.

        The result writes it to a folder that exists, the same for all ranks of a host. No training changes the copy, so a thread may write
        it meanwhile. It raises `ServiceError` if the folder can't be written.
        """
        parts = {"policy": self.policy.snapshot()}
        if self.value is not None:
            parts["value"] = self.value.snapshot()
        counters, moments = dataclasses.asdict(self.counters), self.config.checkpointing.save_optimizer
        parts[TRAINING] = snapshot_training(counters, self._optimizers, moments=moments)
        tokenizer = self.tokenizer if self.ranks.rank == 0 else None

        def write(folder: Path) -> None:
            try:
                for name, write_part in parts.items():
                    write_part(folder / name)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder / "policy")
                # safetensors lets only the owner read what it writes, whatever the umask says
                for file in folder.rglob("*.safetensors"):
                    file.chmod(folder.stat().st_mode & 0o666)
            except (OSError, SafetensorError) as error:
                raise cannot_write_checkpoint(folder, error) from error

        return write

    def try_saving(self, folder: Path) -> None:
        """Write to `folder` what a checkpoint has beside weights and moments, and check that there is room for these. No collective.

        Raises `ServiceError` now, instead of at the first checkpoint, if `snapshot` would not be able to write it.
        """
        try:
            for name, model in self._models.items():
                description(model)(folder / name)
            self.tokenizer.save_pretrained(folder / "policy")
        except OSError as error:
            raise cannot_write_checkpoint(folder.parent, error) from error
        except Exception as error:  # transformers refuses to save some of what it loads
            reason = " ".join(str(error).split())
            raise ServiceError(
                f"no checkpoint could be saved: transformers refuses the configuration or tokenizer of policy.model_name "
                f"{self.config.policy.model_name!r} ({type(error).__name__}: {reason}); correct its files"
            ) from error
        self.require_room(folder.parent)

    def require_room(self, folder: Path, copies: int = 1, *, of_host: bool = False) -> None:
        """Raise `ServiceError` unless `folder` has room for so many checkpoints, or for what the ranks of this host write of them. No
        collective."""
        parameters = [parameter for model in self._models.values() for parameter in model.parameters()]
        weights = sum(4 * parameter.numel() for parameter in parameters)
        saved = self.config.checkpointing.save_optimizer
        moments = 2 * sum(4 * parameter.numel() for parameter in parameters if saved and parameter.requires_grad)
        if of_host:
            local, held = place_on_host()[1], self.policy_optimizer.shard
            weights *= self.ranks.rank < local  # rank 0 writes them
            moments = moments * min(local, held.count) // held.count if held.writes else 0
        free = shutil.disk_usage(folder).free
        if free < copies * (weights + moments):
            takes = f"its weights take {weights >> 20} MiB" + (f" and its moments {moments >> 20}" if moments else "")
            twice = f", {copies} times" if copies > 1 else ""
            raise cannot_write_checkpoint(folder, OSError(f"{takes}{twice}, and {free >> 20} MiB are free"))

    @property
    def _models(self) -> dict[str, Any]:
        return {"policy": self.policy.model} | ({} if self.value is None else {"value": self.value.root.model})

    @property
    def _optimizers(self) -> dict[str, ModelOptimizer]:
        optimizers = {"policy": self.policy_optimizer, "value": self.value_optimizer}
        return {name: optimizer for name, optimizer in optimizers.items() if optimizer is not None}

    def _load(self, folder: Path) -> Counters:
        """Restore the optimizers. Raises on every rank if any rank can't."""
        problems, counters = [], Counters()
        try:
            counters = Counters(**load_training(folder, self._optimizers).counters)
        except ServiceError as error:
            problems = [str(error)]
        self.ranks.raise_any(problems)
        return counters
