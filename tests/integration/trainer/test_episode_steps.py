"""Steps on episodes of several calls: each token that was trained counts once, whatever shape its episode has and however it is packed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.config import Config
from headrace.records.trajectory import AnyTrajectory, EpisodeTrajectory, Trajectory
from headrace_services.trainer.learning.batch import BatchRejected
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import REWARD_IS_ADVANTAGE, config, shaken, weights
from tests.integration.trainer.policy_cases import MODES
from tests.support.episodes import call, episode, random_episodes
from tests.support.trainer import batch

# an eps above the rounding errors of the smallest gradients, which AdamW otherwise blows up to lr
OPTIMIZER = {"kwargs": {"lr": 1e-3, "eps": 1e-4}}
GROUPS = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}
COUNT = 8
TOP_P = {"generation": {"max_new_tokens": 16, "top_p": 0.9}}
SEQUENCES = {"token_level_loss": False}
CORRECTED = {"use_importance_sampling_correction": True}


def bounded(kind: str) -> dict[str, Any]:
    ratios = {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 0.5}
    return {**CORRECTED, "truncated_importance_sampling_type": kind, **ratios}


# What each loss and estimator is configured by; those of `CHAINED` are computed along the tokens of a whole trajectory.
PERMITTED: dict[str, dict[str, Any]] = {
    "tokens": {"loss_fn": {"reference_policy_kl_penalty": 0.1}},
    "sequences": {"loss_fn": {**SEQUENCES, "reference_policy_kl_penalty": 0.1}},
    "constant length": {"loss_fn": {"constant_length": 20, "ratio_clip_c": 3.0}},
    "cispo, tis": {"loss_fn": {"use_cispo": True, **bounded("tis")}},
    "sequences, icepop": {"loss_fn": {**SEQUENCES, **bounded("icepop")}},
    "decoupled": {"loss_fn": {**SEQUENCES, "proximal": "recompute"}},
    "interpolated": {"loss_fn": {"proximal": "interpolate", "positive_example_nll_weight": 0.1}},
    "two steps": {"grpo": GROUPS, "policy": {"train_global_batch_size": 4}, "loss_fn": SEQUENCES},
    "overlong": {"grpo": {**GROUPS, "overlong_filtering": True}, "loss_fn": SEQUENCES},
    "top-p": {"grpo": {**GROUPS, "seq_logprob_error_threshold": 30.0}, "policy": TOP_P},
    "reinforce++": {
        "grpo": {**GROUPS, "adv_estimator": {"name": "reinforce_plus_plus"}},
        "loss_fn": {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True},
    },
    "opd": {"grpo": {**GROUPS, "adv_estimator": {"name": "opd"}}},
}
CHAINED: dict[str, tuple[dict[str, Any], str]] = {
    "gspo": (
        {"loss_fn": {**SEQUENCES, "sequence_level_importance_ratios": True}},
        "loss_fn.sequence_level_importance_ratios true",
    ),
    "seq-mask-tis": ({"loss_fn": bounded("seq-mask-tis")}, "loss_fn.truncated_importance_sampling_type seq-mask-tis"),
    "gae": ({"ppo": {**GROUPS, "ppo_epochs": 1}, "value": {"optimizer": OPTIMIZER}}, "ppo.adv_estimator.name gae"),
    "kl to go": (
        {
            "grpo": {**GROUPS, "adv_estimator": {"name": "reinforce_plus_plus", "kl_to_go": True}},
            "loss_fn": {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True},
        },
        "grpo.adv_estimator.kl_to_go true",
    ),
    "sequences, top-p": (
        {"loss_fn": SEQUENCES, "policy": TOP_P},
        "loss_fn.token_level_loss false with policy.generation.top_k or top_p",
    ),
}
EVERY = {**PERMITTED, **{name: sections for name, (sections, _) in CHAINED.items()}}


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(tiny_model, tmp_path_factory.mktemp("teacher") / "model")


def settings(model: Path, teacher: Path, name: str, **policy: Any) -> Config:
    sections = msgspec.to_builtins(EVERY[name])
    if name == "opd":
        sections["grpo"]["adv_estimator"]["teacher_model_name"] = str(teacher)
    return config(model, **{**sections, "policy": {"optimizer": OPTIMIZER, **sections.get("policy", {}), **policy}})


def step(
    chosen: Config, trajectories: Sequence[AnyTrajectory], rewards: Sequence[float], max_age: int = 1000
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The metrics of a step on the whole batch, and the weights after it."""
    learner = Learner(chosen)
    return train_step(learner, batch(trajectories, rewards, step=1, max_age=max_age)), weights(learner)


