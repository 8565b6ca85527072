"""`headrace env new`: make the folder of a new environment."""

from __future__ import annotations

import json
import keyword
import random
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from headrace.base.errors import ConfigError, ServiceError

_PROBLEMS = 1000
_ENVIRONMENT = Template('''\
"""The reward of $name: 1 for exactly the expected number, else 0. Change it; docs/environments.md has the whole contract."""

import headrace


class $class_name(headrace.Environment):
    deterministic = True
    reward_min, reward_max = 0.0, 1.0

    def score(self, sample: headrace.Sample) -> headrace.Score:
        if "answer" not in sample.extra_env_info:
            return headrace.Score("INVALID", message="extra_env_info has no answer")
        correct = float(sample.completion.strip() == sample.extra_env_info["answer"])
        stopped = float(sample.finish_reason == "stop")  # not cut off at the maximum length
        return headrace.Score("SCORED", correct * stopped, components={"correct": correct, "stopped": stopped})
''')
_TEST = Template('''\
"""Tests that `pytest` runs without a run of Headrace: `serve_environment` is a fixture of headrace."""

from pathlib import Path

import pytest
from $name import $class_name

from headrace.testing import read_samples, sample


@pytest.fixture
def $name(serve_environment):
    return serve_environment($class_name())


def test_the_expected_number_earns_one($name):
    assert $name.reward(sample("132", {"answer": "132"})) == 1


@pytest.mark.parametrize("completion", ["131", "", "132 or 133"])
def test_anything_else_earns_nothing($name, completion):
    assert $name.reward(sample(completion, {"answer": "132"})) == 0


def test_a_completion_that_was_cut_off_earns_nothing($name):
    assert $name.reward(sample("132", {"answer": "132"}, finish_reason="length")) == 0


def test_a_problem_without_an_answer_can_not_be_scored($name):
    (score,) = $name.score(sample("132", {}))
    assert score.status == "INVALID"


def test_it_keeps_the_contract($name):
    """The same checks as `headrace env check $name.py --samples golden.jsonl`."""
    assert not $name.faults(read_samples(Path(__file__).with_name("golden.jsonl")))
''')
_PYTEST = """\
# Without it the settings of a project around this folder would hold here, by which pytest may not find modules beside a test.
[pytest]
pythonpath = .
"""
_CONFIG = Template("""\
# Trains on the reward of $name.py, on two CPU cores. In this folder:
#
#   headrace model tiny models/tiny        once: makes a small model that adds, but often forgets to carry
#   headrace up $name.yaml

grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_num_steps: 30
  val_period: 5
  val_at_end: true
  async_grpo:
    enabled: true
    max_trajectory_age_steps: 2
    in_flight_weight_updates: true

loss_fn:
  reference_policy_kl_penalty: 0
  prev_logprobs_source: generation    # clip against the policy that sampled, however old it is

policy:
  model_name: models/tiny
  precision: float32
  max_total_sequence_length: 64
  optimizer:
    kwargs: {lr: 1.0e-4, weight_decay: 0.0}
  generation:
    max_new_tokens: 6
    vllm_cfg:
      kv_cache_memory_bytes: 67108864

data:
  train:
    data_path: problems.jsonl    # `input` is the prompt; the environment gets all other fields as extra_env_info, `output` as `answer`
    env_name: $name
    split_validation_size: 0.2

env:
  $name:
    target: $name.py:$class_name    # `headrace up` serves it
    timeout_s: 30

replay:
  retain_steps: 5    # `headrace rescore` can score the completions of these steps with another reward

trainer:
  num_threads: 1
""")
_GOLDEN = (
    {"completion": "132", "extra_env_info": {"answer": "132"}, "reward": 1.0},
    {"completion": " 132\n", "extra_env_info": {"answer": "132"}, "reward": 1.0},
    {"completion": "131", "extra_env_info": {"answer": "132"}, "reward": 0.0},
    {
        "completion": "132",
        "extra_env_info": {"answer": "132"},
        "finish_reason": "length",
        "reward": 0.0,
        "components": {"correct": 1.0},
    },
    {"completion": "132", "extra_env_info": {}, "status": "INVALID"},
)


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the environment, its file and its folder.")],
) -> None:
    """Make a folder with an environment, its test, golden samples, problems, and a configuration that trains on them."""
    folder = Path(name)
    _check(folder)
    try:
        folder.mkdir()
        for file, text in files(name).items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"{folder.absolute()}: can't be written ({error.strerror})") from error
    typer.echo(
        f"{folder}/ has {name}.py, its test, golden.jsonl, problems.jsonl and {name}.yaml. Run there:\n"
        "  pytest\n"
        f"  headrace env check {name}.py --samples golden.jsonl\n"
        "  headrace model tiny models/tiny\n"
        f"  headrace env try {name}.py --prompts problems.jsonl --model models/tiny --config {name}.yaml\n"
        f"  headrace up {name}.yaml"
    )


def files(name: str) -> dict[str, str]:
    """Return the text of each file in the folder of a new environment."""
    names = {"name": name, "class_name": "".join(word.capitalize() for word in name.split("_"))}
    drawn = random.Random(name)
    pairs = dict.fromkeys((drawn.randrange(100), drawn.randrange(100)) for _ in range(_PROBLEMS))
    return {
        f"{name}.py": _ENVIRONMENT.substitute(names),
        f"test_{name}.py": _TEST.substitute(names),
        "pytest.ini": _PYTEST,
        f"{name}.yaml": _CONFIG.substitute(names),
        "golden.jsonl": _lines(_GOLDEN),
        "problems.jsonl": _lines({"input": f"{a}+{b}", "output": str(a + b)} for a, b in pairs),
    }


def _lines(records: Iterable[Mapping[str, object]]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def _check(folder: Path) -> None:
    """Raise `ConfigError` for a name that is not valid for a module, a class and an environment, and for a folder that exists."""
    name = folder.name
    if str(folder) != name or not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{folder} is not a valid name; use lower-case letters, digits and single underscores, with a letter first"
        )
    if name in sys.stdlib_module_names or name in ("headrace", "pytest"):
        raise ConfigError(
            f"{name}: its file would hide Python's module {name}; give another name, for example {name}_reward"
        )
    if folder.exists():
        raise ConfigError(f"{name}: {folder.absolute()} already exists; give another name, or remove it")
