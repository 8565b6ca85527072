"""The configuration of a chaos run, and its prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.chaos.plan import YOURS, Shape, Topology
from tests.chaos.servers import PORT

RUN = "chaos"
# Places between prompts that can't be scored: two of them, and nothing else in flight, can't be told from a broken environment, and the run
# waits for somebody to look.
APART = 12
LEASE_S, DEAD_AFTER_S = 6.0, 6.0  # the smallest that are accepted, with a heartbeat of half a second
# of the health pages
HTTP = {"replay": 8390, "reward": 8391, "trainer": 8392, "rollout": 8393, "agents": 8394}
# machines, and the last number of each one's address
HOSTS = {"replay": 4, "reward": 5, "environment": 6, "rollout-1": 7, "rollout-2": 8, "trainer": 9}
RUNNERS = {"agents-1": 12, "agents-2": 13}
_UP_HOST = 4
STORE = "s3://bucket/runs"
STORE_PORT = 50500
_STORE_HOST = 14
VALIDATED = 3  # prompts of a validation
_VALIDATED_EVERY = 3  # steps
# of a single completion, and of an episode of five short ones
_CONTEXT, _NEW_TOKENS = (96, 256), (48, 8)


# Of episodes. A program whose process stands still is noticed within ten seconds, before it is believed to hang.
_CLOCKS = "call_s: 20, think_s: 20, episode_s: 90, finish_s: 10, retry_grace_s: 10"


def services(shape: Shape) -> dict[str, int]:
    """The processes of a run, besides `headrace up`, with the last numbers of their own addresses."""
    return HOSTS | (RUNNERS if shape.episodes else {}) | ({"store": _STORE_HOST} if shape.store else {})


def hosts(shape: Shape) -> dict[str, int]:
    yours: dict[str, int] = {name: host for name, host in services(shape).items() if name in YOURS}
    return {"up": _UP_HOST, **yours} if shape.topology == "up" else services(shape)


def machine_of(service: str, topology: Topology) -> str:
    return "up" if topology == "up" and service not in YOURS else service


def configuration(
    shape: Shape, model: Path, folder: Path, problems: Path, held_out: Path, server: str, replicas: int
) -> str:
    """The run's YAML. `server` is what it says of the buffer's server. `replicas` are those that `headrace up` starts. What is counted
    (attempts, shares, retries) has its default. What is set here is small, for a tiny model on a busy machine, or short: each time is to
    the others as their defaults are, about, but a fault that outlasts the default lease or the default time limit of an environment would
    take a minute, and a run of 31 hours. Only `fleet_deadline_s` is longer: on a busy machine an engine needs minutes to start."""
    host = {name: machine_of(name, shape.topology) for name in HOSTS}  # by its name: its address may change
    # under `up` the replicas are on one machine
    port = 0 if shape.topology == "up" else HTTP["rollout"]
    ahead = f"ahead_steps: {shape.max_age + 1}" if shape.policy != "ordered" else ""
    program = ", episodes: true, public: [mood]" if shape.episodes else ""
    program += ", grader: judge" if shape.graded else ""
    grader = f'\n  judge: {{target: "{host["environment"]}:50400", timeout_s: 10}}' if shape.graded else ""
    agents = f"agents: {{http_port: {HTTP['agents']}, slots: 12, {_CLOCKS}}}" if shape.episodes else ""
    store = f", store: {STORE}" if shape.store else ""
    validators = shape.validators if replicas > 1 else 0
    return f"""
run: {{id: {RUN}, dir: {folder}/runs}}
grpo:
  num_prompts_per_step: {shape.prompts_per_step}
  num_generations_per_prompt: {shape.generations}
  use_leave_one_out_baseline: false
  use_dynamic_sampling: {str(shape.dynamic_sampling).lower()}
  val_period: {_VALIDATED_EVERY}
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
  max_total_sequence_length: {_CONTEXT[shape.episodes]}
  train_micro_batch_size: 8
  generation: {{max_new_tokens: {_NEW_TOKENS[shape.episodes]}, vllm_cfg: {{kv_cache_memory_bytes: 67108864}}}}
data:
  shuffle: false
  train: {{data_path: {problems}, env_name: paced}}
  validation: {{data_path: {held_out}, env_name: paced}}
env:
  paced: {{target: "{host["environment"]}:50400", timeout_s: 10{program}}}{grader}
replay:
  {server}
  redis_port: {PORT}
  host: {host["replay"]}
  port: {HTTP["replay"]}
  lease_s: {LEASE_S}
  scoring_deadline_s: 12
  redundant_generations: {shape.redundant}
rollout:
  replicas: {replicas}
  port: {port}
  max_concurrent_groups: 4
  heartbeat_s: 0.5
  dead_after_s: {DEAD_AFTER_S}
  save_partial_tokens: 16
reward: {{host: {host["reward"]}, http_port: {HTTP["reward"]}, workers: 1}}
trainer: {{host: {host["trainer"]}, port: {HTTP["trainer"]}, num_threads: 1, fleet_deadline_s: 1200,
  validation_replicas: {validators}}}
weight_channel: {{timeout_s: 8}}
security: {{insecure: true}}
{agents}
checkpointing: {{save_period: {shape.save_period}, keep_top_k: 3, metric_name: null{store}}}
"""


def write_held_out(path: Path) -> None:
    """The prompts of a validation; each can be scored."""
    lines = [{"input": f"{index}+1", "output": "0", "mood": "fine"} for index in range(1000, 1000 + VALIDATED)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


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
