"""`headrace migrate`: what becomes of each key of TRL and of verl, and of scripts like their own examples."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.cli.app import app
from headrace.config import Config, load
from headrace.config.migrate import trl, verl
from headrace.config.migrate.draft import Draft, Row, read_scalar
from headrace_services.trainer.data.problems import load_problems

TRAINS = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

def short(completions, **kwargs):
    return [-len(completion[0]["content"]) for completion in completions]

def main():
    GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=short, args=GRPOConfig({}), train_dataset=dataset).train()

if __name__ == "__main__":
    main()
"""


def of_trl(place: Path, keywords: str = "", text: str = TRAINS, **options: Any) -> Draft:
    (place / "train.py").write_text(text.replace("GRPOConfig({})", f"GRPOConfig({keywords})"))
    return trl.migrate(str(place / "train.py"), **options)


def flat(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, dict) and place.count(".") < 3 and not place.startswith(("env.", "data."))
        found |= flat(value, f"{place}{key}.") if inner else {f"{place}{key}": value}
    return found


TRL_RUNS: list[tuple[str, dict[str, Any]]] = [
    # as its quick start
    (
        'output_dir="out", logging_steps=10, report_to="wandb"',
        {
            "grpo.num_prompts_per_step": 1,
            "grpo.num_generations_per_prompt": 8,
            "grpo.max_num_epochs": 3,
            "grpo.use_leave_one_out_baseline": False,
            "grpo.val_period": 0,
            "loss_fn.reference_policy_kl_penalty": 0.0,
            "policy.generation.max_new_tokens": 512,
            "policy.optimizer.kwargs.lr": 1e-6,
            "policy.optimizer.kwargs.weight_decay": 0.0,
            "logger.wandb_enabled": True,
            "run.dir": "out",
            "data.remove_duplicates": False,
        },
    ),
    # as its script of GSPO
    (
        "learning_rate=1e-5, max_completion_length=1024, max_prompt_length=2048, importance_sampling_level='sequence', epsilon=3e-4, "
        "epsilon_high=4e-4, loss_type='grpo', gradient_accumulation_steps=2, steps_per_generation=8",
        {
            "grpo.num_prompts_per_step": 8,
            "policy.train_global_batch_size": 16,
            "policy.train_micro_batch_size": 8,
            "policy.generation.max_new_tokens": 1024,
            "policy.max_total_sequence_length": 3072,
            "loss_fn.sequence_level_importance_ratios": True,
            "loss_fn.token_level_loss": False,
            "loss_fn.ratio_clip_min": 3e-4,
            "loss_fn.ratio_clip_max": 4e-4,
        },
    ),
    # Dr. GRPO with a penalty
    (
        "loss_type='dr_grpo', scale_rewards=False, beta=0.04, max_steps=200, gradient_accumulation_steps=4, delta=4.0",
        {
            "loss_fn.constant_length": 512,
            "grpo.normalize_rewards": False,
            "loss_fn.reference_policy_kl_penalty": 0.04,
            "loss_fn.use_on_policy_kl_approximation": True,
            "loss_fn.kl_input_clamp_value": None,
            "loss_fn.ratio_clip_c": 4.0,
            "grpo.max_num_steps": 200,
            "grpo.num_prompts_per_step": 4,
        },
    ),
    # CISPO: TRL's bound is of the ratio itself
    (
        "loss_type='cispo', epsilon_high=5.0",
        {"loss_fn.use_cispo": True, "loss_fn.ratio_clip_min": 1.0, "loss_fn.ratio_clip_max": 4.0},
    ),
    # schedules of a known length, in trainer steps of two optimizer steps each
    (
        "max_steps=100, warmup_steps=10, lr_scheduler_type='cosine', steps_per_generation=2, eval_strategy='steps', eval_steps=10, "
        "save_steps=50, save_total_limit=2, bf16=False",
        {
            "grpo.max_num_steps": 50,
            "grpo.val_period": 5,
            "checkpointing.save_period": 25,
            "checkpointing.keep_top_k": 2,
            "policy.precision": "float32",
            "policy.scheduler": [
                {
                    "name": "torch.optim.lr_scheduler.LinearLR",
                    "kwargs": {"start_factor": 1e-8, "end_factor": 1.0, "total_iters": 5},
                },
                {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 45, "eta_min": 0.0}},
                {"milestones": [5]},
            ],
        },
    ),
    # vLLM's weights
    (
        "use_vllm=True, vllm_importance_sampling_mode='token_truncate', vllm_importance_sampling_clip_max=2.0",
        {
            "loss_fn.use_importance_sampling_correction": True,
            "loss_fn.truncated_importance_sampling_type": "tis",
            "loss_fn.truncated_importance_sampling_ratio": 2.0,
        },
    ),
]


