"""Data sets with weights: each has its share at every place, and law 5 holds for them as for one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Config
from headrace.config.data import DataConfig
from headrace_services.trainer.data.prompts import Prompts, RoundRobinOrder, spread
from headrace_services.trainer.demo_models import tiny
from tests.support.model_tokens import TINY

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(SHARES)
def test_at_every_place_each_set_has_had_its_share_to_within_one(shares: list[int]) -> None:
    turns, had = spread(shares), [0] * len(shares)
    for place, number in enumerate(turns, 1):
        had[number] += 1
        assert all(abs(had[n] - share * place / sum(shares)) < 1 for n, share in enumerate(shares))
    assert had == shares


@given(
    sets=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    seed=st.integers(0, 3),
    epochs=st.integers(1, 3),
    picks=st.lists(st.integers(0, 10_000), max_size=20),
)
def test_law_5_a_place_is_the_same_however_reached(
    sets: list[tuple[int, int]], seed: int, epochs: int, picks: list[int]
) -> None:
    shares, counts = [share for share, _ in sets], [count for _, count in sets]
    order = RoundRobinOrder(counts, spread(shares), seed, True, epochs)
    line = [order[k] for k in range(len(order))]
    assert len(set(line)) == len(line), "a group's name is its epoch and index"
    of = [number for number, count in enumerate(counts) for _ in range(count)]
    for number, count in enumerate(counts):
        own = [(epoch, index) for epoch, index in line if of[index] == number]
        assert [epoch for epoch, _ in own] == [place // count for place in range(len(own))]
        assert len(own) >= count * epochs, "it is through all its epochs"
    for pick in picks:
        k = pick % len(line)
        again = RoundRobinOrder(counts, spread(shares), seed, True, epochs + 2)
        assert again[k] == line[k]


def test_the_round_is_the_same_in_all_processes_and_releases() -> None:
    """A restarted trainer must find the order it left."""
    assert spread([7, 3]) == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert spread([5, 1, 1]) == [0, 0, 0, 1, 0, 0, 2]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([None, None], None),
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2], [1, 2]),
        ([2, None], [2, 1]),
        ([1.5, 1, 0.25], [6, 4, 1]),
        ([100, 100], [1, 1]),
        ([1e-3, 1e-3], [1, 1]),
    ],
)
def test_weights_are_shares_as_they_are_written(weights: list[float | None], shares: list[int] | None) -> None:
    sets = [{"dataset_name": "arithmetic", "weight": weight} for weight in weights]
    assert DataConfig(train=sets).shares == shares


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"train": [{"weight": 0}]}, "greater than 0"),
        ({"train": [{"weight": float("inf")}]}, "finite"),
        ({"train": [{"weight": 2}, {}], "use_multiple_dataloader": True}, "use_multiple_dataloader true"),
        ({"train": [{"weight": 0.33333}, {"weight": 0.66667}]}, "need 100000 prompts"),
    ],
)
def test_weights_that_can_t_be_followed_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig.model_validate(data)


def config(tmp_path: Path, *sets: tuple[int, float | None]) -> Config:
    sources = []
    for number, (size, weight) in enumerate(sets):
        path = tmp_path / f"set{number}.jsonl"
        path.write_text("".join(json.dumps({"input": f"{number}+{i}", "output": "1"}) + "\n" for i in range(size)))
        sources.append({"data_path": str(path), "env_name": "math", "weight": weight})
    return Config.model_validate(
        {
            "grpo": {"num_prompts_per_step": 4},
            "data": {"train": sources},
            "env": {"math": {}},
            "policy": {"generation": {"max_new_tokens": 6}},
        }
    )


def test_prompts_come_by_weight_and_a_finished_set_starts_again(tmp_path: Path) -> None:
    made = Prompts(config(tmp_path, (2, 3), (4, None)), tiny.make_tokenizer(), TINY)
    groups = made.train(range(made.total))
    assert made.total == 16
    assert len({group.id for group in groups}) == 16
    assert Counter(group.task_name for group in groups) == {"set0": 12, "set1": 4}
    for at in range(0, 16, 4):
        assert Counter(group.task_name for group in groups[at : at + 4]) == {"set0": 3, "set1": 1}


def test_law_5_a_restarted_trainer_asks_the_same_at_the_same_places(tmp_path: Path) -> None:
    settings = config(tmp_path, (3, 0.7), (10, 0.3))
    prompts = Prompts(settings, tiny.make_tokenizer(), TINY)
    before = prompts.train(range(prompts.total))
    for places in (range(7, 20), [3], [18, 2, 11]):
        again = Prompts(settings, tiny.make_tokenizer(), TINY).train(places)
        assert [group.encode() for group in again] == [before[place].encode() for place in places]
