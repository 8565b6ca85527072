"""Tensors of a large model through the weight channel, to a second process on this machine, beside plain copies of as many bytes."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.channel import Pair, pairs, refused, say_where
from benchmarks.gpu.rows import NEEDS_CUDA
from benchmarks.gpu.stage import Stage, seconds
from headrace.base.errors import WeightChannelError
from headrace.config import Config
from headrace_services.refit.checksum import checksum
from headrace_services.refit.manifest import Manifest
from headrace_services.refit.transfer import send

SENT = "all tensors in bfloat16 over"
PATIENCE_S = 240.0
BROADCASTS = 3
WITHIN, CHECKSUM = "copy within the device's memory", "checksum of a bucket"
TO_BUCKET, TO_PAGEABLE = "copy to the host's memory, pinned as gloo's bucket", "copy to the host's memory, pageable"


def refit(stage: Stage) -> None:
    copies = _copies(stage)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(stage.size.refit_config)
    # what a trainer of one rank holds; replicas compute in bfloat16
    weights = {name: torch.ones(p.shape, device=stage.torch_device) for name, p in model.named_parameters()}
    manifest = Manifest.of(
        ((name, "bfloat16", tuple(tensor.shape)) for name, tensor in weights.items()),
        Config().weight_channel.bucket_size(stage.device),
    )
    for backend, pair in pairs(stage):
        say_where(stage, pair)
        try:
            stage.rows.add(f"{SENT} {backend}", *_sent(pair, manifest, weights, copies[backend]))
        except WeightChannelError as error:
            stage.rows.add(f"{SENT} {backend}", refused(backend, error))
    if stage.device != "cuda":
        stage.rows.add(f"{SENT} nccl", NEEDS_CUDA)


def _sent(pair: Pair, manifest: Manifest, weights: dict[str, torch.Tensor], copy: float) -> tuple[str, str]:
    nbytes = max(bucket.nbytes for bucket in manifest.buckets())

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights.items()

    asked = {"broadcasts": BROADCASTS, "nbytes": nbytes, "transfers": 1, "manifest": manifest.encode()}
    with pair.peer(PATIENCE_S, **asked):
        channel = pair.lead(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        (bucket,), times = channel.buffers([nbytes]), []
        for _ in range(BROADCASTS):
            began = time.perf_counter()
            channel.broadcast(bucket, deadline)
            times.append(time.perf_counter() - began)
        began = time.perf_counter()
        send(channel, manifest, source(), deadline)
        rate = manifest.nbytes / (time.perf_counter() - began)
    wire = nbytes / min(times)
    limit = min(wire, copy)
    return (
        f"{manifest.nbytes / 1e9:.3g} GB at {rate / 1e9:.2g} GB/s, {rate / limit:.2g} of the limit",
        f"{limit / 1e9:.2g} GB/s: the slower of a bare broadcast ({wire / 1e9:.2g}) and a copy ({copy / 1e9:.2g})",
    )


def _copies(stage: Stage) -> dict[str, float]:
    """Bytes a second of plain copies, by the backend whose road they are; a row each."""
    device, nbytes = stage.torch_device, stage.size.bandwidth_bytes
    here = torch.ones(nbytes, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    rates = {"nccl": nbytes / seconds(device, lambda: there.copy_(here))}
    stage.rows.add(WITHIN, f"{rates['nccl'] / 1e9:.1f} GB/s")
    stage.rows.add(CHECKSUM, f"{nbytes / seconds(device, lambda: checksum(here)) / 1e9:.1f} GB/s")
    rates["gloo"] = rates["nccl"]
    if stage.device == "cuda":
        for what, pinned in ((TO_PAGEABLE, False), (TO_BUCKET, True)):
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            rates["gloo"] = nbytes / seconds(device, functools.partial(host.copy_, here))
            stage.rows.add(what, f"{rates['gloo'] / 1e9:.1f} GB/s")
    else:
        stage.rows.add(TO_PAGEABLE, NEEDS_CUDA)
        stage.rows.add(TO_BUCKET, NEEDS_CUDA)
    return rates
