"""One trainer step on one rank: what is computed once, then optimizer steps over mini-batches, as often as there are epochs.

With several ranks everything here is a collective. Nothing is drawn: which trajectory is in which optimizer step follows from its
place in the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.config import Config
from headrace.config.ppo import PPO
from headrace.trajectory import Float32
from services.trainer.learning.experience import Experience, Trace, mini_batches
from services.trainer.learning.losses import (
    explained_variance,
    policy_loss,
    policy_metric_names,
    token_mean,
    value_loss,
    value_metric_names,
)
from services.trainer.learning.optimizer import Trained
from services.trainer.learning.passes import LossOf, Passes
from services.trainer.learning.prepare import Known, Passed, PerToken, rewards_of, traces_of
from services.trainer.learning.tokens import GlobalCounts, Logprobs, LossParts, Tokens
from services.trainer.learning.update import Moved, Update, counts_of, summary
from services.trainer.learning.world import World
from services.trainer.network.policy import Policy
from services.trainer.network.projection import Warp
from services.trainer.network.rows import Layout, MicroBatch, Rows, divide, join
from services.trainer.network.value import Value

ENTROPY = "entropy"


@dataclasses.dataclass(frozen=True)
class Models:
    """What is trained, and what it is compared with. `reference`, `teacher` and `value` are None where the configuration needs
    none."""

    policy: Policy
    policy_trained: Trained
    reference: Policy | None
    teacher: Policy | None
    value: Value | None
    value_trained: Trained | None

    @property
    def trained(self) -> dict[str, Trained]:
        named = {"policy": self.policy_trained, "value": self.value_trained}
        return {name: trained for name, trained in named.items() if trained is not None}


def policy_epochs(config: Config, version: int) -> int:
    """Passes of the policy over the batch of step `version`; 0 while the value model is trained alone."""
    if not isinstance(config.algorithm, PPO):
        return 1
    return config.algorithm.ppo_epochs if version >= config.algorithm.policy_training_start_step else 0


def value_epochs(config: Config) -> int:
    if not isinstance(config.algorithm, PPO):
        return 0
    return config.algorithm.critic_ppo_epochs or config.algorithm.ppo_epochs


class Step:
    """Of trainer step `version`, on this rank's share of a batch of `size` trajectories."""

    def __init__(
        self, config: Config, world: World, models: Models, version: int, batch: Sequence[Experience], size: int
    ) -> None:
        self.moves: list[Moved] = []  # all optimizer steps taken so far
        self.traces: list[Trace] = []
        self.seconds: dict[str, float] = {}  # by what was done, on this rank
        self._config = config
        self._world = world
        self._models = models
        self._version = version
        self._batch = batch
        self._size = size
        self._warp = Warp.of(config.policy.generation)
        self._sequences = [experience.tokens for experience in batch]
        self._policy_shares = mini_batches(batch, config.policy_batch, size)
        self._epochs = policy_epochs(config, version)

    def run(self) -> dict[str, float]:
        """Take it. Metrics are means over its optimizer steps, those of the value model are `critic/<name>`.

        Raises `NotFinite` as `Update.move` does: with `moves` empty, nothing has changed.
        """
        metrics = self._prepare()
        if self._models.value is not None and self._models.value_trained is not None:
            with self._timed("value_training"):
                metrics |= self._train_value(self._models.value, self._models.value_trained)
        counts = counts_of(self._world, self.traces, self._policy_shares)
        if self._epochs:
            with self._timed("policy_training"):
                metrics |= self._train_policy(counts)
        metrics["global_valid_toks"] = sum(count.tokens for count in counts)
        metrics["global_valid_seqs"] = sum(count.sequences for count in counts)
        return metrics

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - began

    def _prepare(self) -> dict[str, float]:
        config, models, warp = self._config, self._models, self._warp
        passed = Passed.of(config, self._epochs * len(self._policy_shares))
        rewards = rewards_of(config, self._batch, self._size, self._world)
        passes = self._passes(models.policy.device, Layout.of(config.policy, training=True))
        start = unfiltered = ref = teacher = values = None

        def frozen(model: Policy | None) -> PerToken:
            return passes.forward(lambda rows: model.logprobs(rows, warp.unfiltered).curr) if model else None

        compared = models.reference or models.teacher or models.value
        any_pass = passed.start or compared is not None
        with self._timed("policy_and_reference_logprobs") if any_pass else contextlib.nullcontext():
            if passed.start:
                start = passes.forward(lambda rows: models.policy.logprobs(rows, warp).curr)
            if passed.unfiltered:
                unfiltered = passes.forward(lambda rows: models.policy.logprobs(rows, warp.unfiltered).curr)
            ref, teacher = (frozen(model) for model in (models.reference, models.teacher))
            if models.value is not None:
                values = self._passes(models.value.device, value_layout(config)).forward(models.value.values)
        self.traces, metrics = traces_of(
            config, self._batch, rewards, Known(start, unfiltered, ref, teacher, values), self._world
        )
        return metrics

    def _train_value(self, value: Value, trained: Trained) -> dict[str, float]:
        shares = mini_batches(self._batch, self._config.value_batch, self._size)
        counts = counts_of(self._world, self.traces, shares)
        names = value_metric_names(self._config.value_loss_fn)
        passes = self._passes(value.device, value_layout(self._config))
        update = Update(self._world, passes, trained, names, self.traces, "value", self._version)
        metrics = self._epoch_by_epoch(
            update, trained, shares, [self._value_loss(value, count) for count in counts], value_epochs(self._config)
        )
        metrics["explained_var"] = explained_variance(metrics)
        return {f"critic/{name}": number for name, number in metrics.items()}

    def _train_policy(self, counts: Sequence[GlobalCounts]) -> dict[str, float]:
        models = self._models
        names = policy_metric_names(self._config.loss_fn)
        names = dataclasses.replace(names, sums=(*names.sums, ENTROPY))
        passes = self._passes(models.policy.device, Layout.of(self._config.policy, training=True))
        update = Update(self._world, passes, models.policy_trained, names, self.traces, "policy", self._version)
        seen: list[tuple[MicroBatch, Tensor]] = []
        losses = [self._policy_loss(count, seen) for count in counts]
        metrics = self._epoch_by_epoch(update, models.policy_trained, self._policy_shares, losses, self._epochs)
        starts: dict[int, Float32] = {}
        for batch, start in seen:
            starts.update(divide(batch, self._sequences, start.cpu().numpy()))
        self.traces = [
            trace if trace.start is not None else dataclasses.replace(trace, start=starts.get(index))
            for index, trace in enumerate(self.traces)
        ]
        return metrics

    def _epoch_by_epoch(
        self,
        update: Update,
        trained: Trained,
        shares: Sequence[Sequence[int]],
        losses: Sequence[LossOf],
        epochs: int,
    ) -> dict[str, float]:
        before = len(self.moves)
        # what weighs nothing adds nothing
        weighing = [[i for i in share if self.traces[i].multiplier > 0] for share in shares]
        algorithm = self._config.algorithm
        counts_epochs = isinstance(algorithm, PPO) and algorithm.scheduler_counts == "epochs"
        for epoch in range(epochs):
            for chosen, loss in zip(weighing, losses, strict=True):
                self.moves.append(update.move(chosen, loss))
            if counts_epochs or epoch == epochs - 1:
                trained.advance_schedule()
        return summary(self.moves[before:])

    def _policy_loss(self, counts: GlobalCounts, seen: list[tuple[MicroBatch, Tensor]]) -> LossOf:
        """The loss of micro-batches; with one optimizer step, the log-probabilities at the start of the step are those of its own
        pass, and are left in `seen`."""
        config, device = self._config, self._models.policy.device
        prepared = all(trace.start is not None for trace in self.traces)

        def loss(batch: MicroBatch, rows: Rows) -> LossParts:
            known = self._models.policy.logprobs(rows, self._warp, entropy=True)
            assert known.entropy is not None
            gen = self._flat(batch, lambda trace: trace.experience.gen, device)
            ref = None
            if self._models.reference is not None:
                ref = self._flat(batch, lambda trace: trace.ref, device)
            if prepared:
                start = self._flat(batch, lambda trace: trace.start, device)
            else:
                start = known.curr.detach()
                seen.append((batch, start))
            prev = gen if config.loss_fn.prev_logprobs_source == "generation" else start
            logprobs = Logprobs(known.curr, prev, gen, start, ref, known.unfiltered)
            tokens = self._tokens(batch, rows, device)
            parts = policy_loss(config.loss_fn, tokens, logprobs, counts)
            # of tokens that top-k or top-p leaves out, too: it is the distribution's, not the token's
            entropy = token_mean(known.entropy, tokens, counts)
            return dataclasses.replace(parts, sums={**parts.sums, ENTROPY: entropy})

        return loss

    def _value_loss(self, value: Value, counts: GlobalCounts) -> LossOf:
        def loss(batch: MicroBatch, rows: Rows) -> LossParts:
            old = self._flat(batch, lambda trace: trace.values, value.device)
            returns = self._flat(batch, lambda trace: trace.returns, value.device)
            tokens = self._tokens(batch, rows, value.device)
            return value_loss(self._config.value_loss_fn, value.values(rows), old, returns, tokens, counts)

        return loss

    def _tokens(self, batch: MicroBatch, rows: Rows, device: torch.device) -> Tokens:
        traces = self.traces

        def by_sequence(name: str) -> Tensor:
            return torch.tensor([getattr(traces[i], name) for i in batch.order], dtype=torch.float32, device=device)

        return Tokens(
            sequence=rows.sequence,
            advantages=self._flat(batch, lambda trace: trace.advantages, device),
            mask=self._flat(batch, lambda trace: trace.experience.mask, device),
            behind=self._flat(batch, lambda trace: trace.experience.behind, device),
            multiplier=by_sequence("multiplier"),
            reward=by_sequence("reward"),
        )

    def _flat(self, batch: MicroBatch, of: Callable[[Trace], Any], device: torch.device) -> Tensor:
        return torch.from_numpy(join(batch, lambda i: of(self.traces[i])).astype(np.float32)).to(device)

    def _passes(self, device: torch.device, training: Layout) -> Passes:
        inference = Layout.of(self._config.policy, training=False)
        if training != Layout.of(self._config.policy, training=True):
            inference = training
        return Passes(self._world, device, self._sequences, training, inference)


def value_layout(config: Config) -> Layout:
    """The policy's own, but for the size of a micro-batch."""
    layout = Layout.of(config.policy, training=True)
    size = config.value.train_micro_batch_size
    return layout if layout.sequences is None or size is None else dataclasses.replace(layout, sequences=size)
