"""Files and folders of rows: what they may hold, and how what can't be used is named."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace import Sample
from headrace.base.errors import ConfigError
from headrace.config.data import DataConfig
from headrace.env.wire import sample_from_wire, sample_to_wire
from headrace_services.trainer.data import rows
from headrace_services.trainer.data.problems import load_problems
from headrace_services.trainer.data.prompts import digest_problems
from headrace_services.trainer.data.sources import Problem, describe_columns


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def read(path: Path, **options: Any) -> list[Problem]:
    return load_problems(DataConfig.model_validate({"train": {"data_path": str(path), "env_name": "e", **options}}))[0]


def asked(problems: Sequence[Problem]) -> list[tuple[str, dict[str, Any]]]:
    return [(problem.messages[-1]["content"], problem.extra_env_info) for problem in problems]


ROWS = [{"q": "1+1", "a": 2, "level": 3}, {"q": "2+2", "a": 4, "level": 1}]
EXPECTED = [("1+1", {"level": 3, "answer": "2"}), ("2+2", {"level": 1, "answer": "4"})]
KEYS = {"input_key": "q", "output_key": "a"}


def write(folder: Path, name: str, rows: Sequence[Any]) -> Path:
    path = folder / name
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.json", "sums.parquet"])
def test_every_form_of_a_file_says_the_same(tmp_path: Path, name: str) -> None:
    problems = read(write(tmp_path, name, ROWS), **KEYS)
    assert asked(problems) == EXPECTED
    assert {problem.task_name for problem in problems} == {"sums"}


@pytest.mark.parametrize(("name", "first"), [("sums.jsonl", 1), ("sums.json", 0), ("sums.parquet", 0)])
def test_a_problem_knows_its_row(tmp_path: Path, name: str, first: int) -> None:
    path = write(tmp_path, name, [*ROWS, ROWS[0], {"q": "3+3", "a": 6}])
    kept = read(path, **KEYS, system_prompt="Add.")  # the third is a duplicate
    assert [problem.row for problem in kept] == [(str(path), first), (str(path), first + 1), (str(path), first + 3)]


def test_json_may_also_have_an_object_a_line(tmp_path: Path) -> None:
    (tmp_path / "sums.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert asked(read(tmp_path / "sums.json", **KEYS)) == EXPECTED


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = write(tmp_path, "sums.jsonl", ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert asked(read(path, **KEYS)) == EXPECTED


def test_a_folder_of_data_files_or_of_a_saved_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder, "train.parquet", ROWS)
    bare = [(question, {"answer": info["answer"]}) for question, info in EXPECTED]
    assert asked(read(folder, **KEYS)) == bare
    import datasets

    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "one")
    assert asked(read(tmp_path / "one", **KEYS)) == bare
    datasets.DatasetDict({"train": made.select([0]), "test": made.select([1])}).save_to_disk(tmp_path / "splits")
    assert asked(read(tmp_path / "splits", **KEYS)) == bare[:1]
    assert asked(read(tmp_path / "splits", split="test", **KEYS)) == bare[1:]
    with pytest.raises(ConfigError, match=r"subset default, split dev\).*'dev'"):
        read(tmp_path / "splits", split="dev", **KEYS)


def test_dots_lead_into_nested_fields_unless_a_field_has_that_name(tmp_path: Path) -> None:
    rows = [{"a.b": "x", "a": {"b": "y"}, "c": [{"d": "1"}]}]
    path = write(tmp_path, "rows.jsonl", rows)
    ((question, info),) = asked(read(path, input_key="a.b", output_key="c.0.d"))
    assert question == "x"
    assert info == {"a": {"b": "y"}, "c": [{"d": "1"}], "answer": "1"}
    assert asked(read(path, input_key="c.0.d", output_key="a.b"))[0][1]["answer"] == "x"


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def test_a_message_of_a_table_has_its_own_fields_alone(tmp_path: Path) -> None:
    """Parquet has each field of any message in all of them. Templates ask whether one is there, and equal prompts must be equal."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    rows = [{"input": [*CHAT[:2], call, CHAT[1]], "output": "2"}, {"input": CHAT[:2], "output": "2"}]
    for name in ("calls.parquet", "calls.jsonl"):
        found = [list(problem.messages) for problem in read(write(tmp_path, name, rows))]
        assert found == [row["input"] for row in rows]


