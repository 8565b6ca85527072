"""The learner: trajectories in, the optimizer steps of one trainer step, new weights out.

Torch only: no queue, no network but `torch.distributed`. One `Learner` a rank; with several ranks every method is a
collective that all of them call alike, and the numbers are those of one rank holding all trajectories.

A trainer step is whole or not at all, as seen from outside: weights leave the learner between steps alone. Where a loss is not
finite in the first optimizer step of a trainer step, everything is as it was. In a later one it isn't: then the learner refuses
to work on, and the run goes on from its last checkpoint. A copy of weights and moments from the start of each step would
take three times the model's memory, and a copy a step, to save a process that has to end anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from headrace.config import Config
from headrace.errors import ServiceError
from headrace.trajectory import Float32, Int32
from services.trainer.files import cannot_write_checkpoint
from services.trainer.learning.experience import Experience, Trace, problem_with
from services.trainer.learning.optimizer import Trained
from services.trainer.learning.prepare import Passed, check_groups
from services.trainer.learning.step import Models, Step
from services.trainer.learning.training_state import Counters, load_state, save_state
from services.trainer.learning.update import NotFinite
from services.trainer.learning.world import World
from services.trainer.network.policy import Policy, load_tokenizer
from services.trainer.network.projection import Warp
from services.trainer.network.rows import Layout, MicroBatch, TokenSequence, build
from services.trainer.network.teacher import load_teacher
from services.trainer.network.value import Value


class Learner:
    """Policy and optimizer; a frozen reference policy or teacher where something compares with it, and a value model where the
    estimator asks.

    `counters` says how far it is, `tokenizer` is the run's, and `traces` are what the newest step knew of each token of this rank's
    trajectories, in the order they were given; `seconds` say how long each part of it took here.
    """

    def __init__(self, config: Config, checkpoint: Path | None = None) -> None:
        """Start from the initial models, or go on from `checkpoint`, a folder that `save` wrote.

        Raises `ServiceError` for a model or checkpoint that can't be loaded.
        """
        if config.trainer.num_threads is not None:
            torch.set_num_threads(config.trainer.num_threads)
        self._config = config
        self.tokenizer = load_tokenizer(config)
        self._models = _load(config, checkpoint, self.tokenizer)
        self._policy = self._models.policy
        self._world = World(self._policy.device)
        self._broken: str | None = None
        self.traces: list[Trace] = []
        self.seconds: dict[str, float] = {}
        self.counters = load_state(checkpoint / "training", self._models.trained) if checkpoint else Counters()

    @property
    def version(self) -> int:
        """Trainer steps from the initial model."""
        return self.counters.current_step

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: token ids lie in [0, vocab_size)."""
        return self._policy.vocab_size

    def step(self, batch: Sequence[Experience]) -> dict[str, float]:
        """One trainer step on the trajectories of all ranks; returns global metrics.

        Raises `ServiceError` naming the trajectory, with weights, optimizers and `counters` as they were, for one that can't be trained
        on, and for a loss or gradient that is not finite; in an optimizer step after the first, whatever is called later raises too.
        """
        self._refuse_broken()
        self._world.refuse(self._problems(batch))
        size = int(self._world.sums([float(len(batch))])[0])
        check_groups(size, self._config.algorithm.num_generations_per_prompt)
        step = Step(self._config, self._world, self._models, self.version, batch, size)
        try:
            metrics = step.run()
        except NotFinite as error:
            if step.moves:
                self._broken = (
                    f"{error}. {len(step.moves)} optimizer steps of this step were taken before it, so that these weights are of no "
                    "version"
                )
                raise ServiceError(self._broken) from error
            raise
        self.traces, self.seconds = step.traces, step.seconds
        self.counters.current_step += 1
        self.counters.consumed_samples += size
        self.counters.total_valid_tokens += round(metrics["global_valid_toks"])
        return {
            **metrics,
            "current_step": self.counters.current_step,
            "consumed_samples": self.counters.consumed_samples,
            "total_valid_tokens": self.counters.total_valid_tokens,
        }

    def probe(self, token_ids: Int32) -> Float32:
        """Log-probabilities [L - 1] of `token_ids[1:]` given what precedes each, at temperature 1, under the weights as they are."""
        self._refuse_broken()
        whole = TokenSequence(token_ids[:1], token_ids[1:], np.ones(token_ids.size - 1, np.uint8))
        rows = build([whole], MicroBatch((((0,),),)), Layout.of(self._config.policy, training=False))
        with torch.no_grad():
            return self._policy.logprobs(rows.to(self._policy.device), Warp()).curr.cpu().numpy()

    def weight_metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name in a Hugging Face checkpoint, dtype and full shape of every weight, in the order of `iter_weights`."""
        return [(name, "float32", shape) for name, shape in self._policy.weight_shapes()]

    def iter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, one at a time; all ranks must run the iterator to its end."""
        self._refuse_broken()
        return self._policy.weights()

    def save(self, folder: Path) -> None:
        """Write `policy/` (a Hugging Face checkpoint with its tokenizer), `value/` where there is one, and `training/` into `folder`.

        `folder` exists and is shared by the ranks. Raises `ServiceError` on every rank where any of them can't write.
        """
        self._refuse_broken()
        self._write(folder, lambda: self._policy.save(folder / "policy"))
        if self._models.value is not None:
            value = self._models.value
            self._write(folder, lambda: value.save(folder / "value"))
        self._write(folder, lambda: self._world.rank or self.tokenizer.save_pretrained(folder / "policy"))
        moments = self._config.checkpointing.save_optimizer
        save_state(folder / "training", self.counters, self._models.trained, moments=moments)

    def _write(self, folder: Path, write: Callable[[], object]) -> None:
        """Raise on every rank what any rank can't write."""
        problems = []
        try:
            write()
        except (OSError, SafetensorError) as error:
            problems = [str(cannot_write_checkpoint(folder, error))]
        self._world.refuse(problems)

    def _problems(self, batch: Sequence[Experience]) -> list[str]:
        longest = self._config.policy.max_total_sequence_length
        found = [(e.name, problem_with(e, self.vocab_size, longest)) for e in batch]
        return [f"step {self.version}: {name}: {problem}; no step was taken" for name, problem in found if problem]

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise ServiceError(self._broken)


def _load(config: Config, checkpoint: Path | None, tokenizer: Any) -> Models:
    passed = Passed.of(config, 1)
    policy = Policy(config, checkpoint / "policy" if checkpoint else None)
    value = Value(config, checkpoint / "value" if checkpoint else None) if passed.values else None
    settings = config.value
    return Models(
        policy=policy,
        policy_trained=Trained(
            policy.model, config.policy.optimizer, config.policy.scheduler, config.policy.max_grad_norm, "policy"
        ),
        reference=Policy(config, trainable=False) if passed.ref else None,
        teacher=load_teacher(config, policy.vocab_size, tokenizer) if passed.teacher else None,
        value=value,
        value_trained=Trained(value.root, settings.optimizer, settings.scheduler, settings.max_grad_norm, "value")
        if value
        else None,
    )
