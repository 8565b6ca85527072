"""Data sets of the hub by name, read by the real `datasets` from folders of their names; prompts in files, and splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from headrace.base.errors import ConfigError
from headrace.config.data import DataConfig, HubName
from headrace_services.trainer.data.problems import load_problems
from headrace_services.trainer.data.sources import HUB_DATASETS, Problem


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder owner/name is what `datasets` takes before it asks the hub, which no test does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def publish(
    place: Path, path: str, rows: Sequence[dict[str, Any]], *, split: str = "train", subset: str = "default"
) -> None:
    folder = place / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{subset}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = folder / "README.md"
    head = card.read_text().removesuffix("---\n") if card.exists() else "---\nconfigs:\n"
    card.write_text(
        f"{head}- config_name: {subset}\n  data_files:\n  - split: {split}\n    path: {subset}-{split}.jsonl\n---\n"
    )


def data(**sections: Any) -> DataConfig:
    return DataConfig(**{"default": {"env_name": "math"}, **sections})


def asked(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    return [(problem.messages[-1]["content"], problem.extra_env_info["answer"]) for problem in problems]


CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "OpenMathInstruct-2": [{"problem": "2+2?", "expected_answer": "4"}],
    "DeepScaler": [{"problem": "2+2?", "answer": "4"}],
    "DAPOMath17K": [{"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}}],
    "DAPOMathAIME2024": [{"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}}],
    "AIME2024": [{"problem": "2+2?", "answer": "4"}],
    "AIME2025": [{"question": "2+2?", "answer": "4"}],
    "AIME2026": [{"problem": "2+2?", "answer": 4}],
    "gsm8k": [{"question": "2+2?", "answer": "two and two\n#### 4"}],
    "GSM8K": [{"question": "2+2?", "answer": "#### is not it\n#### 4"}],
    "OpenR1-Math-220k": [{"problem": "2+2?", "answer": "4"}],
    "NuminaMath-1.5": [{"problem": "2+2?", "answer": "4"}],
    "HelpSteer3": [{"context": CHAT[:3], "response1": "5", "response2": "4", "overall_preference": 2}],
    "squad": [{"context": "2+2 is 4.", "question": "2+2?", "answers": {"text": ["4", "four"], "answer_start": [7, 0]}}],
    "tulu3_sft_mixture": [{"messages": CHAT, "source": "x"}],
}


def test_every_name_is_known_to_configuration_and_reader() -> None:
    assert set(get_args(HubName)) == set(HUB_DATASETS) == set(ROWS)


@pytest.mark.parametrize("name", sorted(HUB_DATASETS))
def test_a_set_is_read_by_its_name(place: Path, name: str) -> None:
    known = HUB_DATASETS[name]
    for subset in known.subsets:
        publish(place, known.path, ROWS[name], split=known.split, subset=subset or "default")
    train, _ = load_problems(data(train={"dataset_name": name}))
    assert asked(train) == [("2+2?", "4")] * known.repeat
    assert {problem.task_name for problem in train} == {name}


def test_conversations_are_asked_as_far_as_the_last_answer(place: Path) -> None:
    for name, before in (
        ("HelpSteer3", CHAT[:3]),
        ("squad", [{"role": "system", "content": "2+2 is 4."}, {"role": "user", "content": "2+2?"}]),
        ("tulu3_sft_mixture", CHAT[:3]),
    ):
        known = HUB_DATASETS[name]
        publish(place, known.path, ROWS[name], subset=known.subsets[0] or "default")
        (problem,) = load_problems(data(train={"dataset_name": name}))[0]
        assert list(problem.messages) == before


@pytest.mark.parametrize(("preference", "answer"), [(-1, "a"), (0, "a"), (1, "b")])
def test_the_preferred_response_is_expected(place: Path, preference: int, answer: str) -> None:
    row = {"context": "2+2?", "response1": "a", "response2": "b", "overall_preference": preference}
    publish(place, "nvidia/HelpSteer3", [row], subset="preference")
    assert asked(load_problems(data(train={"dataset_name": "HelpSteer3"}))[0]) == [("2+2?", answer)]


def test_a_row_of_another_shape_is_named(place: Path) -> None:
    publish(place, "rajpurkar/squad", [{"context": "c", "question": "q", "answers": {"text": [], "answer_start": []}}])
    with pytest.raises(ConfigError, match=r"row 0 of rajpurkar/squad.*answers\.text"):
        load_problems(data(train={"dataset_name": "squad"}))


def test_split_subset_and_repeat_choose_what_is_read_and_how_often(place: Path) -> None:
    publish(place, "openai/gsm8k", [{"question": "1+1?", "answer": "#### 2"}], split="test", subset="socratic")
    source = {"dataset_name": "gsm8k", "split": "test", "subset": "socratic", "repeat": 3}
    assert asked(load_problems(data(train=source))[0]) == [("1+1?", "2")] * 3


def test_any_set_is_read_by_owner_and_name(place: Path) -> None:
    publish(place, "me/mine", [{"q": "1+1?", "a": 2}, {"q": [{"role": "user", "content": "2+1?"}], "a": 3}][:1])
    train, _ = load_problems(data(train={"data_path": "me/mine", "input_key": "q", "output_key": "a"}))
    assert asked(train) == [("1+1?", "2")]
    assert train[0].task_name == "mine"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"dataset_name": "gsm8k", "split": "dev"}, r"openai/gsm8k \(subset main, split dev\)"),
        ({"data_path": "me/mine", "output_key": "b"}, "row 0 of me/mine: no field 'b' .output_key."),
        ({"data_path": "me/mine", "input_key": "question", "output_key": "answer"}, "field 'answer' is None, not text"),
    ],
    ids=["split", "field", "answer"],
)
def test_what_cant_be_read_is_refused_by_name(place: Path, source: dict[str, Any], said: str) -> None:
    publish(place, "openai/gsm8k", [{"question": "1+1?", "answer": "2"}], subset="main")
    publish(place, "me/mine", [{"question": "1+1?", "answer": None}])
    with pytest.raises(ConfigError, match=said):
        load_problems(data(train={"input_key": "question", **source}))


def test_an_answer_without_its_mark_is_refused(place: Path) -> None:
    publish(place, "openai/gsm8k", [{"question": "1+1?", "answer": "2"}], subset="main")
    with pytest.raises(ConfigError, match=r"data\.train.0.: row 0 .*'2'.*'####'"):
        load_problems(data(train={"dataset_name": "gsm8k"}))


# -- prompts, splits and duplicates of any source ----------------------------------------------------------------------


def lines(place: Path, *questions: str) -> str:
    path = place / "questions.jsonl"
    path.write_text("".join(json.dumps({"input": question, "output": "1"}) + "\n" for question in questions))
    return str(path)


@pytest.mark.parametrize("end", ["", "\n"], ids=["no last newline", "last newline"])
def test_prompt_and_system_prompt_come_from_files(place: Path, end: str) -> None:
    (place / "cot.txt").write_text(f"Put it into \\boxed{{{{}}}}.\n{{}}{end}")
    (place / "system.txt").write_text(f"You can count.{end}")
    source = {"data_path": lines(place, "1{0}?"), "prompt_file": "cot.txt", "system_prompt_file": "system.txt"}
    train, _ = load_problems(data(train=source))
    assert train[0].messages == (
        {"role": "system", "content": "You can count."},
        {"role": "user", "content": "Put it into \\boxed{}.\n1{0}?"},
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "prompt_file cot.txt: can't be read"),
        ("no place", "prompt_file cot.txt: it has no place"),
        ("{} \\boxed{x}", "prompt_file cot.txt: {x} is not a field of questions"),
        ("{} \\boxed{", "prompt_file cot.txt: ValueError"),
        ("{} {x.y}", "prompt_file cot.txt: .*write {} where the problem goes"),
        ("{0} {1}", "prompt_file cot.txt: IndexError"),
        ("{} {}", "prompt_file cot.txt: IndexError"),
    ],
    ids=["missing", "without", "field", "braces", "attribute", "number", "twice"],
)
def test_a_prompt_file_that_cant_be_used_is_refused(place: Path, text: str | None, said: str) -> None:
    if text is not None:
        (place / "cot.txt").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_problems(data(train={"data_path": lines(place, "1?"), "prompt_file": "cot.txt"}))


def test_a_prompt_file_may_name_other_fields(place: Path) -> None:
    (place / "with.txt").write_text("{passage}\n\n{}")
    path = place / "passages.jsonl"
    rows = [("What is it?", "It is red."), ("What is it?", "It is {blue}."), ("What is it?", "It is red.")]
    path.write_text("".join(json.dumps({"input": q, "passage": p, "output": "1"}) + "\n" for q, p in rows))
    source = {"data_path": str(path), "prompt_file": "with.txt"}
    train, _ = load_problems(data(train=source))
    assert [q for q, _ in asked(train)] == ["It is red.\n\nWhat is it?", "It is {blue}.\n\nWhat is it?"]
    held = place / "held.jsonl"
    held.write_text(path.read_text().splitlines()[1] + "\n")
    train, _ = load_problems(data(train=source, validation={**source, "data_path": str(held)}))
    assert [q for q, _ in asked(train)] == ["It is red.\n\nWhat is it?"]


def test_a_share_of_the_training_set_is_held_out_by_seed(place: Path) -> None:
    source = {"data_path": lines(place, *map(str, range(100))), "split_validation_size": 0.1}
    train, validation = load_problems(data(train={**source, "seed": 1}))
    assert (len(train), len(validation)) == (90, 10)
    assert not set(asked(train)) & set(asked(validation))
    assert [question for question, _ in asked(train)] == sorted((q for q, _ in asked(train)), key=int)
    assert load_problems(data(train={**source, "seed": 1})) == (train, validation)
    assert load_problems(data(train={**source, "seed": 2}))[1] != validation
    assert [len(part) for part in load_problems(data(train={**source, "split_validation_size": 0.001}))] == [99, 1]
    assert [len(part) for part in load_problems(data(train={**source, "split_validation_size": 0.0}))] == [100, 0]


@pytest.mark.parametrize(("once", "copies"), [(True, 1), (False, 20)])
def test_a_share_is_of_the_problems_however_often_a_file_has_each(place: Path, once: bool, copies: int) -> None:
    """A tenth of 400 lines would hold out nine of ten problems."""
    source = {"data_path": lines(place, *map(str, [*range(20)] * 20)), "split_validation_size": 0.1}
    parts = load_problems(data(train=source, remove_duplicates=once))
    assert [len(part) for part in parts] == [18 * copies, 2 * copies]


def test_duplicates_stay_where_wanted_but_never_in_both_parts(place: Path) -> None:
    path = lines(place, "1", "2", "1")
    assert [q for q, _ in asked(load_problems(data(train={"data_path": path}))[0])] == ["1", "2"]
    kept, _ = load_problems(data(train={"data_path": path}, remove_duplicates=False))
    assert [(problem.index, problem.messages[0]["content"]) for problem in kept] == [(0, "1"), (1, "2"), (2, "1")]
    held = place / "held.jsonl"
    held.write_text('{"input": "1", "output": "1"}\n')
    train, _ = load_problems(
        data(train={"data_path": path}, validation={"data_path": str(held)}, remove_duplicates=False)
    )
    assert [q for q, _ in asked(train)] == ["2"]


def test_two_system_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        data(train={"data_path": "x", "system_prompt": "a", "system_prompt_file": "b"})
