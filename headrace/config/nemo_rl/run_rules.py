"""Rules for everything around the algorithm: `data`, `env`, `logger`, `checkpointing`, `cluster` and the data plane."""

from __future__ import annotations

from typing import Any, get_args

from headrace.config.data import OWN_CODE, Generator, HubName, ProcessorName
from headrace.config.in_yaml import in_yaml
from headrace.config.nemo_rl.rules import Rule, Whole, look, names, off, only, refused, renamed, replaced, used

# data sets of images, audio and video, by their names in small letters and with hyphens
MULTIMODAL = (
    "clevr-cogent",
    "refcoco",
    "geometry3k",
    "mmpr-tiny",
    "avqa",
    "daily-omni",
    "intent",
)

_BRING = (
    "convert it to a JSONL file, and give data_path, with the question under input_key and the answer under output_key"
)


def _dataset(value: Any) -> Any:
    """Return a name that Headrace reads too, or None where `data_path` names the data set."""
    if value == "ResponseDataset":
        return None
    known = (*get_args(Generator), *get_args(HubName))
    if value is not None and value not in known and not OWN_CODE.fullmatch(str(value)):
        raise ValueError(f"{in_yaml(value)} is not supported; {_BRING}, or use one of {', '.join(known)}")
    return value


# Headrace does their work for each data set that is read by name, and for files
_WITHOUT_NAME = (
    "math_hf_data_processor",
    "math_data_processor",
    "math_gdpo_data_processor",
    "helpsteer3_data_processor",
)


def _processor(value: Any) -> Any:
    """Return a name that Headrace reads too, or None where problems already have a question and an answer."""
    if value is None or value in _WITHOUT_NAME:
        return None
    if value not in get_args(ProcessorName) and not OWN_CODE.fullmatch(str(value)):
        raise ValueError(
            f"{in_yaml(value)} is not one of {', '.join((*_WITHOUT_NAME, *get_args(ProcessorName)))}; write a function that is called "
            "with each row and returns one with input and output, and name it as FILE.py:NAME"
        )
    return value


_VERIFY = (
    "hf_math_verify is none; dapo_math_verify is answer_line, which takes what follows the last `Answer:`. Headrace compares it by "
    "math-verify, NeMo RL as text; for whole numbers the result is the same"
)


def _extract(value: Any) -> Any:
    ours = {"hf_math_verify": "none", "dapo_math_verify": "answer_line"}
    if value is not None and value not in ours:
        raise ValueError(
            f"{in_yaml(value)} is not one of {', '.join(ours)}; choose one, or serve an environment (env.math.target)"
        )
    return ours.get(value)


def _served(name: str) -> Any:
    def fine(value: Any, whole: Whole) -> bool:
        return bool(look(whole, f"env.{name}.target") or look(whole, f"env.{name}.type"))

    return fine


def _model_itself(value: Any, whole: Whole) -> bool:
    return off(value, whole) or value == look(whole, "env.reward_model.model_name")


def _custom_dataloader(value: Any, whole: Whole) -> bool:
    """Whether the data loader has no effect: NeMo RL's example draws like Headrace, and any other is called only with several data
    loaders."""
    example = isinstance(value, str) and value.endswith(".example_custom_dataloader")
    return off(value, whole) or example or off(look(whole, "data.use_multiple_dataloader"), whole)


def _metric(value: Any) -> Any:
    """Convert the bare names of older releases. `val_reward` was the mean reward of a validation."""
    if isinstance(value, str) and not value.startswith(("val:", "train:")):
        older = {"val_reward": "val:accuracy", "val_accuracy": "val:accuracy"}
        if value not in older:
            raise ValueError(f"{in_yaml(value)} is neither val:… nor train:…; write for example val:accuracy")
        return older[value]
    return value


