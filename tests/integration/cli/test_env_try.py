"""`headrace env try`: what a model writes and what a reward makes of it, with a small replica in place of vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import weights
from headrace.cli.env_try import _first, evaluation, summary
from headrace.cli.evaluate import configuration, new_folder
from headrace.config import load
from headrace.launch import runs
from headrace.launch.served_file import environment_at
from headrace.run.samples import by_group
from tests.support.command import refused
from tests.support.light_services import instead_of
from tests.support.stored_samples import sample

REWARD = """
import headrace

class Digits(headrace.Environment):
    def score(self, sample):
        if sample.extra_env_info["answer"] == "never":
            return headrace.Score("INVALID", message="it has no answer")
        digits = sum(character.isdigit() for character in sample.completion)
        return headrace.Score("SCORED", digits / 4, components={"digits": digits})
"""
SMALL = (
    "policy.precision=float32",
    "policy.max_total_sequence_length=64",
    "policy.generation.max_new_tokens=4",
    "reward.workers=1",
    "trainer.num_threads=1",
)


def test_what_is_said_of_groups() -> None:
    rewards = {"a": (0.0, 1.0), "b": (1.0, 1.0), "c": (0.5, 0.5)}
    groups = by_group(
        sample(name, index, reward) for name, both in rewards.items() for index, reward in enumerate(both)
    )
    assert [group.spread for group in groups] == [0.5, 0, 0]
    means, flat = summary(groups)
    assert means == "3 prompts, 6 completions: mean reward 0.667, deviation 0.373, spread in a group 0.167"
    assert flat == "2 of 3 groups (67%) would teach nothing: all their rewards are equal"
    cut = by_group([sample("a", finish_reason="length"), sample("a", 1)])
    assert [*summary(cut)][-1] == "1 of 2 completions were cut off (policy.generation.max_new_tokens)"
    assert [*summary([])] == []


def test_what_can_not_be_tried_is_refused_before_anything_starts(tmp_path: Path, tiny_model: Path) -> None:
    file, prompts = tmp_path / "mine.py", tmp_path / "prompts.jsonl"
    file.write_text(REWARD)
    prompts.write_text('{"input": "1+1", "output": "2"}\n')

    def said(target: object = file, asked: object = prompts, model: object = tiny_model, *more: object) -> str:
        return refused("env", "try", target, "--prompts", asked, "--model", model, *more)

    assert "gone.py can't be read" in said(tmp_path / "gone.py")
    assert "nowhere is neither FILE.py" in said("nowhere")
    assert "gone.jsonl: can't be read" in said(file, tmp_path / "gone.jsonl")
    assert "neither a run nor a model" in said(file, prompts, tmp_path)
    assert "no does not exist" in said(file, prompts, tiny_model, "--html", tmp_path / "no" / "page.html")
    assert "an evaluation sets grpo.val_period" in said(file, prompts, tiny_model, "--set", "grpo.val_period=3")
    prompts.write_text("\n")
    assert "has no problems" in said()
    prompts.write_text('\n{"input": "1+1", "output": "2"}\n\n{"input":\n')
    assert f"error: {prompts}:4: Expecting value" in said()
    prompts.write_text('{"question": "1+1"}\n')
    assert f"{prompts}:1: no field 'input'" in said()


def test_only_a_line_feed_ends_a_problem(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1\u2028+\x0b1"}\n\n{"input": "2"}\n{"input": "3"}\n', encoding="utf-8")
    assert _first(prompts, 2).split("\n") == ['{"input": "1\u2028+\x0b1"}', "", '{"input": "2"}', ""]


def test_a_checkpoint_is_tried_as_the_run_samples_in_training(tmp_path: Path, tiny_model: Path) -> None:
    file, prompts, config = tmp_path / "mine.py", tmp_path / "prompts.jsonl", tmp_path / "run.yaml"
    file.write_text(REWARD)
    prompts.write_text('{"input": "1+1", "output": "2"}\n')
    generation = {"temperature": 0.8, "val_temperature": 0, "max_new_tokens": 4}
    values = {
        "run": {"id": "adder", "dir": str(tmp_path)},
        "policy": {"model_name": str(tiny_model), "max_total_sequence_length": 64, "generation": generation},
        "data": {"train": {"dataset_name": "arithmetic", "env_name": "math", "system_prompt": "Add."}},
        "env": {"math": {}},
        "security": {"credentials": str(tmp_path / "credentials")},
    }
    config.write_text(json.dumps(values))
    run = runs.save(load(config, environ={})).parent
    found = weights.find(f"{run}@0")
    given, place = configuration(found, None, [])
    with new_folder(place, found) as folder:
        made = evaluation(given, found, environment_at(str(file)), prompts, 8, [], folder)
    assert not folder.exists()
    assert made.policy.generation.val_temperature == 0.8
    assert made.policy.generation.max_new_tokens == 4
    assert made.run_folder.parent == run / "evals"
    assert made.security.credentials == str(made.run_folder.absolute() / "credentials")
    assert set(made.env) == {"tried"}
    (asked,) = (made.data.evaluate or {}).values()
    assert asked is not None
    assert (asked.env_name, asked.system_prompt) == ("tried", "Add.")


@pytest.mark.nightly  # `headrace eval`, in tests/e2e, goes the same road by day; the tests above have what is made of its results
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_completions_and_rewards_are_shown_in_a_terminal_and_a_page(tmp_path: Path, tiny_model: Path) -> None:
    file, prompts, page = tmp_path / "mine.py", tmp_path / "prompts.jsonl", tmp_path / "page.html"
    file.write_text(REWARD)
    problems = [{"input": f"{i}+1", "output": str(i + 1)} for i in range(4)]
    problems[1]["output"] = "never"
    prompts.write_text("".join(f"{json.dumps(each)}\n" for each in problems))
    arguments = ["--prompts", prompts, "--model", tiny_model, "-n", 4, "--first", 3, "--html", page]
    settings = [word for each in SMALL for word in ("--set", each)]
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "env", "try", file, *map(str, arguments), *settings],
        cwd=tmp_path,
        env={**instead_of(tmp_path / "services", rollout="small_rollout"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "2 prompts, 8 completions: mean reward" in done.stdout
    assert "would teach nothing" in done.stdout
    assert "v0-prompts-1 failed: " in done.stdout
    assert "it has no answer" in done.stdout
    assert "(digits " in done.stdout
    written = page.read_text()
    assert written.count("<article") == 8
    assert "2 prompts, 8 completions: mean reward" in written
    assert "it has no answer" in written
    assert "user: 3+1" not in written, "it is the fourth"
    (folder,) = (tmp_path / "runs" / "evals").iterdir()
    assert (folder / "logs" / "val_data_step0.jsonl.gz").exists()
