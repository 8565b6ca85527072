from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from headrace.base.errors import ConfigError
from headrace.base.tagged_json import from_json
from headrace.config import Config
from headrace.config.data import DataConfig
from headrace_services.trainer.data.arithmetic import select_held_out, training_pairs
from headrace_services.trainer.data.problems import load_evaluated, load_problems

CHAIN_SUM = {
    "dataset_name": "reasoning_gym",
    "task": "chain_sum",
    "task_config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def data(**sections: Any) -> DataConfig:
    return DataConfig(**{"default": {"env_name": "e"}, **sections})


def evaluated(**sections: Any) -> dict[str, list[str]]:
    return {name: [question(p) for p in problems] for name, problems in load_evaluated(data(**sections)).items()}


def question(problem: Any) -> str:
    return problem.messages[-1]["content"]


def unordered(problem: Any) -> tuple[int, ...]:
    return tuple(sorted(int(n) for n in question(problem).split("+")))


def test_arithmetic_problems_carry_their_sum() -> None:
    train, _ = load_problems(data(train={"dataset_name": "arithmetic", "size": 50}))
    assert [p.index for p in train] == list(range(len(train)))
    for problem in train:
        assert problem.messages == ({"role": "user", "content": question(problem)},)
        assert problem.extra_env_info == {"answer": str(sum(unordered(problem)))}
        assert (problem.env_name, problem.task_name) == ("e", "arithmetic")


def test_no_unordered_pair_is_in_training_and_validation() -> None:
    source = {"dataset_name": "arithmetic", "size": 20_000}
    train, validation = load_problems(data(train={**source, "seed": 3}, validation={**source, "seed": 3}))
    assert len(validation) == 400
    assert {unordered(p) for p in validation} == set(select_held_out(2))
    assert not {unordered(p) for p in train} & {unordered(p) for p in validation}
    # all the rest can be drawn: nothing but the held-out pairs is missing from training
    assert len({unordered(p) for p in train}) > 0.95 * (5050 - 400)


def test_the_held_out_pairs_do_not_depend_on_any_seed() -> None:
    assert select_held_out(2) == select_held_out(2)
    assert len(set(select_held_out(2))) == 400
    assert all(0 <= a <= b <= 99 for a, b in select_held_out(2))
    first, second = (
        load_problems(
            data(train={"dataset_name": "arithmetic"}, validation={"dataset_name": "arithmetic", "seed": seed})
        )
        for seed in (1, 2)
    )
    assert {unordered(p) for p in first[1]} == {unordered(p) for p in second[1]}


@pytest.mark.parametrize(("digits", "count"), [(1, 5), (2, 400), (6, 400)])
def test_a_tenth_is_held_out_where_400_is_more(digits: int, count: int) -> None:
    pairs = select_held_out(digits)
    assert len(set(pairs)) == count
    assert all(0 <= a <= b < 10**digits for a, b in pairs)
    drawn = {tuple(sorted(p)) for p in islice(training_pairs(digits, random.Random(0)), 2000)}
    assert not drawn & set(pairs)


def test_repeats_are_removed() -> None:
    train, _ = load_problems(data(train={**CHAIN_SUM, "size": 500}))
    assert len(train) == len({question(p) for p in train}) < 250


def test_validation_problems_are_removed_from_training() -> None:
    train, validation = load_problems(
        data(train={**CHAIN_SUM, "size": 500, "seed": 0}, validation={**CHAIN_SUM, "size": 60, "seed": 1})
    )
    alone, _ = load_problems(data(train={**CHAIN_SUM, "size": 500, "seed": 0}))
    held = {question(p) for p in validation}
    assert held & {question(p) for p in alone}
    assert [question(p) for p in train] == [question(p) for p in alone if question(p) not in held]


def test_a_system_prompt_does_not_hide_a_repeat() -> None:
    source = {**CHAIN_SUM, "size": 100}
    with pytest.raises(ConfigError, match=r"data\.train: .*no problem"):
        load_problems(data(train={**source, "system_prompt": "Be brief."}, validation=source))


def test_sources_are_joined_with_their_environment_and_prompt() -> None:
    train, _ = load_problems(
        data(
            train=[
                {**CHAIN_SUM, "size": 5, "system_prompt": "Reply with only the number."},
                {"dataset_name": "arithmetic", "size": 5, "env_name": "other"},
            ]
        )
    )
    assert train[0].messages[0] == {"role": "system", "content": "Reply with only the number."}
    assert {(p.env_name, p.task_name, len(p.messages)) for p in train} == {
        ("e", "chain_sum", 2),
        ("other", "arithmetic", 1),
    }
    assert [p.index for p in train] == list(range(len(train)))


def test_an_entry_survives_json_and_is_scored_the_same() -> None:
    """With fractions, and with keys that are no text; that of every task is sent over the wire in `reward/test_built_in.py`."""
    for task in ("gsm_symbolic", "graph_color"):
        train, _ = load_problems(data(train={"dataset_name": "reasoning_gym", "task": task, "size": 1, "seed": 1}))
        info = json.loads(json.dumps(train[0].extra_env_info))
        assert info["task"] == task
        dataset = reasoning_gym.create_dataset(task, size=1, seed=1)
        entry = from_json(info["entry"])
        assert entry["metadata"] == dataset[0]["metadata"], task
        told, expected = (dataset.score_answer(each["answer"], each) for each in (entry, dataset[0]))
        assert told == expected, task


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, r"data\.train\[0\]: give dataset_name"),
        ({"dataset_name": "arithmetic", "task_config": {"digits": 0}}, r"arithmetic takes only digits"),
        ({"dataset_name": "arithmetic", "task_config": {"digit": 2}}, r"arithmetic takes only digits"),
        ({"dataset_name": "reasoning_gym", "task": "chain_sums"}, r"task 'chain_sums' is not a task .*chain_sum,"),
        ({**CHAIN_SUM, "task_config": {"terms": 2}}, r"chain_sum refuses it .*terms"),
        ({**CHAIN_SUM, "task_config": {"min_terms": 3, "max_terms": 2}}, r"chain_sum refuses it"),
        ({"data_path": "nowhere.jsonl"}, r"data\.train\[0\]\.data_path nowhere\.jsonl: can't be read"),
    ],
)
def test_an_unusable_source_is_refused_by_name(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_problems(data(train=[source]))


def jsonl(tmp_path: Path, *lines: str, **options: Any) -> DataConfig:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return data(train=[{"data_path": str(path), **options}])


def test_jsonl_problems(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "2+2"}]
    lines = [{"q": "1+1", "a": 2, "level": 3}, {"q": messages, "a": "4"}]
    section = jsonl(
        tmp_path, json.dumps(lines[0]), "", json.dumps(lines[1]), input_key="q", output_key="a", system_prompt="Given."
    )
    train, _ = load_problems(section)
    assert train[0].messages == ({"role": "system", "content": "Given."}, {"role": "user", "content": "1+1"})
    assert train[0].extra_env_info == {"level": 3, "answer": "2"}
    assert train[1].messages == tuple(messages)
    assert train[1].extra_env_info == {"answer": "4"}
    assert {p.task_name for p in train} == {"sums"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "a JSON list, not an object"),
        ('{"input": "1+1"}', r"no field 'output' \(output_key\)"),
        ('{"output": "2"}', r"no field 'input' \(input_key\)"),
        ('{"input": 3, "output": "2"}', "field 'input' is 3, not text or a list of messages"),
        ('{"input": [], "output": "2"}', r"field 'input' is \[\]"),
        ('{"input": [{"role": "user"}], "output": "2"}', "with role and content"),
        ('{"input": [{"role": "assistant", "content": "2"}], "output": "2"}', "ends with a message of the assistant"),
        ('{"input": "1+1", "output": null}', "field 'output' is None, not text or a number"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"sums\.jsonl:2: .*{message}"):
        load_problems(jsonl(tmp_path, '{"input": "1+1", "output": "2"}', line))