def _source(at: str) -> list[Any]:
    return [
        *used(
            at,
            "dataset_name",
            "ResponseDataset is data_path; openai_format is data_path with input_key: messages and output_key: null; your own class is "
            "called with task_config",
            _dataset,
        ),
        *used(at, "data_path input_key output_key seed env_name"),
        *used(at, "split subset split_validation_size repeat prompt_file system_prompt_file"),
        *used(
            at,
            "processor",
            "those of NeMo RL's named data sets are null; your own function is called with a row",
            _processor,
        ),
        *used(at, "system_prompt"),
        renamed(f"{at}.chat_key", f"{at}.input_key", "for openai_format"),
        *refused(_BRING, f"{at}.system_key", f"{at}.tool_key"),
        *replaced("datasets keeps its own cache (HF_HOME)", f"{at}.download_dir", f"{at}.cache_dir"),
    ]


DATA = [
    *used("data", "shuffle max_input_seq_length num_prompts_per_dataloader"),
    *used("data", "use_multiple_dataloader", "asynchronous runs draw from several sets too"),
    *replaced("the trainer reads all problems once", "data.num_workers"),
    *_source("data.train.*"),
    *_source("data.validation.*"),
    *_source("data.default"),
    *refused(
        "custom iterators have their own state, but the order of prompts depends only on the seed, so that a killed run trains none "
        "twice. use_multiple_dataloader draws num_prompts_per_dataloader prompts from each set in turn; for other shares, give the sets "
        "weights (data.train.<number>.weight) instead",
        "data.custom_dataloader",
        fine=_custom_dataloader,
    ),
    *refused(
        "it belongs to the flat form of earlier releases, which isn't read beside data.train; move it into data.train or data.default",
        *names("data", "dataset_name train_data_path val_data_path prompt_file system_prompt_file processor env_name"),
    ),
    *refused(
        "prompts go through the chat template; leave it out",
        "data.add_bos",
        "data.add_eos",
        fine=lambda value, whole: value is not False,
    ),
    *replaced(
        "prompts go through the chat template, which asks for an answer",
        "data.add_generation_prompt",
        "data.add_system_prompt",
    ),
]

ENV = [
    Rule("env.math.math_verify_impl", "renamed", to="env.math.extract", says=_VERIFY, convert=_extract),
    *used("env.*", "type target timeout_s max_batch_size failure_share give_up_after require_stop extract"),
    *used("env.code", "runs_with cpu_s wall_s memory_mb processes partial_credit"),
    *replaced("reward.workers", "env.*.num_workers"),
    renamed(
        "env.math.verifier_type",
        "env.math.extract",
        "english_multichoice is choice, which also accepts a letter in a box, in a tag or alone, and uses the last letter where NeMo RL "
        "uses the first; multilingual_multichoice is refused",
        gathered=True,
    ),
    *refused(
        "math_multi_reward compares letter by letter, like hf_math_verify in NeMo RL; leave it out",
        "env.math_multi_reward.math_verify_impl",
        fine=only("hf_math_verify"),
    ),
    *refused(
        "math_multi_reward compares letter by letter; for multiple choice use math",
        "env.math_multi_reward.verifier_type",
        fine=only("math"),
    ),
    *replaced("policy.generation.stop_strings", "env.math.stop_strings", "env.math_multi_reward.stop_strings"),
    *used("env.reward_model", "model_name precision batch_size max_model_len"),
    *replaced("an environment that a data set names is started", "env.reward_model.enabled"),
    *replaced(
        "the model is on one device, in its own process (env.reward_model.device)",
        *names(
            "env.reward_model",
            "resources.** dtensor_cfg.** automodel_cfg.** megatron_cfg.** generation.** colocated.**",
        ),
    ),
    *replaced("batch_size", "env.reward_model.logprob_batch_size"),
    *replaced("a reward model is not trained", "env.reward_model.max_grad_norm"),
    *replaced(
        "completions are batched by number, without packing",
        *names("env.reward_model", "dynamic_batching.** sequence_packing.** make_sequence_length_divisible_by"),
    ),
    *refused(
        "the tokenizer is the one beside the model; leave it out, or set it to the name of the model",
        "env.reward_model.tokenizer.name",
        fine=_model_itself,
    ),
    *refused(
        "the chat template is the one beside the model; leave it out",
        "env.reward_model.tokenizer.chat_template",
        "env.reward_model.tokenizer.chat_template_kwargs",
    ),
    *refused(
        "NeMo RL checkpoints can't be read; set env.reward_model.model_name to a Hugging Face model",
        "env.reward_model.checkpoint_path",
    ),
    *refused(
        "the reward is the model's single logit, as with bradley_terry; set it to bradley_terry",
        "env.reward_model.reward_model_cfg.reward_model_type",
        fine=only("bradley_terry"),
    ),
    *replaced("the model has one label", "env.reward_model.reward_model_cfg.enabled"),
    *refused(
        "in NeMo RL this is an interpreter for several turns, which gives no rewards; to test programs set env.code.type code and give "
        "the tests (docs/environments.md), or serve an environment (env.code.target)",
        "env.code",
        "env.code.**",
        fine=_served("code"),
        once=True,
    ),
    *(
        row
        for name in ("code_jaccard", "vlm", "nemo_gym")
        for row in refused(
            f"not built in; write it (docs/environments.md) and set env.{name}.target (FILE.py:CLASS or host:port), or use another",
            f"env.{name}",
            f"env.{name}.**",
            fine=_served(name),
            once=True,
        )
    ),
]

