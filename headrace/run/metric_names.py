"""The registry of metrics: name, unit, meaning and healthy values of each. `docs/metrics.md` is generated from it.

Names and formulae are NeMo RL's where it has them. In a name, `<…>` stands for a name from the run (a task, a GPU's number).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

MOST_COMPONENTS = 32  # of a reward
VALIDATION = "Validation"  # the section of the metrics that only validations have


@dataclasses.dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    meaning: str
    healthy: str = ""


@dataclasses.dataclass(frozen=True)
class MetricSection:
    title: str
    note: str
    metrics: tuple[Metric, ...]


METRIC_SECTIONS = (
    MetricSection("Rewards and lengths", "For the batch that a step trained on.", (
        Metric("reward", "", "mean reward after scaling and shaping", "rises"),
        Metric("unshaped_total_reward", "", "the same before shaping; only with reward shaping"),
        Metric("reward_std", "", "standard deviation of the same over the batch", "above 0"),
        Metric("groups_without_spread", "share",
               "groups whose rewards (gdpo: components with a weight) are all equal, whatever their value: they give no signal",
               "well below 1"),
        Metric("equal_rewards_alarm", "0 or 1",
               "1 from the fifth step in a row in which no reward differs from those that it is compared with: those of its group, or "
               "of the batch if the estimator has no group baseline", "0"),
        Metric("reward/<component>", "",
               f"mean of a reward component, over the trajectories that have it (at most {MOST_COMPONENTS} components)"),
        Metric("reward_std/<component>", "", "standard deviation of the same"),
        Metric("environment_reward", "", "mean reward as the environments returned it", "rises"),
        Metric("environment_reward/<task>", "", "the same for one task, if a batch mixes several"),
        Metric("mean_prompt_length", "tokens", "mean prompt length over trajectories; in an episode, of its first call's context"),
        Metric("mean_gen_tokens_per_sample", "tokens",
               "mean tokens that the policy wrote in a trajectory", "neither collapses nor grows to the limit"),
        Metric("min_gen_tokens_per_sample", "tokens", "the fewest in a trajectory"),
        Metric("max_gen_tokens_per_sample", "tokens", "the most in a trajectory"),
        Metric("mean_total_tokens_per_sample", "tokens",
               "mean of prompt and completion; for an episode, of all its paths, with shared tokens counted in each"),
        Metric("total_num_tokens", "tokens", "the same, summed over all trajectories"),
        Metric("truncation_rate", "share",
               "completions that were cut off at the length limit", "small; a rise means that answers outgrow max_new_tokens"),
        Metric("repetition", "share",
               "runs of 4 tokens that the same completion has had before; only if some completion has 4 tokens",
               "small; near 1, completions say the same over and over"),
        Metric("collapse_alarm", "0 or 1",
               "1 while the policy is collapsed: the mean reward has lost half of what it had gained, or completions repeat themselves "
               "([more](#when-the-policy-collapses))", "0"),
        Metric("failed_prompts", "prompts",
               "prompts that failed since the step before, and were replaced by later ones; the trainer's log has the reasons", "0"),
        Metric("masked_tokens", "tokens", "policy tokens over age, which are left out of the loss (staleness_policy: mask)"),
        Metric("num_valid_samples", "trajectories", "N: sum of the multipliers of trajectories with a policy token"),
        Metric("global_valid_toks", "tokens", "T: tokens that count, by their weight, over the step's optimizer steps"),
        Metric("global_valid_seqs", "trajectories", "N, over the step's optimizer steps"),
    )),
    MetricSection("Episodes",
            "Means over the batch's trajectories, by environment, for programs that call the policy themselves ([agents](agents.md)).", (
        Metric("episode_calls/<environment>", "calls", "calls of an episode that are trained"),
        Metric("episode_tokens/<environment>", "tokens", "tokens of an episode that the policy wrote and that are trained"),
        Metric("episode_roots/<environment>", "roots", "calls of an episode that continue no other call",
               "1, or what the program intends; more if histories change on the way"),
        Metric("episode_rendered_again/<environment>", "tokens",
               "tokens in the contexts of roots after the first, which are computed from their beginning", "as `episode_roots`, from 0"),
    )),
    MetricSection("Age", "Steps between the weights that wrote a trajectory's oldest token and those that train on it.", (
        Metric("avg_trajectory_age", "steps", "mean over the batch", "at most `max_trajectory_age_steps`"),
        Metric("max_trajectory_age", "steps", "of the oldest trajectory (law 2)", "at most `max_trajectory_age_steps`, except with `mask`"),
    )),
    MetricSection("Do training and inference agree?",
            "`rollout` is a token's log-probability as the inference engine sampled it, `old` the trainer's at the start of the step. "
            "Means are over tokens that count, and M is their weight. With data from older weights the two differ by what the weights have "
            "learnt since; on-policy, only by numerics. k1, k2, k3 of d: -d, d²/2, exp(d) - 1 - d.", (
        Metric("token_mult_prob_error", "", "mean of exp(|rollout - old| M)", "< 1.05; on-policy 1.000"),
        Metric("gen_kl_error", "nats",
               "mean of k(old - rollout), of KL(inference ‖ trainer); k by `reference_policy_kl_type`", "about 1e-3 and less"),
        Metric("policy_kl_error", "nats", "mean of k(rollout - old), of KL(trainer ‖ inference)", "about 1e-3 and less"),
        Metric("js_divergence_error", "nats",
               "mean of ½k3(old - m) + ½k3(rollout - m), m = log(½exp(old) + ½exp(rollout))", "about 1e-3 and less"),
        Metric("on_policy_token_mult_prob_error", "",
               "token_mult_prob_error of the trajectories that the step's own weights sampled, if any: only numerics",
               "< 1.05; 1.000 in float32"),
        Metric("on_policy_gen_kl_error", "nats", "gen_kl_error of the same", "about 1e-3 and less"),
        Metric("off_policy_tokens", "share",
               "tokens whose probability differs from that at sampling by more than the clip of the ratio, or 0.2", "< 0.1"),
        Metric("train_inference_alarm", "0 or 1",
               "1 if trainer and inference disagree on data from the current weights, or most tokens have been off-policy for three steps",
               "0"),
        Metric("max_seq_mult_prob_error", "", "largest mean of exp(|rollout - old|) of a trajectory"),
        Metric("mean_seq_mult_prob_error", "", "mean of the same over trajectories"),
        Metric("min_seq_mult_prob_error", "", "smallest of the same"),
        Metric("max_seq_mult_prob_error_after_mask", "", "largest among the trajectories that `seq_logprob_error_threshold` left"),
        Metric("mean_seq_mult_prob_error_after_mask", "", "mean over the same"),
        Metric("min_seq_mult_prob_error_after_mask", "", "smallest among the same"),
        Metric("num_masked_seqs_by_logprob_error", "trajectories", "left out of the loss by `seq_logprob_error_threshold`", "few"),
        Metric("masked_correct_pct", "share",
               "trajectories with a reward of 1 (after scaling and shaping) among those left out", "about the share in the batch"),
    )),
    MetricSection("Loss, ratio and update",
            "r is the ratio exp(logprobs - old_logprobs), r_c the clipped one, w the importance weight. Averages over the optimizer steps "
            "of a step; minima and maxima are those of all of them, -1 where no token counts.", (
        Metric("loss", "", "the minimized loss"),
        Metric("grad_norm", "", "2-norm of the gradient before clipping", "finite, without sudden growth"),
        Metric("lr", "", "learning rate"),
        Metric("kl_penalty", "nats", "KL(policy ‖ reference), before beta", "grows slowly"),
        Metric("probs_ratio", "", "mean r", "about 1"),
        Metric("probs_ratio_min", "", "smallest r"),
        Metric("probs_ratio_max", "", "largest r"),
        Metric("probs_ratio_clamped", "", "mean r_c"),
        Metric("probs_ratio_clamped_min", "", "smallest r_c"),
        Metric("probs_ratio_clamped_max", "", "largest r_c"),
        Metric("clip_fraction_low", "share", "tokens whose ratio the lower bound stops (A < 0)", "< 0.1"),
        Metric("clip_fraction_high", "share", "tokens whose ratio the upper bound stops (A > 0)", "< 0.1"),
        Metric("sampling_importance_ratio", "", "mean w before truncation", "about 1"),
        Metric("sampling_importance_ratio_truncated", "", "mean w after truncation"),
        Metric("is_oob_ratio", "share", "tokens (seq-mask-tis: sequences) whose w is out of bounds", "small"),
        Metric("entropy", "nats",
               "mean over tokens that count of -Σ p log p, p over the whole vocabulary as sampled from: after "
               "temperature, top-k and top-p; exact", "falls slowly; at 0 nothing is explored"),
        Metric("approx_entropy", "nats",
               "-mean of exp(logprobs - rollout_logprobs) logprobs: NeMo RL's estimate of the same, from only the sampled tokens; "
               "noisier, more so for older data", "near entropy"),
        Metric("positive_nll_loss", "nats", "negative log-likelihood of trajectories with a positive reward"),
        Metric("probability_difference_masked", "share", "tokens that `probability_difference_mask` drops"),
    )),
    MetricSection("Advantages", "Over all policy tokens.", (
        Metric("advantages/mean", "", "mean advantage", "about 0"),
        Metric("advantages/std", "", "standard deviation, unbiased"),
        Metric("advantages/min", "", "smallest"),
        Metric("advantages/max", "", "largest"),
        Metric("baseline_reward/pct_0", "%", "trajectories whose baseline is 0: their whole group fails", "falls"),
        Metric("baseline_reward/pct_1", "%",
               "trajectories whose baseline is 1: their whole group succeeds", "rises; at 100 nothing is left to learn"),
        Metric("baseline_reward/pct_mixed", "%",
               "the others: if rewards are 0 or 1, those with a signal (otherwise see groups_without_spread)", "well above 0"),
        Metric("on_policy_distillation/teacher_student_logprob_gap_mean", "nats", "mean of teacher - student (opd)", "rises to 0"),
    )),
    MetricSection("The value model", "PPO. R is the return, v the value before a token.", (
        Metric("critic/loss", "", "value loss"),
        Metric("critic/explained_var", "", "1 - Var(R - v) / Var(R)", "rises towards 1; below 0 is worse than a constant"),
        Metric("critic/grad_norm", "", "2-norm of its gradient before clipping", "finite"),
        Metric("critic/lr", "", "its learning rate"),
        Metric("critic/vf_clipfrac", "share", "tokens whose clipped error is the larger", "small"),
        Metric("critic/returns_mean", "", "mean R"),
        Metric("critic/returns_sq_mean", "", "mean R^2"),
        Metric("critic/residual_sq_mean", "", "mean (R - v)^2"),
        Metric("critic/values_mean", "", "mean v", "follows returns_mean"),
        Metric("critic/values_min", "", "smallest v"),
        Metric("critic/values_max", "", "largest v"),
    )),
    MetricSection("Dynamic sampling",
                  "With `use_dynamic_sampling`. Rewards and lengths are of what was trained, without filtered groups: the mean reward is "
                  "above that of a poor policy, and below that of a good one. A validation measures all.", (
        Metric("dynamic_sampling_num_gen_batches", "batches",
               "groups scored since the step before, in generated batches", "far below `dynamic_sampling_max_gen_batches`"),
        Metric("dynamic_sampling_scored_groups", "groups", "scored since the step before"),
        Metric("dynamic_sampling_filtered_groups", "groups", "of those, filtered because all rewards were equal but for rounding"),
    )),
    MetricSection("Counters", "They continue across restarts.", (
        Metric("current_step", "steps", "steps trained so far"),
        Metric("consumed_samples", "trajectories", "trajectories trained on so far"),
        Metric("failed_prompts_total", "prompts", "prompts that have failed so far, without those that were retried", "0"),
        Metric("total_valid_tokens", "tokens", "tokens that counted in the loss so far"),
        Metric("trackers/failures", "attempts", "failed attempts to write to a tracker, since the trainer started", "0"),
        Metric("trackers/lines_behind", "lines", "lines of metrics.jsonl that the slowest tracker has not received yet", "0 or 1"),
    )),
    MetricSection("Time", "Seconds of the step, by the loop's own clock.", (
        Metric("timing/train/total_step_time", "s", "from the end of the step before to the end of this one"),
        Metric("timing/train/exposed_generation", "s", "no batch was ready: the sum of the next two", "about 0: generation keeps up"),
        Metric("timing/train/wait_for_generation", "s", "of that, groups were being generated",
               "about 0; else more replicas, or a wider age bound"),
        Metric("timing/train/wait_for_scores", "s", "of that, groups waited for their scores",
               "about 0; else more reward.workers, or a faster environment (scoring_wait, scoring_time)"),
        Metric("timing/train/policy_training", "s", "optimizer steps of the policy"),
        Metric("timing/train/policy_and_reference_logprobs", "s", "passes without a gradient, and advantages"),
        Metric("timing/train/value_training", "s", "optimizer steps of the value model"),
        Metric("timing/train/weight_sync", "s", "weights were sent to the fleet"),
        Metric("weight_channel_alarm", "1 or 2",
               "only where NCCL does not connect the trainer and its replicas as it should: 1 if it takes blocking calls, 2 if gloo "
               "carries the weights instead ([on GPUs](gpu.md#where-nccl-does-not-connect))"),
        Metric("timing/train/validation", "s",
               "a refit waited for a validation, or the loop was at work on one: began it, read its results, wrote them"),
        Metric("timing/train/checkpointing", "s",
               "the loop waited for a snapshot, in memory or for a checkpoint, and for the previous checkpoint"),
        Metric("timing/train/checkpoint_write", "s",
               "from the snapshot of a checkpoint to its publication, during training; reported with the step in which it was published",
               "below the time between two checkpoints; else `timing/train/checkpointing` grows"),
        Metric("timing/train/checkpoint_upload", "s",
               "a checkpoint was sent to `checkpointing.store`, during training; reported with the step in which it had arrived",
               "below the time between two checkpoints; else the store lacks those between"),
        Metric("store_failures", "tries", "uploads of a checkpoint to `checkpointing.store` that failed since the step before", "0"),
        Metric("offer_failures", "tries", "versions of the weights that did not reach `checkpointing.store`, for replicas that pull", "0"),
        Metric("timing/validation/total_validation_time", "s", "from its beginning until its last result, during training"),
    )),
    MetricSection("Scoring",
            "Means over the trajectories of the batch or the validation, by environment. The two add up to the time from push to score.", (
        Metric("scoring_wait/<environment>", "s", "a trajectory waited for a place in the environment, and was in transit",
               "far below the time of a step; else more reward.workers or more concurrency"),
        Metric("scoring_time/<environment>", "s", "the environment was at work on a trajectory"),
    )),
    MetricSection("Where the time went",
            "The goodput of the trainer. The shares of one step (`_pct`, with `efficiency_pct`) add up to 100. The categories are NeMo "
            "RL's, but its `efficiency_pct` is what the idle ones leave of the step, so it counts overheads as productive; its "
            "`total_waste_s` is the sum of the idle ones, its `total_wall_time_s` is `timing/train/total_step_time`. "
            "It has more for its generation workers, which a trainer here does not time: `idle/refit_event_wait`, "
            "`idle/generation_limit_pause`, `idle/buffer_full_backoff` and `wasted/failed_trajectory`; of the last two "
            "`headrace_replay_full` and `headrace_replay_requeues_total` tell. Trackers have these names, and Prometheus has them with "
            "`_` for `/`, after `headrace_trainer_`.", (
        Metric("efficiency/idle/buffer_starvation_s", "s", "no batch was ready; `timing/train/wait_for_…` tell for what"),
        Metric("efficiency/idle/buffer_starvation_pct", "%", "the same, as a share of the step"),
        Metric("efficiency/idle/refit_bubble_s", "s", "weights were sent"),
        Metric("efficiency/idle/refit_bubble_pct", "%", "the same, as a share of the step"),
        Metric("efficiency/idle/validation_s", "s", "a refit waited for a validation, or the loop was at work on one"),
        Metric("efficiency/idle/validation_pct", "%", "the same, as a share of the step"),
        Metric("efficiency/overhead/checkpoint_s", "s", "the loop waited for a checkpoint"),
        Metric("efficiency/overhead/checkpoint_pct", "%", "the same, as a share of the step"),
        Metric("efficiency/overhead/upkeep_s", "s", "the rest: deciding what to do, and writing metrics and samples"),
        Metric("efficiency/overhead/upkeep_pct", "%", "the same, as a share of the step"),
        Metric("efficiency/init/total_s", "s",
               "before the first step after each start: loading models, waiting for the buffer, resuming the run; not part of the step"),
        Metric("efficiency/productive_time_s", "s", "from the batch to its new weights"),
        Metric("efficiency/efficiency_pct", "%", "the same, as a share of the step", "near 100"),
    )),
    MetricSection("Throughput",
            "Tokens are those of whole sequences, prompts included, as in NeMo RL. A GPU is a rank of the trainer, or one of a replica's "
            "tensor parallel ranks; on CPUs, a process.", (
        Metric("performance/samples_per_sec", "1/s", "trajectories over the step"),
        Metric("performance/tokens_per_sec", "1/s", "tokens over the step"),
        Metric("performance/samples_per_sec_per_gpu", "1/s", "the same, over all GPUs"),
        Metric("performance/tokens_per_sec_per_gpu", "1/s", "the same, over all GPUs"),
        Metric("performance/policy_training_tokens_per_sec_per_gpu", "1/s", "tokens / policy_training / training GPUs"),
        Metric("performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu", "1/s",
               "tokens / policy_and_reference_logprobs / training GPUs"),
        Metric("performance/training_worker_group_tokens_per_sec", "1/s",
               "tokens / the training group's time: policy_training + policy_and_reference_logprobs"),
        Metric("performance/training_worker_group_tokens_per_sec_per_gpu", "1/s", "the same, over training GPUs"),
        Metric("performance/generation_tokens_per_sec", "1/s", "tokens / (exposed_generation + the training group's time)"),
        Metric("performance/generation_tokens_per_sec_per_gpu", "1/s", "the same, over generation GPUs"),
        Metric("performance/training_worker_idle_time_ratio", "share",
               "exposed_generation / (the same + the training group's time + weight_sync)", "near 0"),
        Metric("performance/train_flops_per_gpu", "TFLOP/s",
               "FLOPs that training the policy computed (with padding and recomputation) / policy_training / training GPUs; only for an "
               "architecture with a known formula"),
        Metric("performance/train_fp_utilization", "share",
               "train_flops_per_gpu / the device's peak (from its data sheet, or else a measured matrix product)", "0.3-0.5 on one node"),
        Metric("gpu/<number>/util", "%", "mean utilization of a GPU of the trainer's machine since the step before"),
        Metric("gpu/<number>/mem_gb", "GiB", "its memory in use, largest since the step before"),
    )),
    MetricSection(VALIDATION, "For the weights of a version, on the held-out prompts.", (
        Metric("accuracy", "", "mean reward; shown as \"mean reward\" if some reward is neither 0 nor 1", "rises"),
        Metric("accuracy/<task>", "", "the same for one task, if there are several"),
        Metric("partial_credit", "share", "completions whose reward is neither 0 nor 1"),
        Metric("pass_k", "share", "prompts with a completion whose reward is above 0; with `val_num_generations_per_prompt` of 2 or more",
            "rises"),
        Metric("mean_length", "tokens", "mean length of a completion"),
        Metric("evaluated", "prompts", "prompts with a result"),
        Metric("failed", "prompts", "prompts that ended without a reward; they enter no mean", "0"),
        Metric("pending", "prompts", "prompts without a result: the validation was given up, lost with its trainer, or skipped", "0"),
        Metric("version_min", "version", "version of the oldest weights that wrote a token"),
        Metric("version_max", "version", "version of the newest"),
    )),
)  # fmt: skip

# Trackers get these under the same names. Others get the prefix `train/` or `validation/`.
OWN_PREFIX = ("timing/", "efficiency/", "performance/", "gpu/", "trackers/")


def tracked_name(kind: str, name: str) -> str:
    """Return a metric's name in trackers, for a `train` or `validation` line."""
    return name if name.startswith(OWN_PREFIX) else f"{kind}/{name}"


def unknown(names: Iterable[str]) -> list[str]:
    """Return the names that no section has."""
    return sorted(name for name in names if not _KNOWN.fullmatch(name))


def _pattern(metric: Metric) -> str:
    return re.sub(r"<[^>]*>", "[^ ]+", re.escape(metric.name).replace(r"\<", "<").replace(r"\>", ">"))


_KNOWN = re.compile("|".join(_pattern(metric) for section in METRIC_SECTIONS for metric in section.metrics))
_SECTION_OF = [
    (re.compile(_pattern(metric)), section, metric) for section in METRIC_SECTIONS for metric in section.metrics
]


@functools.lru_cache(maxsize=10_000)
def find_metric(kind: str, name: str) -> tuple[MetricSection, Metric] | None:
    """Return the section and the metric of a name in a `train` or `validation` line; None if no section has it. A name that a section of
    the other kind has too means that of its own kind."""
    found = [(section, metric) for pattern, section, metric in _SECTION_OF if pattern.fullmatch(name)]
    own = [each for each in found if (each[0].title == VALIDATION) == (kind == "validation")]
    return next(iter(own or found), None)
