"""Each kind of environment has its own keys: in a file, in what a run saves, and in what runs saved when all kinds shared theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headrace.base.errors import ConfigError
from headrace.config import Config, load
from headrace.config.compare import diff
from headrace.config.environments import KINDS, MathConfig, TargetConfig, read_environment
from headrace.config.marks import Mark

FORMER = Path(__file__).with_name("former_environments.yaml")
# What the run of FORMER was given, without what had no effect: `file` and `node` were given options of built-in environments.
GIVEN: dict[str, dict[str, Any]] = {
    "math": {"require_stop": True},
    "sums": {"type": "math_multi_reward"},
    "gym": {"type": "reasoning_gym", "extract": "answer_tag", "threshold": 0.5},
    "number": {"type": "regex", "pattern": r"\d", "extract": "boxed"},
    "format": {"tags": ["answer"]},
    "brief": {"type": "length", "max_tokens": 9},
    "fresh": {"type": "repetition"},
    "both": {"type": "combine", "parts": {"math": 1, "brief": 0.2}, "gate": "math", "timeout_s": 80},
    "code": {"cpu_s": 2},
    "polite": {
        "type": "llm_judge",
        "rubric": "Is it polite?",
        "judges": [{"base_url": "http://127.0.0.1:1/v1", "model": "small"}],
    },
    "helpful": {"type": "reward_model", "model_name": "models/reward"},
    "game": {"type": "function", "function": "games.chess:play", "grader": "math"},
    "echo": {"type": "verifiers", "python": ".venv/bin/python", "verifiers": {"taskset": {"id": "echo-v1"}}},
    "file": {"target": "rewards/my_env.py:Exact"},
    "far": {"target": "judge.internal:50400", "episodes": True, "public": ["board"]},
    "node": {"command": ["node", "judge.js"], "port": 50401},
    "mine": {"attached": True},
}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The configuration in the folder of a run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "x" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(FORMER.read_text())
    return path


def given() -> Config:
    return Config.model_validate({"run": {"id": "x", "dir": "runs"}, "env": GIVEN})


def test_all_kinds_are_here() -> None:
    assert {type(env) for env in given().env.values()} == {*KINDS.values()}


def test_a_run_saved_when_all_kinds_shared_their_keys_is_read(saved: Path) -> None:
    assert diff(load(saved, environ={}), given()) == []


def test_such_a_file_may_still_be_wrong(saved: Path) -> None:
    saved.write_text(saved.read_text().replace("tolerance: null", "tolerance: 0.5"))
    with pytest.raises(ConfigError, match=r"env\.code\.tolerance: 0\.5 is an option of math, not of type code"):
        load(saved, environ={})


def test_a_kind_may_be_changed_on_the_command_line(saved: Path) -> None:
    changed = load(saved, ["env.fresh.type=null", "env.fresh.target=h:1"], {}).env["fresh"]
    assert changed == TargetConfig(target="h:1")


@pytest.mark.parametrize("name", GIVEN)
def test_a_run_saves_the_keys_of_the_kind_alone_and_reads_them_back(name: str) -> None:
    env = given().env[name]
    written = env.model_dump(mode="json")
    assert written.keys() == type(env).model_fields.keys()
    assert read_environment(yaml.safe_load(yaml.safe_dump(written))) == env


@pytest.mark.parametrize("option", ["ngram: 4", "port: 0", "judges: []", "episodes: false"])
def test_an_option_of_another_kind_is_refused_even_at_its_default(tmp_path: Path, option: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"env:\n  math:\n    {option}\n")
    key = option.partition(":")[0]
    with pytest.raises(
        ConfigError, match=rf"env\.math\.{key}: .* not of type math; leave it out.*run\.yaml:3\)"
    ) as refused:
        load(file, environ={})
    owners = [kind for kind in KINDS.values() if key in kind.model_fields]
    assert all(name in str(refused.value) for name, kind in KINDS.items() if kind in owners)


@pytest.mark.parametrize("option", ["typ: regex", "tagret: a.py:B", "comand: [node]"])
def test_the_key_that_says_the_kind_is_named_where_it_is_misspelt(tmp_path: Path, option: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"env:\n  mine:\n    timeout_s: 5\n    {option}\n")
    meant = {"typ": "type", "tagret": "target", "comand": "command"}[option.partition(":")[0]]
    with pytest.raises(ConfigError, match=rf"^.*unknown key.*run\.yaml:4\); did you mean env\.mine\.{meant}\?$"):
        load(file, environ={})


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("patern", r"env\.math has .*extract, failure_share, "),
        ("tolerence", r"did you mean env\.math\.tolerance\?"),
        ("tagret", r"did you mean env\.math\.target\?"),
    ],
)
def test_an_unknown_option_is_taken_for_none_of_another_kind(tmp_path: Path, option: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text("env: {math: {}}\n")
    with pytest.raises(ConfigError, match=rf"env\.math\.{option}: unknown key.*{said}") as refused:
        load(tmp_path / "run.yaml", [f"env.math.{option}=1"], {})
    assert "pattern" not in str(refused.value)


@pytest.mark.parametrize(("option", "default"), [("timeout_s", None), ("require_stop", "false")])
def test_the_default_of_another_kind_is_not_offered(tmp_path: Path, option: str, default: str | None) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"env:\n  math:\n    {option}: soon\n")
    with pytest.raises(ConfigError, match=rf"env\.math\.{option}: 'soon'") as refused:
        load(file, environ={})
    assert str(refused.value).partition("default is ")[2] == (default or "")


def test_null_leaves_an_option_out_so_that_a_file_changes_the_kind() -> None:
    changed = {"type": "math", "target": None, "attached": False, "pattern": None, "python": None}
    assert Config.model_validate({"env": {"mine": changed}}).env["mine"] == MathConfig()
    with pytest.raises(ValidationError, match="Extra inputs"):
        Config.model_validate({"env": {"mine": {"type": "math", "nothing": None}}})


def test_a_key_of_several_kinds_has_the_same_marks_in_each() -> None:
    marks: dict[str, set[frozenset[Mark]]] = {}
    for kind in KINDS.values():
        for key, field in kind.model_fields.items():
            marks.setdefault(key, set()).add(frozenset(mark for mark in field.metadata if isinstance(mark, Mark)))
    assert [key for key, found in marks.items() if len(found) > 1] == []


@pytest.mark.parametrize("url", ["http://[::1/v1", "http:///v1", "https://judge:99999/v1", "https://judge:x/v1"])
def test_a_judge_without_a_host_or_a_port_that_can_be_is_refused(url: str) -> None:
    env = {"type": "llm_judge", "rubric": "r", "judges": [{"base_url": url, "model": "m"}]}
    with pytest.raises(ValidationError, match="host"):
        read_environment(env)
