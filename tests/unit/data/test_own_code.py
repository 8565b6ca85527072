"""Data sets and processors of the user's own, by file and by dotted path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.config import load
from headrace.config.data import DataConfig
from headrace_services.trainer.data.problems import load_problems, look_at
from headrace_services.trainer.data.sources import Problem

CODE = '''
def numbers(count=3, start=0):
    for i in range(start, start + count):
        yield {"input": f"{i}+1", "output": i + 1, "level": i}


class Questions:
    """As a data set of NeMo RL holds its rows."""

    def __init__(self, answer):
        chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": answer}]
        self.dataset = [{"messages": chat, "task_name": "mine"}]


def ask(row):
    return {"input": f"What is {row['q']}?", "output": row["a"], "unit": row.get("unit", "none")}


def broken(row):
    return {"input": row["nothing"]}


def torn():
    yield {"input": "1", "output": "1"}
    raise OSError("the disk is gone")


def leave(row=None):
    raise SystemExit(0)


def nothing(row):
    return None


def words():
    return ["1+1"]


here = 7
'''


def read(source: dict[str, Any]) -> list[Problem]:
    return load_problems(DataConfig.model_validate({"train": {"env_name": "e", **source}}))[0]


def asked(problems: list[Problem]) -> list[tuple[str, dict[str, Any]]]:
    return [(problem.messages[-1]["content"], problem.extra_env_info) for problem in problems]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1+1", "a": 2}\n{"q": "2+2", "a": 4, "unit": "m"}\n')
    return path


def test_a_function_yields_rows(mine: Path) -> None:
    problems = read({"dataset_name": f"{mine}:numbers", "task_config": {"count": 2, "start": 5}})
    assert asked(problems) == [("5+1", {"level": 5, "answer": "6"}), ("6+1", {"level": 6, "answer": "7"})]
    assert {problem.task_name for problem in problems} == {"numbers"}


def test_a_class_holds_rows_as_in_nemo_rl(mine: Path) -> None:
    source = {"dataset_name": f"{mine}:Questions", "task_config": {"answer": "2"}}
    (problem,) = read({**source, "input_key": "messages", "output_key": None})
    assert problem.messages == ({"role": "user", "content": "1+1"},)
    assert problem.extra_env_info == {"task_name": "mine", "answer": "2"}


def test_a_dotted_path_is_imported(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.rename(mine.parent / "prompts_of_mine.py")
    monkeypatch.syspath_prepend(str(mine.parent))
    assert len(read({"dataset_name": "prompts_of_mine.numbers"})) == 3
    with pytest.raises(ConfigError, match=r"prompts_of_mine\.other.*prompts_of_mine\.py.*other"):
        read({"dataset_name": "prompts_of_mine.other"})


def test_a_processor_makes_the_row_that_the_keys_are_fields_of(mine: Path, rows: Path) -> None:
    source = {"data_path": str(rows), "processor": f"{mine}:ask"}
    assert asked(read(source)) == [
        ("What is 1+1?", {"unit": "none", "answer": "2"}),
        ("What is 2+2?", {"unit": "m", "answer": "4"}),
    ]
    assert asked(read({**source, "output_key": "unit"}))[1] == ("What is 2+2?", {"output": 4, "answer": "m"})


def test_multiple_choice_questions_list_their_options(tmp_path: Path) -> None:
    row = {"question": "2+2?", "options": {"A": "4", "B": "5", "C": None}, "answer": "A", "subject": "sums"}
    path = tmp_path / "choices.jsonl"
    path.write_text(json.dumps(row) + "\n")
    source = {"data_path": str(path), "processor": "multichoice_qa_processor"}
    assert asked(read(source)) == [("Question: 2+2?\nOptions:\nA) 4\nB) 5", {"subject": "sums", "answer": "A"})]
    path.write_text('{"question": "2+2?", "answer": "A"}\n')
    with pytest.raises(ConfigError, match=r"choices\.jsonl:1: .*options .*'question', 'answer'"):
        read(source)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "broken",
            r"processor: 2 rows .*mine\.py:broken: .*mine\.py:20 raised KeyError: 'nothing'\n  .*rows\.jsonl:1\n",
        ),
        ("leave", r"processor: 2 rows .*mine\.py:leave: .*mine\.py:29 raised SystemExit: 0"),
        ("nothing", r"processor: 2 rows .*mine\.py:nothing returned None.*\n  .*rows\.jsonl:1\n"),
        ("numbers", r"processor: 2 rows .*mine\.py:numbers returned .*\n  .*rows\.jsonl:1"),
        ("missing", r"data\.train\[0\]\.processor .*mine\.py has no function or class missing"),
        ("here", r"mine\.py has no function or class here"),
    ],
)
def test_a_processors_error_names_the_row_and_the_line_of_code(mine: Path, rows: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read({"data_path": str(rows), "processor": f"{mine}:{name}"})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"dataset_name": ":torn"}, r"dataset_name .*mine\.py:torn, row 1: .*mine\.py:25 raised OSError"),
        ({"dataset_name": ":numbers", "task_config": {"size": 2}}, r"raised TypeError: .*'size'"),
        ({"dataset_name": ":leave"}, r"dataset_name .*mine\.py:leave, row 0: .*mine\.py:29 raised SystemExit: 0"),
        ({"dataset_name": ":words"}, r"row 0 of .*mine\.py:words: it is '1\+1'"),
        ({"dataset_name": ":ask"}, r"raised TypeError: .*missing 1 required positional argument"),
        (
            {"dataset_name": ":numbers", "output_key": "a"},
            r"3 rows .*no field 'a' \(output_key\).*\n  .*row 0 of .*mine\.py:numbers\n",
        ),
        ({"dataset_name": "no.such.module.f"}, r"no\.such\.module can't be imported; install it, .*FILE\.py:f"),
    ],
)
def test_what_goes_wrong_in_a_data_set_is_named(mine: Path, source: dict[str, Any], said: str) -> None:
    name = source["dataset_name"]
    with pytest.raises(ConfigError, match=said):
        read({**source, "dataset_name": f"{mine}{name}" if name.startswith(":") else name})


def test_a_file_that_isn_t_there_or_is_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset_name gone\.py:f"):
        read({"dataset_name": "gone.py:f"})
    (tmp_path / "bad.py").write_text("import nothing_like_it\n")
    with pytest.raises(ConfigError, match=r"bad\.py .*ModuleNotFoundError: .*'nothing_like_it'"):
        read({"dataset_name": f"{tmp_path / 'bad.py'}:f"})


def test_a_check_before_the_run_finds_it_too(mine: Path, rows: Path) -> None:
    config = DataConfig.model_validate(
        {"train": {"data_path": str(rows), "processor": f"{mine}:broken", "env_name": "e"}}
    )
    ((keys, message),) = look_at(config)
    assert keys == ("data", "train", "0", "processor")
    assert "mine.py:20 raised KeyError" in message


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"data_path": "prompt_file .jsonl"}, "data_path"),
        ({"data_path": "{rows}", "input_key": "processor "}, "input_key"),
        ({"data_path": "{rows}", "input_key": "q", "output_key": "prompt_file "}, "output_key"),
        ({"data_path": "{rows}", "prompt_file": "data_path processor "}, "prompt_file"),
        ({"data_path": "{rows}", "system_prompt_file": "prompt_file "}, "system_prompt_file"),
        ({"data_path": "{rows}", "processor": "prompt_file .py:f"}, "processor"),
        ({"dataset_name": "prompt_file .py:f"}, "dataset_name"),
        ({"dataset_name": "arithmetic", "task_config": {"processor ": 1}}, "task_config"),
    ],
)
def test_a_check_blames_the_key_at_fault_whatever_it_holds(rows: Path, source: dict[str, Any], key: str) -> None:
    given = {name: value.format(rows=rows) if isinstance(value, str) else value for name, value in source.items()}
    ((keys, _),) = look_at(DataConfig.model_validate({"train": {**given, "env_name": "e"}}))
    assert keys == ("data", "train", "0", key)


def test_what_is_no_row_gets_to_no_processor(mine: Path, rows: Path) -> None:
    rows.write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: .*list"):
        read({"data_path": str(rows), "processor": f"{mine}:ask"})


def test_files_are_found_beside_the_yaml_that_names_them(mine: Path, rows: Path) -> None:
    (mine.parent / "gsm8k").mkdir()  # no file of code, whatever is called so
    path = mine.parent / "run.yaml"
    path.write_text(
        "data:\n  train: [{data_path: rows.jsonl, processor: 'mine.py:ask'}, {dataset_name: 'mine.py:numbers'}, {dataset_name: gsm8k}]\n"
        "  default: {env_name: math}\nenv: {math: {}}\n"
    )
    first, second, third = load(path).data.train
    assert first.processor == f"{mine}:ask"
    assert second.dataset_name == f"{mine}:numbers"
    assert third.dataset_name == "gsm8k"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"dataset_name": "gsm"}, "unknown data set 'gsm'; did you mean gsm8k"),
        ({"processor": "multichoice"}, "unknown processor 'multichoice'; did you mean multichoice_qa_processor"),
    ],
)
def test_an_unknown_name_leads_to_the_nearest(source: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig.model_validate({"train": source})
