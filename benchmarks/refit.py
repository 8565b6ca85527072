"""A refit's phases for a tiny and a 25 M-parameter model, beside its limits, which are measured between refits: a bare gloo broadcast of
the same bytes, and vLLM's bare reload of tensors that are there already.

    python -m benchmarks.refit
    python -m benchmarks.refit --model 25M --precision bfloat16 --bucket-bytes 67108864

One vLLM replica, the real buffer, loopback. Times are milliseconds: of each column the median over the rounds, and the least, which a busy
machine distorts less; so are `trainer` and `engine`, the processor time that each spends on a refit, in the mean (the trainer's has the
replica's service in it, which lives in the same process here). `announce` lasts until the replica has acknowledged the epoch. Between the
end of `pause` and the end of `resume` no token is generated. `limit` is `broadcast` + `reload`. The broadcast is that of one flat tensor
from one process to another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.buffer import limits, server
from headrace.config import Config
from headrace.replay import ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.probe import choose_token_ids
from headrace_services.refit.receiver import WeightReceiver
from headrace_services.refit.sender import WeightSender
from headrace_services.rollout.engine import running_engine
from headrace_services.trainer.demo_models import tiny

ROUNDS = 30
TIMELINE = "benchmark"
PATIENCE = timedelta(seconds=600)
PHASES = {
    "pause": ("pausing",),
    "transfer": ("receiving weights",),
    "resume": ("resuming",),
    "verify": ("computing the probe",),
}
# with the digits that they are shown with
COLUMNS = {
    "MB": 1,
    "announce": 1,
    **dict.fromkeys(PHASES, 1),
    "whole": 0,
    "broadcast": 1,
    "reload": 1,
    "whole / limit": 2,
    "trainer": 0,
    "engine": 0,
}


class Source:
    """A plain module's parameters, changed a little before every refit."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.001)

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, "float32", tuple(p.shape)) for name, p in self.model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        tokens = torch.as_tensor(ids, dtype=torch.long, device=next(self.model.parameters()).device)[None]
        with torch.no_grad():
            logits = self.model(tokens).logits[0]
        return logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].cpu().numpy()


def in_wire(port: int, rank: int, nbytes: int) -> Callable[[], float]:
    """Join the group of the bare broadcast; the call takes part in one, ended by a barrier, and returns its seconds."""
    store = dist.TCPStore("127.0.0.1", port, None, False, PATIENCE)
    group: Any = dist.ProcessGroupGloo(store, rank, 2, PATIENCE)
    tensor = torch.zeros(nbytes, dtype=torch.uint8)

    def broadcast() -> float:
        group.barrier().wait()
        started = time.perf_counter()
        group.broadcast(tensor, 0).wait()
        group.barrier().wait()
        return time.perf_counter() - started

    return broadcast


def wire_peer(port: int, nbytes: int) -> None:
    torch.set_num_threads(1)
    broadcast = in_wire(port, 1, nbytes)
    for _ in range(ROUNDS + 1):
        broadcast()


