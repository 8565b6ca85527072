"""Several data sets, drawn from in turn: law 5 holds for them as for one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace_services.trainer.data.prompts import PromptOrder, Prompts, RoundRobinOrder
from headrace_services.trainer.demo_models import tiny
from tests.support.model_tokens import TINY


def evenly(counts: list[int], each: int, seed: int, shuffle: bool, epochs: int) -> RoundRobinOrder:
    turns = [number for number in range(len(counts)) for _ in range(each)]
    return RoundRobinOrder(counts, turns, seed, shuffle, epochs)


SETS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@given(counts=SETS, each=st.integers(1, 4), seed=st.integers(0, 3), epochs=st.integers(1, 3), shuffle=st.booleans())
def test_every_round_is_even_and_every_epoch_asks_each_problem_once(
    counts: list[int], each: int, seed: int, epochs: int, shuffle: bool
) -> None:
    order = evenly(counts, each, seed, shuffle, epochs)
    line = [order[k] for k in range(len(order))]
    sets = [number for number, count in enumerate(counts) for _ in range(count)]
    drawn = [sets[index] for _, index in line]
    turns = [number for number in range(len(counts)) for _ in range(each)]
    assert drawn == turns * (len(line) // len(turns))
    assert len(set(line)) == len(line), "a group's name is its epoch and index"
    for number, count in enumerate(counts):
        own = [(epoch, index) for (epoch, index), of in zip(line, drawn, strict=True) if of == number]
        assert [epoch for epoch, _ in own] == [place // count for place in range(len(own))]
        assert len(own) >= count * epochs, "it is through all its epochs"
    largest = max(counts) * epochs
    assert len(line) // len(counts) < largest + each, "and the line goes no further than the last round that needs"


@given(counts=SETS, each=st.integers(1, 4), seed=st.integers(0, 3), picks=st.lists(st.integers(0, 10_000), max_size=20))
def test_law_5_a_place_is_the_same_however_reached(counts: list[int], each: int, seed: int, picks: list[int]) -> None:
    walked = evenly(counts, each, seed, True, 2)
    line = [walked[k] for k in range(len(walked))]
    jumping, longer = evenly(counts, each, seed, True, 2), evenly(counts, each, seed, True, 5)
    for pick in picks:
        k = pick % len(line)
        assert jumping[k] == longer[k] == line[k]


def test_sets_have_orders_of_their_own() -> None:
    order = evenly([100, 100], 1, 42, True, 1)
    first, second = ([order[k][1] - start for k in range(number, 200, 2)] for number, start in ((0, 0), (1, 100)))
    alone = [PromptOrder(100, 42, True, 1)[k][1] for k in range(100)]
    assert sorted(first) == sorted(second) == list(range(100))
    assert len({tuple(first), tuple(second), tuple(alone), tuple(range(100))}) == 4
    # fixed across processes and releases: a restarted trainer must find the order it left
    assert first[:5] == [15, 45, 99, 51, 21]


def test_unshuffled_sets_follow_one_another_as_in_nemo_rl() -> None:
    order = evenly([4, 8], 2, 0, False, 1)
    letters = "abcd12345678"
    batches = ["".join(letters[order[k][1]] for k in range(at, at + 4)) for at in range(0, len(order), 4)]
    assert batches == ["ab12", "cd34", "ab56", "cd78"]
    assert [order[k][0] for k in range(len(order))] == [0] * 8 + [1, 1, 0, 0] * 2


@pytest.mark.parametrize("place", [-1, 8])
def test_there_is_no_place_outside(place: int) -> None:
    with pytest.raises(IndexError, match=f"place {place} of 8 prompts"):
        evenly([4, 1], 1, 0, True, 1)[place]


def config(tmp_path: Path, *sizes: int, prompts: int = 4, **data: Any) -> Config:
    sources = []
    for number, size in enumerate(sizes):
        path = tmp_path / f"set{number}.jsonl"
        lines = [json.dumps({"input": f"{number}+{i}", "output": str(number + i)}) + "\n" for i in range(size)]
        path.write_text("".join(lines))
        sources.append({"data_path": str(path), "env_name": "math"})
    return Config.model_validate(
        {
            "grpo": {"num_prompts_per_step": prompts},
            "data": {"train": sources, "use_multiple_dataloader": True, **data},
            "env": {"math": {}},
            "policy": {"generation": {"max_new_tokens": 6}},
        }
    )


def test_every_batch_is_even_and_a_small_set_comes_round_again(tmp_path: Path) -> None:
    made = Prompts(config(tmp_path, 3, 10), tiny.make_tokenizer(), TINY)
    assert made.total == 20
    groups = made.train(range(made.total))
    assert len({group.id for group in groups}) == made.total
    for at in range(0, made.total, 4):
        assert Counter(group.task_name for group in groups[at : at + 4]) == {"set0": 2, "set1": 2}


def test_law_5_a_restarted_trainer_asks_the_same_at_the_same_places(tmp_path: Path) -> None:
    """Whether it goes on, rewinds or refills: groups are made by their places alone."""
    settings = config(tmp_path, 3, 10, num_prompts_per_dataloader=1)
    before = Prompts(settings, tiny.make_tokenizer(), TINY).train(range(20))
    for places in (range(7, 20), [3], [18, 2, 11]):
        again = Prompts(settings, tiny.make_tokenizer(), TINY).train(places)
        assert [group.encode() for group in again] == [before[place].encode() for place in places]


def test_a_set_that_nothing_is_left_of_is_named(tmp_path: Path) -> None:
    settings = config(tmp_path, 2, 2)
    (tmp_path / "set1.jsonl").write_text((tmp_path / "set0.jsonl").read_text())
    with pytest.raises(ConfigError, match=r"data\.train\[1\] .*no problem"):
        Prompts(settings, tiny.make_tokenizer(), TINY)


@pytest.mark.parametrize(
    ("sizes", "prompts", "data", "problem"),
    [
        ((2,), 4, {}, r"use_multiple_dataloader true with 1 data sets"),
        ((2, 2), 5, {}, r"num_prompts_per_step 5 is not a multiple of the 2 data sets"),
        ((2, 2), 6, {"num_prompts_per_dataloader": 2}, r"data\.num_prompts_per_dataloader 2"),
    ],
    ids=["one-set", "uneven", "uneven-turns"],
)
def test_what_can_t_be_drawn_evenly_is_refused(
    tmp_path: Path, sizes: tuple[int, ...], prompts: int, data: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        config(tmp_path, *sizes, prompts=prompts, **data)
