"""The peer of `benchmarks.end_to_end`: TRL's GRPOTrainer on the same job. Runs in TRL's virtual environment and imports no headrace.

    python end_to_end_peer.py MODEL PROBLEMS.json STEPS THREADS LATENCY_S

Prints one JSON line: of the end of every step the Unix time (`ends`), and the CPU seconds until then (`cpu_s`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GENERATIONS, TOKENS = 8, 8, 64


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())
        self.cpu_s.append(time.process_time())


def digits(latency_s: float) -> Any:
    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        """Share of digits in each completion, each after `latency_s`: what the pipeline's environment does."""
        rewards = []
        for completion in completions:
            time.sleep(latency_s)
            text = completion[0]["content"]
            rewards.append(sum(character.isdigit() for character in text) / TOKENS)
        return rewards

    return reward


def main(model: str, problems: Path, steps: int, threads: int, latency_s: float) -> None:
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "<eos>"
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},
            max_steps=steps,
            num_iterations=1,
            beta=0.0,
            loss_type="dapo",
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
        )
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        network.config.use_cache = True
        trainer = GRPOTrainer(
            model=network,
            reward_funcs=digits(latency_s),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": messages} for messages in json.loads(problems.read_text())]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    sys.stdout.write(json.dumps({"ends": clock.ends, "cpu_s": clock.cpu_s}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