def test_the_last_message_of_a_conversation_may_be_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path, "chats.jsonl", [{"messages": CHAT}, {"messages": CHAT[1:2]}, {"messages": "3+3", "x": 1}])
    problems = read(path, input_key="messages", output_key=None)
    assert [list(problem.messages) for problem in problems[:2]] == [CHAT[:2], CHAT[1:2]]
    assert [info for _, info in asked(problems)] == [{"answer": "2"}, {}, {"x": 1}]
    alone = write(tmp_path, "alone.jsonl", [{"messages": CHAT[2:]}])
    with pytest.raises(ConfigError, match=r"alone\.jsonl:1: .*assistant"):
        read(alone, input_key="messages", output_key=None)


def test_an_answer_may_be_a_number_of_any_size(tmp_path: Path) -> None:
    path = write(tmp_path, "big.jsonl", [{"input": "10^30", "output": 10**30}])
    assert asked(read(path)) == [("10^30", {"answer": "1" + "0" * 30})]


def test_a_whole_number_is_no_fraction_though_a_table_made_it_one(tmp_path: Path) -> None:
    rows_of_table = [{"input": name, "output": value} for name, value in (("a", 42.0), ("b", 0.5), ("c", -0.0))]
    answers = [info["answer"] for _, info in asked(read(write(tmp_path, "table.jsonl", rows_of_table)))]
    assert answers == ["42", "0.5", "0"]


CASES = {
    "nan": ('{"input": "a", "output": "1", "w": NaN}', "field 'w' .*info_keys"),
    "infinite-answer": ('{"input": "a", "output": 1e400}', "'output' is inf, not a finite"),
    "infinite": ('{"input": "a", "output": "1", "w": 1e999}', "field 'w'"),
    "surrogate": ('{"input": "a\\ud800", "output": "1"}', "field 'input' .*surrogates"),
    "surrogate-answer": ('{"input": "a", "output": "\\ud800"}', "field 'answer' .*surrogates"),
    "integer": ('{"input": "a", "output": "1", "n": 1' + "0" * 30 + "}", "field 'n' "),
    "nested": ('{"input": "a", "output": "1", "n": ' + "[" * 100_000 + "]" * 100_000 + "}", "too deeply"),
    "digits": ('{"input": "a", "output": 1' + "0" * 5000 + "}", "4300 digits"),
    "control": ("\0\x1b[2J", "Expecting value"),
}


@pytest.mark.parametrize(("line", "said"), CASES.values(), ids=CASES)
def test_what_can_t_be_carried_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"input": "1", "output": "1"}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:2: .*{said}"):
        read(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_columns_that_nobody_names_are_not_looked_at(tmp_path: Path, name: str) -> None:
    odd: dict[str, Any] = {"gap": float("nan"), "level": 3}
    if name == "rows.parquet":
        odd |= {"when": datetime.date(2026, 1, 1), "raw": b"\xff"}
    path = write(tmp_path, name, [{"input": "1+1", "output": "2", **odd}])
    with pytest.raises(ConfigError, match=r"field 'gap' .*info_keys"):
        read(path)
    assert asked(read(path, info_keys=["level"])) == [("1+1", {"answer": "2", "level": 3})]
    assert asked(read(path, info_keys=[])) == [("1+1", {"answer": "2"})]
    with pytest.raises(ConfigError, match=r"no field 'levels' \(info_keys"):
        read(path, info_keys=["levels"])


TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # surrogates, too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(2**64) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CHATS = st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), VALUES, max_size=3), max_size=3)
LINES = st.fixed_dictionaries({"input": TEXT, "output": TEXT, "level": VALUES}) | st.fixed_dictionaries(
    {"input": CHATS | VALUES, "output": VALUES}
)


@given(rows=st.lists(LINES | VALUES, max_size=3), torn=st.binary(max_size=6), answered=st.booleans())
@example(rows=[None, None], torn=b"", answered=False)  # rows with one fault are told together
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_bad_line_of_any_file_is_named(tmp_path: Path, rows: list[Any], torn: bytes, answered: bool) -> None:
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows) + torn)
    problems, refused = [], ""
    try:
        problems = read(path, output_key="output" if answered else None)
    except ConfigError as error:
        refused = str(error)
    said = r"hostile\.jsonl(:\d+: .*; correct or remove the line|: can't be read)|remove the line\n.*hostile\.jsonl:\d+|no problem to train"
    assert bool(problems) != bool(re.search(said, refused)), refused
    digest_problems(problems, [])
    for problem in problems:
        sample = Sample("", problem.extra_env_info, messages=problem.messages, environment="e")
        assert sample_from_wire(sample_to_wire(sample)).extra_env_info == problem.extra_env_info