def test_an_evaluation_asks_the_runs_sets_and_each_further_one(tmp_path: Path) -> None:
    """A problem that several sets have counts in each of them."""
    path, other = tmp_path / "sums.jsonl", tmp_path / "others.jsonl"
    path.write_text("".join(json.dumps({"input": f"{i}+1", "output": str(i + 1)}) + "\n" for i in range(20)))
    other.write_text(json.dumps({"input": "0+1", "output": "1"}) + "\n" + json.dumps({"input": "7", "output": "7"}))
    own = {"train": {"data_path": str(path), "split_validation_size": 0.25}, "validation": {"data_path": str(other)}}
    training, validation = load_problems(data(**own))
    found = evaluated(**own, evaluate={"validation": None, "train": None, "again": {"data_path": str(other)}})
    assert list(found) == ["validation", "train", "again"]
    assert found["validation"] == [question(p) for p in validation]
    assert found["train"] == [question(p) for p in training]
    assert found["again"] == ["0+1", "7"]
    assert evaluated(**own, evaluate={"validation": None}) == {"validation": found["validation"]}


def test_an_evaluation_reads_no_training_set_that_it_does_not_ask(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text(json.dumps({"input": "1+1", "output": "2"}))
    gone, there = {"data_path": str(tmp_path / "gone.jsonl")}, {"data_path": str(tmp_path / "sums.jsonl")}
    assert evaluated(train=gone, validation=there, evaluate={"validation": None}) == {"validation": ["1+1"]}
    assert evaluated(train=gone, validation=gone, evaluate={"sums": there}) == {"sums": ["1+1"]}
    with pytest.raises(ConfigError, match=r"data\.train\[0\]\.data_path .*gone"):
        evaluated(train=gone, evaluate={"train": None})


def test_an_evaluation_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"data\.evaluate\.empty"):
        evaluated(evaluate={"empty": {"data_path": str(tmp_path / "empty.jsonl")}})
    with pytest.raises(ValueError, match=r"evaluate\.mine is null"):
        data(evaluate={"mine": None})


