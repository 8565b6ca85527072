"""The peer of `benchmarks.vs_trl`: TRL's GRPOTrainer on the same job. Runs in TRL's virtual environment and imports no headrace.

    python vs_trl_peer.py JOB.json

`JOB.json` holds model, problems (messages and answer each, in order), prompts and generations a step, steps, seed, threads, lr and
max_new_tokens. Prints one JSON line: the Unix time at the end of every step, and the mean reward of every step.
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


class Record(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())

    def on_log(self, *arguments: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def exact(end_token: int) -> Any:
    def reward(
        completions: list[list[dict[str, str]]], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        """1 where the completion is the answer's number and ended by itself: the `math` environment with `require_stop`."""
        texts = [completion[0]["content"].strip() for completion in completions]
        return [
            float(text.isdecimal() and int(text) == int(right) and end_token in ids)
            for text, ids, right in zip(texts, completion_ids, answer, strict=True)
        ]

    return reward


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    record = Record()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job["prompts"] * job["generations"],
            num_generations=job["generations"],
            max_completion_length=job["max_new_tokens"],
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
            reward_funcs=exact(tokenizer.eos_token_id),
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": problem["messages"], "answer": problem["answer"]} for problem in job["problems"]]
            ),
            processing_class=tokenizer,
            callbacks=[record],
        )
        trainer.train()
    sys.stdout.write(json.dumps({"ends": record.ends, "rewards": record.rewards}) + "\n")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