def test_a_line_that_is_no_line_of_prompts_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_LONGEST_LINE", 100)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "1", "output": "1"}\n' + "x" * 1000)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: .*100 characters"):
        read(path)


def test_a_bad_row_of_a_table_or_a_list_is_named(tmp_path: Path) -> None:
    rows = [{"input": "1", "output": "1"}, {"input": "2", "output": None}]
    with pytest.raises(ConfigError, match=r"row 1 .*t\.parquet: .*'output' is None"):
        read(write(tmp_path, "t.parquet", rows))
    with pytest.raises(ConfigError, match=r"item 1 .*t\.json: .*'output' is None"):
        read(write(tmp_path, "t.json", rows))
    dated = [{"input": "1", "output": "1", "at": datetime.date(2026, 1, 1)}]
    with pytest.raises(ConfigError, match=r"row 0 .*t\.parquet: .*'at'.*date"):
        read(write(tmp_path, "t.parquet", dated))


@pytest.mark.parametrize("name", ["t.parquet", "t.json", "t.jsonl"])
@pytest.mark.parametrize("content", [b"\xff\xfe\x00PAR1", b"[1", b""], ids=["bytes", "torn", "empty"])
def test_a_file_that_is_none_of_these_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"t\.(parquet|jsonl?)|no problem"):
        read(tmp_path / name)


QUESTION = [{"role": "user", "content": "2+2"}]
TRL_ROWS = [{"prompt": "2+2", "solution": "4", "level": None}, {"prompt": "3+3", "solution": "6", "level": 1}]
VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": QUESTION,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_rows_of_trl_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    problems = read(write(tmp_path, name, TRL_ROWS))
    # the text stays, and tells that the function gets texts
    assert asked(problems) == [("2+2", TRL_ROWS[0]), ("3+3", TRL_ROWS[1])]
    (chat,) = read(write(tmp_path, f"chat_{name}", [{"prompt": QUESTION, "answer": 4}]))
    assert (list(chat.messages), chat.extra_env_info) == (QUESTION, {"answer": 4})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("options", [{}, {"input_key": "prompt"}])
def test_rows_of_verl_are_read_as_they_are(tmp_path: Path, name: str, options: dict[str, str]) -> None:
    (problem,) = read(write(tmp_path, name, VERL_ROWS), **options)
    rest = {key: value for key, value in VERL_ROWS[0].items() if key != "prompt"}
    assert (list(problem.messages), problem.extra_env_info) == (QUESTION, {**rest, "answer": "4"})


@pytest.mark.parametrize("truth", [{"target": 24, "numbers": [1, 2]}, ["4", "four"], None, True])
def test_a_truth_of_verl_that_is_no_text_reaches_the_function_alone(tmp_path: Path, truth: Any) -> None:
    row = VERL_ROWS[0] | {"reward_model": {"ground_truth": truth}}
    (problem,) = read(write(tmp_path, "rows.jsonl", [row]))
    assert problem.extra_env_info["reward_model"] == {"ground_truth": truth}
    assert "answer" not in problem.extra_env_info


