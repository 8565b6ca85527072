"""Environments and data sets of a file of NeMo RL, of the newest release and of older ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.environments import RewardModelConfig
from tests.unit.config.nemo_cases import read, refusal


def test_an_environment_that_is_not_built_in_has_to_be_served(tmp_path: Path) -> None:
    text = "data: {default: {env_name: vlm}}\n"
    (line,) = refusal(tmp_path, text + "env: {vlm: {num_workers: 8}}")
    assert line.startswith("env.vlm: not built in")
    config, _ = read(tmp_path, text + "env: {vlm: {_override_: true, target: 'localhost:9'}}")
    assert config.env["vlm"].target == "localhost:9"


def test_the_interpreter_called_code_there_is_not_the_tests_here(tmp_path: Path) -> None:
    text = "data: {default: {env_name: code}}\n"
    (line,) = refusal(tmp_path, text)
    assert line.startswith("env.code: in NeMo RL this is an interpreter")
    config, _ = read(tmp_path, text + "env: {code: {_override_: true, target: 'localhost:9'}}")
    assert config.env["code"].target == "localhost:9"
    config, _ = read(tmp_path, text + "env: {code: {_override_: true, type: code, cpu_s: 3, wall_s: 5, timeout_s: 9}}")
    assert (config.env["code"].cpu_s, config.env["code"].timeout_s) == (3, 9)


def test_a_data_set_that_is_not_read_says_how_to_bring_it(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, "data: {train: {dataset_name: open_assistant}}")
    assert line.startswith("data.train.dataset_name: 'open_assistant' is not supported")


@pytest.mark.parametrize(
    ("name", "processor"), [("HelpSteer3", "helpsteer3_data_processor"), ("squad", None), ("tulu3_sft_mixture", None)]
)
def test_data_sets_of_conversations_are_read_by_name(tmp_path: Path, name: str, processor: str | None) -> None:
    config, _ = read(tmp_path, f"data: {{train: {{dataset_name: {name}, processor: {processor or 'null'}}}}}")
    assert (config.data.train[0].dataset_name, config.data.train[0].processor) == (name, None)


def test_a_file_in_openai_s_format_is_one_of_conversations(tmp_path: Path) -> None:
    text = "data: {{train: {{dataset_name: openai_format, data_path: a.jsonl, system_prompt: Hi{more}}}}}"
    for more, key in (("", "messages"), (", chat_key: turns", "turns")):
        (train,) = read(tmp_path, text.format(more=more))[0].data.train
        assert (train.dataset_name, train.data_path, train.input_key) == (None, "a.jsonl", key)
        assert (train.output_key, train.system_prompt) == (None, "Hi")
    (line,) = refusal(tmp_path, text.format(more=", tool_key: tools"))
    assert line.startswith("data.train.tool_key")


def test_processors_and_data_sets_of_ones_own(tmp_path: Path) -> None:
    text = "data: {train: {dataset_name: my.data.Questions, processor: 'mine.py:ask'}}"
    (train,) = read(tmp_path, text)[0].data.train
    assert (train.dataset_name, train.processor) == ("my.data.Questions", "mine.py:ask")
    (train,) = read(tmp_path, "data: {train: {processor: multichoice_qa_processor}}")[0].data.train
    assert train.processor == "multichoice_qa_processor"
    (line,) = refusal(tmp_path, "data: {train: {processor: sft_processor}}")
    assert "'sft_processor'" in line
    assert "name it as FILE.py:NAME" in line


def test_a_file_of_ones_own_and_lists_of_sets(tmp_path: Path) -> None:
    text = """
data:
  train: [{dataset_name: ResponseDataset, data_path: a.jsonl, input_key: q}, {dataset_name: DeepScaler}]
  validation: {dataset_name: AIME2024, repeat: 4}