@pytest.mark.parametrize(("keywords", "expected"), TRL_RUNS)
def test_a_run_of_trl_means_the_same_here(tmp_path: Path, keywords: str, expected: dict[str, Any]) -> None:
    draft = of_trl(tmp_path, keywords)
    assert draft.problem() is None
    found = flat(draft.values())
    assert {key: found.get(key, "not written") for key in expected} == expected
    assert yaml.safe_load(draft.text("train.py")) is not None
    assert found["policy.model_name"] == "Qwen/Qwen2-0.5B-Instruct"
    assert found["data.train"] == {"data_path": "trl-lib/DeepMath-103K", "split": "train"}
    assert found["env.short"] == {"target": "train_rewards.py:short"}


def test_rewards_are_weighed_and_told_where_they_must_be(tmp_path: Path) -> None:
    funcs = "[think_format_reward, short, 'org/judge', make(3), functools.partial(short, by=2), get_cosine_scaled_reward(9)]"
    text = TRAINS.replace("reward_funcs=short", f"reward_funcs={funcs}")
    text = text.replace("think_format_reward\n", "get_cosine_scaled_reward, think_format_reward\nimport functools\n", 1)
    draft = of_trl(tmp_path, "reward_weights=[1.0, 0.5, 2, 0.1, 1, 1]", text)
    env = draft.values()["env"]
    parts = {
        "think_format_reward": 1.0,
        "short": 0.5,
        "judge": 2.0,
        "make": 0.1,
        "short_5": 1.0,
        "get_cosine_scaled_reward": 1.0,
    }
    assert env["reward"] == {"type": "combine", "parts": parts}
    assert env["judge"] == {"type": "reward_model", "model_name": "org/judge"}
    assert env["make"] == {"target": "train_rewards.py:make_reward"}
    copied = draft.files["train_rewards.py"]
    assert "from trl.rewards import get_cosine_scaled_reward\n" in copied
    assert "make_reward = make(3)\n" in copied
    assert "short_5_reward = functools.partial(short, by=2)\n" in copied
    assert draft.problem() is None
    told = "\n".join(draft.to_add)
    assert "train_rewards.py: make, which it uses" in told
    assert "train_rewards.py: the package trl must be installed here: pip install --no-deps trl" in told


def test_a_reward_that_reads_a_command_line_is_told(tmp_path: Path) -> None:
    text = TRAINS.replace("def short", "limits = TrlParser().parse_args()\n\ndef short").replace(
        "-len(", "limits.n - len("
    )
    told = of_trl(tmp_path, text=text.replace("GRPOTrainer\n", "GRPOTrainer, TrlParser\n")).to_add
    assert any(each.startswith("train_rewards.py: values in place") for each in told)


def test_rewards_without_a_name_of_their_own_get_one(tmp_path: Path) -> None:
    funcs = "[functools.partial(short, by=1), functools.partial(short, by=2), lambda completions: [0.0], SCORE[0]]"
    draft = of_trl(tmp_path, text=f"import functools\n{TRAINS.replace('=short', f'={funcs}')}")
    assert [*draft.values()["env"]["reward"]["parts"]] == ["short", "short_2", "reward_3", "reward_4"]
    assert "short_2_reward = functools.partial(short, by=2)\n" in draft.files["train_rewards.py"]
    assert "reward_3_reward = lambda completions: [0.0]\n" in draft.files["train_rewards.py"]


@pytest.mark.parametrize(
    ("completion", "earned"),
    [
        ("<think>\nwhy\n</think>\nso", True),
        ("<think>why so", False),
        ("so <think>why</think>", False),
        ("\n<think>why</think>", False),
        ("<think>a<think>b</think>", False),
        ("<think></think>", True),
    ],
)
def test_a_reward_of_trls_own_is_a_built_in_environment(completion: str, earned: bool) -> None:
    draft = trl.migrate(
        "trl grpo --model_name_or_path Q --dataset_name a/b --reward_funcs accuracy_reward think_format_reward"
    )
    values = draft.values()
    assert values["env"]["accuracy_reward"] == {"type": "math"}
    assert values["data"]["default"]["output_key"] == "solution"
    assert draft.problem() is None
    assert not any("reward" in each for each in draft.to_add)
    pattern = values["env"]["think_format_reward"]["pattern"]
    theirs = re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", completion, re.DOTALL | re.MULTILINE)
    assert (re.search(pattern, completion) is not None) is (theirs is not None) is earned


