"""The peer of `benchmarks.end_to_end`: TRL's GRPOTrainer on the same job. Runs in TRL's virtual environment and imports no headrace.

    python end_to_end_peer.py JOB.json

`JOB.json` holds model, problems (messages and extra_env_info each, in order), prompts and generations a step, steps, seed, threads, lr,
tokens, and latency_s: the reward is that of `end_to_end_rewards.py` for completions of exactly so many tokens; or, where latency_s is
null, 1 for the right answer that ended by itself.

Prints one JSON line: of the end of every step the Unix time (`ends`), the CPU seconds until then (`cpu_s`), and its mean reward
(`rewards`).
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
from end_to_end_rewards import digits  # type: ignore[import-not-found]  # it lies beside this file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Record(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_s: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())
        self.cpu_s.append(time.process_time())

    def on_log(self, *arguments: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def exact(end_token: int) -> Any:
    def reward(
        completions: list[list[dict[str, str]]], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        """The `math` environment with `require_stop`."""
        texts = [completion[0]["content"].strip() for completion in completions]
        return [
            float(text.isdecimal() and int(text) == int(right) and end_token in ids)
            for text, ids, right in zip(texts, completion_ids, answer, strict=True)
        ]

    return reward


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    learns = job["latency_s"] is None
    if not learns:
        tokenizer.eos_token = "<eos>"
    record = Record()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job["prompts"] * job["generations"],
            num_generations=job["generations"],
            max_completion_length=job["tokens"],
            generation_kwargs={} if learns else {"min_new_tokens": job["tokens"]},
            max_steps=job["steps"],
            num_iterations=1,
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",
            scale_rewards="group",
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            shuffle_dataset=False,
            seed=job["seed"],
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        network = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
        network.config.use_cache = True
        trainer = GRPOTrainer(
            model=network,
            reward_funcs=exact(tokenizer.eos_token_id) if learns else digits,
            args=config,
            train_dataset=Dataset.from_list(
                [
                    {"prompt": problem["messages"], "answer": problem["extra_env_info"]["answer"]}
                    for problem in job["problems"]
                ]
            ),
            processing_class=tokenizer,
            callbacks=[record],
        )
        trainer.train()
    found = {"ends": record.ends, "cpu_s": record.cpu_s, "rewards": record.rewards}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
