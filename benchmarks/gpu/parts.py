"""The parts in the order of their value. Each is a process of its own; this table imports none of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

# A part may take this many times its estimate, which is for an H100; a small machine without one is slower, at toy size, too.
TIMES = {"cuda": 2.5, "cpu": 8.0}


@dataclasses.dataclass(frozen=True)
class Part:
    """`group` is the number that `--parts` takes, too. `minutes` is an estimate for an H100; `function` is `MODULE:NAME` in this package;
    `gpus` are as many as the part needs where there are any; `environ` is added to its process."""

    group: str
    name: str
    asks: str
    minutes: float
    function: str
    gpus: int = 1
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def limit_s(self, device: str) -> float:
        return 60 * TIMES[device] * self.minutes


_V1, _V2 = ({"VLLM_USE_V2_MODEL_RUNNER": value} for value in "01")
PARTS = (
    Part("0", "ladder", "Each backend of the weight channel between two GPUs: does it connect, and how fast?", 2, "channel:ladder", 2),
    Part("0", "killed-peer", "A peer killed in a broadcast: what does the trainer say, and after how long?", 2, "channel:killed_peer", 2),
    Part("0", "refit-nccl", "`headrace up` with replicas that are refitted over NCCL: are they verified?", 2, "runs:over_nccl", 2),
    Part("0", "tensor-parallel", "`headrace up` with `tensor_parallel_size: 2`: is the replica verified?", 3, "runs:tensor_parallel", 2),
    Part("0", "two-ranks", "A step of two ranks (FSDP2) beside one: are loss and gradients equal?", 2, "ranks:two_ranks", 2),
    Part("1", "tiny-run", "`headrace up examples/arithmetic_tiny.yaml`, 3 steps in float32: refits, backend, drift", 4, "runs:tiny"),
    Part("2", "killed-replica", "`headrace up examples/gpu_1_5b_1gpu.yaml`, 5 steps, its replica killed", 6, "runs:killed_replica"),
    Part("3", "step", "A training step, full and LoRA, with and without checkpointing: speed, and memory beside its plan", 2, "step:step"),
    Part("4", "refit", "Refits during completions, model runner V1: the pause, the speed, the tokens", 3, "refit:in_flight", environ=_V1),
    Part("4", "refit-v2", "The same with model runner V2", 3, "refit:in_flight", environ=_V2),
    Part("5", "drift", "How far apart engine and trainer are in bfloat16", 3, "drift:usual"),
    Part("5", "drift-float32-head", "The same with a head in float32", 3, "drift:float32_head"),
    Part("6", "decode", "256 and 1,024 requests at once: tokens a second, and the CPU time of the front end", 4, "decode:decode"),
)  # fmt: skip


def choose(names: Sequence[str]) -> list[Part]:
    """Return the parts of these names or numbers, in the table's order. Raises `ValueError` for a name that is none."""
    known = {part.group for part in PARTS} | {part.name for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: no part; give {', '.join(part.name for part in PARTS)}, or 0 to 6")
    return [part for part in PARTS if part.group in names or part.name in names]


def table() -> str:
    """In Markdown, for docs/gpu.md."""
    lines = ["| number | part | what it answers | about, min |", "| --- | --- | --- | --- |"]
    lines += [f"| {part.group} | `{part.name}` | {part.asks} | {part.minutes:g} |" for part in PARTS]
    return "\n".join(lines) + "\n"
