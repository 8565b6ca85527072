"""Which rank trains on what: everything goes to one rank, in about equal parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Config
from headrace_services.trainer.control.rank import TrainerRank, shard_batch, split_evenly, split_groups
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.telemetry.metrics import TrajectoryReport
from tests.support.trainer import batch, on_ranks, trajectory
from tests.unit.trainer.loop_cases import reservation


def configured(share_prompts: bool, optimizer_step: int | None = None) -> Config:
    """Of steps of three groups of two."""
    return Config.model_validate(
        {
            "grpo": {"num_prompts_per_step": 3, "num_generations_per_prompt": 2},
            "policy": {"share_prompts": share_prompts, "train_global_batch_size": optimizer_step},
        }
    )


def test_every_trajectory_goes_to_one_rank() -> None:
    shares = shard_batch(reservation("a", "b", "c"), configured(share_prompts=False), ranks=2)
    assert sorted(place for share in shares for place in share) == list(range(6))
    assert [len(share) for share in shares] == [3, 3]


def test_every_optimizer_step_is_shared_out_by_itself() -> None:
    lengths = [9, 1, 1, 9, 5, 5]
    shares = shard_batch(reservation("a", "b", "c", lengths=lengths), configured(False, optimizer_step=2), ranks=2)
    assert [[place // 2 for place in share] for share in shares] == [[0, 1, 2], [0, 1, 2]]


def test_what_the_ranks_read_comes_together_in_the_batchs_order() -> None:
    trajectories = [trajectory([1], [2] * (place + 1)) for place in range(4)]
    whole = batch(trajectories, components=[{"c": float(place)} for place in range(4)])

    whole.advantages = np.arange(10.0)

    def read(ranks: Ranks) -> list[TrajectoryReport]:
        rank = TrainerRank(configured(share_prompts=False), ranks, lambda keys: [])
        return rank._reports(whole.take([[3, 0], [2, 1]][ranks.rank]))

    reports, other = on_ranks(read, 2)
    assert [report.components["c"] for report in reports] == [0, 1, 2, 3]
    assert [report.components["c"] for report in other] == [1, 2]
    assert [report.extent.paths for report in reports] == [[2], [3], [4], [5]]
    assert [report.extent.wrote for report in other] == [2, 3]
    assert [report.origin.advantage for report in reports] == [0, 1.5, 4, 7.5]


def test_prompts_that_are_shared_keep_a_group_on_one_rank() -> None:
    shares = shard_batch(reservation("a", "b", "c"), configured(share_prompts=True), ranks=2)
    assert shares == [[4, 5], [0, 1, 2, 3]]


@given(sized=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 6)), max_size=40), ranks=st.integers(1, 5))
def test_groups_that_share_a_prompt_stay_on_one_rank(sized: list[tuple[int, int]], ranks: int) -> None:
    lengths, groups = [n for n, _ in sized], [f"g{g}" for _, g in sized]
    shares = split_groups(lengths, groups, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    for own in set(groups):
        assert sum(any(groups[i] == own for i in share) for share in shares) == 1
    loads = [sum(lengths[i] for i in share) for share in shares]
    largest = max((sum(n for n, g in sized if f"g{g}" == own) for own in groups), default=0)
    assert max(loads) - min(loads) <= largest


@given(lengths=st.lists(st.integers(1, 500), max_size=40), ranks=st.integers(1, 5))
def test_split_evenly_is_a_partition_of_even_counts(lengths: list[int], ranks: int) -> None:
    shares = split_evenly(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= 2 * max(lengths, default=0)