"""
    config, _ = read(tmp_path, text.replace("data:\n", "data:\n  _override_: true\n  default: {env_name: math}\n"))
    first, second = config.data.train
    assert (first.dataset_name, first.data_path, first.input_key) == (None, "a.jsonl", "q")
    assert second.dataset_name == "DeepScaler"
    assert config.data.validation[0].repeat == 4


def test_a_split_that_a_data_set_there_takes_no_notice_of_is_not_made(tmp_path: Path) -> None:
    config, translation = read(tmp_path, "data: {train: {dataset_name: DAPOMath17K}}")
    assert config.data.train[0].split_validation_size == 0
    assert any("not split" in says for says in translation.replaced)


def test_what_is_inherited_there_for_other_data_sets_is_left_out(tmp_path: Path) -> None:
    train = "{dataset_name: DAPOMath17K, input_key: q, output_key: a}"
    config, translation = read(tmp_path, f"data: {{num_prompts_per_dataloader: 4, train: {train}}}")
    assert (config.data.train[0].input_key, config.data.num_prompts_per_dataloader) == ("input", None)
    (left_out,) = (keys for says, keys in translation.replaced.items() if "columns of DAPOMath17K" in says)
    assert left_out == ["data.train.input_key", "data.train.output_key"]
    (line,) = refusal(tmp_path, "data: {train: {output_key: generated_solution}}")  # which has an effect there
    assert line.startswith(
        "data.train.output_key: 'generated_solution' has no effect on dataset_name OpenMathInstruct-2"
    )


@pytest.mark.parametrize(
    ("name", "validation", "share"),
    [("OpenMathInstruct-2", [], 0.05), ("DeepScaler", ["AIME2024"], 0), ("DAPOMath17K", ["DAPOMathAIME2024"], 0)],
)
def test_a_flat_data_section_brings_the_validation_it_brought_then(
    tmp_path: Path, name: str, validation: list[str], share: float
) -> None:
    flat = (
        f"data: {{_override_: true, dataset_name: {name}, prompt_file: p.txt, max_input_seq_length: 9, shuffle: false}}"
    )
    config, translation = read(tmp_path, flat)
    (train,) = config.data.train
    assert (train.dataset_name, train.prompt_file, train.env_name) == (name, "p.txt", "math")
    assert train.split_validation_size == share
    assert [source.dataset_name for source in config.data.validation] == validation
    assert not config.data.shuffle
    assert ("data.dataset_name", "data.train.dataset_name") in translation.renamed


def test_a_flat_data_section_with_files(tmp_path: Path) -> None:
    flat = "{_override_: true, dataset_name: ResponseDataset, train_data_path: a.jsonl, val_data_path: b.jsonl, output_key: a}"
    config, _ = read(tmp_path, f"data: {flat}")
    assert (config.data.train[0].data_path, config.data.validation[0].data_path) == ("a.jsonl", "b.jsonl")
    assert config.data.train[0].output_key == config.data.validation[0].output_key == "a"


SEVERAL = """
data:
  use_multiple_dataloader: true
  num_prompts_per_dataloader: 4
  custom_dataloader: examples.custom_dataloader.custom_dataloader.example_custom_dataloader
  train: [{dataset_name: gsm8k}, {dataset_name: DeepScaler}]
"""


def test_several_data_loaders_are_taken_but_no_function_of_ones_own(tmp_path: Path) -> None:
    config, _ = read(tmp_path, SEVERAL)
    assert config.data.use_multiple_dataloader
    assert config.prompts_of_each_set == 4
    problem = "depends only on the seed"
    assert any(problem in line for line in refusal(tmp_path, SEVERAL, "data.custom_dataloader=mine.mix"))
    read(tmp_path, "data: {custom_dataloader: mine.mix}\n")  # not called there either


def test_dapos_verifier_is_an_answer_line(tmp_path: Path) -> None:
    config, translation = read(tmp_path, "env: {math: {math_verify_impl: dapo_math_verify}}")
    assert config.env["math"].extract == "answer_line"
    assert ("env.math.math_verify_impl", "env.math.extract") in translation.renamed
    assert read(tmp_path)[0].env["math"].extract == "none"


def test_multiple_choice_in_english_is_a_choice(tmp_path: Path) -> None:
    config, translation = read(tmp_path, "env: {math: {verifier_type: english_multichoice}}")
    assert config.env["math"].extract == "choice"
    assert ("env.math.verifier_type", "env.math.extract") in translation.renamed
    assert read(tmp_path, "env: {math: {verifier_type: math}}")[0].env["math"].extract == "none"
    (line,) = refusal(tmp_path, "env: {math: {verifier_type: multilingual_multichoice}}")
    assert line.startswith("env.math.verifier_type: 'multilingual_multichoice'")


REWARD_MODEL = """
data: {default: {env_name: reward_model}}
env:
  reward_model:
    enabled: true
    model_name: Skywork/Skywork-Reward-V2-Qwen3-0.6B
    tokenizer: {name: "${env.reward_model.model_name}"}
    precision: bfloat16
    batch_size: ${policy.train_micro_batch_size}
    checkpoint_path: null
    max_model_len: 2048
    resources: {gpus_per_node: 1, num_nodes: 1}
    dtensor_cfg: {_v2: true, enabled: true, sequence_parallel: false, tensor_parallel_size: 1, custom_parallel_plan: null}
"""


def test_a_reward_model_is_the_built_in_one(tmp_path: Path) -> None:
    config, translation = read(tmp_path, REWARD_MODEL)
    env = config.env["reward_model"]
    assert isinstance(env, RewardModelConfig)
    assert (env.model_name, env.precision) == ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "bfloat16")
    assert (env.batch_size, env.max_model_len) == (config.policy.train_micro_batch_size, 2048)
    assert read(tmp_path, REWARD_MODEL, "env.reward_model.processor=helpsteer3_data_processor")[0] == config
    told = {key: says for says, keys in translation.replaced.items() for key in keys}
    assert "env.reward_model.device" in told["env.reward_model.dtensor_cfg.tensor_parallel_size"]
    for more, said in (
        (
            "env.reward_model.tokenizer.name=other",
            "env.reward_model.tokenizer.name: 'other' (command line): the tokenizer is the one beside",
        ),
        (
            "env.reward_model.checkpoint_path=/x",
            "env.reward_model.checkpoint_path: '/x' (command line): NeMo RL checkpoints can't be read",
        ),
    ):
        (line,) = refusal(tmp_path, REWARD_MODEL, more)
        assert line.startswith(said)


def test_the_environment_of_several_rewards_is_built_in(tmp_path: Path) -> None:
    text = "env: {math_multi_reward: {num_workers: 8, math_verify_impl: hf_math_verify}}\ndata: {default: {env_name: math_multi_reward}}\n"
    config, _ = read(tmp_path, text)
    assert config.env.keys() == {"math_multi_reward"}
