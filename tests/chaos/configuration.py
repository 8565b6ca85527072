"""The configuration of a chaos run, and its prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.chaos.network import SUBNET
from tests.chaos.plan import Shape
from tests.chaos.servers import PORT

RUN = "chaos"
# Places between prompts that can't be scored: two of them, and nothing else in flight, can't be told from a broken environment, and the run
# waits for somebody to look.
APART = 12
LEASE_S, DEAD_AFTER_S = 3.0, 2.0
HTTP = 8390
# the last number of each service's address
HOSTS = {"replay": 4, "reward": 5, "environment": 6, "rollout-1": 7, "rollout-2": 8, "trainer": 9}


def configuration(shape: Shape, model: Path, folder: Path, problems: Path, server_address: str) -> str:
    """The run's YAML. What is counted (attempts, shares, retries) has its default. What is set here is small, for a tiny model on a busy
    machine, or short: each time is to the others as their defaults are, about, but a fault that outlasts the default lease or the default
    time limit of an environment would take a minute, and a run of 31 hours."""
    address = {name: f"{SUBNET}.{host}" for name, host in HOSTS.items()}
    server = (
        f"redis_url: redis://{server_address}:{PORT}/0"
        if shape.topology == "external"
        else f"redis_host: {server_address}"
    )
    ahead = f"ahead_steps: {shape.max_age + 1}" if shape.policy != "ordered" else ""
    return f"""
run: {{id: {RUN}, dir: {folder}/runs}}
grpo:
  num_prompts_per_step: {shape.prompts_per_step}
  num_generations_per_prompt: {shape.generations}
  use_leave_one_out_baseline: false
  use_dynamic_sampling: {str(shape.dynamic_sampling).lower()}
  val_period: 0
  async_grpo:
    enabled: true
    max_trajectory_age_steps: {shape.max_age}
    staleness_policy: {shape.policy}
    {ahead}
    in_flight_weight_updates: {str(shape.in_flight).lower()}
loss_fn: {{reference_policy_kl_penalty: 0}}
policy:
  model_name: {model}
  precision: float32
  max_total_sequence_length: 96
  train_micro_batch_size: 8
  generation: {{max_new_tokens: 48, vllm_cfg: {{kv_cache_memory_bytes: 67108864}}}}
data:
  shuffle: false
  train: {{data_path: {problems}, env_name: paced}}
env:
  paced: {{target: "{address["environment"]}:50400", timeout_s: 10}}
replay:
  {server}
  redis_port: {PORT}
  host: {address["replay"]}
  port: {HTTP}
  lease_s: {LEASE_S}
  scoring_deadline_s: 12
  redundant_generations: {shape.redundant}
rollout: {{max_concurrent_groups: 4, heartbeat_s: 0.5, dead_after_s: {DEAD_AFTER_S}, save_partial_tokens: 16}}
reward: {{host: {address["reward"]}, http_port: {HTTP}, workers: 1}}
trainer: {{host: {address["trainer"]}, port: {HTTP}, num_threads: 1}}
weight_channel: {{host: {address["trainer"]}, timeout_s: 8}}
security: {{insecure: true}}
checkpointing: {{save_period: {shape.save_period}, keep_top_k: 3, metric_name: null}}
"""


def write_problems(path: Path, shape: Shape, seed: int) -> str | None:
    """One problem a line, no two alike; some fail at first, a few always, and of some all answers are worth the same. Returns the group of
    the one that kills its replicas, if there is one."""
    rng = random.Random(f"problems {seed}")
    flat, last = 5 if shape.dynamic_sampling else 0, -APART
    deadly = shape.prompts_per_step * rng.randint(2, 6) if shape.deadly else None
    with path.open("w") as file:
        for index in range(shape.prompts):
            mood = rng.choices(("fine", "flaky", "poison", "flat"), (90, 7, 3, flat))[0]
            if mood == "poison":
                mood, last = ("poison", index) if index - last >= APART else ("fine", last)
            mood = "deadly" if index == deadly else mood
            file.write(json.dumps({"input": f"{index}+{rng.randint(10, 99)}", "output": "0", "mood": mood}) + "\n")
    return None if deadly is None else f"e0-train-{deadly}"