def chains(count: int) -> tuple[list[EpisodeTrajectory], list[float]]:
    """Every call of them continues the one before."""
    trees, rewards = random_episodes(count)
    return [
        msgspec.structs.replace(
            tree, calls=tuple(msgspec.structs.replace(one, parent=i - 1) for i, one in enumerate(tree.calls))
        )
        for tree in trees
    ], rewards


def path_of(chain: EpisodeTrajectory) -> Trajectory:
    (path,) = chain.paths()
    return path


@pytest.mark.parametrize("name", EVERY)
def test_a_chain_is_trained_as_the_single_completion_that_it_is(tiny_model: Path, teacher: Path, name: str) -> None:
    found, rewards = chains(COUNT)
    assert max(len(chain.calls) for chain in found) > 3
    chosen = settings(tiny_model, teacher, name, train_micro_batch_size=3)
    metrics, after = step(chosen, found, rewards, max_age=0)
    expected, reference = step(chosen, [Trajectory.decode(path_of(c).encode()) for c in found], rewards, max_age=0)
    assert metrics == expected
    for key in reference:
        assert torch.equal(after[key], reference[key]), key


def test_artifacts_change_neither_training_nor_metrics(tiny_model: Path, teacher: Path) -> None:
    """An episode of one call with artifacts is a tree of one call."""
    found, rewards = random_episodes(COUNT)
    single = [msgspec.structs.replace(one, calls=one.calls[:1]) for one in found]
    left = [msgspec.structs.replace(one, artifacts={"board": [1, 2]}) for one in single]
    chosen = settings(tiny_model, teacher, "gspo", train_micro_batch_size=3)
    metrics, after = step(chosen, left, rewards)
    expected, reference = step(chosen, [one.flat() for one in single], rewards)
    assert metrics == expected
    for key in reference:
        assert torch.equal(after[key], reference[key]), key


def test_a_tree_trains_as_its_paths_with_shared_tokens_once(tiny_model: Path) -> None:
    found, rewards = random_episodes(COUNT)
    assert max(len(tree.paths()) for tree in found) > 2
    chosen = config(tiny_model, policy={"optimizer": OPTIMIZER}, loss_fn={"reference_policy_kl_penalty": 0.1})
    metrics, after = step(chosen, found, rewards)
    # an algorithm whose advantage is the reward, and whose loss is a mean over tokens, knows nothing of trajectories
    assert chosen.ppo is not None
    assert chosen.ppo.adv_estimator.name == REWARD_IS_ADVANTAGE["adv_estimator"]["name"]
    alone = [(path, reward) for tree, reward in zip(found, rewards, strict=True) for path in tree.paths()]
    expected, reference = step(chosen, [path for path, _ in alone], [reward for _, reward in alone])
    for key in ("loss", "grad_norm", "kl_penalty", "entropy", "global_valid_toks"):
        assert metrics[key] == expected[key], key
    assert metrics["global_valid_toks"] == sum(tree.length for tree in found)
    assert metrics["global_valid_seqs"] == metrics["num_valid_samples"] == pytest.approx(COUNT)
    for key in reference:
        assert torch.equal(after[key], reference[key]), key


# by day one of each way in which tokens are weighed, divided, or given more than their reward
LAID_OUT_BY_DAY = ("sequences, icepop", "interpolated", "two steps", "top-p", "reinforce++")


@pytest.mark.parametrize(
    "name", [name if name in LAID_OUT_BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in PERMITTED]
)
def test_layouts_and_micro_batches_change_nothing(tiny_model: Path, teacher: Path, name: str) -> None:
    found, rewards = random_episodes(COUNT)
    expected, reference = step(settings(tiny_model, teacher, name), found, rewards)
    for mode in ({"train_micro_batch_size": 1}, *(MODES[m] for m in ("dynamic", "packed", "shared-packed", "shared"))):
        chosen = settings(tiny_model, teacher, name, **{"train_micro_batch_size": 2, **mode})
        metrics, after = step(chosen, found, rewards)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5), mode
        for key in reference:
            torch.testing.assert_close(after[key], reference[key], atol=1e-5, rtol=0, msg=f"{mode} {key}")


