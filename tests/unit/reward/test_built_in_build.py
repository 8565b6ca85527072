"""Law 3, one build scores a group: the build of a built-in environment is of all options that decide its rewards, and of nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import reasoning_gym

from headrace import Sample
from headrace.base.tagged_json import to_json
from headrace.config.environments import (
    KINDS,
    BuiltInConfig,
    CombineConfig,
    JudgeConfig,
    MathConfig,
    ProgramConfig,
    SandboxedConfig,
)
from headrace.records.score import BUILD_BYTES
from headrace_services.reward.environment_build import compute_build
from headrace_services.reward.environments import make

JUDGE = {"base_url": "http://127.0.0.1:1/v1", "model": "small"}
# What each has to have.
LEAST: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "a"},
    "length": {"max_tokens": 4},
    "llm_judge": {"judges": [JUDGE], "rubric": "Is it polite?"},
    "reward_model": {"model_name": "models/reward"},
    "combine": {"parts": {"right": 1.0, "brief": 1.0}},
}
# Another value of every option, and what it takes besides.
OTHER: dict[str, dict[str, Any]] = {
    "require_stop": {"require_stop": True},
    "extract": {"extract": "boxed"},
    "tolerance": {"tolerance": 0.01},
    "threshold": {"threshold": 0.5},
    "pattern": {"pattern": "b"},
    "tags": {"tags": ["answer"]},
    "min_tokens": {"min_tokens": 2},
    "max_tokens": {"max_tokens": 3},
    "fade_tokens": {"fade_tokens": 2},
    "ngram": {"ngram": 2},
    "runs_with": {"runs_with": ["perl"]},
    "cpu_s": {"cpu_s": 1},
    "wall_s": {"wall_s": 1.0},
    "memory_mb": {"memory_mb": 64},
    "processes": {"processes": 2},
    "partial_credit": {"partial_credit": True},
    "judges": {"judges": [JUDGE, JUDGE]},
    "rubric": {"rubric": "Is it short?"},
    "scale": {"scale": (1, 3)},
    "template": {"template": "{{ completion }} {{ rubric }}"},
    "compare": {"compare": "group"},
    "opponents": {"compare": "pairs", "opponents": 2},
    "samples": {"samples": 2, "judges": [{**JUDGE, "temperature": 1.0}]},
    "calibration": {"calibration": "labels.jsonl"},
    "min_agreement": {"calibration": "labels.jsonl", "min_agreement": 0.5},
    "map_to_people": {"calibration": "labels.jsonl", "map_to_people": True},
    "retries": {"retries": 0},
    "vote": {"vote": "majority", "threshold": 0.5},
    "budget": {"budget": 9},
    "concurrency": {"concurrency": 1},
    "model_name": {"model_name": "models/other"},
    "device": {"device": "cpu"},
    "precision": {"precision": "bfloat16"},
    "batch_size": {"batch_size": 1},
    "max_model_len": {"max_model_len": 9},
    "parts": {"parts": {"right": 1.0, "brief": 0.25}},
    "combine": {"combine": "product"},
    "gate": {"gate": "right"},
    "timeout_s": {"timeout_s": 120.0},
    "max_batch_size": {"max_batch_size": 1},
    "failure_share": {"failure_share": 0.9},
    "give_up_after": {"give_up_after": 9.0},
    "unsafe_no_sandbox": {"unsafe_no_sandbox": True},
}
OTHER_OF_JUDGE: dict[str, Any] = {
    "base_url": "http://127.0.0.1:2/v1",
    "model": "large",
    "api_key_file": "judge.key",
    "tls_ca": "ca.pem",
    "temperature": 1.0,
    "max_tokens": 64,
    "seed": 1,
}
IDLE = {
    "timeout_s", "max_batch_size", "failure_share", "give_up_after", "unsafe_no_sandbox",
    "budget", "concurrency", "retries", "batch_size", "max_model_len", "api_key_file", "tls_ca",
    "calibration", "min_agreement",
    "device",  # the process of the model says where it computes
}  # fmt: skip
# `code`: of a program that ran out of its own time, the tests for which no time is left are failed.
DECIDING = {("code", "timeout_s")}


SCORING = {
    key: kind for key, kind in KINDS.items() if issubclass(kind, BuiltInConfig) and not issubclass(kind, ProgramConfig)
}


def environment(kind: str, **options: Any) -> BuiltInConfig:
    env = SCORING[kind].model_validate({**LEAST.get(kind, {}), **options})
    assert isinstance(env, BuiltInConfig)
    return env


def options() -> Iterator[tuple[str, str, BuiltInConfig]]:
    """Each built-in environment that scores, with another value of each of its options."""
    for key, kind in SCORING.items():
        for option in sorted(kind.model_fields.keys() - {"type"}):
            yield key, option, environment(key, **OTHER[option])
    for option, value in OTHER_OF_JUDGE.items():
        yield "llm_judge", option, environment("llm_judge", judges=[{**JUDGE, option: value}])


def test_no_option_is_forgotten_here() -> None:
    assert OTHER_OF_JUDGE.keys() == JudgeConfig.model_fields.keys()
    assert OTHER.keys() == {option for kind in SCORING.values() for option in kind.model_fields} - {"type"}


def test_law_3_one_build_has_each_option_that_decides_a_reward() -> None:
    decides = {
        (kind, option) for kind, option, env in options() if compute_build(env) != compute_build(environment(kind))
    }
    assert decides == {(kind, option) for kind, option, _ in options() if option not in IDLE} | DECIDING


ENTRY = to_json(reasoning_gym.create_dataset("countdown", size=1, seed=3)[0])
GYM = {"task": "countdown", "entry": ENTRY, "task_config": {}}


@pytest.mark.parametrize(
    ("kind", "option", "sample"),
    [
        ("math", "extract", Sample("132", {"answer": "132"})),
        ("math", "tolerance", Sample("9.81", {"answer": "9.80665"})),
        ("math", "require_stop", Sample("132", {"answer": "132"}, finish_reason="length")),
        ("math_multi_reward", "require_stop", Sample("132", {"answer": "132"}, finish_reason="length")),
        ("reasoning_gym", "threshold", Sample("7", GYM)),
        ("reasoning_gym", "extract", Sample(str(ENTRY["metadata"]["expression"]), GYM)),
        ("regex", "pattern", Sample("a")),
        ("format", "tags", Sample("<answer>1</answer>")),
        ("length", "min_tokens", Sample("", completion_token_ids=(1,))),
        ("length", "max_tokens", Sample("", completion_token_ids=(1, 2, 3, 4))),
        ("length", "fade_tokens", Sample("", completion_token_ids=(1, 2, 3, 4, 5))),
        ("repetition", "ngram", Sample("", completion_token_ids=(1, 1, 1))),
    ],
)
def test_law_3_one_build_changes_where_an_option_changes_a_reward(kind: str, option: str, sample: Sample) -> None:
    before, after = environment(kind), environment(kind, **OTHER[option])
    assert isinstance(before, SandboxedConfig)
    assert isinstance(after, SandboxedConfig)
    former, now = make("mine", before), make("mine", after)
    assert reward(former.score(sample)) != reward(now.score(sample))
    assert former.build != now.build


def reward(said: Any) -> float:
    return float(getattr(said, "reward", said))


def test_it_is_the_same_in_every_process_name_and_order() -> None:
    one = CombineConfig.model_validate({"type": "combine", "parts": {"a": 1.0, "b": 2.0}, "gate": "a"})
    same = CombineConfig.model_validate({"gate": "a", "parts": {"b": 2.0, "a": 1.0}, "type": "combine"})
    assert compute_build(one) == compute_build(same)
    program = (
        "from headrace.config.environments import MathConfig; from headrace_services.reward.environment_build import compute_build;"
        "print(compute_build(MathConfig(tolerance=0.01, extract='boxed'), 'math-verify 1'))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/", env=os.environ | {"PYTHONHASHSEED": "7"}
    )  # fmt: skip
    here = compute_build(MathConfig(tolerance=0.01, extract="boxed"), "math-verify 1")
    assert elsewhere.stdout.strip() == here
    assert here.startswith("math-verify 1, ")


def test_it_is_no_longer_than_a_result_may_name() -> None:
    long = [compute_build(environment("combine"), "x" * BUILD_BYTES + end) for end in "ab"]
    assert all(len(each) <= BUILD_BYTES for each in long)
    assert len(set(long)) == 2