def test_a_reward_that_can_not_keep_time_in_a_thread_is_told(tmp_path: Path) -> None:
    text = TRAINS.replace("def short", "from math_verify import parse\n\ndef short").replace("-len(", "-parse(")
    assert any("parsing_timeout=None" in each for each in of_trl(tmp_path, text=text).to_add)
    text = text.replace('["content"])', '["content"], parsing_timeout=None)')
    assert not any("parsing_timeout" in each for each in of_trl(tmp_path, text=text).to_add)


COPIED = """
from __future__ import annotations
import math, re
import os.path as place
from trl import GRPOConfig, GRPOTrainer
from mine import other

LONGEST = 20
unused = open("nowhere")

def within(text):
    # how far
    return re.sub("a", "", text), LONGEST

if __name__ == "__main__":
    @place.decorate
    async def nested(completions, **kwargs):
        return [within(each) for each in completions]

    trainer = GRPOTrainer("M", [nested, other], GRPOConfig(), None)
    trainer.train()
"""


def test_functions_of_the_script_are_copied_with_what_they_use(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def other(completions): ...")
    draft = of_trl(tmp_path, text=COPIED, folder=Path("here"))
    assert draft.values()["env"]["nested"] == {"target": "here/train_rewards.py:nested"}
    assert draft.values()["env"]["other"] == {"target": f"{tmp_path}/mine.py:other"}
    assert draft.values()["policy"]["model_name"] == "M"
    text = draft.files["train_rewards.py"]
    copied = ast.parse(text)
    names = [getattr(each, "name", "") or ast.unparse(each) for each in copied.body[1:]]
    assert names == [
        "from __future__ import annotations",
        "import re",
        "import os.path as place",
        "LONGEST = 20",
        "within",
        "nested",
    ]
    assert "# how far" in text
    assert "@place.decorate\nasync def nested" in text


def test_what_only_running_the_script_tells_is_asked_for(tmp_path: Path) -> None:
    text = TRAINS.replace("reward_funcs=short", "reward_funcs=short, peft_config=LoraConfig(r=RANK, lora_alpha=16)")
    draft = of_trl(
        tmp_path, "learning_rate=rate(), **more, max_steps=STEPS", text.replace("def main", "STEPS = 50\n\ndef main")
    )
    told = "\n".join(draft.to_add)
    assert all(token in told for token in ("rate()", "**more", "policy.optimizer.kwargs.lr"))
    assert draft.values()["grpo"]["max_num_steps"] == 50
    # the script is not run
    assert of_trl(tmp_path, text=f"raise SystemExit\n{TRAINS}").problem() is None


def test_the_flags_of_a_command_count_over_the_script(tmp_path: Path) -> None:
    text = TRAINS.replace("def main", "parser = TrlParser()\n\ndef main")
    assert any("command line" in each for each in of_trl(tmp_path, "learning_rate=1e-6", text).to_add)
    flags = "--learning_rate 2e-5 --use_peft --lora_target_modules q_proj v_proj"
    command = f"accelerate launch --config_file z.yaml {tmp_path / 'train.py'} {flags}"
    draft = trl.migrate(f"{command} \\\n --max_steps=10 --push_to_hub")
    policy = draft.values()["policy"]
    assert policy["optimizer"]["kwargs"]["lr"] == 2e-5
    assert policy["lora_cfg"]["target_modules"] == ["q_proj", "v_proj"]
    assert policy["lora_cfg"]["dim"] == 16
    assert not any("command line" in each for each in draft.to_add)
    draft = trl.migrate(
        "trl grpo --model_name_or_path Q --dataset_name a/b --reward_funcs accuracy_reward --num_generations 4"
    )
    assert draft.values()["data"]["train"] == {"data_path": "a/b", "split": "train"}
    assert draft.values()["env"]["accuracy_reward"] == {"type": "math"}


def test_the_file_of_a_command_is_read_and_its_flags_count_over_it(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "model_name_or_path: Q\nlearning_rate: 1e-5\nreward_funcs: accuracy_reward\nmax_steps: 9\nfoo: [1]\n"
    )
    draft = trl.migrate(f"trl grpo --config {file} --max_steps 5 --dataset_name a/b")
    found = flat(draft.values())
    assert (found["policy.model_name"], found["policy.optimizer.kwargs.lr"], found["grpo.max_num_steps"]) == (
        "Q",
        1e-5,
        5,
    )
    assert found["env.accuracy_reward"] == {"type": "math"}
    assert any(line.startswith("foo") for line in draft.missing)
    for text in ("[1]", "a: ["):
        file.write_text(text)
        with pytest.raises(ConfigError, match="--config"):
            trl.migrate(f"trl grpo --config {file}")
    file.unlink()
    assert any("not here" in line for line in trl.migrate(f"trl grpo --config {file}").to_add)


def test_what_a_script_sets_after_it_read_its_flags_counts(tmp_path: Path) -> None:
    """As TRL's own examples do."""
    (tmp_path / "train.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer, TrlParser\n"
        "if __name__ == '__main__':\n"
        "    (training_args,) = TrlParser((GRPOConfig,)).parse_args_and_config()\n"
        "    training_args.scale_rewards = False\n"
        "    training_args.chat_template_kwargs = {'enable_thinking': False}\n"
        "    training_args.beta = 0.1\n"
        "    if training_args.beta:\n"
        "        training_args.epsilon = 0.3\n"
        "    GRPOTrainer(model='m', args=training_args, reward_funcs=[]).train()\n"
    )
    draft = trl.migrate(f"python {tmp_path / 'train.py'} --scale_rewards group --beta 0.2 --max_steps 5")
    found = flat(draft.values())
    assert found["grpo.normalize_rewards"] is False
    assert found["policy.tokenizer.chat_template_kwargs.enable_thinking"] is False
    assert found["loss_fn.reference_policy_kl_penalty"] == 0.1
    assert any("epsilon" in line and "0.3" in line for line in draft.to_add)


ROWS = """
import random

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

random.seed(7)
rows = []
unused = open("nowhere")
WORDS = {"+": "and"}
WORDS["-"] = "less"


def ask(row):
    return {"prompt": f"{row['a']} {WORDS['+']} {row['b']}"}


def short(completions, **kwargs):
    return [0.0]


def main(rank):
    for a in random.sample(range(100), 20):
        rows.append({"a": a, "b": 1, "answer": str(a + 1)})
    dataset = Dataset.from_list(rows).map(ask)
    print(dataset)
    dataset.push_to_hub("mine")
    note = \"\"\"
a text
\"\"\"
    both = dataset.train_test_split(test_size=0.5, seed=1)
    trainer = GRPOTrainer("M", short, GRPOConfig(eval_strategy="steps", eval_steps=2), both["train"], both["test"])
    trainer.train()


if __name__ == "__main__":
    main(0)
"""


def test_rows_that_the_script_makes_are_made_by_a_copy_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])  # it is added to
    draft = of_trl(tmp_path, text=ROWS)
    Path("train_data.py").write_text(draft.files["train_data.py"])
    assert draft.files["train_data.py"].count("random.seed(7)") == 1
    assert not any(word in draft.files["train_data.py"] for word in ("nowhere", "push_to_hub", "print", "trl", "note"))
    assert not any(each.startswith(("data", "train_data")) for each in draft.to_add), draft.to_add
    config = Config.model_validate(draft.values())
    training, validation = load_problems(config.data)
    assert [len(training), len(validation)] == [10, 10]
    (message,) = training[0].messages
    assert message["content"].split()[1:] == ["and", "1"]
    assert training[0].extra_env_info["answer"] == str(int(message["content"].split()[0]) + 1)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("random.seed(7)\n", "", "train_data.py: a seed"),
        ("), 20)", "), rank)", "data.train: only running"),
        ("), 20)", "), argparse.ArgumentParser().parse_args().n)", "data.train: only running"),
        (".map(ask)", ".map(lambda row: row, load_from_cache_file=not GRPOConfig)", "data.train: only running"),
    ],
)
def test_rows_that_only_running_the_script_would_tell_are_asked_for(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    draft = of_trl(tmp_path, text=ROWS.replace(old, new).replace("import random", "import argparse, random"))
    assert any(each.startswith(told) for each in draft.to_add), draft.to_add


def test_rows_changed_by_what_is_unknown_ask_for_a_processor(tmp_path: Path) -> None:
    changed = 'train, held_out = load_dataset("org/set", split=["train[:5%]", "test[:5%]"])\ntrain = train.map(ask)\n'
    text = TRAINS.replace("def short", f"{changed}\ndef short").replace(
        "train_dataset=dataset", "train_dataset=train, eval_dataset=held_out"
    )
    draft = of_trl(tmp_path, "eval_strategy='steps', eval_steps=5", text)
    assert draft.values()["data"]["train"] == {"data_path": "org/set", "split": "train[:5%]"}
    assert draft.values()["data"]["validation"] == {"data_path": "org/set", "split": "test[:5%]"}
    assert any("processor" in each for each in draft.to_add)


VERL = """
set -x
data_folder=$HOME/data
train_files="['$data_folder/gsm8k.parquet', '$data_folder/math.parquet']"
LR=${LR:-1e-6}
PROMPTS=${PROMPTS:-512}
if [ "$DEVICE" = npu ]; then
    PROMPTS=16
fi
ACTOR=(
    actor_rollout_ref.actor.optim.lr=${LR}    # the rate
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.fsdp_config.param_offload=False
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" data.val_files=$data_folder/test.parquet \\
    data.train_batch_size=${PROMPTS} data.max_prompt_length=$((1024 * 2)) data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen3-4B actor_rollout_ref.rollout.n=5 "${ACTOR[@]}" \\
    trainer.logger='["console","wandb"]' trainer.test_freq=5 trainer.save_freq=20 KEYS $@
"""

VERL_RUNS: list[tuple[str, dict[str, Any]]] = [
    (
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002",
        {
            "grpo.num_prompts_per_step": 512,
            "grpo.num_generations_per_prompt": 5,
            "grpo.max_num_epochs": 30,
            "grpo.val_period": 5,
            "grpo.use_leave_one_out_baseline": False,
            "policy.train_global_batch_size": 1280,
            "policy.max_total_sequence_length": 2560,
            "policy.generation.max_new_tokens": 512,
            "policy.generation.val_temperature": 0,
            "policy.optimizer.kwargs.lr": 1e-6,
            "loss_fn.reference_policy_kl_penalty": 0.002,
            "loss_fn.ratio_clip_c": 3.0,
            "data.max_input_seq_length": 2048,
            "checkpointing.save_period": 20,
            "logger.wandb_enabled": True,
        },
    ),
    # DAPO
    (
        "actor_rollout_ref.actor.clip_ratio_high=0.28 algorithm.filter_groups.enable=True data.gen_batch_size=1536 "
        "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000 "
        "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=256 reward_model.reward_manager=dapo "
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        {
            "loss_fn.ratio_clip_max": 0.28,
            "loss_fn.reference_policy_kl_penalty": 0.0,
            "grpo.use_dynamic_sampling": True,
            "grpo.batch_multiplier": 3.0,
            "grpo.reward_shaping.enabled": True,
            "grpo.reward_shaping.overlong_buffer_length": 256,
            "policy.sequence_packing.train_mb_tokens": 20000,
        },
    ),
    # GSPO, and a LoRA adapter
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4 "
        "actor_rollout_ref.actor.clip_ratio_high=4e-4 actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32",
        {
            "loss_fn.sequence_level_importance_ratios": True,
            "loss_fn.token_level_loss": False,
            "loss_fn.ratio_clip_min": 3e-4,
            "policy.lora_cfg.dim": 64,
            "policy.lora_cfg.init": "uniform",
        },
    ),
    # RLOO; validation that samples
    (
        "algorithm.adv_estimator=rloo actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=4 "
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.6",
        {
            "grpo.normalize_rewards": False,
            "policy.generation.val_temperature": 0.6,
            "grpo.val_num_generations_per_prompt": 4,
        },
    ),
    # PPO with a value model and a penalty in the rewards
    (
        "algorithm.adv_estimator=gae actor_rollout_ref.rollout.n=1 critic.optim.lr=2e-5 critic.model.path=M trainer.critic_warmup=10 "
        "algorithm.use_kl_in_reward=True trainer.total_training_steps=100 custom_reward_function.path=my/score.py",
        {
            "ppo.ppo_epochs": 1,
            "ppo.adv_estimator.gae_lambda": 1.0,
            "ppo.policy_training_start_step": 10,
            "ppo.max_num_steps": 100,
            "value.optimizer.kwargs.lr": 2e-5,
            "value.model_name": "M",
            "value_loss_fn.cliprange": 0.5,
            "loss_fn.use_kl_in_reward": True,
            "env.reward": {"target": "my/score.py:compute_score"},
        },
    ),
]


