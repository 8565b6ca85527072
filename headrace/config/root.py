"""The whole configuration, and the checks between sections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails

from headrace.config.agents import MOST_SLOTS, AgentsConfig
from headrace.config.algorithm import AlgorithmConfig
from headrace.config.data import DataConfig, DataSourceConfig
from headrace.config.environments import (
    AnyEnvConfig,
    CommandConfig,
    CustomConfig,
    EnvConfig,
    EpisodicConfig,
    TargetConfig,
    VerifiersConfig,
    name_type,
)
from headrace.config.grpo import GRPOConfig
from headrace.config.in_yaml import in_yaml
from headrace.config.keys import ItemPath
from headrace.config.logger import LoggerConfig
from headrace.config.loss import LossConfig, OnPolicyRatio, ValueLossConfig
from headrace.config.marks import MayChange
from headrace.config.policy import PolicyConfig, ValueConfig
from headrace.config.ppo import PPOConfig
from headrace.config.references import Reference, restore_references, variables
from headrace.config.section import Section
from headrace.config.security import SecurityConfig
from headrace.config.services import (
    CheckpointingConfig,
    PageConfig,
    ReplayConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    WeightChannelConfig,
)
from headrace.config.telemetry import TelemetryConfig

TEACHER_KEY = "grpo.adv_estimator.teacher_model_name"
# The buffer treats a gap of this length, or of half of `rollout.dead_after_s` if that is longer, as a pause and not as an outage
# (LONGEST_GAP_MS in _run.lua).
LONGEST_GAP_S = 5.0
# Tokens a second of one sequence that a busy replica may not reach.
_FAST_ANSWER = 30.0
# The name is part of the buffer's keys.
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Config(Section):
    run: RunConfig = RunConfig()
    grpo: GRPOConfig | None = None
    ppo: PPOConfig | None = None
    loss_fn: MayChange[LossConfig] = LossConfig()
    value_loss_fn: MayChange[ValueLossConfig] = ValueLossConfig()
    policy: PolicyConfig = PolicyConfig()
    value: ValueConfig = ValueConfig()
    data: DataConfig = DataConfig()
    env: dict[str, AnyEnvConfig] = Field({}, description="environments, by the names that data sets use")
    replay: ReplayConfig = ReplayConfig()
    rollout: MayChange[RolloutConfig] = RolloutConfig()
    reward: MayChange[RewardConfig] = RewardConfig()
    agents: AgentsConfig = AgentsConfig()
    trainer: MayChange[TrainerConfig] = TrainerConfig()
    page: MayChange[PageConfig] = PageConfig()
    weight_channel: MayChange[WeightChannelConfig] = WeightChannelConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: MayChange[LoggerConfig] = LoggerConfig()
    telemetry: MayChange[TelemetryConfig] = TelemetryConfig()
    security: MayChange[SecurityConfig] = SecurityConfig()
    # the run's folder, if it is not the one that `run` names
    _folder: Path | None = PrivateAttr(None)
    _references: tuple[Reference, ...] = PrivateAttr(())

    @model_validator(mode="before")
    @classmethod
    def _grpo_unless_ppo(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("grpo") is None and values.get("ppo") is None:
            return {**values, "grpo": {}}
        return values

    @field_validator("env", mode="before")
    @classmethod
    def _names_are_types(cls, values: Any) -> Any:
        return {name: name_type(name, env) for name, env in values.items()} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = [
            InitErrorDetails(type="value_error", loc=keys, input=None, ctx={"error": message})
            for keys, message in _find_contradictions(self)
        ]
        if problems:
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self

    @property
    def has_episodes(self) -> bool:
        """Whether the run has work for runners."""
        return bool(self.episodic)

    @property
    def episodic(self) -> dict[str, EpisodicConfig]:
        """The environments that run episodes."""
        return {name: env for name, env in self.env.items() if isinstance(env, EpisodicConfig) and env.episodes}

    def list_scorers(self, name: str) -> Iterator[str]:
        """Yield the environments that score what `env.<name>` scores: itself, its parts and its grader."""
        yield name
        for scorer in self.env[name].scorers:
            yield from self.list_scorers(scorer)

    @property
    def custom(self) -> dict[str, CustomConfig]:
        """The environments in their own processes, which the hub dials or which dial the hub."""
        return {name: env for name, env in self.env.items() if isinstance(env, CustomConfig)}

    @property
    def longest_episode_s(self) -> float:
        """Seconds after which a program must have ended by any clock. Its own stand still while no replica can sample, and may do so for as
        long as a group may be silent."""
        return self.agents.episode_s + self.agents.finish_s + self.replay.group_deadline_s

    @property
    def started(self) -> dict[str, TargetConfig | CommandConfig]:
        """The environments that `headrace up` starts."""
        startable = {name: env for name, env in self.env.items() if isinstance(env, TargetConfig | CommandConfig)}
        return {name: env for name, env in startable.items() if env.is_started}

    @property
    def algorithm(self) -> AlgorithmConfig:
        """`grpo` or `ppo`, whichever the run uses."""
        algorithm = self.ppo or self.grpo
        assert algorithm is not None
        return algorithm

    @property
    def max_num_steps(self) -> int:
        """Trainer steps after which the run ends; 0 for a run that only evaluates."""
        return self.algorithm.max_num_steps if self.data.evaluate is None else 0

    @property
    def policy_batch(self) -> int:
        """Trajectories in an optimizer step of the policy."""
        return self.policy.train_global_batch_size or self.algorithm.batch_size

    @property
    def trainer_precisions(self) -> dict[str, str]:
        """The precisions in which the trainer computes its models, by the key that sets each."""
        value = {} if self.value.precision is None else {"value.precision": self.value.precision}
        return {"policy.precision": self.policy.precision, **value}

    @property
    def value_batch(self) -> int:
        """Trajectories in an optimizer step of the value model."""
        return self.value.train_global_batch_size or self.policy_batch

    @property
    def prompts_of_each_set(self) -> int:
        """Prompts that a data set gives at its turn, under `data.use_multiple_dataloader`."""
        return self.data.num_prompts_per_dataloader or self.algorithm.num_prompts_per_step // len(self.data.train)

    @property
    def max_response_length(self) -> int:
        """The number of tokens from which `reward_shaping` applies the full overlong penalty."""
        return self.algorithm.reward_shaping.max_response_length or self.policy.max_total_sequence_length

    @property
    def warnings(self) -> list[str]:
        """Settings that are valid but probably not intended, one line each."""
        new, context = self.policy.generation.max_new_tokens, self.policy.max_total_sequence_length
        cut_off = [
            f"policy.generation.max_new_tokens {new} is never reached: prompt and completion together have at most "
            f"policy.max_total_sequence_length {context} tokens; raise the latter, or lower the former"
        ]
        answer = min(new, context)
        slow = [
            f"{key} {limit:g}: an answer of {answer} tokens (policy.generation.max_new_tokens) would need {answer / limit:.0f} tokens a "
            f"second; raise it{also}"
            for key, limit, also, applies in (
                ("agents.call_s", self.agents.call_s, ", and agents.episode_s with it", self.has_episodes),
                ("trainer.validation_deadline_s", self.trainer.validation_deadline_s, "", bool(self.data.validation)),
            )
            if applies and answer / limit > _FAST_ANSWER
        ]
        validators, replicas = self.trainer.validation_replicas, self.rollout.replicas
        too_few = [
            f"trainer.validation_replicas {validators} with rollout.replicas {replicas}: one replica always goes on training, so that "
            f"{'all validate, and refits wait' if replicas == 1 else f'{replicas - 1} validate'} unless others join; raise rollout.replicas"
        ]
        few = too_few if validators >= replicas else []
        name, age = self.algorithm.name, self.algorithm.max_age
        stale = [
            f"{name}.async_{name}.max_trajectory_age_steps {age}: tokens may be so many steps older than the weights, and the loss treats "
            "them as if these had sampled them, by which a policy can collapse; set loss_fn.prev_logprobs_source to generation, or "
            "loss_fn.use_importance_sampling_correction to true"
        ]
        several = self.algorithm.val_num_generations_per_prompt
        alike = [
            f"{name}.val_num_generations_per_prompt {several} with policy.generation.val_temperature 0: greedy completions of a prompt are "
            "all the same, so that pass_k is the accuracy; raise the temperature, or ask once"
        ]
        return [
            *(cut_off if new >= context else []),
            *slow,
            *(stale if age and not self.loss_fn.corrects_for_sampling else []),
            *(alike if several > 1 and self.policy.generation.val_temperature == 0 else []),
            *self._fp8_warnings,
            *self._shaping_warnings(answer),
            *few,
        ]

    def _shaping_warnings(self, answer: int) -> Iterator[str]:
        """`answer`: the most tokens that a single answer can have."""
        shaping, scaling = self.algorithm.reward_shaping, self.algorithm.reward_scaling
        section, coefficient = f"{self.algorithm.name}.reward_shaping", shaping.stop_properly_penalty_coef
        for key in shaping.ignored:
            yield f"{section}.{key} has no effect: stop_properly_penalty_coef replaces the overlong penalty; leave one of the two out"
        begins = self.max_response_length - shaping.overlong_buffer_length
        if shaping.enabled and coefficient is None and begins >= answer and not self.has_episodes:
            yield (
                f"{section} has no effect: its penalty begins after {begins} tokens (max_response_length {self.max_response_length} minus "
                f"overlong_buffer_length {shaping.overlong_buffer_length}), and no answer has more than {answer} "
                f"(policy.generation.max_new_tokens); set max_response_length to {answer}"
            )
        lowest = min(scaling.target_min, scaling.target_max)
        if shaping.enabled and coefficient is not None and scaling.enabled and lowest < 0:
            yield (
                f"{section}.stop_properly_penalty_coef {coefficient:g} with reward_scaling down to {lowest:g}: times a factor below 1 a "
                "negative reward is closer to 0, so that an answer that is cut off gets more than one that fails; scale rewards to 0 and "
                "more, or leave the factor out"
            )

    @property
    def unused_environments(self) -> list[str]:
        """The names of the environments that score nothing: no data set names them, and no environment that one names does."""
        used = {name for source in self.data.sources if source.env_name for name in self.list_scorers(source.env_name)}
        return [name for name in self.env if name not in used]

    @property
    def _fp8_warnings(self) -> list[str]:
        if self.policy.generation.vllm_cfg.kv_cache_dtype != "fp8":
            return []
        corrected, channel = self.loss_fn.corrects_for_sampling, self.weight_channel
        largest = channel.verify_tolerance or 2.0
        mean = channel.verify_mean_tolerance or min(0.2, largest)
        remedy = "" if corrected else " loss_fn.use_importance_sampling_correction: true corrects for that;"
        return [
            "policy.generation.vllm_cfg.kv_cache_dtype fp8: replicas keep keys and values without calibrated scales, each with an error of "
            "up to a sixteenth, so they sample from another distribution than the trainer computes (0.06 nats a token in a tiny model);"
            f"{remedy} refits are verified, and the train-inference alarm is silent, up to {mean:g} nats on average (weight_channel."
            f"verify_mean_tolerance) and {largest:g} at most (weight_channel.verify_tolerance). Set it to auto, or watch "
            "token_mult_prob_error"
        ]

    @property
    def run_folder(self) -> Path:
        """The folder of this run. Raises if the run has no id yet (`headrace up` makes one before it starts anything)."""
        if self.run.id is None:
            raise ValueError("run.id is not set")
        return self._folder or Path(self.run.dir) / self.run.id

    @property
    def run_store(self) -> str | None:
        """The address of this run's folder in the object store; None if it has none."""
        settings = self.checkpointing
        return None if settings.store is None else f"{settings.store.rstrip('/')}/{self.run.id}"

    def change(self, **sections: Mapping[str, Any]) -> Config:
        """Return the configuration with other values of some keys, by section. They are not validated."""
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )

    def relocate(self, folder: Path) -> Config:
        """Return the configuration of a run that is now in `folder`, because it was moved, renamed or copied. Its buffer and its
        checkpoints know it by its first name, `run.id`."""
        placed = self.model_copy()
        placed._folder = folder
        return placed

    def referring(self, references: Sequence[Reference]) -> Config:
        """Return the configuration with the `references` of what came from the environment."""
        referring = self.model_copy()
        referring._references = tuple(one for place, one in enumerate(references) if one not in references[:place])
        return referring

    @property
    def references(self) -> tuple[Reference, ...]:
        """The text that came from the environment, except for paths, the names of models, and `run`."""
        return self._references

    @property
    def variables(self) -> set[str]:
        """The variables of the environment that the configuration refers to."""
        return variables(reference.expression for reference in self._references)

    def show(self) -> dict[str, Any]:
        """Return every value, for files and people: text from the environment as the expression that gives it."""
        values: dict[str, Any] = restore_references(self.model_dump(mode="json"), self._references)
        return values

    @property
    def redis_url(self) -> str:
        """The URL of the buffer's server: `replay.redis_url`, or that of the embedded server."""
        return self.replay.redis_url or f"redis://{self.replay.redis_host}:{self.replay.redis_port}/0"

    @property
    def models(self) -> dict[str, str]:
        """The models that the run starts from, by the key that names them: directories, or names on the Hugging Face Hub."""
        models = {"policy.model_name": self.policy.model_name}
        if self.grpo is not None and self.grpo.adv_estimator.teacher_model_name is not None:
            models[TEACHER_KEY] = self.grpo.adv_estimator.teacher_model_name
        if self.algorithm.adv_estimator.has_value_model and self.value.model_name is not None:
            models["value.model_name"] = self.value.model_name
        return models

    @property
    def tokenizer(self) -> tuple[str, str]:
        """The key that names the run's tokenizer, and its value: a directory, or a name on the Hugging Face Hub."""
        if self.policy.tokenizer.name is not None:
            return "policy.tokenizer.name", self.policy.tokenizer.name
        return "policy.model_name", self.policy.model_name

    @property
    def needs_one_path(self) -> str | None:
        """The setting that computes along all tokens of a trajectory in order, so that episodes with branching calls can't be trained; None
        if no such setting is used."""
        loss, generation = self.loss_fn, self.policy.generation
        if loss.sequence_level_importance_ratios:
            return "loss_fn.sequence_level_importance_ratios true"
        if loss.truncated_importance_sampling_type == "seq-mask-tis":
            return "loss_fn.truncated_importance_sampling_type seq-mask-tis"
        if self.algorithm.adv_estimator.has_value_model:
            return f"{self.algorithm.name}.adv_estimator.name {self.algorithm.adv_estimator.name}"
        if self.grpo is not None and self.grpo.adv_estimator.kl_to_go:
            return "grpo.adv_estimator.kl_to_go true"
        if not loss.token_level_loss and (generation.top_k is not None or generation.top_p < 1):
            return "loss_fn.token_level_loss false with policy.generation.top_k or top_p"
        return None

    @property
    def checkpoint_folder(self) -> Path:
        folder = self.checkpointing.checkpoint_dir
        return Path(folder) if folder else self.run_folder / "checkpoints"

    @property
    def log_folder(self) -> Path:
        """The folder for the files of trackers, samples and alarms. Raises as `run_folder` does."""
        folder, logs = self.logger.log_dir, self.run_folder / "logs"
        return Path(folder) / str(self.run.id) if folder else logs


