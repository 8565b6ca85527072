"""What the parts should find on one H100 at full size: arithmetic from published figures. Nothing here has been measured.

    python -m benchmarks.gpu.expected          the table of docs/gpu.md

NVIDIA's data sheet of the H100 SXM: 989.4 TFLOP/s in bfloat16 and 66.9 in float32 (`telemetry/throughput.py`), 3.35 TB/s of memory. PCIe
5.0 has 32 GT/s on each of 16 lanes, 63 GB/s each way.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import channel, drift, engine, precision, refit, step
from benchmarks.gpu.rows import Expected
from benchmarks.gpu.sizes import SIZES
from headrace_services.trainer.memory import GIB, ModelSize, ModelUse, trainer_memory
from headrace_services.trainer.network.packing import Packing, Work, pack, plan
from headrace_services.trainer.telemetry.throughput import DATA_SHEETS, Architecture

SIZE = SIZES["full"]
PEAK = DATA_SHEETS["NVIDIA H100"]
MEMORY_GB_S, PCIE_GB_S = 3350.0, 63.0
SHARE = 0.4  # of the peak: what large matrix products leave over, an assumption
# docs/results.md: 101 MB in 32 to 42 ms on two busy x86 cores, the least of nine in each of several runs
GLOO_GB_S = 2.5


@functools.cache
def figures() -> dict[str, list[Expected]]:
    """By part, in the order of its rows."""
    return {
        "nccl": [
            Expected(
                f"two ranks of nccl on one device, {channel.MULTI_RANK}=0",
                "refused",
                "NCCL: two ranks on one device, below 2.30",
            )
        ],
        "nccl-multi-rank": [
            Expected(
                f"two ranks of nccl on one device, {channel.MULTI_RANK}=1",
                "allowed from NCCL 2.30 on",
                "its release notes: experimental",
            )
        ],
        "missing-peer": [_given_up(f"{channel.MISSING}, nccl")],
        "stopped-peer": [_given_up(f"{channel.STOPPED}, nccl")],
        "step": [_step(step.FLOAT32, "float32", step.CHUNKED | step.CHECKPOINTED)]
        + [_step(name, "bfloat16", keys) for name, keys in step.MODES.items()],
        "drift": [
            Expected(
                drift.A_STEP,
                "about 0.01 nats",
                "AdamW moves a weight by at most the learning rate, 1e-6 beside 0.02",
            ),
            *(_drift(f"bfloat16, {name}") for name in drift.LAYOUTS),
            _drift(drift.BETWEEN),
        ],
        "refit": _refit(),
        "precision": _precision(),
        "engine": _engine(1),
        "engine-v2": _engine(2),
    }


def _given_up(what: str) -> Expected:
    return Expected(
        what, f"given up after {SIZE.deadline_s:g} s, its call ends within 30 s more", "the deadline given; ABORT_S"
    )


def _drift(what: str) -> Expected:
    config = SIZE.policy_config
    spread = math.sqrt(config.hidden_size) * config.initializer_range
    rounding = 2**-9 * math.sqrt(4 * config.num_hidden_layers)
    return Expected(
        what,
        f"about {spread * rounding:.2f} nats in the mean",
        f"logits of random weights spread by {spread:.1f}; four roundings of 2^-9 in each of {config.num_hidden_layers} layers add up",
    )


def _step(what: str, dtype: str, keys: dict[str, Any]) -> Expected:
    run = SIZE.config(Path("policy"), "cpu", dtype, **keys)
    packing, trajectories = Packing.of(run.policy, training=True), SIZE.trajectories
    micro_batches = [pack(trajectories, rows, packing) for rows in plan(trajectories, packing)]
    work = sum((packed.work for packed in micro_batches), Work())
    architecture = Architecture.of(SIZE.policy_config)
    assert architecture is not None
    recompute = run.policy.recomputes("cuda")
    flops = architecture.training_flops(work, recompute=recompute, chunked=True)
    tokens = sum(one.prompt_token_ids.size + one.completion_token_ids.size for one in trajectories)
    rate = tokens / (flops / (SHARE * PEAK[dtype] * 1e12))
    widest = max(packed.input_ids.numel() for packed in micro_batches)
    chunk = min(run.policy.chunk_size("cuda") or widest, max(packed.targets.numel() for packed in micro_batches))
    model = ModelUse(ModelSize.of(SIZE.policy_config), 2 if dtype == "bfloat16" else 4, True, chunk, recompute)
    parts = trainer_memory(
        {"policy": model}, widest, shards=1, copies=1, reduce_gradients="auto", device=0, bucket=0, sent=0
    )
    figure = f"{rate:,.0f} tokens/s, {SHARE} of the peak, {sum(parts.values()) / GIB:.0f} GiB"
    if dtype == "bfloat16":
        figure += ", gradient off by 1e-2"
    return Expected(
        what,
        figure,
        f"{flops / 1e12:,.0f} TFLOP at {SHARE} of {PEAK[dtype]} TFLOP/s, an assumption; `headrace plan memory`",
    )


def _refit() -> list[Expected]:
    size = ModelSize.of(SIZE.refit_config)
    sent = 2 * size.parameters / 1e9
    return [
        Expected(refit.WITHIN, f"up to {MEMORY_GB_S / 2:,.0f} GB/s", "3.35 TB/s, read and written"),
        Expected(refit.CHECKSUM, f"below {MEMORY_GB_S:,.0f} GB/s", "read once; its sums are made in slices"),
        Expected(
            refit.TO_BUCKET,
            "5 to 15 GB/s",
            "pageable memory goes through a staging buffer",
        ),
        Expected(refit.TO_PINNED, f"up to {PCIE_GB_S:.0f} GB/s", "PCIe 5.0 x16"),
        Expected(
            f"{refit.SENT} gloo",
            f"{sent:.3g} GB at about {GLOO_GB_S} GB/s: {sent / GLOO_GB_S:.0f} s",
            "a bare gloo broadcast of 101 MB on a CPU (results.md)",
        ),
        Expected(
            f"{refit.SENT} nccl",
            f"not run, or up to {MEMORY_GB_S / 2:,.0f} GB/s",
            "as far as NCCL allows two ranks on one device",
        ),
    ]


def _precision() -> list[Expected]:
    size = ModelSize.of(SIZE.policy_config)
    cast = 2 * sum(math.prod(shape) for shape in size.shapes if len(shape) > 1) / GIB
    layer = max(sum(map(math.prod, shapes)) for shapes in size.layers)
    gathered = 2 * (sum(map(math.prod, size.rest)) + 2 * layer) / GIB
    return [
        Expected(
            f"{way}{', checkpointed' if recompute else ''}",
            f"{(gathered if mixed else cast):.1f} GiB of it are weights in bfloat16",
            "embedding and two layers at a time" if mixed else "a copy of every matrix, kept to the end of the pass",
        )
        for recompute in (False, True)
        for way, mixed in precision.WAYS.items()
    ]


def _engine(version: int) -> list[Expected]:
    runner = engine.RUNNER.format(version)
    size = ModelSize.of(SIZE.policy_config)
    gb = 2 * size.parameters / 1e9
    limit = SIZE.requests * MEMORY_GB_S / gb
    return [
        Expected(
            f"{engine.DECODING}, {runner}",
            f"below {limit:,.0f} tokens/s",
            f"{gb:.2f} GB of weights are read once for a token of each of {SIZE.requests} requests, at 3.35 TB/s",
        ),
        Expected(
            f"{engine.REFIT}, {runner}", f"{gb / GLOO_GB_S:.0f} s and its proofs", f"{gb:.2f} GB over gloo, as above"
        ),
    ]


def table() -> str:
    """In Markdown."""
    lines = ["| part | what | expected, not measured | from |", "| --- | --- | --- | --- |"]
    for part, rows in figures().items():
        lines += [f"| `{part}` | {row.what} | {row.figure} | {row.source} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--json"]:
        sys.stdout.write(json.dumps({part: [vars(row) for row in rows] for part, rows in figures().items()}))
    else:
        sys.stdout.write(table())


if __name__ == "__main__":
    main()
