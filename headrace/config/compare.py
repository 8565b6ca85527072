"""Compares two configurations of one run, and decides which changes are allowed when the run continues."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from headrace.config.in_yaml import without_password
from headrace.config.root import Config

# Keys that may change: steps, periods, optimisation, deadlines, addresses. All others decide the groups, weights and order of the run
# (model, data, seed, P, n, sampling, environments, the age bound), so a run can't continue from a checkpoint made under another value.
# Every key that an error of a live run names as its remedy is listed here.
FREE = (
    "run.dir",
    "run.started_in",
    "run.max_failed_share",
    "run.hang_timeout_s",
    *(
        f"{algorithm}.{key}"
        for algorithm in ("grpo", "ppo")
        for key in (
            "max_num_epochs",
            "max_num_steps",
            "val_period",
            "val_at_start",
            "val_at_end",
            "val_start_at",
            "max_val_samples",
            "val_num_generations_per_prompt",
            "stop_at_validation_metric",
            "stop_at_validation_threshold",
            "dynamic_sampling_max_gen_batches",
            "reward_shaping",
            "overlong_filtering",
            "advantage_clip_low",
            "advantage_clip_high",
            "adv_estimator",
            "seq_logprob_error_threshold",
            "skip_reference_policy_logprobs_calculation",
            f"async_{algorithm}.ahead_steps",
            f"async_{algorithm}.in_flight_weight_updates",
            f"async_{algorithm}.recompute_kv_cache_after_weight_updates",
        )
    ),
    "grpo.normalize_rewards",
    "grpo.use_leave_one_out_baseline",
    "ppo.ppo_epochs",
    "ppo.critic_ppo_epochs",
    "ppo.policy_training_start_step",
    "ppo.scheduler_counts",
    "loss_fn",
    "value_loss_fn",
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "policy.dynamic_batching",
    "policy.sequence_packing",
    "policy.share_prompts",
    "policy.logprob_chunk_size",
    "policy.activation_checkpointing",
    "policy.torch_compile",
    "policy.max_grad_norm",
    "policy.freeze_moe_router",
    "policy.lora_cfg.refit",
    "policy.optimizer.kwargs",
    "policy.scheduler",
    "value.train_global_batch_size",
    "value.train_micro_batch_size",
    "value.max_grad_norm",
    "value.freeze_moe_router",
    "value.optimizer.kwargs",
    "value.scheduler",
    "policy.generation.val_temperature",
    "policy.generation.val_top_p",
    "policy.generation.val_top_k",
    "policy.generation.vllm_cfg",
    # where the prompts are read from; the checkpoint checks that they are the same prompts
    "data.default.data_path",
    "data.default.prompt_file",
    "data.default.system_prompt_file",
    "data.default.processor",
    *(
        f"data.{part}.*.{key}"
        for part in ("train", "validation")
        for key in ("data_path", "prompt_file", "system_prompt_file", "processor")
    ),
    "env.*.target",
    "env.*.command",
    "env.*.attached",
    "env.*.port",
    "env.*.timeout_s",
    "env.*.max_batch_size",
    "env.*.failure_share",
    "env.*.give_up_after",
    "replay.redis_url",
    "replay.redis_host",
    "replay.redis_port",
    "replay.host",
    "replay.port",
    "replay.appendfsync",
    "replay.lease_s",
    "replay.group_deadline_s",
    "replay.scoring_deadline_s",
    "replay.max_attempts",
    "replay.max_scoring_attempts",
    "replay.max_bytes",
    "replay.retain_steps",
    "replay.bias_warning",
    "rollout",
    "reward",
    "agents.host",
    "agents.port",
    "agents.http_port",
    "agents.advertised_url",
    "agents.runners",
    "agents.slots",
    "agents.validation_slots",
    "agents.call_s",
    "agents.think_s",
    "agents.episode_s",
    "agents.finish_s",
    "agents.retry_grace_s",
    "agents.max_rollout_turns",
    "agents.max_episode_tokens",
    "agents.max_episode_bytes",
    "agents.max_request_bytes",
    "agents.max_parallel_calls",
    "agents.max_requests_per_s",
    "trainer",
    "logger",
    "weight_channel",
    "security",
    "checkpointing.enabled",
    "checkpointing.checkpoint_dir",
    "checkpointing.save_period",
    "checkpointing.checkpoint_must_save_by",
    "checkpointing.keep_top_k",
    "checkpointing.metric_name",
    "checkpointing.higher_is_better",
)


@dataclasses.dataclass(frozen=True)
class Change:
    key: str
    before: Any
    after: Any

    @property
    def allowed(self) -> bool:
        """Whether a run may continue with this change."""
        parts = self.key.split(".")
        return any(
            len(parts) >= len(free) and all(f in ("*", p) for f, p in zip(free, parts, strict=False))
            for free in (key.split(".") for key in FREE)
        )

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.before)} -> {_show(self.after)}"


def fixed(config: Config) -> dict[str, Any]:
    """Return every key that may not change when the run continues, with its value."""
    return {key: value for key, value in _flat(config.model_dump(mode="json")) if not Change(key, None, None).allowed}


def digest(config: Config) -> str | None:
    """Return a digest of the fixed keys whose text comes from the environment and is not stored; None without any."""
    shown = dict(_flat(config.shown()))
    hidden = {key: value for key, value in fixed(config).items() if shown.get(key) != value}
    if not hidden:
        return None
    # slow on purpose: it stands in a file, and a short value could be guessed
    key = hashlib.scrypt(json.dumps(hidden).encode(), salt=str(config.run.id).encode(), n=2**14, r=8, p=1, dklen=16)
    return key.hex()


def diff(before: Config, after: Config) -> list[Change]:
    """Return the keys whose values differ: those of `before` in its order, then the others. A key that only one of them has is null in the
    other. Text from the environment is compared, and given as the expression that gives it."""
    old, new = dict(_flat(before.model_dump(mode="json"))), dict(_flat(after.model_dump(mode="json")))
    old_shown, new_shown = dict(_flat(before.shown())), dict(_flat(after.shown()))
    return [
        Change(key, old_shown.get(key), new_shown.get(key))
        for key in [*old, *(key for key in new if key not in old)]
        if _differs(old, new, key)
    ]


def _differs(old: dict[str, Any], new: dict[str, Any], key: str) -> bool:
    if key in old and key in new:
        return bool(old[key] != new[key])
    # a missing key equals null and an empty mapping or list
    return (old | new)[key] not in (None, {}, [])


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield prefix, value
    for key, inner in items:
        yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))


def _show(value: Any) -> str:
    return "null" if value is None else without_password(repr(value))
