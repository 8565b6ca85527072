"""Episodes of several calls in the columns of a batch, and in what is told of a step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.records.origin import TokenRange, trace_origin
from headrace.records.score import Score
from headrace.records.trajectory import Group, Sampling, Span
from headrace.replay import Evaluated
from headrace.run.samples import MaskReason
from headrace_services.trainer.control.validation import summarize
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.batch import Batch, GlobalCounts, MicroBatch, gather
from headrace_services.trainer.network.packing import Packing, pack, plan
from headrace_services.trainer.telemetry import alarm, batch_samples
from headrace_services.trainer.telemetry.batch_samples import training_records, validation_record
from headrace_services.trainer.telemetry.plots import draw_disagreement
from tests.support.episodes import call, episode, random_episodes
from tests.support.trainer import batch, on_ranks, trajectory

# call 1 is a root of its own; 2 and 3 continue call 0, and call 2 is not trained
TREE = episode(
    [
        call(-1, [1], [2, 3], [-0.5, -1.0], version=3, replica="a"),
        call(-1, [4], [5], [-2.0], version=2, replica="b"),
        call(0, [6], [7], [-3.0], version=0, trained=False),
        call(0, [8], [9, 10], [-0.25, -0.75], spans=(Span(3, 0, 1), Span(4, 1, 2)), replica="a"),
    ],
    truncated=True,
)
PROMPT = Group("g", "train", 0, "sums", "math", (), np.array([1], np.int32), {}, 0, 2, Sampling(1.0, 4))


def step_four() -> Batch:
    """The tree between two single completions, at step 4, where tokens of version 2 are over age."""
    return batch([trajectory([1], [2], [-0.5]), TREE, trajectory([3], [4, 5], [-0.1, -0.2])], step=4, max_age=1)


def test_columns_hold_the_trained_tokens_path_by_path() -> None:
    found = step_four()
    assert found.lengths.tolist() == [1, 5, 2]
    assert found.trajectory.tolist() == [0, 1, 1, 1, 1, 1, 2, 2]
    # the path of the root call 1 ends before that of call 3
    assert found.rollout_logprobs.tolist() == pytest.approx([-0.5, -2.0, -0.5, -1.0, -0.25, -0.75, -0.1, -0.2])
    assert found.ages.tolist() == [4, 2, 1, 1, 1, 0, 4, 4]
    assert found.mask.tolist() == [False, False, True, True, True, True, False, False]
    assert found.truncated.tolist() == [False, True, False]
    assert found.owners.tolist() == [0, 1, 1, 2]
    assert found.paths_of([2, 1]) == [3, 1, 2]
    assert found.tokens_of_paths([2, 0]).tolist() == [2, 3, 4, 5, 0]
    assert found.tokens_of([1]).tolist() == [1, 2, 3, 4, 5]
    assert [found.branches(i) for i in range(3)] == [False, True, False]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_what_micro_batches_count_of_a_trajectory_adds_up(size: int) -> None:
    trees, rewards = random_episodes(12)
    found = batch(trees, rewards, step=1, max_age=0)
    found.advantages = found.rollout_logprobs.astype(np.float64)
    packing = Packing(mode="padded", paths=size, tokens=None)
    seen: Counter[int] = Counter()
    shares, sequences = np.zeros(len(found)), 0.0
    for rows in plan(found.paths, packing):
        packed = pack(found.paths, rows, packing)
        tokens = MicroBatch.of(found, packed.indices, torch.device("cpu"))
        own = list(dict.fromkeys(found.owners[list(packed.indices)].tolist()))
        places = found.tokens_of_paths(packed.indices)
        seen.update(places.tolist())
        assert tokens.advantages.tolist() == pytest.approx(found.advantages[places].tolist())
        assert [own[i] for i in tokens.trajectory.tolist()] == found.trajectory[places].tolist()
        assert tokens.rewards.tolist() == pytest.approx([rewards[i] for i in own])
        assert packed.targets.numel() == places.size
        assert tokens.elsewhere is not None
        assert tokens.share is not None
        here = np.bincount(tokens.trajectory.numpy(), tokens.mask.numpy(), len(own))
        np.testing.assert_array_equal(here + tokens.elsewhere.numpy(), found.sums(found.mask)[own])
        shares[own] += tokens.share.numpy()
        sequences += float(tokens.share.sum())
    assert seen == Counter(range(found.trajectory.size))
    np.testing.assert_allclose(shares, 1)
    (counts,) = GlobalCounts.of(found, [range(len(found))], Ranks())
    assert sequences == pytest.approx(counts.sequences)


def test_a_batch_without_branches_is_whole_in_every_micro_batch() -> None:
    found = batch([trajectory([1], [2, 3]), episode([call(-1, [1], [2]), call(0, [3], [4])], index=1)])
    found.advantages = np.zeros(found.trajectory.size)
    tokens = MicroBatch.of(found, (1,), torch.device("cpu"))
    assert (tokens.elsewhere, tokens.share, tokens.trajectory.tolist()) == (None, None, [0, 0])


def test_a_batch_of_both_kinds_is_gathered_with_all_its_columns() -> None:
    trees, rewards = random_episodes(5)
    whole = batch([*trees, trajectory([1], [2, 3], index=5)], [*rewards, 0.5])
    whole.old_logprobs = np.arange(whole.trajectory.size, dtype=np.float32)

    def work(ranks: Ranks) -> Batch:
        return gather(whole.take([4, 0, 5] if ranks.rank == 0 else [3, 1, 2]), ranks)

    found = on_ranks(work, 2)[0]
    assert found.encode() == whole.encode()
    assert [t.encode() for t in Batch.decode(whole.encode()).trajectories] == [t.encode() for t in whole.trajectories]


def test_the_disagreement_of_a_token_is_its_own_replica_s() -> None:
    found = step_four()
    found.mask[:] = True
    found.old_logprobs = found.rollout_logprobs.copy()
    found.old_logprobs[1] -= 1.0  # the one token of replica b
    errors = alarm.error_by_replica(found)
    assert {name: of.tokens for name, of in errors.items()} == {"r": 3, "a": 4, "b": 1}
    assert errors["b"].error == pytest.approx(np.e)
    assert errors["a"].error == errors["r"].error == 1


def test_an_episodes_line_says_of_every_token_how_it_counted() -> None:
    found = step_four()
    found.advantages = np.arange(8, dtype=np.float64)
    found.mask_reasons = np.array([0, MaskReason.OVER_AGE] + [0] * 6, np.int8)
    line = list(training_records(4, [PROMPT] * 2, found))[1]
    assert line["token_ids"] == [2, 3, 5, 7, 9, 10]
    np.testing.assert_array_equal(line["advantages"], [2, 3, 1, np.nan, 4, 5])
    np.testing.assert_array_equal(line["generation_logprobs"], [-0.5, -1, -2, np.nan, -0.25, -0.75])
    assert line["token_loss_mask"] == [1, 1, 0, 0, 1, 1]
    assert line["mask_reasons"] == [0, 0, MaskReason.OVER_AGE, MaskReason.UNTRAINED_CALL, 0, 0]
    assert line["turns"] == ((0, 2), (2, 3), (4, 6))
    assert line["input_lengths"] == (1 + 1) + (1 + 2 + 1 + 2)
    assert [one["tokens"] for one in line["calls"]] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert [one["context_token_ids"] for one in line["calls"]] == [[1], [4], [6], [8]]
    held_out = validation_record(4, PROMPT, TREE, Score("SCORED", 1.0))
    assert held_out["token_loss_mask"] == [1, 1, 1, 0, 1, 1]
    assert (held_out["finish_reason"], held_out["replica"]) == ("length", "a")


def test_lines_are_the_same_however_many_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = step_four()
    found.advantages = np.arange(8, dtype=np.float64)
    found.policy_logprobs = np.array([np.nan] * 2 + [-0.5] * 6, np.float32)
    together = [msgspec.json.encode(line) for line in training_records(4, [PROMPT] * 2, found)]
    monkeypatch.setattr(batch_samples, "_TOKENS", 1)
    assert [msgspec.json.encode(line) for line in training_records(4, [PROMPT] * 2, found)] == together
    assert len(together) == len(found) > 1


def test_the_lineage_of_an_episode_is_that_of_its_trained_calls() -> None:
    origin = trace_origin(TREE, Score("SCORED", 1.0, environment="math", build="7"))
    assert (origin.tokens, origin.finish_reason, origin.reward) == (6, "length", 1.0)
    assert origin.ranges == (
        TokenRange(0, 2, "a", 3),
        TokenRange(2, 3, "b", 2),
        TokenRange(4, 5, "a", 3),
        TokenRange(5, 6, "a", 4),
    )


def test_held_out_episodes_count_what_was_written_and_where_from() -> None:
    metrics = summarize([Evaluated(PROMPT, ((TREE, Score("SCORED", 1.0)),))], failed=0, pending=0)
    assert (metrics["mean_length"], metrics["truncation_rate"]) == (5, 1)
    assert (metrics["version_min"], metrics["version_max"]) == (2, 4)


def test_the_picture_of_a_disagreement_has_an_episode(tmp_path: Path) -> None:
    found = step_four()
    found.mask[:] = True
    found.old_logprobs = found.rollout_logprobs - 0.5
    draw_disagreement(found, alarm.worst(found), 4, alarm.picture_path(tmp_path, 4))
    assert alarm.picture_path(tmp_path, 4).stat().st_size > 1000
