"""Seconds per step, CPU seconds by process and rewards of the whole pipeline, beside TRL's GRPOTrainer on the same job in the same run.

    python -m benchmarks.end_to_end [--steps N] [--size 0.8M|10M|demo] [--seed N] [--peer-python PYTHON]

Two jobs measure time: a Qwen2 of 0.8 or 10 M parameters, 8 prompts x 8 completions of exactly 64 tokens, one AdamW step each, the clipped
loss averaged over tokens, no KL, float32; the reward is the share of digits, given at once, or (0.8 M) after 10 ms a sample. The third
shows that both learn the same: `demo` is `examples/arithmetic_tiny.yaml`, whose reward is 1 for the right sum. `reward` is that of the
first step and the mean of the last five.

TRL runs a script, with one thread and with two, in a virtual environment of its own (made in the cache folder on first use; it wants a
newer transformers). The pipeline runs the same script as `headrace migrate trl` writes it, with the keys that TRL lacks (`OWN`); for `demo`
it runs the example, and the script has its settings, and its problems in the order in which the pipeline queues them. It runs as `headrace
up` starts it: generation, training and an environment in a process of its own, threads at their default (auto), weights at most one step
old. The first steps of each are left out of the times.

`limit` is the CPU seconds of a step spread evenly over the cores, sooner than which no step can be done; `load` the machine's in the last
minute of the run, which is about the number of threads of compute where nothing else runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.end_to_end_rewards import TOKENS
from benchmarks.processes import PROCESSES, Meter, run
from headrace.config import Config, load, threads
from headrace.config.data import DataConfig
from headrace_services.trainer.data.problems import load_problems
from headrace_services.trainer.data.prompts import PromptOrder
from headrace_services.trainer.data.sources import Problem
from headrace_services.trainer.demo_models import tiny
from tests.support.ports import free_port

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "arithmetic_tiny.yaml"
DEMO = "demo"
PEER = ("torch==2.13.0", "trl==1.16.*")
PROMPTS, GENERATIONS = 8, 8
WARM_UP, LAST = 5, 5
RUN_ID = "end-to-end"


SCRIPT = """
from datasets import load_dataset
from end_to_end_rewards import {reward}
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained({model!r})
{end}
trainer = GRPOTrainer(
    model={model!r},
    reward_funcs={function},
    args=GRPOConfig(
        output_dir={folder!r},
        per_device_train_batch_size={batch},
        num_generations={generations},
        max_completion_length={tokens},
        generation_kwargs={least},
        max_steps={steps},
        num_iterations=1,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate={lr},
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        seed={seed},
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    ),
    train_dataset=load_dataset("json", data_files={data!r}, split="train"),
    processing_class=tokenizer,
)
trainer.train()
"""
# What the pipeline has besides the settings of the script.
OWN = {
    "grpo.async_grpo.enabled": "true",
    "grpo.async_grpo.max_trajectory_age_steps": 1,
    "grpo.async_grpo.in_flight_weight_updates": "true",
    "loss_fn.prev_logprobs_source": "generation",
    "policy.max_total_sequence_length": 128,
    # text that the tokenizer can't write, since the model has no end token
    "policy.generation.stop_strings": "[never]",
    # as many samples in a call as are scored at a time otherwise
    "env.digits.max_batch_size": 4,
    "replay.port": 0,
    "rollout.device": "cpu",
    "trainer.device": "cpu",
}


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and the environment's seconds for a sample that it is measured with."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    latencies_s: tuple[float, ...]


SIZES = {"0.8M": Size(128, 4, 4, 344, (0.0, 0.01)), "10M": Size(384, 6, 6, 960, (0.0,))}


@dataclasses.dataclass(frozen=True)
class Job:
    """What is run once with each: a script of TRL; and a file that `headrace up` takes, and KEY=VALUE. The reward of digits takes
    `latency_s` for a sample; with None the environment is built in."""

    name: str
    steps: int
    script: Path
    file: Path
    overrides: tuple[str, ...] = ()
    latency_s: float | None = None

    def config(self) -> Config:
        return load(self.file, self.overrides, {})

    @property
    def environ(self) -> dict[str, str]:
        return {} if self.latency_s is None else {"REWARD_LATENCY_S": str(self.latency_s)}

    @property
    def latency(self) -> str:
        return "" if self.latency_s is None else f"{self.latency_s * 1000:.0f}"


@dataclasses.dataclass(frozen=True)
class Row:
    """`cpu_s` are CPU seconds of a step by process, `load` was the machine's at the end."""

    job: Job
    name: str
    threads: str
    step_s: float
    rewards: list[float]
    cpu_s: dict[str, float]
    load: float
    where: str = ""

    @property
    def limit_s(self) -> float:
        return sum(self.cpu_s.values()) / threads.usable_cores()

    @property
    def reward(self) -> str:
        return f"{self.rewards[0]:.2f}, {statistics.fmean(self.rewards[-LAST:]):.2f}"

    def line(self) -> str:
        what = f"{self.job.name}, {self.name}, {self.threads} thread(s), {self.job.latency or 0} ms a sample"
        return f"{what}: {self.step_s:.3f} s a step, limit {self.limit_s:.3f} s, load {self.load:.1f}, reward {self.reward}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help=f"steps of each run, of which {WARM_UP} are left out")
    parser.add_argument("--size", choices=[*SIZES, DEMO], help="this job alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer-python", type=Path, help="Python of an environment that holds TRL 1.16")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 2:
        parser.error(f"--steps {arguments.steps}: at least {WARM_UP + 2}")
    console = Console()
    peer = arguments.peer_python or peer_python(console)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as name:
        for size in [arguments.size] if arguments.size else [*SIZES, DEMO]:
            for job in jobs(Path(name) / size, size, arguments.steps, arguments.seed):
                for peer_threads in (1, 2):
                    rows.append(run_peer(job, peer, peer_threads))
                    console.print(rows[-1].line())
                rows.append(run_pipeline(job))
                console.print(rows[-1].line())
    Console(width=240).print(table(rows))


