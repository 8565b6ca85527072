"""Compares the plan of memory with torch's own tracker, phase by phase: `python -m benchmarks.memory`.

The policy's forward and backward passes and its optimizer run through `PolicyModel`, as a step runs them, sharded by FSDP2 over ranks of
which only the first exists (`torch.testing`'s fake process group), on fake tensors: they have shapes and no data, so that any model fits.
`MemTracker` counts the bytes of the storages that are alive. What it can't see is what CUDA, NCCL and its allocator take beside tensors.

`train_step` as a whole can't run so: it copies log-probabilities to numpy, and reads the loss's metrics and the gradients' norm as numbers
(`_forward`, `OptimizerStep.of`, `ModelOptimizer.grad_norm`), which fake tensors don't have. And devices are CPUs here, so attention is
SDPA's, not flash attention for sequences of different lengths; both keep the same.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from headrace.config import Config
from headrace_services.trainer.distributed import sharding
from headrace_services.trainer.learning.optimizer import ModelOptimizer
from headrace_services.trainer.memory.models import KNOWN, list_models, micro_batch
from headrace_services.trainer.memory.parts import BUCKETS, CUDA_PART, GIB, NCCL_PART, total, trainer_phases
from headrace_services.trainer.network import backbone, policy_model
from headrace_services.trainer.network.packing import PackedRows, TreeSpan
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel

CPU = torch.device("cpu")
# The phases that a step has here, in their order.
PHASES = ("inference", "refit", "loss", "layers", "root")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `KNOWN`, of which `layers` are kept (None: all), on `ranks` GPUs, with micro-batches of `tokens`. `dim` is that of an
    adapter; 0 is none."""

    model: str
    ranks: int
    tokens: int = 8192
    recompute: bool = True
    dim: int = 0
    layers: int | None = None
    top_p: float = 1.0

    def config(self, folder: str) -> Config:
        """A run's configuration, whose model is described in `folder`."""
        known = copy.deepcopy(KNOWN[self.model])
        if self.layers is not None:
            kinds = getattr(known, "layer_types", None)
            known.update({"num_hidden_layers": self.layers} | ({"layer_types": kinds[: self.layers]} if kinds else {}))
        known.save_pretrained(folder)
        return Config.model_validate(
            {
                "policy": {
                    "model_name": folder,
                    "max_total_sequence_length": self.tokens,
                    "train_micro_batch_size": 1,
                    "activation_checkpointing": self.recompute,
                    "logprob_chunk_size": 2048,
                    "lora_cfg": {"enabled": self.dim > 0, "dim": self.dim or 8},
                    "generation": {"top_p": self.top_p},
                },
                "loss_fn": {"reference_policy_kl_penalty": 0},
                "trainer": {"device": "cpu", "num_processes": self.ranks, "reduce_gradients": "micro_batch"},
                "data": {"train": {"dataset_name": "arithmetic", "env_name": "math"}},
                "env": {"math": {"type": "math"}},
            }
        )


class Tracker(MemTracker):
    """Torch's tracker, with the largest sum of each `phase`, and without its snapshots of modules, which take far longer than a step."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.peaks: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """Begin a phase, which counts what is alive from now on."""
        self.phase = phase

    def _update_peak_stats(self, peak_state: Any) -> None:
        found = self._curr_mem_snap.get(CPU, {}).get("Total", 0)
        self.peaks[self.phase] = max(found, self.peaks.get(self.phase, 0))

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None: ...

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None: ...

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None: ...

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None: ...


def planned(case: Case) -> dict[str, int]:
    """The plan's bytes by phase, without what the tracker can't see."""
    with tempfile.TemporaryDirectory() as folder:
        config = case.config(folder)
        found = trainer_phases(
            list_models(config),
            micro_batch(config.policy, training=True),
            shards=case.ranks,
            copies=1,
            reduce_gradients="micro_batch",
            device=0,
            bucket=0,
            sent=2,
            inference=case.tokens,
        )
    unseen = (CUDA_PART, NCCL_PART, BUCKETS)
    seen = {
        name.removeprefix("policy: "): {part: count for part, count in parts.items() if part not in unseen}
        for name, parts in found.items()
    }
    seen["inference"] = max(seen["inference, layers"], seen["inference, logits"], key=total)
    return {phase: total(seen[phase]) for phase in PHASES}


def tracked(case: Case) -> dict[str, int]:
    """The tracker's bytes by phase, in a step of two micro-batches that is not the first."""
    with _first_of(case.ranks), tempfile.TemporaryDirectory() as folder, _as_on_a_gpu():
        config = case.config(folder)
        policy = PolicyModel(config)
        with FakeTensorMode(allow_non_fake_inputs=True):
            policy.placed._root.to_empty(device="cpu")
            optimizer = ModelOptimizer(policy.model, config.policy.optimizer, [], 1.0, "policy")
            tracker = Tracker()
            tracker.track_external(policy.placed._root, optimizer._optimizer)
            place = torch.arange(case.tokens)
            ids = torch.zeros(1, case.tokens, dtype=torch.int64)
            rows = PackedRows(ids, place[None], place[:-1], ids[0, 1:], (0,), ((TreeSpan(0, 1, (case.tokens - 1,)),),))
            with tracker, _phases(policy.model, tracker):
                warper = LogitsWarper.of(config.policy.generation)

                def micro_batch(*, last: bool) -> None:
                    tracker.begin("loss")
                    policy.placed.expect_backward(last=last)
                    policy.forward(rows, warper, entropy=True).logprobs.sum().backward()

                micro_batch(last=True)
                optimizer.step(1.0)
                tracker.peaks.clear()  # the first step makes the moments
                for phase in ("", "refit"):  # at first DTensor makes whole tensors to see what comes of its operations
                    tracker.begin(phase)
                    collections.deque(policy.weights(torch.bfloat16), maxlen=0)  # none of them is kept
                tracker.begin("inference")
                with torch.no_grad():
                    policy.forward(rows, warper)
                micro_batch(last=False)
                micro_batch(last=True)
            return {phase: tracker.peaks[phase] for phase in PHASES if phase in tracker.peaks}


