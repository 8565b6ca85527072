"""Rows that can't be used: all of them are told at once, by kind, and bounded, however many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.config.data import DataConfig
from headrace_services.trainer.data import rows
from headrace_services.trainer.data.faults import MOST_KINDS, MOST_ROWS, BadRow, Faults
from headrace_services.trainer.data.problems import load_problems, look_at

GOOD, NOT_JSON, NO_ANSWER = '{"input": "1+1", "output": "2"}', '{"input": "1+1", ', '{"input": "1+1"}'


def write(path: Path, *lines: str) -> dict[str, Any]:
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"data_path": str(path), "env_name": "e"}


def refusal(**data: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load_problems(DataConfig.model_validate(data))
    return str(refused.value).splitlines()


def test_all_bad_rows_of_all_data_sets_are_told_at_once(tmp_path: Path) -> None:
    data = {
        "train": [
            write(tmp_path / "a.jsonl", NO_ANSWER, GOOD, NOT_JSON, "[1]", NOT_JSON),
            {"data_path": str(tmp_path / "gone.jsonl"), "env_name": "e"},
        ],
        "validation": write(tmp_path / "held.jsonl", GOOD, '{"input": 3, "output": "2"}'),
    }
    told = refusal(**data)
    for place in ("a.jsonl:1: no field 'output'", "a.jsonl:4: a JSON list", "held.jsonl:2: field 'input' is 3"):
        assert len([line for line in told if place in line]) == 1, place
    both = next(at for at, line in enumerate(told) if "2 rows can't be used" in line)
    assert "data.train[0].data_path" in told[both]
    assert [line.split(":")[1] for line in told[both + 1 : both + 3]] == ["3", "5"]
    assert any("gone.jsonl: can't be read" in line for line in told)
    config = DataConfig.model_validate(data)
    assert [line for _, message in look_at(config) for line in message.splitlines()] == told
    keys = [keys for keys, _ in look_at(config)]
    assert keys[0] == ("data", "validation", "0", "data_path")
    assert ("data", "train", "0", "output_key") in keys


def test_of_many_rows_the_first_are_named_and_the_remedy_once(tmp_path: Path) -> None:
    told = refusal(train=write(tmp_path / "a.jsonl", GOOD, *[NO_ANSWER, NOT_JSON] * 100))
    assert len(told) <= 2 * (MOST_ROWS + 2)
    assert [line for line in told if "and 80 more of the kind" in line] == ["  and 80 more of the kind"] * 2
    assert "".join(told).count("correct or remove the line") == 2
    assert f"{tmp_path}/a.jsonl:2" in told[1]


def test_however_many_rows_and_kinds_there_are_few_are_kept() -> None:
    faults = Faults("data.train[0]", "data_path", "correct it")
    for number in range(100_000):
        faults.add(f"a.jsonl:{number}", BadRow("…" * 50, f"kind {number % (2 * MOST_KINDS)}"))
    told = [line for _, message in faults.problems() for line in message.splitlines()]
    assert len(told) <= MOST_KINDS * (MOST_ROWS + 2) + 1
    assert "50000 rows have further faults" in told[-1]
    assert sum(len(kind.rows) for kind in faults._kinds.values()) == MOST_KINDS * MOST_ROWS  # the others take no memory


def test_a_processor_that_fails_for_every_row_shows_its_trace_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def ask(row):\n    return {'input': row['nothing']}\n")
    source = write(tmp_path / "a.jsonl", *[GOOD] * 50)
    told = refusal(train={**source, "processor": f"{tmp_path / 'mine.py'}:ask"})
    assert "50 rows" in told[0]
    assert "mine.py:2 raised KeyError" in told[0]
    assert len([line for line in told if line.startswith("Traceback")]) == 1


def test_a_row_that_lacks_a_field_of_the_prompt_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("{level}: {}")
    source = write(tmp_path / "a.jsonl", '{"input": "1", "output": "2", "level": 3}', GOOD, GOOD)
    told = refusal(train={**source, "prompt_file": str(tmp_path / "prompt.txt")})
    assert "2 rows" in told[0]
    assert "{level}" in told[0]
    assert told[1].endswith("a.jsonl:2")


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", GOOD, GOOD)
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b'\n{"input": "\xff", "output": "2"}\n\xc3\xa9\n')
    told = refusal(train=source)
    assert "a.jsonl:2: it is not UTF-8 (byte 0xff)" in told[0]
    assert "a.jsonl:3: Expecting value" in told[1]


def test_what_follows_a_line_that_is_too_long_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_LONGEST_LINE", 100)
    told = refusal(train=write(tmp_path / "a.jsonl", GOOD, "x" * 350, GOOD, NO_ANSWER))
    assert ["a.jsonl:2: the line has 100" in told[0], "a.jsonl:4: no field" in told[1]] == [True, True]