@pytest.mark.parametrize(("keys", "expected"), VERL_RUNS)
def test_a_run_of_verl_means_the_same_here(tmp_path: Path, keys: str, expected: dict[str, Any]) -> None:
    (tmp_path / "run.sh").write_text(VERL.replace("KEYS", keys))
    draft = verl.migrate(str(tmp_path / "run.sh"))
    assert draft.problem() is None
    found = flat(draft.values())
    assert {key: found.get(key, "not written") for key in expected} == expected
    folder = Path("~/data").expanduser()
    assert found["data.train"] == [{"data_path": f"{folder}/gsm8k.parquet"}, {"data_path": f"{folder}/math.parquet"}]
    assert found["policy.model_name"] == "Qwen/Qwen3-4B"
    assert draft.missing == []


def test_sizes_of_which_there_is_one_here_are_all_accounted_for() -> None:
    rollout, ref = (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    )
    alike = verl.migrate(f"algorithm.adv_estimator=grpo {rollout}=64 {ref}=64")
    assert alike.values()["policy"]["logprob_batch_size"] == 64
    assert alike.missing == []
    other = verl.migrate(f"algorithm.adv_estimator=grpo {rollout}=160 {ref}=32")
    assert other.values()["policy"]["logprob_batch_size"] == 32
    (told,) = other.missing
    assert told.startswith(f"{rollout} 160: ")