@contextlib.contextmanager
def wire(nbytes: int) -> Iterator[Callable[[], float]]:
    """A bare broadcast between this process and another, to be called ROUNDS + 1 times."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    peer = mp.get_context("spawn").Process(target=wire_peer, args=(store.port, nbytes), daemon=True)
    peer.start()
    yield in_wire(store.port, 0, nbytes)
    peer.join()


async def refits(
    config: Config,
    engine: Any,
    redis_url: str,
    source: Source,
    rounds: int = ROUNDS,
    beside: Callable[[], Awaitable[dict[str, float]]] | None = None,
) -> tuple[dict[str, list[float]], dict[str, float], int]:
    """By column the seconds of so many refits, and what `beside` measures after each, but for a first one; the CPU seconds that a refit
    takes in the mean, and its bytes."""
    run_id = f"benchmark-{uuid.uuid4().hex[:8]}"
    replay = await open_run(redis_url, run_id)
    sender = WeightSender(config, replay)
    receiver = WeightReceiver(config, engine, replay, "replica")
    await replay.register("replica", {"device": "cpu"})
    followed = asyncio.create_task(follow(replay, receiver))
    config_of_model: Any = source.model.config
    ids = choose_token_ids(config_of_model.vocab_size)
    samples: dict[str, list[float]] = {}
    spent = np.zeros(2)
    for version in range(rounds + 1):
        source.change()
        probe = source.logprobs(ids)
        started, before = time.perf_counter(), cpu_seconds()
        report = await sender.refit(version, TIMELINE, source, ids, probe)
        whole, after = time.perf_counter() - started, cpu_seconds()
        if report.verified != ("replica",):
            raise SystemExit(f"refit {version} was refused: {report.refused}")
        row = {
            "announce": report.seconds["acknowledge"],
            **{phase: sum(receiver.seconds[name] for name in names) for phase, names in PHASES.items()},
            "whole": whole,
            **(await beside() if beside else {}),
        }
        if version:  # the first one forms the group
            spent += after - before
            for column, seconds in row.items():
                samples.setdefault(column, []).append(seconds)
    followed.cancel()
    await sender.aclose()
    await replay.aclose()
    return samples, dict(zip(("trainer", "engine"), spent / rounds, strict=True)), report.nbytes


def cpu_seconds() -> np.ndarray:
    """Of this process, and of its children with theirs."""
    pids = [os.getpid()]
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (thread / "children").read_text().split())
    ticks = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids)
    own, *others = (sum(map(int, row)) / os.sysconf("SC_CLK_TCK") for row in ticks)
    return np.array([own, sum(others)])


async def follow(replay: ReplayClient, receiver: WeightReceiver) -> None:
    seen: object = None
    while True:
        epoch = (await replay.heartbeat("replica", [])).epoch
        if epoch is not None and (epoch.id, epoch.state) != seen:
            seen = (epoch.id, epoch.state)
            if epoch.state == "announced":
                await receiver.acknowledge(epoch)
            elif epoch.state == "transfer":
                await receiver.take_part(epoch)
        await replay.wait_work(0.05)


async def open_run(redis_url: str, run_id: str) -> ReplayClient:
    replay = ReplayClient(open_redis(redis_url), run_id)
    await replay.open_run(limits(1, 1))
    await replay.rewind(0, TIMELINE)
    return replay


def make_25m(directory: Path) -> None:
    """The tiny model's tokenizer with a Qwen2 of 25 M random parameters."""
    tiny.make(directory, warmup=False)
    config = AutoConfig.from_pretrained(directory)
    config.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8})
    config.update({"num_key_value_heads": 8, "layer_types": ["full_attention"] * 6, "head_dim": 64})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)


def measure(config: Config, redis_url: str) -> list[dict[str, float]]:
    """The rows of a model by column: median and least."""
    source = Source(AutoModelForCausalLM.from_pretrained(config.policy.model_name, dtype=torch.float32))
    parameters = sum(parameter.numel() for parameter in source.model.parameters())
    nbytes = parameters * (4 if config.policy.precision == "float32" else 2)
    with (
        running_engine(config, {"worker_extension_cls": "benchmarks.bare_reload.BareReload"}) as engine,
        wire(nbytes) as broadcast,
    ):

        async def measure_limits() -> dict[str, float]:
            (reload,) = await engine.collective_rpc("bare_reload", args=(config.policy.model_name,))
            return {"broadcast": await asyncio.to_thread(broadcast), "reload": reload}

        samples, spent, _ = asyncio.run(refits(config, engine, redis_url, source, beside=measure_limits))
    rows = []
    for of in (statistics.median, min):
        seconds = {column: of(values) for column, values in samples.items()} | spent
        share = seconds["whole"] / (seconds["broadcast"] + seconds["reload"])
        rows.append(
            {"MB": nbytes / 1e6, **{name: 1000 * value for name, value in seconds.items()}, "whole / limit": share}
        )
    return rows


MODELS = {"tiny": lambda directory: tiny.make(directory, warmup=False), "25M": make_25m}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--bucket-bytes", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"A refit in {arguments.precision} over gloo on loopback, milliseconds")
    for column in ("model", "", *COLUMNS):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder, server() as buffer:
        for name in arguments.model:
            directory = Path(folder) / name
            MODELS[name](directory)
            fields = {
                "policy": {
                    "model_name": str(directory),
                    "precision": arguments.precision,
                    "max_total_sequence_length": 256,
                    "generation": {"max_new_tokens": 128, "vllm_cfg": {"kv_cache_memory_bytes": 64 * 2**20}},
                },
                "weight_channel": {"bucket_bytes": arguments.bucket_bytes},
            }
            rows = measure(Config.model_validate(fields), buffer.url)
            for kind, row in zip(("median", "least"), rows, strict=True):
                table.add_row(name, kind, *(f"{row[column]:.{digits}f}" for column, digits in COLUMNS.items()))
    Console(file=sys.stdout, width=160).print(table)


if __name__ == "__main__":
    main()
