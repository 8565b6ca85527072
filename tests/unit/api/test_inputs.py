"""What is given to a run as Python objects: rewards and data sets as files in its folder, and values as overrides."""

from __future__ import annotations

import importlib.util
import json
import linecache
import math
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import pytest
import yaml

import headrace
from headrace.api import inputs
from headrace.api.starting import to_overrides
from headrace.base.errors import ConfigError
from headrace.config import Config, load
from headrace.config.yaml_text import parse
from headrace_services.trainer.data.problems import look_at

NOTEBOOK = '''
import math
import os.path as paths
from collections import Counter

import headrace

LIMIT = 3

def lengths(completions, **columns):
    """Half the length."""
    return [math.floor(len(each) / 2) + len(Counter(each)) * 0 + len(paths.sep) * 0 for each in completions]

def limited(completions):
    return [min(LIMIT, len(each)) for each in completions]

def nested(completions):
    return [sum(1 for _ in each if LIMIT) for each in completions]

def helped(completions):
    return lengths(completions)

def undefined(completions):
    return nowhere(completions)

def make(bonus):
    def closed(completions):
        return [bonus for _ in completions]
    return closed

closed = make(1.0)
nameless = lambda completions: [1.0]

class Half(headrace.Environment):
    def score(self, sample):
        return super().label and math.floor(0.5)

one = Half()
'''


@pytest.fixture
def cells() -> dict[str, Any]:
    """The names of a notebook, whose source is where a kernel puts it."""
    name = "<ipython-input-1>"
    linecache.cache[name] = (len(NOTEBOOK), None, NOTEBOOK.splitlines(keepends=True), name)
    known: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(NOTEBOOK, name, "exec"), known)
    return known


def loaded(target: str) -> Any:
    path, _, name = target.rpartition(":")
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def test_a_function_of_a_notebook_is_written_with_what_it_imports(cells: dict[str, Any], tmp_path: Path) -> None:
    assert loaded(inputs.target_of(cells["lengths"], tmp_path))(["four", ""]) == [2, 0]


def test_a_class_of_a_notebook_is_written_likewise(cells: dict[str, Any], tmp_path: Path) -> None:
    written = loaded(inputs.target_of(cells["Half"], tmp_path))
    assert issubclass(written, headrace.Environment)
    assert written().score(None) == 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("limited", "LIMIT"),
        ("nested", "LIMIT"),
        ("helped", "lengths"),
        ("undefined", "nowhere"),
        ("closed", "bonus"),
        ("nameless", "lambda"),
        ("one", "subclass of headrace.Environment"),
    ],
)
def test_what_only_the_notebook_has_is_named(cells: dict[str, Any], tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        inputs.target_of(cells[name], tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_function_of_a_module_stays_in_its_file(tmp_path: Path) -> None:
    assert inputs.target_of(loaded, tmp_path) == f"{Path(__file__).resolve()}:loaded"
    assert not any(tmp_path.iterdir())


def test_rows_are_written_as_they_are(tmp_path: Path) -> None:
    rows = [{"input": "1+1 = ü\u2028", "output": 2, "more": {"a": [1.5, None]}}, {"input": "😀"}]
    path = inputs.write_data(rows, tmp_path)
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == rows
    table = pandas.DataFrame({"input": ["a", "b"], "output": [1, 2]}, index=[7, 9])
    path = inputs.write_data(table, tmp_path / "other")
    assert pandas.read_parquet(path).to_dict("list") == {"input": ["a", "b"], "output": [1, 2]}


def test_a_run_keeps_the_rows_that_it_has(tmp_path: Path) -> None:
    rows = [{"input": "1", "output": "2"}]
    path = inputs.write_data(rows, tmp_path)
    assert inputs.write_data(rows, tmp_path) == path
    for other in ([*rows, *rows], pandas.DataFrame(rows)):
        with pytest.raises(ConfigError, match=r"run\.id"):
            inputs.write_data(other, tmp_path)
    assert path.read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"input": ["a"]}, "dict"),
        ("file.jsonl", "str"),
        (3, "int"),
        ([{"input": "a"}, "b"], r"data\[1\]"),
        ([{"input": math.nan}], r"data\[0\]"),
        ([{"input": b"a"}], r"data\[0\]"),
        (pandas.DataFrame({"input": ["1+1", 2]}), "Parquet.*input"),
    ],
)
def test_rows_that_can_not_be_written_are_named(tmp_path: Path, data: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        inputs.write_data(data, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [
        1e-6,
        1e22,
        True,
        None,
        "",
        "true",
        "1e-5",
        "a: b # c",
        "line\nline",
        "ü😀",
        [1, "1e-5", {"a": "no"}],
        {},
        math.inf,
        "${x}",
    ],
)
def test_a_value_is_what_the_configuration_reads(value: Any) -> None:
    (override,) = to_overrides({"section": {"key": value}})
    key, _, text = override.partition("=")
    assert key == "section.key"
    assert parse(text, key) == value


def test_nested_and_dotted_keys_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"run": {"id": "a"}, "policy": {"model_name": "b"}}))
    dotted = {"grpo.max_num_steps": 7, "policy.optimizer.kwargs.lr": 1e-6, "run.dir": tmp_path}
    nested = {"grpo": {"max_num_steps": 7}, "policy": {"optimizer": {"kwargs": {"lr": 1e-6}}}, "run": {"dir": tmp_path}}
    assert list(to_overrides(dotted)) == list(to_overrides(nested))
    config = load(file, list(to_overrides(nested)))
    assert (config.grpo.max_num_steps, config.policy.optimizer.kwargs.lr) == (7, 1e-6)
    assert config.run.dir == str(tmp_path)


def test_a_value_without_a_form_in_yaml_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a\.b: .*object"):
        list(to_overrides({"a": {"b": object()}}))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"input": "1", "output": None}],
            "data[0]: field 'output' is None, not text or a number; correct or remove the line",
        ),
        ([{"input": 1, "output": ""}, {"input": 2, "output": ""}], "  data[1]: "),
        ([], "data: it has no problem; give one per line"),
        (
            pandas.DataFrame([{"input": "1", "output": "1"}, {"input": None, "output": "1"}]),
            "row 1 of data: field 'input'",
        ),
    ],
)
def test_an_error_of_a_data_set_names_the_argument_and_its_row(tmp_path: Path, rows: Any, said: str) -> None:
    path = inputs.write_data(rows, tmp_path)
    settings = {"data": {"train": {"data_path": str(path), "env_name": "math"}}, "env": {"math": {"type": "math"}}}
    ((_, message),) = look_at(Config.model_validate(settings).data)
    named = inputs.name_arguments(message, tmp_path)
    assert said in named
    assert str(tmp_path) not in named
    assert "data_path" not in named


def test_an_error_of_a_reward_names_the_argument(tmp_path: Path) -> None:
    error = f"env.mine.target {tmp_path / inputs.REWARD}:mine: it does not define mine"
    assert inputs.name_arguments(error, tmp_path) == "env.mine.target reward:mine: it does not define mine"