@pytest.mark.parametrize("place", ["$PWD", "${PWD}", "$(pwd)", "${DATA:-$PWD}"])
def test_files_may_be_in_the_working_directory(place: str) -> None:
    draft = verl.migrate(f"python3 -m verl.trainer.main_ppo data.train_files={place}/a.parquet")
    assert draft.values()["data"]["train"] == [{"data_path": "a.parquet"}]


def test_images_and_other_accelerators_have_no_counterpart() -> None:
    """They would be missed: they are more than what is not needed."""
    draft = verl.migrate("data.image_key=images trainer.device=npu")
    assert {line.split()[0] for line in draft.missing} >= {"data.image_key", "trainer.device"}


def test_overrides_need_no_script() -> None:
    draft = verl.migrate(
        "+algorithm.adv_estimator=grpo ++data.train_batch_size=8 actor_rollout_ref.rollout.n=$N trainer.nonsense=1"
    )
    assert draft.values()["grpo"]["num_prompts_per_step"] == 8
    assert any("$N" in each and "grpo.num_generations_per_prompt" in each for each in draft.to_add)
    assert any(each.startswith("trainer.nonsense 1") for each in draft.missing)


UNKNOWN = [
    "data.chat_template_kwargs.a=$X",
    "actor_rollout_ref.model.override_config.a=$X",
    "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=$X",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=$X",
]


