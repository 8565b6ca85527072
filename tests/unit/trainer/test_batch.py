"""A batch in columns: what becomes of real trajectories, what can't be trained on, shares of ranks, and mini-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import CodecError
from headrace.config import Config
from headrace.records.score import Score
from headrace_services.trainer.control.rank import shard_batch
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.batch import Batch, GlobalCounts, MicroBatch, gather
from tests.support.trainer import batch, on_ranks, trajectory
from tests.unit.trainer.advantage_cases import batches, by_trajectory
from tests.unit.trainer.loop_cases import reservation

TRAJECTORY = trajectory(
    [1, 2],
    [3, 4, 5, 6, 7],
    logprobs=[-1, -2, -3, -4, -5],
    own=[1, 0, 1, 1, 1],
    index=3,
    versions=[2, 2, 3, 5, 5],
    finish_reason="length",
)


def of(max_age: int = 9, step: int = 5) -> Batch:
    score = Score("SCORED", 0.5, components={"form": 1.0}, environment="math")
    return Batch.of(
        [TRAJECTORY], [score], places=[7], groups=[1], multipliers=[2.0], step=step, max_age=max_age, size=8
    )


def test_what_the_environment_wrote_is_nowhere() -> None:
    found = of()
    assert found.rollout_logprobs.tolist() == [-1, -3, -4, -5]
    assert found.ages.tolist() == [3, 2, 0, 0]
    assert found.lengths.tolist() == [4]
    assert (found.rewards.tolist(), found.multipliers.tolist()) == ([0.5], [2.0])
    assert (found.places.tolist(), found.groups.tolist(), found.size, len(found)) == ([7], [1], 8, 1)
    assert [(score.components, score.environment) for score in found.scores] == [({"form": 1.0}, "math")]
    assert found.truncated.tolist() == [True]
    assert found.name(0) == "trajectory 'g'[3]"


@pytest.mark.parametrize(
    ("max_age", "expected"), [(3, [1, 1, 1, 1]), (2, [0, 1, 1, 1]), (1, [0, 0, 1, 1]), (0, [0, 0, 1, 1])]
)
def test_law_2_tokens_over_age_do_not_count(max_age: int, expected: list[int]) -> None:
    found = of(max_age=max_age)
    assert found.mask.tolist() == [bool(x) for x in expected]
    assert found.lengths.tolist() == [4]  # they stay in what is computed over the whole trajectory


@pytest.mark.parametrize(
    ("of_trajectory", "columns", "says"),
    [
        ({"logprobs": np.array([-1, -1, np.nan, -1, -1], np.float32)}, {}, "log-probability is not finite"),
        ({}, {"rewards": np.array([np.inf])}, "its reward is inf"),
        ({}, {"multipliers": np.array([-1.0])}, "multiplier is -1"),
        ({}, {"multipliers": np.array([np.nan])}, "multiplier is nan"),
        ({"prompt_token_ids": np.array([], np.int32)}, {}, "prompt of 0 and a completion of 5"),
        ({"prompt_token_ids": np.array([20], np.int32)}, {}, "of 20"),
        ({"completion_token_ids": np.array([3, 4, -1, 6, 7], np.int32)}, {}, "of 20"),
    ],
    ids=["nan", "reward", "multiplier", "no multiplier", "prompt", "vocabulary", "negative id"],
)
def test_problems_are_named(of_trajectory: dict[str, Any], columns: dict[str, Any], says: str) -> None:
    good = of()
    assert good.find_problem(0, 20, 7) is None
    changed = msgspec.structs.replace(TRAJECTORY, **of_trajectory)
    bad = dataclasses.replace(good, trajectories=(changed,), **columns)
    assert says in (bad.find_problem(0, 20, 7) or "")
    assert "7 tokens, more than policy.max_total_sequence_length 6" in (good.find_problem(0, 20, 6) or "")


def test_a_log_probability_of_the_environment_s_token_may_be_anything() -> None:
    changed = msgspec.structs.replace(TRAJECTORY, logprobs=np.array([-1, np.nan, -1, -1, -1], np.float32))
    assert dataclasses.replace(of(), trajectories=(changed,)).find_problem(0, 20, 7) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": np.array([-1], np.float32)}, "logprobs has 1 entries for 5 tokens"),
        ({"loss_mask": np.ones(1, np.uint8)}, "loss_mask has 1 entries for 5 tokens"),
        ({"completion_token_ids": np.ones(3, np.int32)}, "logprobs has 5 entries for 3 tokens"),
    ],
    ids=["logprobs", "loss mask", "completion"],
)
def test_arrays_of_unequal_length_never_reach_a_batch(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CodecError, match=says):
        msgspec.structs.replace(TRAJECTORY, **change).check()


def test_the_advantage_of_a_trajectory_is_the_mean_over_its_tokens() -> None:
    def mean(advantages: list[float]) -> list[float]:
        length = len(advantages)
        whole = batch([trajectory([1], [2] * max(length, 1), own=[1] * length or [0]), TRAJECTORY])
        whole.advantages = np.array([*advantages, 2.0, 2.0, 2.0, 4.0])
        return whole.mean_advantages()

    assert mean([0.1] * 7) == [0.1, 2.5]  # to the last bit where all are the same
    assert mean([1.0, -2.0, 4.0]) == [pytest.approx(1.0), 2.5]
    assert mean([]) == [0, 2.5]


@given(sizes=st.tuples(st.integers(1, 6), st.integers(1, 5)), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_steps_trajectories_are_the_same_for_any_ranks(sizes: tuple[int, int], ranks: int, seed: int) -> None:
    size, count = sizes
    groups, per_group = size * count, 2
    lengths = np.random.default_rng(seed).integers(1, 50, groups * per_group).tolist()
    names = [f"g{place}" for place in range(groups)]
    grpo = {"num_prompts_per_step": groups, "num_generations_per_prompt": per_group}
    config = Config.model_validate({"grpo": grpo, "policy": {"train_global_batch_size": size * per_group}})
    shares = shard_batch(reservation(*names, lengths=lengths), config, ranks)
    assert sorted(place for share in shares for place in share) == list(range(groups * per_group))
    whole = batch([trajectory([1], [2], group=name, index=index) for name in names for index in range(per_group)])
    own = [whole.take(share) for share in shares]
    for rank, share in zip(own, shares, strict=True):
        assert rank.places.tolist() == list(share)
        assert rank.groups.tolist() == [place // per_group for place in share]
        assert [t.group_id for t in rank.trajectories] == [names[place // per_group] for place in share]
    chosen = [rank.mini_batches(config.policy_batch) for rank in own]
    for step in range(count):
        found = sorted(own[rank].places[i] for rank in range(ranks) for i in chosen[rank][step])
        assert found == list(range(step * size * per_group, (step + 1) * size * per_group))
        counts = [len(chosen[rank][step]) for rank in range(ranks)]
        assert max(counts) - min(counts) <= 1


def equal(ours: Batch, theirs: Batch) -> None:
    for field in dataclasses.fields(Batch):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, strict=True)
        else:
            assert a == b if not isinstance(a, tuple) else [x.encode() for x in a] == [y.encode() for y in b], (
                field.name
            )


@given(whole=batches(), data=st.data())
def test_a_share_has_all_columns_and_rank_0_gathers_the_whole(whole: Batch, data: st.DataObject) -> None:
    whole.advantages = np.random.default_rng(0).normal(size=whole.trajectory.size)
    order = data.draw(st.permutations(range(len(whole))))
    cut = data.draw(st.integers(0, len(whole)))
    split = [order[:cut], order[cut:]]
    shares = [whole.take(places) for places in split]
    for share, places in zip(shares, split, strict=True):
        assert (share.size, share.places.tolist(), len(share)) == (whole.size, list(places), len(places))
        assert [id(t) for t in share.trajectories] == [id(whole.trajectories[place]) for place in places]
        for name in ("rollout_logprobs", "mask", "ages", "old_logprobs", "ref_logprobs", "values", "advantages"):
            of_whole = by_trajectory(whole, getattr(whole, name))
            for i, own in enumerate(by_trajectory(share, getattr(share, name))):
                np.testing.assert_array_equal(own, of_whole[places[i]])
        for name in ("rewards", "multipliers", "groups"):
            np.testing.assert_array_equal(getattr(share, name), getattr(whole, name)[list(places)])

    first, second = on_ranks(lambda ranks: gather(shares[ranks.rank], ranks), 2)
    equal(first, whole)
    equal(second, shares[1])
    equal(gather(whole, Ranks()), whole)


@given(given_batch=batches())
def test_sums_lengths_and_places_are_those_of_each_trajectory(given_batch: Batch) -> None:
    tokens = np.arange(given_batch.trajectory.size)
    each = by_trajectory(given_batch, tokens)
    assert given_batch.lengths.tolist() == [len(own) for own in each]
    assert [own.tolist() for own in given_batch.split(tokens)] == [own.tolist() for own in each]
    assert given_batch.sums(tokens).tolist() == [own.sum() for own in each]
    assert given_batch.to_go.tolist() == [len(own) - 1 - t for own in each for t in range(len(own))]
    order = range(len(given_batch))[::-1]
    assert given_batch.tokens_of(order).tolist() == [token for i in order for token in each[i]]


def test_a_micro_batch_has_its_trajectories_columns_in_its_order() -> None:
    one, two = (
        trajectory([1], [2, 3], logprobs=[-1, -2], group="a"),
        trajectory([1], [4, 5, 6], own=[1, 0, 1], group="b"),
    )
    whole = batch([one, TRAJECTORY, two], [1.0, 2.0, 3.0], multipliers=[0.0, 0.5, 1.0], step=5, max_age=2)
    whole.advantages, whole.returns = np.arange(8.0), -np.arange(8.0)
    whole.old_logprobs = np.arange(8, dtype=np.float32) / 8
    found = MicroBatch.of(whole, (2, 0), torch.device("cpu"))
    assert found.trajectory.tolist() == [0, 0, 1, 1]
    assert found.mask.tolist() == [0, 0, 0, 0]
    assert found.ages.tolist() == [5, 5, 5, 5]
    assert (found.multipliers.tolist(), found.rewards.tolist()) == ([1, 0], [3, 1])
    assert found.advantages.tolist() == [6, 7, 0, 1]
    assert found.rollout_logprobs.tolist() == [-1, -1, -1, -2]
    assert found.old_logprobs is not None
    assert found.old_logprobs.tolist() == [0.75, 0.875, 0, 0.125]
    assert found.returns is not None
    assert found.returns.tolist() == [-6, -7, 0, -1]
    assert (found.ref_logprobs, found.values) == (None, None)
    dtypes = {column.dtype for column in vars(found).values() if column is not None}
    assert dtypes == {torch.float32, torch.int64}


@given(whole=batches(), data=st.data())
def test_counts_are_those_of_all_ranks(whole: Batch, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 1), min_size=len(whole), max_size=len(whole)))
    size = data.draw(st.integers(1, len(whole)))

    def of_rank(ranks: Ranks) -> list[GlobalCounts]:
        mine = whole.take([i for i, owner in enumerate(owners) if owner == ranks.rank])
        return GlobalCounts.of(mine, mine.mini_batches(size), ranks)

    found, same = on_ranks(of_rank, 2)
    assert found == same
    masks = by_trajectory(whole, whole.mask)
    for step, counts in enumerate(found):
        chosen = [i for i in range(step * size, min((step + 1) * size, len(whole))) if masks[i].size]
        tokens = [masks[i].sum() * whole.multipliers[i] for i in chosen]
        assert counts.tokens == pytest.approx(sum(tokens))
        assert counts.sequences == pytest.approx(sum(whole.multipliers[i] for i in chosen))
        positive = [n for i, n in zip(chosen, tokens, strict=True) if whole.rewards[i] > 0]
        assert counts.positive_tokens == pytest.approx(sum(positive))