GAMES = [{"input": "Play.", "output": str(seed), "seed": seed, "note": note} for seed, note in ((1, 1), (2, 2), (1, 3))]


def games(tmp_path: Path, *, public: list[str]) -> tuple[DataConfig, dict[str, Any]]:
    path = tmp_path / "games.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GAMES))
    env = {"game": {"target": "game.py:Game", "episodes": True, "public": public}, "e": {"type": "math"}}
    source = {"data_path": str(path), "env_name": "game"}
    return DataConfig.model_validate({"train": source}), Config.model_validate({"env": env}).env


@pytest.mark.parametrize(("public", "kept"), [([], [1]), (["seed"], [1, 2]), (["seed", "note"], [1, 2, 1])])
def test_problems_that_a_program_can_tell_apart_are_not_equal(
    tmp_path: Path, public: list[str], kept: list[int]
) -> None:
    section, env = games(tmp_path, public=public)
    training, _ = load_problems(section, None, env)
    assert [problem.extra_env_info["seed"] for problem in training] == kept
    evaluate = {"games": section.train[0].model_dump(mode="json")}
    found = load_evaluated(section.model_copy(update={"evaluate": DataConfig(evaluate=evaluate).evaluate}), None, env)
    assert [problem.extra_env_info["seed"] for problem in found["games"]] == kept


def test_a_validated_game_is_not_trained_whatever_scores_it(tmp_path: Path) -> None:
    section, env = games(tmp_path, public=["seed"])
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps(GAMES[1]) + "\n")
    validated = DataConfig.model_validate(
        {"train": section.train[0].model_dump(mode="json"), "validation": {"data_path": str(held), "env_name": "e"}}
    )
    training, validation = load_problems(validated, None, env)
    assert [problem.extra_env_info["seed"] for problem in (*training, *validation)] == [1, 2]


def test_data_sets_of_one_name_are_tasks_of_their_own(tmp_path: Path) -> None:
    """Each task has its own metrics; those of `gsm8k/test.jsonl` and `math/test.jsonl` would be one."""
    for number, folder in enumerate(("gsm8k", "math", "other")):
        (tmp_path / folder).mkdir()
        name = "gsm8k-test" if folder == "other" else "test"
        (tmp_path / folder / f"{name}.jsonl").write_text(f'{{"input": "{number}+1", "output": "{number + 1}"}}\n')
    paths = ("gsm8k/test", "math/test", "other/gsm8k-test", "math/test")
    files = [{"data_path": str(tmp_path / f"{path}.jsonl")} for path in paths]
    sums = [{"dataset_name": "arithmetic", "size": 1, "task_config": {"digits": digits}} for digits in (3, 4)]
    section = data(train=[*files, *sums], remove_duplicates=False)
    tasks = [problem.task_name for problem in load_problems(section)[0]]
    assert tasks == ["gsm8k-test-0", "math-test-1", "gsm8k-test-2", "math-test-3", "arithmetic-4", "arithmetic-5"]
    two = data(train=files[:1], validation=files[1:3])
    training, validation = load_problems(two)
    assert [problem.task_name for problem in (*training, *validation)] == ["test", "test", "gsm8k-test"]
    held = data(train=[{**each, "split_validation_size": 0.9} for each in files[:2]])
    with pytest.raises(ConfigError, match="no problem to train on"):
        load_problems(held)
    _, both = load_problems(data(train=sums[0], validation=files[:2]))
    assert [problem.task_name for problem in both] == ["gsm8k-test", "math-test"]


def test_what_is_held_out_is_no_task_of_the_validation_sets(tmp_path: Path) -> None:
    """Two files have the name of file and folder, and each is the first of its list."""
    files = [tmp_path / "a" / "math" / "test.jsonl", tmp_path / "b" / "math" / "test.jsonl"]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_text("".join(f'{{"input": "{number}+{other}", "output": "?"}}\n' for other in range(2)))
    train, validation = ({"data_path": str(file)} for file in files)
    _, asked = load_problems(data(train=[{**train, "split_validation_size": 0.5}], validation=[validation]))
    assert [problem.task_name for problem in asked] == ["math-test-0", "math-test-0", "math-test-1"]