@pytest.mark.parametrize("overrides", UNKNOWN)
def test_what_only_the_shell_knows_is_asked_for(overrides: str) -> None:
    draft = verl.migrate(f"algorithm.adv_estimator=grpo {overrides}")
    name = overrides.split()[-1].partition("=")[0]
    assert any(each.startswith(f"{name} is $X") for each in draft.to_add)
    assert "$X" not in str(draft.values())
    assert isinstance(yaml.safe_load(draft.text("a command")), dict)


def tells(draft: Draft, name: str) -> bool:
    """Whether a setting comes from this key, or a note is about it. That a text has the word is not enough."""
    notes = (*draft.same, *draft.replaced, *draft.missing, *draft.to_add)
    is_noted = any(re.search(rf"(^|, ){re.escape(name)} ", note) for note in notes)
    return is_noted or any(name in setting.names for setting in draft.settings.values())


def named(table: tuple[Row, ...]) -> list[str]:
    return [row.name for row in table if "*" not in row.name]


RARE = ("text", "true", "null", "{a: 1}", "-1", "0", "0.5")


@pytest.mark.parametrize("value", ["3", "[1, a]", *(pytest.param(each, marks=pytest.mark.nightly) for each in RARE)])
def test_no_key_is_dropped_in_silence_whatever_its_value(value: str) -> None:
    other = ("model_name_or_path", "lora_r", "lora_target_modules", "torch_dtype", "dtype")  # told by their other names
    of_trl = {name: f"--{name}={value}" for name in named(trl.TABLE)}
    of_verl = {name: f"{name}='{value}'" for name in named(verl.TABLE)}
    for name, given in of_trl.items():
        assert name in other or tells(trl.migrate(shlex.join(["trl", "grpo", given])), name), name
    for name, given in of_verl.items():
        assert tells(verl.migrate(f"algorithm.adv_estimator=grpo {given}"), name), name
    # to write a draft takes longer than to make it: what is noted of all keys is one
    every = (
        trl.migrate(shlex.join(["trl", "grpo", *of_trl.values()])),
        verl.migrate(" ".join(["algorithm.adv_estimator=grpo", *of_verl.values()])),
    )
    for draft in every:
        assert isinstance(yaml.load(draft.text("a command"), yaml.CSafeLoader), dict)


