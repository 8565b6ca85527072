"""What may change when a run goes on, and what may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import Config, load
from headrace.config.compare import diff, may_change
from headrace.config.explain import known_keys
from headrace.config.marks import Mark


def loaded(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(
        "env: {adder: {type: math, timeout_s: 60}}\ndata: {train: [{dataset_name: arithmetic, env_name: adder}]}\n"
    )
    return load(path, overrides, {})


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("grpo.max_num_steps=7", True),
        ("grpo.val_period=7", True),
        ("checkpointing.save_period=7", True),
        ("policy.optimizer.kwargs.lr=0.1", True),
        ("replay.group_deadline_s=7", True),
        ("replay.port=7", True),
        ("rollout.replicas=7", True),
        ("trainer.num_processes=2", True),
        ("env.adder.timeout_s=7", True),
        ("policy.model_name=other", False),
        ("grpo.seed=7", False),
        ("grpo.num_prompts_per_step=7", False),
        ("grpo.num_generations_per_prompt=7", False),
        ("grpo.async_grpo.max_trajectory_age_steps=7", False),
        ("data.shuffle=false", False),
        ("data.train.0.size=7", False),
        ("env.adder.type=reasoning_gym", False),
        ("policy.generation.temperature=0.7", False),
        ("checkpointing.checkpoint_dir=elsewhere", True),
        ("data.train.0.prompt_file=elsewhere", True),
    ],
)
def test_a_change_is_named_and_judged(tmp_path: Path, override: str, allowed: bool) -> None:
    changes = diff(loaded(tmp_path), loaded(tmp_path, override))
    key, _, value = override.partition("=")
    assert [(change.key, change.allowed) for change in changes] == [(key, allowed)]
    assert str(changes[0]).startswith(f"{key}: ")
    assert value in str(changes[0]).lower()


def test_what_schedules_count_may_not_change(tmp_path: Path) -> None:
    """A checkpoint has one number of them: 100 steps would be 100 epochs."""
    [change] = diff(
        loaded(tmp_path, "ppo.ppo_epochs=2"), loaded(tmp_path, "ppo.ppo_epochs=2", "ppo.scheduler_counts=epochs")
    )
    assert (change.key, change.allowed) == ("ppo.scheduler_counts", False)


def test_an_environment_that_comes_or_goes_may_not(tmp_path: Path) -> None:
    changes = diff(loaded(tmp_path), loaded(tmp_path, "env.other={type: math}"))
    assert "env.other.type: null -> 'math'" in map(str, changes)
    assert not all(change.allowed for change in changes)
    assert not all(change.allowed for change in diff(loaded(tmp_path, "env.other={type: math}"), loaded(tmp_path)))


def test_what_says_nothing_is_no_change(tmp_path: Path) -> None:
    """A mapping without items is the same as one that is not there."""
    before, after = loaded(tmp_path), loaded(tmp_path, "policy.hf_config_overrides.rope_theta=7")
    assert before.policy.hf_config_overrides == {}
    for changes in (diff(before, after), diff(after, before)):
        assert [change.key for change in changes] == ["policy.hf_config_overrides.rope_theta"]
    assert diff(before, loaded(tmp_path, "policy.hf_config_overrides={}")) == []


def test_changes_come_in_the_order_of_the_configuration(tmp_path: Path) -> None:
    before, after = loaded(tmp_path), loaded(tmp_path, "env.other={type: math}")
    keys = [change.key.removeprefix("env.other.") for change in diff(before, after)]
    told = list(dict.fromkeys(key.partition(".")[0] for key in keys))  # of a list, each item
    assert told == [
        key for key, value in after.env["other"].model_dump(exclude_none=True).items() if value not in ({}, [])
    ]


def test_equal_configurations_have_no_changes(tmp_path: Path) -> None:
    assert diff(loaded(tmp_path), loaded(tmp_path)) == []


def test_every_key_says_whether_it_may_change() -> None:
    sections = {key[:end] for key in known_keys() for end in range(len(key))}
    assert [".".join(key) for key in known_keys() if key not in sections and may_change(key) is None] == []


def test_no_key_says_both() -> None:
    both = {Mark.MAY_CHANGE, Mark.FIXED}
    marks = {key: [mark for mark in field.metadata if mark in both] for key, field in known_keys().items()}
    assert [".".join(key) for key, said in marks.items() if len(said) > 1] == []
