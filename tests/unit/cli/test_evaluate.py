"""Which run `headrace eval` makes of what it is asked, and how it tells what was found."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.cli.evaluate import data_sets, evaluation_config, failures, refuse_ignored, table
from headrace.cli.weights import NamedModel
from headrace.config import Config
from headrace.run.evaluation import DataSetReport
from tests.support.command import error_of, headrace

AT = datetime.datetime(2026, 1, 2, 3, 4, 5)
SUMS = {"dataset_name": "arithmetic", "env_name": "math", "system_prompt": "Reply with the sum."}
# a run of PPO on several machines
SETTINGS: dict[str, Any] = {
    "run": {"id": "adder"},
    "ppo": {"seed": 7, "num_prompts_per_step": 6},
    "policy": {
        "train_global_batch_size": 8,
        "hf_config_overrides": {"rope_theta": 1.0},
        "lora_cfg": {"enabled": True, "refit": "adapter"},
        "generation": {"temperature": 0.7, "max_new_tokens": 9},
    },
    "data": {"train": [SUMS, SUMS], "validation": {**SUMS, "seed": 1}, "use_multiple_dataloader": True},
    "env": {"math": {"timeout_s": 7}},
    "replay": {"redis_url": "rediss://redis.internal:6379", "host": "0.0.0.0", "group_deadline_s": 77},
    "rollout": {"host": "0.0.0.0", "advertise_host": "gpu-1", "replicas": 3, "port": 9},
    "reward": {"host": "0.0.0.0", "address": "reward.internal:50390"},
    "trainer": {"host": "0.0.0.0", "port": 8},
    "logger": {"wandb_enabled": True, "keep_step_data": 0},
    "security": {"credentials": "credentials", "insecure": True},
}  # fmt: skip


@pytest.fixture
def config() -> Config:
    return Config.model_validate(SETTINGS)


def made(config: Config, tmp_path: Path, **changes: Any) -> Config:
    arguments: dict[str, Any] = {"samples": 4, "temperature": None, "folder": tmp_path / "evals" / "adder-3"}
    arguments |= changes
    return evaluation_config(config, NamedModel("adder@3", str(tmp_path)), {"validation": None}, **arguments)


def test_the_run_that_evaluates_is_the_one_that_trained_but_local(config: Config, tmp_path: Path) -> None:
    evaluation = made(config, tmp_path, temperature=0.5)
    assert evaluation.run_folder == tmp_path / "evals" / "adder-3"
    assert (evaluation.policy.model_name, evaluation.max_num_steps, evaluation.ppo) == (str(tmp_path), 0, None)
    algorithm = evaluation.algorithm
    assert (algorithm.seed, algorithm.val_num_generations_per_prompt, algorithm.val_at_end) == (7, 4, True)
    assert evaluation.loss_fn.reference_policy_kl_penalty == 0
    assert evaluation.policy.generation == config.policy.generation.model_copy(update={"val_temperature": 0.5})
    assert evaluation.policy.hf_config_overrides == config.policy.hf_config_overrides
    assert not evaluation.policy.lora_cfg.enabled, "the model of a checkpoint is merged"
    assert (evaluation.env, evaluation.data.validation) == (config.env, config.data.validation)
    assert (evaluation.rollout.replicas, evaluation.replay.group_deadline_s) == (3, 77)
    assert evaluation.replay.redis_url is None
    for section in (evaluation.replay, evaluation.rollout, evaluation.reward, evaluation.trainer):
        assert (section.host, section.port) == ("127.0.0.1", 0)
    assert (evaluation.reward.address, evaluation.rollout.advertise_host) == (None, None)
    assert not evaluation.logger.wandb_enabled
    assert evaluation.logger.keep_step_data != 0, "the results are read from them"
    assert evaluation.security == config.security


def test_an_override_that_does_nothing_is_refused(config: Config, tmp_path: Path) -> None:
    """`config` is what the overrides made."""
    evaluation = made(config, tmp_path)
    refuse_ignored(
        ["policy.generation.max_new_tokens=9", "rollout.replicas=3", "data.train.0.seed=0"], config, evaluation
    )
    for override in ("policy.model_name=other", "ppo.seed=7", "rollout.port=9"):
        with pytest.raises(ConfigError, match=r"an evaluation sets"):
            refuse_ignored([override], config, evaluation)


def test_several_samples_need_a_temperature(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--samples 4.*temperature 0"):
        made(config, tmp_path, temperature=0.0)
    greedy = config.policy.generation.model_copy(update={"val_temperature": 0.0})
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"generation": greedy})})
    with pytest.raises(ConfigError, match="--samples 4 at temperature 0"):
        made(config, tmp_path)
    assert made(config, tmp_path, samples=1).policy.generation.val_temperature == 0
    assert made(config, tmp_path, temperature=1.0).policy.generation.val_temperature == 1


def test_a_file_is_asked_as_the_runs_own_problems_are(config: Config, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [tmp_path / "my sums.jsonl", tmp_path / "other" / "my sums.jsonl"]
    for file in files:
        file.write_text("")
    found = data_sets(["train", *map(str, files), "gsm8k", "owner/name"], config, [])
    assert list(found) == ["train", "my-sums", "my-sums-2", "gsm8k", "name"]
    assert found["train"] is None
    values = config.model_dump(mode="json")
    values["data"]["default"]["dataset_name"] = "arithmetic"  # which says nothing of other data sets
    evaluate = Config.model_validate(values | {"data": values["data"] | {"evaluate": found}}).data.evaluate
    assert evaluate is not None
    second, hub = evaluate["my-sums-2"], evaluate["name"]
    assert second is not None
    assert hub is not None
    assert (second.data_path, second.dataset_name) == (str(files[1]), None)
    assert (second.env_name, second.system_prompt) == ("math", "Reply with the sum.")
    assert hub.data_path == "owner/name"
    assert data_sets([f"{tmp_path / 'other'}/"], config, []).keys() == {"other"}


def test_where_the_runs_data_sets_differ_the_user_says_what_holds(config: Config, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text("")
    values = config.model_dump(mode="json")
    values["data"]["validation"].append(SUMS | {"system_prompt": None})
    values["data"]["default"]["system_prompt"] = "Mine."
    config = Config.model_validate(values)
    with pytest.raises(ConfigError, match=r"system_prompt.*--set data\.default\.system_prompt=VALUE"):
        data_sets([str(tmp_path / "sums.jsonl")], config, [])
    found = data_sets([str(tmp_path / "sums.jsonl")], config, ["data.default.system_prompt=Mine."])
    assert found["sums"] is not None
    assert found["sums"]["system_prompt"] == "Mine."


def test_data_sets_that_are_not_there(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl .*validation or train"):
        data_sets(["missing.jsonl"], config, [])
    nothing = config.model_copy(update={"data": config.data.model_copy(update={"train": [], "validation": []})})
    for name in ("train", "validation"):
        with pytest.raises(ConfigError, match=rf"{name}: .*data\.{name}"):
            data_sets([name], nothing, [])


def test_what_was_found_in_a_table_and_why_prompts_failed() -> None:
    reports = {
        "sums": DataSetReport(
            3, 2, {"late\x1b[2J": 2}, 6, {k: k / 10 for k in range(1, 7)}, 0.5, 0.25, {"format": 1.0}, 4.0, 0.125
        ),
        "words": DataSetReport(0, 1, {"broken": 1}),
    }
    console = Console(file=io.StringIO(), width=1000)
    console.print(table("adder@3", reports))
    title, head, sums, words = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert title.strip() == "adder@3"
    wanted = "data set prompts failed pass@1 pass@2 pass@4 pass@6 reward length truncated components"
    assert head.split() == wanted.split()
    wanted = "sums 3 2 0.100 0.200 0.400 0.600 0.500 ± 0.250 4.0 0.125 format 1.000"
    assert sums.split() == wanted.split()
    assert words.split() == ["words", "0", "1", *["-"] * 8]
    first, second = failures(reports)
    assert first.startswith("sums: 2 of 5 prompts failed")
    assert "late" in first
    assert "\x1b" not in first
    assert second.startswith("words: 1 of 1 prompts failed")
    assert second.endswith("broken")


def test_a_model_that_no_run_made_needs_a_configuration(tmp_path: Path) -> None:
    error = error_of(headrace("eval", "nobody/nothing"))
    assert "give --config FILE" in error
    (tmp_path / "config.json").write_text("{}")
    assert "give --config FILE" in error_of(headrace("eval", tmp_path))
    assert "no does not exist" in error_of(headrace("eval", tmp_path, "--json", tmp_path / "no" / "out.json"))