def _find_contradictions(config: Config) -> Iterator[tuple[ItemPath, str]]:
    """Yield what is wrong between the sections. A message that begins with the key at fault needs no other keys."""
    if config.grpo is not None and config.ppo is not None:
        yield (
            (),
            "grpo and ppo are both given, but a run has only one of them; leave one out (on the command line, grpo=null)",
        )
        return
    for check in (
        _check_batches,
        _check_loss,
        _check_estimator,
        _check_shaping,
        _check_data_sets,
        _check_leases,
        _check_store,
        _check_collective_timeout,
        _check_episodes,
    ):
        for message in check(config):
            yield (), message
    for place, source in config.data.places.items():
        for key, message in (*_find_unread(config, place, source), *_check_source(config, source)):
            yield (*place, key), message
    for name, env in config.env.items():
        for problem in _check_environment(config, name, env):
            yield ("env", name, *problem.partition(" ")[0].split(".")[1:]), f"env.{name}{problem}"


def _check_environment(config: Config, name: str, env: EnvConfig) -> Iterator[str]:
    """Yield what is wrong, to be appended to `env.<name>`."""
    if not _ENVIRONMENT_NAME.fullmatch(name):
        yield " is not a valid name; use 1 to 64 letters, digits and ._-"
    yield from env.problems(name, config.env)
    if env.runs_episodes and config.algorithm.asynchrony.staleness_policy == "drop":
        yield (
            ".episodes true with staleness_policy drop: an episode would be replayed only because it is too old; use ordered or mask"
        )
    deadline = config.replay.scoring_deadline_s
    if env.timeout_s > deadline:
        yield (
            f".timeout_s {env.timeout_s:g} is more than replay.scoring_deadline_s {deadline:g}, after which the trajectories of a lost "
            "scorer are sent again, and the first requests must have ended; lower timeout_s or raise scoring_deadline_s"
        )