def test_a_token_of_a_divided_sequence_weighs_as_in_one_piece(tiny_model: Path) -> None:
    """One call with three that continue it, and one with a single token: under a mean of the sequences' means both count the same."""
    fork = episode([call(-1, [1, 2], [3, 4, 5]), *(call(0, [6], [7, 8], version=v) for v in (0, 1, 1))])
    single = episode([call(-1, [1, 2], [9])], index=1)
    for size in (1, 64):
        chosen = config(tiny_model, loss_fn=SEQUENCES, policy={"train_micro_batch_size": size})
        # at the weights that sampled, each term is minus its advantage, so that the loss is the mean of -2 and 1
        metrics, _ = step(chosen, [fork, single], [2.0, -1.0])
        assert metrics["loss"] == pytest.approx(-0.5, abs=1e-6)
        masked, _ = step(chosen, [fork, single], [2.0, -1.0], max_age=0)
        # the tokens of version 0 are over age: four of nine remain, and nothing of the other sequence
        assert masked["loss"] == pytest.approx(-1.0, abs=1e-6)
        assert masked["global_valid_toks"] == 4


@pytest.mark.parametrize("name", CHAINED)
def test_branches_are_refused_by_the_name_of_what_needs_one_path(tiny_model: Path, teacher: Path, name: str) -> None:
    chosen = settings(tiny_model, teacher, name)
    reason = CHAINED[name][1]
    assert chosen.needs_one_path == reason
    found, rewards = chains(COUNT)
    found[5] = msgspec.structs.replace(
        episode([call(-1, [1], [2]), call(0, [3], [4]), call(0, [5], [6])], index=5), group_id="branching"
    )
    learner = Learner(chosen)
    before = weights(learner)
    with pytest.raises(BatchRejected) as refused:
        train_step(learner, batch(found, rewards))
    assert list(refused.value.groups) == ["branching"]
    assert f"an episode with branches, but {reason} needs a single path" in refused.value.groups["branching"]
    assert all(torch.equal(before[key], tensor) for key, tensor in weights(learner).items())


@pytest.mark.parametrize("name", PERMITTED)
def test_what_is_permitted_needs_no_single_path(tiny_model: Path, teacher: Path, name: str) -> None:
    assert settings(tiny_model, teacher, name).needs_one_path is None


def test_calls_that_branch_off_untrained_are_no_branch(tiny_model: Path, teacher: Path) -> None:
    calls = [call(-1, [1], [2]), call(0, [3], [4], trained=False), call(0, [5], [6])]
    found, rewards = chains(COUNT)
    metrics, _ = step(settings(tiny_model, teacher, "gspo"), [*found[1:], episode(calls, index=0)], rewards)
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (call(0, [3] * 60, [4, 5]), "65 tokens, more than policy.max_total_sequence_length 64"),
        (call(0, [3], [1000]), "outside the model's vocabulary"),
        (call(0, [1000], [3]), "outside the model's vocabulary"),
    ],
)
def test_every_path_must_be_an_input_of_the_model(tiny_model: Path, bad: Any, said: str) -> None:
    tree = episode([call(-1, [1, 2], [3]), call(0, [4], [5]), bad])
    with pytest.raises(BatchRejected, match=said):
        step(config(tiny_model), [tree], [1.0])


def test_gradients_that_are_not_finite_name_their_episode(tiny_model: Path) -> None:
    found, _ = random_episodes(COUNT)
    place = next(i for i, tree in enumerate(found) if len(tree.paths()) > 1)
    chosen = config(tiny_model, loss_fn={"prev_logprobs_source": "generation"}, policy={"train_micro_batch_size": 2})
    given = batch(found, [-1.0] * COUNT)
    given.rollout_logprobs[given.tokens_of([place])[-1:]] = -1e30
    with pytest.raises(Exception, match=rf"because of trajectory 'g'\[{place}\];"):
        train_step(Learner(chosen), given)
