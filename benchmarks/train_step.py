"""A training step's forward and backward pass in each way of packing, beside the plain padded one: time, memory, equal gradients.

    python -m benchmarks.train_step [--model DIRECTORY] [--groups N] [--generations N] [--prompt TOKENS] [--completion TOKENS]

Groups of trajectories with a prompt of `--prompt` tokens each and completions of long-tailed lengths (log-normal, `--completion` at
most) go through the model in micro-batches of `--micro-batch` trajectories, or of as many tokens as those would have at most. Every
mode has a process of its own and processes take turns, `--repeats` times, so that a busy machine slows all alike; times are medians
of all rounds but each process's first (on a CPU, of the processor's time). Memory is the high-water mark of the passes beyond what model
and gradients take: of the process (RSS) on a CPU, of torch's allocator on a GPU. `work` is the number of places that go through the
layers, padding included. The last column is how far the gradient of the whole batch is from the padded one, as a share of its length.

Without `--model` the model is made: a Qwen2 type of random weights with 32,000 ids. The optimizer is left out: it costs the same in
every mode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from headrace.config import Config
from headrace.records.trajectory import Span, Trajectory
from headrace_services.trainer.network.packing import Packing, pack, plan
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel

DYNAMIC = {"dynamic_batching": {"enabled": True, "sequence_length_round": 8}}
PACKED = {"sequence_packing": {"enabled": True, "sequence_length_round": 8}}
CHUNK = {"logprob_chunk_size": 128}
RECOMPUTE = {"activation_checkpointing": True}
MODES: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic_batching": DYNAMIC,
    "sequence_packing": PACKED,
    "share_prompts": {"share_prompts": True},
    "share_prompts, dynamic_batching": {"share_prompts": True, **DYNAMIC},
    "share_prompts, sequence_packing": {"share_prompts": True, **PACKED},
    "logprob_chunk_size 128": CHUNK,
    "activation_checkpointing": RECOMPUTE,
    "both": {**CHUNK, **RECOMPUTE},
    "shared, dynamic, chunked, checkpointed": {"share_prompts": True, **DYNAMIC, **CHUNK, **RECOMPUTE},
    "bfloat16": {"precision": "bfloat16"},
    "torch_compile": {"torch_compile": True},
}
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face causal language model")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="steps of a process, the first of which is not timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--modes", help="those whose names contain one of these, comma-separated; and padded")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _result_file(args.folder).write_text(json.dumps(_measure(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        _compare(args)


def _compare(args: argparse.Namespace) -> None:
    if args.model is None:
        args.model = str(args.folder / "model")
        _make_model(Path(args.model))
    wanted = args.modes.split(",") if args.modes else [""]
    modes = [name for name in MODES if name == "padded" or any(part in name for part in wanted)]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(args.repeats):
        for name in modes:
            found[name].append(_in_a_process(name, args))
    gradients = {name: load_file(_gradient_file(args.folder, name)) for name in modes}
    table = Table("mode", "micro-batches", "work", "s", "of padded", "memory, MiB", "of padded", "gradient off by")
    base = found["padded"]
    for name in modes:
        seconds, first = _seconds(found[name]), found[name][0]
        memory = statistics.median(run["memory"] for run in found[name])
        base_memory = statistics.median(run["memory"] for run in base)
        table.add_row(
            name,
            str(first["batches"]),
            f"{first['places']:,}",
            f"{seconds:.2f}",
            f"{seconds / _seconds(base):.2f}",
            f"{memory / MIB:,.0f}",
            f"{memory / base_memory:.2f}",
            f"{distance(gradients[name], gradients['padded']):.1e}",
        )
    tokens = base[0]["tokens"]
    console = Console(width=160)
    console.print(
        f"{args.groups} groups of {args.generations}, prompts of {args.prompt}, {tokens:,} completion tokens; "
        f"micro-batches of {args.micro_batch}; {base[0]['device']}, {args.threads} threads"
    )
    console.print(table)


def _in_a_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    own = {
        key: value for key, value in vars(args).items() if value is not None and key not in ("modes", "one", "repeats")
    }
    flags = [part for key, value in own.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "benchmarks.train_step", "--one", name, *flags]
    subprocess.run(command, check=True)
    return dict(json.loads(_result_file(args.folder).read_text()))


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """One mode, in this process."""
    torch.set_num_threads(args.threads)
    keys = {
        "model_name": args.model,
        "precision": "float32",
        "max_total_sequence_length": args.prompt + args.completion,
        "train_micro_batch_size": args.micro_batch,
        "generation": {"max_new_tokens": args.completion},
        **MODES[args.one],
    }
    config = Config.model_validate({"policy": keys, "trainer": {"device": args.device}})
    policy, packing = PolicyModel(config), Packing.of(config.policy, training=True)
    trajectories = trajectories_of(args.groups, args.generations, args.prompt, args.completion, policy.vocab_size)
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=one.completion_token_ids.size) for one in trajectories]
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    micro_batches = plan(trajectories, packing)
    memory = Memory(policy.device)
    clock = time.perf_counter if policy.device.type == "cuda" else time.process_time
    seconds, places = [], 0
    for _ in range(args.rounds):
        for parameter in policy.model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        places, start = 0, clock()
        for rows in micro_batches:
            packed = pack(trajectories, rows, packing).to(policy.device)
            places += packed.input_ids.numel()
            factors = torch.from_numpy(np.concatenate([weights[i] for i in packed.indices])).float().to(policy.device)
            (policy.forward(packed, LogitsWarper()).logprobs * factors).sum().backward()
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - start)
    peak = memory.peak()
    gradients = {n: p.grad.cpu().contiguous() for n, p in policy.model.named_parameters() if p.grad is not None}
    save_file(gradients, _gradient_file(args.folder, args.one))
    return {
        "seconds": seconds[1:],
        "memory": peak,
        "places": places,
        "batches": len(micro_batches),
        "tokens": sum(one.completion_token_ids.size for one in trajectories),
        "device": torch.cuda.get_device_name() if policy.device.type == "cuda" else "cpu",
    }


class Memory:
    """The high-water mark from here on, beyond what is held now, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # begins VmHWM anew
            self._held = self._resident("VmRSS")

    def peak(self) -> int:
        highest = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else self._resident("VmHWM")
        return highest - self._held

    @staticmethod
    def _resident(what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def trajectories_of(
    groups: int, generations: int, prompt_tokens: int, most_tokens: int, vocabulary: int
) -> list[Trajectory]:
    """Groups of random tokens: prompts of equal lengths, completions of log-normal ones. Their log-probabilities are 0."""
    rng = np.random.default_rng(0)
    found: list[Trajectory] = []
    for _ in range(groups):
        prompt = rng.integers(0, vocabulary, prompt_tokens).astype(np.int32)
        for length in np.clip(rng.lognormal(np.log(most_tokens / 4), 0.8, generations), 1, most_tokens):
            completion = rng.integers(0, vocabulary, int(length)).astype(np.int32)
            found.append(
                Trajectory(
                    group_id="g",
                    attempt=1,
                    index=len(found),
                    prompt_token_ids=prompt,
                    completion_token_ids=completion,
                    logprobs=np.zeros(completion.size, np.float32),
                    loss_mask=np.ones(completion.size, np.uint8),
                    spans=(Span(0, 0, completion.size),),
                    finish_reason="stop",
                    text="",
                    replica="benchmark",
                )
            )
    return found


def _make_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = Qwen2Config(
        vocab_size=32_000, num_key_value_heads=4, max_position_embeddings=32_768, tie_word_embeddings=True, **sizes
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _result_file(folder: Path) -> Path:
    return folder / "result.json"


def _gradient_file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_')}.safetensors"


def _seconds(runs: list[dict[str, Any]]) -> float:
    return statistics.median(s for run in runs for s in run["seconds"])


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """|ours - theirs| / |theirs|"""
    square = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs)
    return float(np.sqrt(square / sum(float(t.double().square().sum()) for t in theirs.values())))


if __name__ == "__main__":
    main()
