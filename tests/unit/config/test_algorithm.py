"""`grpo` or `ppo`, the batches of their optimizer steps, and the schedule of the learning rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.config import load
from headrace.config.yaml_text import dump
from tests.support.configurations import refusal


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_grpo_or_ppo_and_grpo_where_it_gives_neither(tmp_path: Path) -> None:
    assert load(written(tmp_path, "{}"), [], {}).algorithm.name == "grpo"
    ppo = load(written(tmp_path, "ppo:\n  # num_prompts_per_step: 8\n"), [], {})
    assert ppo.grpo is None
    assert ppo.algorithm.name == "ppo"
    assert ppo.algorithm.num_prompts_per_step == 32


def test_both_are_refused_and_one_can_make_room_for_the_other(tmp_path: Path) -> None:
    path = written(tmp_path, "grpo: {seed: 3}\n")
    assert "grpo and ppo are both given" in refusal(path, "ppo.seed=4")
    assert load(path, ["ppo.seed=4", "grpo=null"], {}).algorithm.seed == 4


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_initial_model_is_validated_unless_nothing_ever_is(tmp_path: Path, name: str) -> None:
    for keys, validates in (
        ({}, True),
        ({"val_period": 0}, False),
        ({"val_at_start": False}, False),
        ({"val_period": 0, "val_at_start": True}, True),
    ):
        path = written(tmp_path, json.dumps({name: keys}))
        assert load(path, [], {}).algorithm.validates_at_start is validates


@pytest.mark.parametrize("text", ["grpo: {seed: 3}", "ppo: {seed: 3}"])
def test_what_show_prints_has_the_one_algorithm_there_is(tmp_path: Path, text: str) -> None:
    config = load(written(tmp_path, text), [], {})
    assert load(written(tmp_path, dump(config)), [], {}) == config


def test_both_name_the_bound_on_ages_by_their_own_key(tmp_path: Path) -> None:
    for name in ("grpo", "ppo"):
        path = written(tmp_path, f"{name}: {{async_{name}: {{enabled: true, max_trajectory_age_steps: 3}}}}")
        assert load(path, [], {}).algorithm.max_age == 3
        assert load(path, [f"{name}.async_{name}.enabled=false"], {}).algorithm.max_age == 0
        said = refusal(path, f"{name}.async_{name}.staleness_policy=drop", f"{name}.async_{name}.ahead_steps=2")
        assert f"{name}.async_{name}: ahead_steps 2 is below max_trajectory_age_steps 3" in said


@pytest.mark.parametrize("section", ["policy", "value"])
def test_optimizer_steps_divide_the_batch(tmp_path: Path, section: str) -> None:
    path = written(tmp_path, "ppo: {num_prompts_per_step: 6, num_generations_per_prompt: 4}")
    key = f"{section}.train_global_batch_size"
    assert getattr(load(path, [f"{key}=8"], {}), f"{section}_batch") == 8
    said = refusal(path, f"{key}=9")
    assert said.startswith(f"{key} 9 does not divide the 24 trajectories")


def test_without_a_size_one_optimizer_step_takes_the_batch(tmp_path: Path) -> None:
    path = written(tmp_path, "ppo: {num_prompts_per_step: 6, num_generations_per_prompt: 4}")
    assert (load(path, [], {}).policy_batch, load(path, [], {}).value_batch) == (24, 24)
    assert load(path, ["policy.train_global_batch_size=12"], {}).value_batch == 12


WARM_UP = """
policy:
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - {milestones: [50]}
"""


def test_a_schedule_is_written_as_nemo_rl_writes_it(tmp_path: Path) -> None:
    config = load(written(tmp_path, WARM_UP), [], {})
    linear, constant, last = config.policy.scheduler
    assert linear.kwargs == {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50}
    assert (constant.name, last.milestones) == ("torch.optim.lr_scheduler.ConstantLR", [50])
    assert load(written(tmp_path, dump(config)), [], {}) == config
    one = "{name: torch.optim.lr_scheduler.ExponentialLR, kwargs: {gamma: 0.9}}"
    assert load(written(tmp_path, f"policy: {{scheduler: {one}}}"), [], {}).policy.scheduler[0].kwargs == {"gamma": 0.9}
    assert load(written(tmp_path, "policy: {scheduler: null}"), [], {}).policy.scheduler == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.scheduler.2.milestones=[50, 60]", "2 schedulers need 1 milestones, not 2"),
        ("policy.scheduler.2.milestones=[0]", "milestones [0]"),
        (
            "policy.scheduler.0.name=torch.optim.lr_scheduler.LambdaLR",
            "unknown scheduler 'torch.optim.lr_scheduler.LambdaLR'",
        ),
        ("policy.scheduler.0.kwargs.gamma=2", "LinearLR takes no gamma"),
        ("policy.scheduler.0.milestones=[3]", "name and milestones; give name and kwargs"),
        ("ppo={policy_training_start_step: 5, max_num_steps: 5}", "never be trained"),
    ],
)
def test_what_cannot_be_a_schedule_is_refused(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(written(tmp_path, WARM_UP), override)