def peer_python(console: Console) -> Path:
    """The Python of an environment that holds TRL, made on first use: it wants a newer transformers than vLLM."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace" / "trl-1.16"
    python = cache / "bin" / "python"
    complete = cache / "complete"
    if not complete.exists():
        console.print(f"installing {' and '.join(PEER)} in {cache} …")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(cache)], check=True)
        for requirement in PEER:  # torch first: what comes after must not bring another one
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", requirement], check=True)
        complete.touch()
    return python


def jobs(folder: Path, size: str, steps: int, seed: int) -> Iterator[Job]:
    """Make the model in `folder`, and yield what is done with it."""
    model = folder / "model"
    if size == DEMO:
        tiny.make(model)
        changes = {
            "run.id": RUN_ID,
            "run.dir": folder / "runs",
            "policy.model_name": model,
            "grpo.seed": seed,
            "grpo.max_num_steps": steps,
            "grpo.val_period": 0,
            "grpo.val_at_start": "false",
            "grpo.val_at_end": "false",
            "grpo.async_grpo.max_trajectory_age_steps": 1,
            "trainer.num_threads": "auto",
            "checkpointing.save_period": 1_000_000,
            "replay.redis_port": free_port(),
            "replay.port": 0,
            "reward.port": free_port(),
        }
        job = Job(size, steps, folder / "train.py", EXAMPLE, tuple(f"{key}={value}" for key, value in changes.items()))
        config = job.config()
        algorithm, (problems, _) = config.algorithm, load_problems(config.data)
        order = PromptOrder(len(problems), algorithm.seed, config.data.shuffle, algorithm.max_num_epochs)
        asked = [problems[order[place][1]] for place in range(steps * algorithm.num_prompts_per_step)]
        write_script(job.script, config, asked, "exact")
        yield job
        return
    make_model(model, SIZES[size])
    for latency_s in SIZES[size].latencies_s:
        script = folder / f"{latency_s * 1000:.0f}ms" / "train.py"
        script.parent.mkdir()
        asked, _ = load_problems(
            DataConfig.model_validate(
                {"train": {"dataset_name": "arithmetic", "env_name": "digits", "size": 3 * PROMPTS * steps, "seed": 1}}
            )
        )
        write_script(script, digits_config(model, steps, seed), asked, "digits")
        file = script.with_name("run.yaml")
        run([sys.executable, "-m", "headrace.cli", "migrate", "trl", str(script), "--out", str(file)], {**os.environ})
        own = {
            **OWN,
            "run.id": RUN_ID,
            "run.dir": script.parent / "runs",
            "replay.redis_port": free_port(),
            "reward.port": free_port(),
        }
        overrides = tuple(f"{key}={value}" for key, value in own.items())
        yield Job(size, steps, script, file, overrides, latency_s=latency_s)


def make_model(directory: Path, size: Size) -> None:
    """Random weights, and no end token, so that every completion has its full length."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = None
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            intermediate_size=size.intermediate,
            max_position_embeddings=tiny.CONTEXT,
            initializer_range=0.08,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def run_peer(job: Job, python: Path, peer_threads: int) -> Row:
    # threads that wait as those of the pipeline's services do, no GPU, no model hub
    environ = {"OMP_NUM_THREADS": str(peer_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [str(python), str(HERE / "end_to_end_peer.py"), str(job.script), str(peer_threads)]
    done = json.loads(run(words, os.environ | environ | job.environ).splitlines()[-1])
    if len(done["rewards"]) != job.steps:
        raise SystemExit(f"TRL logged {len(done['rewards'])} of {job.steps} rewards")
    cpu_s = {"its one process": mean_step(done["cpu_s"])}
    step_s, load_average = mean_step(done["ends"]), psutil.getloadavg()[0]
    return Row(job, "TRL 1.16", str(peer_threads), step_s, done["rewards"], cpu_s, load_average)


def run_pipeline(job: Job) -> Row:
    config = job.config()
    journal = config.run_folder / "metrics.jsonl"
    meter = Meter(journal, WARM_UP, job.steps - 1)
    meter.start()
    run([sys.executable, "-m", "headrace.cli", "up", str(job.file), *job.overrides], os.environ | job.environ)
    load_average, cpu_s = psutil.getloadavg()[0], meter.a_step()
    lines = [line for line in map(json.loads, journal.read_text().splitlines()) if line["kind"] == "train"]
    metrics = [line["metrics"] for line in lines]
    spent = metrics[WARM_UP:]
    wrong = {m["mean_gen_tokens_per_sample"] for m in spent} - {float(TOKENS)}
    if len(lines) != job.steps or (wrong and job.latency_s is not None):
        raise SystemExit(
            f"the pipeline made {len(lines)} of {job.steps} steps, with {wrong or TOKENS} tokens a completion"
        )
    parts = {"wait": "exposed_generation", "train": "policy_training", "refit": "weight_sync"}
    where = ", ".join(
        f"{name} {statistics.fmean(m[f'timing/train/{metric}'] for m in spent):.2f}" for name, metric in parts.items()
    )
    own = threads.of(config, threads.usable_cores(), os.environ, trains=True, generates=True)
    step_s, rewards = mean_step([line["time"] for line in lines]), [m["reward"] for m in metrics]
    return Row(job, "Headrace", f"{own.trainer} + {own.rollout}", step_s, rewards, cpu_s, load_average, where)


def digits_config(model: Path, steps: int, seed: int) -> Config:
    """What both sides have of a job that measures time."""
    return Config.model_validate(
        {
            "grpo": {
                "seed": seed,
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": GENERATIONS,
                "max_num_steps": steps,
            },
            "policy": {
                "model_name": str(model),
                "optimizer": {"kwargs": {"lr": 1e-3}},
                "generation": {"max_new_tokens": TOKENS},
            },
        }
    )


def write_script(script: Path, config: Config, problems: Sequence[Problem], reward: str) -> None:
    """Write a job as a user of TRL has it: a script, its reward functions, and the file of its problems."""
    data = script.with_name("problems.jsonl")
    rows = ({"prompt": each.messages, "answer": each.extra_env_info["answer"]} for each in problems)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(HERE / "end_to_end_rewards.py", script.parent)
    algorithm, policy = config.algorithm, config.policy
    script.write_text(
        SCRIPT.format(
            reward=reward,
            function=reward if reward == "digits" else "exact(tokenizer.eos_token_id)",
            model=policy.model_name,
            # a model without an end token, for TRL, which wants one
            end="" if reward == "exact" else 'tokenizer.eos_token = "<eos>"',
            folder=str(script.with_name("trl")),
            batch=algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt,
            generations=algorithm.num_generations_per_prompt,
            tokens=policy.generation.max_new_tokens,
            # until its end token, or as long as the pipeline's completions
            least={} if reward == "exact" else {"min_new_tokens": policy.generation.max_new_tokens},
            steps=algorithm.max_num_steps,
            lr=policy.optimizer.kwargs.lr,
            seed=algorithm.seed,
            data=str(data),
        )
    )


def mean_step(ends: list[float]) -> float:
    """Mean seconds of a step, without the first ones. Steps of a pipeline come in bursts: a median would flatter it."""
    measured = ends[WARM_UP - 1 :]
    return (measured[-1] - measured[0]) / (len(measured) - 1)


def table(rows: list[Row]) -> Table:
    made = Table(
        title=f"from {PROCESSES[0]} to all: CPU seconds of a step; limit: these, spread evenly over the cores",
        title_justify="left",
    )
    left = ("job", "", "of which, s")
    for name in (*left[:2], "threads", "ms a sample", "reward", "s/step", "against TRL", "limit, s", "load", left[2]):
        made.add_column(name, justify="left" if name in left else "right")
    for name in (*PROCESSES, "all"):
        made.add_column(name, justify="right")
    for row in rows:
        best = min(r.step_s for r in rows if r.job == row.job and r.name != "Headrace")
        made.add_row(
            row.job.name,
            row.name,
            row.threads,
            row.job.latency,
            row.reward,
            f"{row.step_s:.3f}",
            f"{best / row.step_s:.2f}x" if row.name == "Headrace" else "",
            f"{row.limit_s:.3f}",
            f"{row.load:.1f}",
            row.where,
            *(f"{row.cpu_s[name]:.3f}" if name in row.cpu_s else "" for name in PROCESSES),
            f"{sum(row.cpu_s.values()):.3f}",
        )
    return made


if __name__ == "__main__":
    main()