def _find_unread(config: Config, place: ItemPath, source: DataSourceConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that a data set gives without effect, each with the message. What `data.default` gives is for others."""
    kind = f"data_path {source.data_path}" if source.dataset_name is None else f"dataset_name {source.dataset_name}"
    for key in source.unread(str(place[1])):
        value, default = getattr(source, key), DataSourceConfig.model_fields[key].default
        if value not in (default, getattr(config.data.default, key)):
            yield (
                key,
                f"{in_yaml(value)} has no effect on {kind} in data.{place[1]}; leave it out, or set it to its default, {in_yaml(default)}",
            )


def _check_source(config: Config, source: DataSourceConfig) -> Iterator[tuple[str, str]]:
    """Check that there is the environment of a data set, and that one of verifiers gets its own tasks, with the prompts that it makes of
    them. Yield the key at fault, and the message."""
    name = in_yaml(source.env_name)
    env = config.env.get(source.env_name or "")
    if env is None:
        known = ", ".join(sorted(config.env)) or "none"
        yield "env_name", f"{name} is not one of the environments under env ({known})"
        return
    of_verifiers, plays_them = source.dataset_name == "verifiers", isinstance(env, VerifiersConfig)
    if of_verifiers and not plays_them:
        yield (
            "dataset_name",
            f"verifiers with env_name {name}, which is of another type; name an environment of type verifiers",
        )
    if plays_them and not of_verifiers:
        yield (
            "env_name",
            f"{name} is of type verifiers, which has only its own tasks; give dataset_name: verifiers instead of another data set",
        )
    for key in ("system_prompt", "system_prompt_file", "prompt_file"):
        if of_verifiers and getattr(source, key) is not None:
            yield (
                key,
                "dataset_name is verifiers, whose environment makes its own prompts; leave this out (a system prompt is "
                f"env.{source.env_name}.verifiers.taskset.system_prompt, a file)",
            )


def _check_episodes(config: Config) -> Iterator[str]:
    """Check that every group of episodes can be leased, and can end within its deadlines."""
    episodes = config.episodic
    if not episodes:
        return
    agents, replay, algorithm = config.agents, config.replay, config.algorithm
    if config.trainer.validation_replicas:
        yield (
            f"trainer.validation_replicas {config.trainer.validation_replicas} with an environment that has episodes "
            f"({', '.join(sorted(episodes))}): any replica answers their calls, so that none can measure one version alone; set it to 0"
        )
    started = algorithm.num_generations_per_prompt + replay.redundant_generations
    validated = algorithm.val_num_generations_per_prompt
    if agents.slots < started:
        yield (
            f"agents.slots {agents.slots} is less than {started}, the number of episodes of a group, which start together "
            f"({algorithm.name}.num_generations_per_prompt and replay.redundant_generations); raise it"
        )
    if agents.slots_of("validation") < validated:
        yield (
            f"agents.validation_slots {agents.slots_of('validation')} (agents.slots, unless given) is less than {validated}, the number of "
            f"episodes of a validation group, which start together ({algorithm.name}.val_num_generations_per_prompt); raise it"
        )
    validation_slots = agents.slots_of("validation")
    if agents.slots + validation_slots > MOST_SLOTS:
        yield (
            f"agents.slots {agents.slots} and agents.validation_slots {validation_slots} (agents.slots, unless given) are together more "
            f"than the {MOST_SLOTS} that a runner can hold; lower them, and raise agents.runners"
        )
    most = max(started, validated)
    done = (algorithm.num_prompts_per_step - 1) * algorithm.num_generations_per_prompt
    needed = (2 * most + done) * agents.max_episode_bytes
    if needed > replay.max_bytes:
        yield (
            f"agents.max_episode_bytes {agents.max_episode_bytes}: each of the {most} episodes of a group may hold twice as much while it "
            f"is played, and each of the step's {done} others as much once it is done. That is more than replay.max_bytes "
            f"{replay.max_bytes}, so the last group of a step might never be leased; lower it, or raise max_bytes to {needed}"
        )
    if config.trainer.validation_deadline_s < agents.episode_s and any(
        source.env_name in episodes for source in config.data.validation
    ):
        yield (
            f"trainer.validation_deadline_s {config.trainer.validation_deadline_s:g} is less than agents.episode_s {agents.episode_s:g}: a "
            "validation would be given up while its episodes still run; raise it, or lower agents.episode_s"
        )
    if agents.branches != "refuse" and (needs := config.needs_one_path) is not None:
        yield (
            f"{needs} with agents.branches allow: the setting needs a trajectory to be one sequence, and one with branches is not; set "
            "agents.branches to refuse, or change the setting"
        )


def _check_batches(config: Config) -> Iterator[str]:
    """Check that every optimizer step takes the same number of whole trajectories of the batch."""
    algorithm = config.algorithm
    for section, size in (
        ("policy", config.policy.train_global_batch_size),
        ("value", config.value.train_global_batch_size),
    ):
        if size is not None and algorithm.batch_size % size:
            yield (
                f"{section}.train_global_batch_size {size} does not divide the {algorithm.batch_size} trajectories of a batch "
                f"({algorithm.name}.num_prompts_per_step {algorithm.num_prompts_per_step} x num_generations_per_prompt "
                f"{algorithm.num_generations_per_prompt}); give a divisor, or null for one optimizer step per batch"
            )


def _check_loss(config: Config) -> Iterator[str]:
    algorithm, loss = config.algorithm, config.loss_fn
    on_policy = isinstance(loss.policy_term, OnPolicyRatio)
    if on_policy and config.policy_batch != algorithm.batch_size:
        yield (
            f"loss_fn.force_on_policy_ratio true with policy.train_global_batch_size {config.policy_batch} of the "
            f"{algorithm.batch_size} trajectories of a batch: from the second optimizer step on the ratio is not 1; set one of "
            "them to false or null"
        )
    if on_policy and config.ppo is not None and config.ppo.ppo_epochs > 1:
        yield (
            f"loss_fn.force_on_policy_ratio true with ppo.ppo_epochs {config.ppo.ppo_epochs}: from the second epoch on the ratio "
            "is not 1; set force_on_policy_ratio false or ppo_epochs 1"
        )
    if algorithm.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty > 0:
        yield (
            f"{algorithm.name}.skip_reference_policy_logprobs_calculation true with loss_fn.reference_policy_kl_penalty "
            f"{loss.reference_policy_kl_penalty}, which needs a reference policy; set one of them to false or 0"
        )


def _check_estimator(config: Config) -> Iterator[str]:
    estimator, algorithm, loss = config.algorithm.adv_estimator, config.algorithm, config.loss_fn
    key = f"{algorithm.name}.adv_estimator.name {estimator.name}"
    grpo, n = config.grpo, algorithm.num_generations_per_prompt
    if n == 1 and estimator.has_group_baseline:
        yield (
            f"{algorithm.name}.num_generations_per_prompt 1 with {key}, which compares a reward with those of its group: a group of one "
            "has no others, so that every advantage would be 0; use 2 or more, or name reinforce_plus_plus with minus_baseline false"
        )
    if n == 1 and algorithm.use_dynamic_sampling:
        yield (
            f"{algorithm.name}.num_generations_per_prompt 1 with use_dynamic_sampling true: the rewards of a group of one are always "
            "equal, so that every group would be filtered; use 2 or more, or set the latter to false"
        )
    if estimator.has_teacher and algorithm.use_dynamic_sampling:
        yield (
            f"{algorithm.name}.use_dynamic_sampling true with {key}: it filters groups by their rewards, which have no part in the "
            "advantages; set it to false"
        )
    if algorithm.reward_shaping.enabled and (estimator.has_teacher or estimator.weighs_components):
        yield (
            f"{algorithm.name}.reward_shaping.enabled true with {key}, whose advantages don't come from the reward that is shaped; set it "
            "to false" + ("" if estimator.has_teacher else ", and have the environment give length as a component")
        )
    yield from _check_teacher(config, key)
    if loss.use_kl_in_reward and not estimator.takes_kl:
        yield (
            f"loss_fn.use_kl_in_reward true with {key}, which has no token rewards to subtract it from; set it to false, or choose "
            "grpo.adv_estimator.name reinforce_plus_plus or ppo.adv_estimator.name gae"
        )
    if grpo is not None and grpo.adv_estimator.kl_to_go and not loss.kl_in_reward:
        yield (
            "grpo.adv_estimator.kl_to_go true without a KL penalty in the rewards; set loss_fn.use_kl_in_reward true and "
            "loss_fn.reference_policy_kl_penalty above 0, or leave kl_to_go out"
        )


def _check_teacher(config: Config, key: str) -> Iterator[str]:
    teacher = config.grpo.adv_estimator.teacher_model_name if config.grpo else None
    has_teacher = config.algorithm.adv_estimator.has_teacher
    if has_teacher and teacher is None:
        yield (f"{key} without grpo.adv_estimator.teacher_model_name; name the model that the policy is to imitate")
    if teacher is not None and not has_teacher:
        yield (
            f"grpo.adv_estimator.teacher_model_name {in_yaml(teacher)} with {key}, which has no teacher; leave it out, or set name: opd"
        )


def _check_shaping(config: Config) -> Iterator[str]:
    shaping, name = config.algorithm.reward_shaping, config.algorithm.name
    longest = config.max_response_length
    if shaping.enabled and shaping.stop_properly_penalty_coef is None and shaping.overlong_buffer_length > longest:
        yield (
            f"{name}.reward_shaping.overlong_buffer_length {shaping.overlong_buffer_length} is more than max_response_length "
            f"{longest} (null: policy.max_total_sequence_length), so that an empty completion would be overlong; lower it"
        )


def _check_collective_timeout(config: Config) -> Iterator[str]:
    """Check that a rank is not reported as frozen while it waits for another that waits for the buffer or for replicas."""
    trainer, channel = config.trainer, config.weight_channel
    longest, key = max(
        (trainer.fleet_deadline_s, "trainer.fleet_deadline_s"), (channel.timeout_s, "weight_channel.timeout_s")
    )
    if trainer.collective_timeout_s <= longest:
        yield (
            f"trainer.collective_timeout_s {trainer.collective_timeout_s:g} is not more than {key} {longest:g}: a rank that only waits "
            "that long would be reported as frozen; raise the former, or lower the latter"
        )


def _check_data_sets(config: Config) -> Iterator[str]:
    """Check that each data set has the same share of every batch."""
    data, algorithm = config.data, config.algorithm
    if not data.use_multiple_dataloader:
        if data.num_prompts_per_dataloader is not None:
            yield (
                f"data.num_prompts_per_dataloader {data.num_prompts_per_dataloader} with data.use_multiple_dataloader false, which mixes "
                "all sets; leave it out, or set the latter to true"
            )
        return
    each, sets = data.num_prompts_per_dataloader, len(data.train)
    if sets < 2:
        yield (
            f"data.use_multiple_dataloader true with {sets} data sets under data.train; list two or more to draw from in turn, or set it "
            "to false"
        )
    if algorithm.num_prompts_per_step % (sets * (each or 1)):
        yield (
            f"{algorithm.name}.num_prompts_per_step {algorithm.num_prompts_per_step} is not a multiple of the {sets} data sets "
            f"of data.train times data.num_prompts_per_dataloader {each or 'null (any)'}, so a batch would not be drawn evenly; change one "
            "of them"
        )


def _check_store(config: Config) -> Iterator[str]:
    if config.rollout.weights_from == "store" and config.checkpointing.store is None:
        yield "rollout.weights_from is store, and checkpointing.store names none; set it to that of the trainer"


def _check_leases(config: Config) -> Iterator[str]:
    """Check that no replica counts as dead because the server was away, and that leases outlive dead replicas, so that the groups of a dead
    replica are known."""
    lease_s, dead_after_s, heartbeat_s = config.replay.lease_s, config.rollout.dead_after_s, config.rollout.heartbeat_s
    unreachable_s = max(LONGEST_GAP_S, dead_after_s / 2)
    if dead_after_s < unreachable_s + 2 * heartbeat_s:
        yield (
            f"rollout.dead_after_s {dead_after_s:g} is less than {unreachable_s + 2 * heartbeat_s:g}: two heartbeats (rollout.heartbeat_s "
            f"{heartbeat_s:g}) and the {unreachable_s:g} s for which the buffer's server may be away before its clock stops. Replicas "
            "would count as dead because the server was restarted; raise it, or lower rollout.heartbeat_s"
        )
    if lease_s < dead_after_s:
        yield (
            f"replay.lease_s {lease_s:g} is less than rollout.dead_after_s {dead_after_s:g}: a group that kills its replica would not be "
            "found, because its lease ends before the replica counts as dead; raise the former or lower the latter"
        )
