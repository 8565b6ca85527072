"""NeMo RL files: environments of several turns, and environments that no data set names."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.environments import CustomConfig, VerifiersConfig
from tests.unit.config.nemo_cases import read, refusal

# a game whose script trains on it, over a base for mathematics, as NeMo RL has them
GAME = "grpo: {max_rollout_turns: 50}\nenv: {sliding_puzzle: {cfg: {game_config: {size: 5}, max_moves: 50}}}\n"
NAMED = GAME + "data: {train: {_override_: true, data_path: boards.jsonl}, default: {env_name: sliding_puzzle}}\n"
PROGRAM = ("env.sliding_puzzle.target=puzzle.py:Puzzle", "env.sliding_puzzle.episodes=true")


def test_a_game_that_no_data_set_names_is_no_other_task(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, GAME)
    assert line.startswith("env.sliding_puzzle: ")
    assert "OpenMathInstruct-2 with math" in line
    assert "data.train.env_name" in line


def test_an_enabled_environment_that_no_data_set_names_is_refused(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, "env: {reward_model: {enabled: true, model_name: some/judge}}")
    assert line.startswith("env.reward_model: no data set names this environment")


def test_turns_are_the_calls_of_an_episode(tmp_path: Path) -> None:
    config, translation = read(tmp_path, NAMED, *PROGRAM)
    env = config.env["sliding_puzzle"]
    assert isinstance(env, CustomConfig)
    assert env.episodes
    assert config.agents.max_rollout_turns == 50
    assert ("grpo.max_rollout_turns", "agents.max_rollout_turns") in translation.renamed
    listed = {key for keys in translation.replaced.values() for key in keys}
    assert "env.sliding_puzzle.cfg.max_moves" in listed
    assert read(tmp_path, NAMED, *PROGRAM, "agents.max_rollout_turns=7")[0].agents.max_rollout_turns == 7
    # episodes have their own limit where the file has single answers
    assert read(tmp_path, NAMED, *PROGRAM, "grpo.max_rollout_turns=1")[0].agents.max_rollout_turns == 64


def test_turns_without_episodes_are_refused(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, NAMED, PROGRAM[0])
    assert line.startswith("grpo.max_rollout_turns: 50, but env.sliding_puzzle has no episodes")


@pytest.mark.parametrize("turns", [1, 3])
def test_turns_change_nothing_where_one_answer_ends_it(tmp_path: Path, turns: int) -> None:
    config, translation = read(tmp_path, f"grpo: {{max_rollout_turns: {turns}}}")
    assert config == read(tmp_path)[0]
    assert "grpo.max_rollout_turns" in {key for keys in translation.replaced.values() for key in keys}


def test_an_environment_that_scores_for_a_named_one_is_used(tmp_path: Path) -> None:
    text = (
        "data: {default: {env_name: both}}\n"
        "env: {both: {type: combine, parts: {math: 1.0, brief: 0.2}}, brief: {type: length, max_tokens: 9}}\n"
    )
    assert read(tmp_path, text)[0].env.keys() == {"both", "math", "brief"}


GYM = """
env: {should_use_nemo_gym: true, should_mask_flagged_samples: true, nemo_gym: {config_paths: [a.yaml], port_range_low: 5000}}
data:
  train: {_override_: true, data_path: tasks.jsonl, dataset_name: NemoGymDataset}
  default: {env_name: nemo_gym, prompt_file: null, processor: nemo_gym_data_processor}
"""


def test_nemo_gym_is_refused_with_the_way_to_play_it(tmp_path: Path) -> None:
    said = refusal(tmp_path, GYM)
    assert {line.split(": ")[0] for line in said} == {
        "env.nemo_gym",
        "env.should_use_nemo_gym",
        "data.train.dataset_name",
        "data.default.processor",
    }
    assert all("type verifiers" in line and "docs/agents.md" in line for line in said)


def test_nemo_gym_plays_as_an_environment_of_verifiers(tmp_path: Path) -> None:
    own = (
        "env: {should_use_nemo_gym: false, nemo_gym: {type: verifiers, python: p, verifiers: {taskset: {id: nemo-gym}}}}\n"
        "data: {train: {_override_: true, dataset_name: verifiers}, default: {processor: null}}\n"
    )
    (tmp_path / "gym").mkdir()
    gym = tmp_path / "gym" / "gym.yaml"
    read(tmp_path)  # writes the base
    gym.write_text("defaults: ../base.yaml\n" + GYM)
    config, translation = read(tmp_path / "mine", "", base=f"defaults: {gym}\n" + own)
    env = config.env["nemo_gym"]
    assert isinstance(env, VerifiersConfig)
    assert (env.python, env.verifiers) == ("p", {"taskset": {"id": "nemo-gym"}})
    assert "env.nemo_gym.config_paths" in {key for keys in translation.replaced.values() for key in keys}


def test_the_switch_of_nemo_gym_is_no_environment(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, "env: {should_use_nemo_gym: true}")
    assert line.startswith("env.should_use_nemo_gym: true")