def test_an_answer_that_is_named_is_one_of_such_rows_too(tmp_path: Path) -> None:
    problems = read(write(tmp_path, "rows.jsonl", TRL_ROWS), output_key="solution")
    assert [problem.extra_env_info["answer"] for problem in problems] == ["4", "6"]
    assert problems[0].extra_env_info["solution"] == "4"
    # with both keys given, a row is as any other
    (problem, _) = read(write(tmp_path, "rows.jsonl", TRL_ROWS), input_key="prompt", output_key="solution")
    assert problem.extra_env_info == {"level": None, "answer": "4"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "2+2", "image": b"\x89PNG"}, "'image'"),
        ({"prompt": "2+2", "share": float("nan")}, "'share'"),
        ({"prompt": [{"role": "user", "content": None}]}, "'prompt'"),
        ({"prompt": [*QUESTION, {"role": "assistant", "content": "4"}]}, "'prompt' ends with"),
        ({"prompt": 5}, "'prompt'"),
    ],
)
def test_a_column_that_can_not_be_carried_is_named(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    path = write(tmp_path, "rows.parquet", [row])
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert named in str(refused.value)


@pytest.mark.parametrize("keys", [{}, {"input_key": "q", "output_key": "a", "info_keys": ["level"]}])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("images", ["a.png"]),
        ("images", [{"image": "file:///a.jpg"}]),
        ("image", "data:image/png;base64,iVBO"),
        ("image", "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"),
        ("image", "https://example.com/a.jpg?signature=1f"),
        ("videos", ["https://example.com/a.mp4"]),
        ("audio", {"path": "a.wav", "bytes": None}),
    ],
)
def test_what_is_shown_beside_the_text_is_never_left_out(
    tmp_path: Path, keys: dict[str, Any], field: str, value: Any
) -> None:
    row = {"prompt": "What is in <image>?", "q": "What is in <image>?", "a": "cat", "level": 1, field: value}
    path = write(tmp_path, "rows.jsonl", [row])
    with pytest.raises(ConfigError, match=f"rows.jsonl:1: field '{field}'.*info_keys"):
        read(path, **keys)
    (problem,) = read(path, input_key="q", output_key="a", info_keys=[field])
    assert problem.extra_env_info[field] == value


@pytest.mark.parametrize("value", [None, [], "", "python:3.11-slim", ["registry.example/tasks/7"], 3, "UK"])
def test_a_field_of_that_name_without_a_picture_is_as_any(tmp_path: Path, value: Any) -> None:
    for field in ("image", "images"):
        (problem,) = read(write(tmp_path, "rows.jsonl", [{"prompt": "2+2", field: value}]))
        assert problem.extra_env_info[field] == value


def test_config_check_says_what_was_recognised(tmp_path: Path) -> None:
    def said(name: str, rows: Sequence[Any]) -> list[str]:
        path = str(write(tmp_path, name, rows))
        (source,) = DataConfig.model_validate({"train": {"data_path": path}}).train
        return list(describe_columns(source, "data.train[0]"))

    (of_verl,) = said("verl.parquet", VERL_ROWS)
    assert of_verl.startswith("data.train[0].data_path")
    assert all(token in of_verl for token in ("as in verl", "ground_truth", "ability, reward_model, extra_info"))
    (of_trl,) = said("trl.jsonl", TRL_ROWS)
    assert "as in TRL" in of_trl
    assert said("own.jsonl", [{"input": "1", "output": "2", "prompt": "3"}]) == []


def test_config_check_names_the_columns_after_the_processor(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def only(row):\n    return {'prompt': row['prompt'], 'kept': 1}\n")
    path, processor = write(tmp_path, "rows.jsonl", [{"prompt": "2+2?", "dropped": 1}]), f"{tmp_path}/mine.py:only"
    (source,) = DataConfig.model_validate({"train": {"data_path": str(path), "processor": processor}}).train
    (line,) = describe_columns(source, "data.train[0]")
    assert "kept" in line
    assert "dropped" not in line