NOT_UNDERSTOOD = [
    ("trl grpo --model_name_or_path Q", "dataset_name", "7"),
    ("trl grpo --model_name_or_path Q", "output_dir", "true"),
    ("algorithm.adv_estimator=grpo", "data.seed", "soon"),
    ("algorithm.adv_estimator=gae", "algorithm.filter_groups.enable", "true"),
    ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.response_length", "64"),
]


@pytest.mark.parametrize(("command", "name", "value"), NOT_UNDERSTOOD)
def test_a_value_that_nothing_takes_is_not_understood(command: str, name: str, value: str) -> None:
    flag = "--" if command.startswith("trl") else ""
    draft = (trl if flag else verl).migrate(f"{command} {flag}{name}={value}")
    assert any(each.startswith(f"{name} {value}:") for each in draft.missing)
    assert not any(name in each for each in draft.same)


@pytest.mark.parametrize(("name", "on"), [("kl_loss_coef=0.5", "use_kl_loss"), ("clip_ratio_c=9", "loss_mode")])
def test_a_key_without_its_switch_does_nothing(name: str, on: str) -> None:
    mode = "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
    draft = verl.migrate(f"algorithm.adv_estimator=grpo {mode} actor_rollout_ref.actor.{name}")
    assert any(name.partition("=")[0] in each and on in each for each in draft.same)
    assert draft.missing == []


def test_a_cosine_ends_at_its_share_of_the_rate_even_of_a_default_one() -> None:
    options = "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{min_lr_rate: 0.5}' --max_steps 100"
    scheduler = trl.migrate(f"trl grpo --model_name_or_path Q {options}").values()["policy"]["scheduler"]
    assert scheduler[0]["kwargs"] == {"T_max": 100, "eta_min": 5e-7}