ENV += [
    *refused("environments of NeMo Gym can't be used; set it to false", "env.should_use_nemo_gym"),
    *replaced("environments of NeMo Gym can't be used", "env.*nemo_gym_*"),
]

LOGGER = [
    *used("logger", "log_dir wandb_enabled tensorboard_enabled mlflow_enabled num_val_samples_to_print monitor_gpus"),
    *used("logger.wandb", "project name entity"),
    *used("logger.mlflow", "experiment_name run_name tracking_uri artifact_location run_id"),
    *used("logger.tensorboard", "log_dir"),
    *used("logger.gpu_monitoring", "collection_interval"),
    *replaced("metrics are written as they are measured", "logger.gpu_monitoring.flush_interval"),
    *refused("SwanLab is not supported; use tensorboard, wandb, mlflow or the JSONL files", "logger.swanlab_enabled"),
    *replaced("no SwanLab", "logger.swanlab.**"),
    *replaced("the dashboard and /metrics", "logger.*.log_nemo_gym_*"),
    *replaced("every service has /metrics for Prometheus", "logger.prometheus.**"),
    *replaced("logs are in the run's folder", "logger.log_level"),
]

CHECKPOINTING = [
    *used(
        "checkpointing",
        "enabled checkpoint_dir higher_is_better keep_top_k save_period save_optimizer",
    ),
    *used(
        "checkpointing",
        "checkpoint_must_save_by",
        "one more checkpoint by then; the run continues until it is stopped from outside",
    ),
    *used("checkpointing", "metric_name", "val_reward, its name in older releases, is val:accuracy", _metric),
    *replaced(
        "every checkpoint is complete, in safetensors that transformers loads",
        "checkpointing.model_save_format",
        "checkpointing.save_consolidated",
        "checkpointing.model_cache_dir",
        "checkpointing.model_repo_id",
        "checkpointing.peft_config",
    ),
    *replaced("every checkpoint is written while training continues", "checkpointing.is_async"),
    *refused(
        "there is one period and one choice of what is kept; use save_period and keep_top_k",
        "checkpointing.ft_save_period",
        "checkpointing.ft_keep_latest_k",
    ),
    *replaced("`headrace up` with the run.id of an earlier run continues it", "checkpointing.resume_if_exists"),
    *replaced(
        "the buffer itself is durable, and a restart continues with what it holds",
        "checkpointing.save_data_plane",
        "checkpointing.load_replay_buffer",
        "rollout_checkpointing.**",
    ),
]

CLUSTER = [
    *replaced(
        "processes, not nodes: trainer.num_processes, rollout.replicas; on several machines, start services on each or use Kubernetes",
        "cluster.**",
    ),
    *replaced("the buffer (replay.*), on Redis or Valkey", "data_plane.**"),
    *replaced("tokens and log-probabilities are kept with each trajectory", "token_capture.**", "rollout_recovery.**"),
]