@contextlib.contextmanager
def _first_of(ranks: int) -> Iterator[None]:
    """In the context this process is the first of so many ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sharding._mesh.cache_clear()


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """In the context a model is made and sharded as on a GPU, and its weights are not read."""

    def entropy(logp: Tensor) -> Tensor:
        lowest = torch.finfo(logp.dtype).min
        parts = logp.split(-(-len(logp) // 16))
        return -torch.cat([part.exp().mul_(part.clamp(min=lowest)).sum(-1) for part in parts])

    alone = lambda device, *, bfloat16: bfloat16  # noqa: E731
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (sharding, "shards_alone", alone),
            (backbone, "shards_alone", alone),
            (backbone, "several_ranks", lambda: True),
            (backbone, "fill", _fill),
            (policy_model, "compute_entropy", entropy),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _fill(model: Any, device: torch.device) -> None:
    """Leave the model on the meta device, with what loading tells of its checkpoint: which of its tensors that has one by one."""
    found = get_model_conversion_mapping(model)
    model._weight_conversions = [each for each in found if isinstance(each, WeightConverter)]


@contextlib.contextmanager
def _phases(model: Any, tracker: Tracker) -> Iterator[None]:
    """In the context a backward pass sets the tracker's phase: `layers` once the gradient of the last layer's output is there, `root` once
    that of the embedding's output is."""

    def enter(phase: str, module: nn.Module, arguments: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        if states.requires_grad:
            states.register_hook(functools.partial(_entered, tracker, phase))

    base = model.base_model
    handles = [
        base.norm.register_forward_hook(functools.partial(enter, "layers")),
        model.get_input_embeddings().register_forward_hook(functools.partial(enter, "root")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entered(tracker: Tracker, phase: str, _: Tensor) -> None:
    tracker.begin(phase)


CASES = [
    Case(model, ranks, recompute=recompute, dim=dim)
    for model, ranks in (
        ("Qwen/Qwen2.5-1.5B", 1),
        ("meta-llama/Llama-3.1-8B", 4),
        ("Qwen/Qwen2.5-32B", 16),
        ("Qwen/Qwen3-30B-A3B", 16),
    )
    for dim in (0, 16)
    for recompute in (True, False)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, help="keep so many layers of each model; by default all, which takes minutes"
    )
    parser.add_argument("--models", default="", help="only the models whose names contain this")
    given = parser.parse_args()
    figures = " | ".join(f"{phase}: plan, tracker" for phase in PHASES)
    sys.stdout.write(f"| model, GPUs | | checkpointing | {figures} | peak |\n")
    sys.stdout.write("| --- | --- | --- |" + " ---: |" * (len(PHASES) + 1) + "\n")
    for case in CASES:
        if given.models in case.model:
            sys.stdout.write(row(dataclasses.replace(case, layers=given.layers)) + "\n")
            sys.stdout.flush()


def row(case: Case) -> str:
    """A line of the table."""
    ours, theirs = planned(case), tracked(case)
    cells = [f"{ours[phase] / GIB:.1f}, {theirs[phase] / GIB:.1f}" if phase in theirs else "-" for phase in PHASES]
    apart = max(ours.values()) / max(theirs.values()) - 1
    kind = f"LoRA {case.dim}" if case.dim else "full"
    checkpointing = "on" if case.recompute else "off"
    return (
        f"| {case.model.split('/')[1]}, {case.ranks} | {kind} | {checkpointing} | {' | '.join(cells)} | {apart:+.0%} |"
    )


if __name__ == "__main__":
    main()