def test_a_mapping_may_be_given_as_a_whole() -> None:
    draft = verl.migrate(
        "algorithm.adv_estimator=grpo data.apply_chat_template_kwargs='{enable_thinking: false}' "
        "actor_rollout_ref.model.override_config.attention_dropout=0.1"
    )
    assert draft.values()["policy"]["tokenizer"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert draft.values()["policy"]["hf_config_overrides"] == {"attention_dropout": 0.1}


def test_a_key_that_is_the_same_here_takes_the_value() -> None:
    for row in trl.TABLE:
        if row.direct:
            other = not row.default if isinstance(row.default, bool) else (row.default or 1) + 1
            settings = trl.migrate(f"trl grpo --model_name_or_path Q --{row.name} {other}").settings
            assert settings[tuple(row.says.split("."))].value == other, row.name


def test_every_key_of_ours_in_the_tables_is_one() -> None:
    def exists(key: str, section: str) -> bool:
        found: Any = Config.model_validate({section: {}})
        for part in key.replace("{section}", section).split("."):
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True

    for row in (*trl.TABLE, *verl.TABLE):
        if row.direct:
            assert exists(row.says, "grpo"), row.name


@pytest.mark.parametrize(
    ("framework", "source", "named"),
    [
        ("trl", "nowhere.py", "nowhere.py"),
        ("trl", "python 'x.py", "No closing quotation"),
        ("trl", "{file}", "GRPOTrainer"),
        ("verl", "nowhere.sh", "nowhere.sh"),
        ("verl", "a=b", "data.train_batch_size"),
    ],
)
def test_a_source_that_says_nothing_is_refused(tmp_path: Path, framework: str, source: str, named: str) -> None:
    file = tmp_path / "empty.py"
    file.write_text("x = 1")
    with pytest.raises(ConfigError, match=named):
        {"trl": trl, "verl": verl}[framework].migrate(source.format(file=file))


def test_the_command_writes_a_file_that_loads_and_says_the_rest(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL.replace("KEYS", "actor_rollout_ref.actor.entropy_coeff=0.01"))
    argv = ["migrate", "verl", str(tmp_path / "run.sh"), "--out", str(tmp_path / "run.yaml")]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.output
    assert "no counterpart: actor_rollout_ref.actor.entropy_coeff 0.01" in done.output
    assert done.output.endswith(f"headrace config check {tmp_path / 'run.yaml'}\n")
    config = load(tmp_path / "run.yaml", [], {})
    assert config.algorithm.num_prompts_per_step == 512
    again = CliRunner().invoke(app, argv)
    assert isinstance(again.exception, ConfigError)


def test_no_file_is_written_if_one_of_them_is_there(tmp_path: Path) -> None:
    script = "from trl import GRPOTrainer\ndef right(completions, **kw):\n    return [1.0]\n"
    (tmp_path / "train.py").write_text(f"{script}GRPOTrainer(model='m', reward_funcs=right, train_dataset='d')\n")
    (tmp_path / "run.yaml").write_text("mine")
    done = CliRunner().invoke(app, ["migrate", "trl", str(tmp_path / "train.py"), "--out", str(tmp_path / "run.yaml")])
    assert isinstance(done.exception, ConfigError)
    assert "run.yaml" in str(done.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml", "train.py"]
    assert (tmp_path / "run.yaml").read_text() == "mine"


def test_hostile_text_of_a_script_stays_text(tmp_path: Path) -> None:
    name = "Q ${oc.env:HOME} \x1b[31m # no comment: {a: 1}"
    draft = trl.migrate(f"trl grpo --model_name_or_path '{name}' --run_name 'a\nb: [c'")
    (tmp_path / "run.yaml").write_text(draft.text("x\ny: 1"))
    config = load(tmp_path / "run.yaml", [], {})
    assert config.policy.model_name == name
    assert config.logger.wandb.name == "a\nb: [c"


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    draft = of_trl(tmp_path, "run_name='1e-6', project='1_0'")
    (tmp_path / "run.yaml").write_text(draft.text("train.py"))
    wandb = load(tmp_path / "run.yaml", [], {}).logger.wandb
    assert (wandb.name, wandb.project) == ("1e-6", "1_0")


def test_a_command_of_one_long_word_is_no_file() -> None:
    draft = verl.migrate(" ".join(["algorithm.adv_estimator=grpo", *["data.train_batch_size=8"] * 20]))
    assert draft.values()["grpo"]["num_prompts_per_step"] == 8


@pytest.mark.parametrize("text", ["2024-12-31", "2024-31-12", "1" * 5000, "[" * 1000])
def test_a_word_that_yaml_takes_for_something_else_stays_text(text: str) -> None:
    assert read_scalar(text) == text


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ("lr_scheduler_type='cosine', lr_scheduler_kwargs=dict(min_lr=rate * 0.1), max_steps=5", "lr_scheduler_kwargs"),
        ("warmup_steps=float('inf')", "warmup_steps"),
        ("num_train_epochs=1e999", "num_train_epochs"),
        ("eval_strategy='steps', eval_steps='often'", "eval_steps"),
        ("reward_weights=[None]", "reward_weights"),
        ("reward_weights=[1.0]", "reward_weights"),
    ],
)
def test_a_value_that_is_no_number_where_one_is_meant_is_asked_for(tmp_path: Path, keywords: str, name: str) -> None:
    draft = of_trl(tmp_path, keywords, TRAINS.replace("=short", "=[short, 'org/judge']"))
    assert any(each.startswith(name) for each in draft.to_add), draft.to_add


def test_variables_of_variables_take_no_memory() -> None:
    doubled = "\n".join(f"A{number + 1}=$A{number}$A{number}" for number in range(18))
    draft = verl.migrate(f"A0=xx\n{doubled}\nactor_rollout_ref.model.path=$A18")
    assert len(draft.values()["policy"]["model_name"]) == 100_000
