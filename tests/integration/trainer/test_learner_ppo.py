"""Policy and value model in one process: several optimizer steps a batch, on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModel

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.trainer.learning.batch import Batch, GlobalCounts
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.losses import policy_loss
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel, PolicyOutput
from headrace_services.trainer.network.value_model import HEAD, ValueModel
from tests.integration.trainer.learner_cases import by_hand, config, random_batch, sampled, token_ids, unpacked, weights
from tests.integration.trainer.policy_cases import own_tokens
from tests.support.trainer import batch, trajectory

# an eps above the rounding errors of the smallest gradients, which AdamW otherwise blows up to lr
SMOOTH = {"kwargs": {"lr": 1e-3, "eps": 1e-4}}


def ppo(model: Path, *, algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    policy = {"train_global_batch_size": 4, "optimizer": SMOOTH, **sections.pop("policy", {})}
    given = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "ppo_epochs": 2, **(algorithm or {})}
    value = {"optimizer": SMOOTH, **sections.pop("value", {})}
    return config(model, ppo=given, policy=policy, value=value, **sections)


def test_a_value_is_the_head_on_what_came_before_the_token(tiny_model: Path) -> None:
    value = ValueModel(config(tiny_model))
    torch.nn.init.normal_(value.root.head.weight, generator=torch.Generator().manual_seed(0))
    trajectories, _ = sampled(5)
    with torch.no_grad():
        found = value.forward(unpacked(trajectories))
    backbone = AutoModel.from_pretrained(tiny_model, dtype=torch.float32).eval()
    expected = []
    for one in trajectories:
        with torch.no_grad():
            hidden = backbone(input_ids=torch.from_numpy(token_ids(one))[None]).last_hidden_state[0]
        places = one.prompt_token_ids.size + np.flatnonzero(one.loss_mask)
        expected.append(hidden[places - 1] @ value.root.head.weight[0] + value.root.head.bias)
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-5)


def test_a_value_model_of_a_smaller_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(tiny_model, dtype=torch.float32)
    model.resize_token_embeddings(19)
    model.save_pretrained(tmp_path / "value")
    with pytest.raises(ServiceError, match=r"value\.model_name.*19.*policy.*20"):
        Learner(ppo(tiny_model, value={"model_name": str(tmp_path / "value")}))


def test_a_value_does_not_see_its_token(tiny_model: Path) -> None:
    value = ValueModel(config(tiny_model))
    torch.nn.init.normal_(value.root.head.weight, generator=torch.Generator().manual_seed(0))

    def values(completion: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return value.forward(unpacked([trajectory([1, 2], completion)]))

    one, other = values([3, 4, 5, 6, 7]), values([3, 4, 9, 6, 7])
    assert torch.equal(one[:3], other[:3])  # up to the token that differs, whose value comes before it
    assert (one[3:] != other[3:]).all()


def test_a_new_value_model_has_no_say(tiny_model: Path) -> None:
    with torch.no_grad():
        assert not ValueModel(config(tiny_model)).forward(unpacked(sampled(3)[0])).any()


def test_the_loss_s_gradient_is_that_of_values_before_their_tokens(tiny_model: Path) -> None:
    """Half the squared error against rewards to go (lambda 1, values 0 at the start), by hand."""
    estimator = {"gae_lambda": 1.0}
    settings = ppo(
        tiny_model,
        algorithm={"adv_estimator": estimator, "ppo_epochs": 1, "policy_training_start_step": 1},
        policy={"train_global_batch_size": None},
        value_loss_fn={"scale": 1.0, "cliprange": None},
    )
    metrics = train_step(Learner(settings), random_batch(8))
    value = ValueModel(settings)
    whole = random_batch(8)
    returns = torch.from_numpy(whole.rewards).float()[torch.from_numpy(whole.trajectory)]
    loss = 0.5 * (value.forward(unpacked(whole.trajectories)) - returns).square().mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in value.root.parameters() if p.grad is not None])
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("source", ["recompute", "generation"])
def test_several_optimizer_steps_clip_against_the_start_of_the_step(tiny_model: Path, source: str) -> None:
    """The same with torch's AdamW by hand: two mini-batches in their order, twice, and `prev` of before the first of them."""
    reward = {"adv_estimator": {"name": "raw_reward", "normalize_advantages": False}}
    settings = ppo(tiny_model, algorithm=reward, loss_fn={"prev_logprobs_source": source})
    learner = Learner(settings)
    metrics = train_step(learner, random_batch(8))

    policy = PolicyModel(settings)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3, eps=1e-4)
    trajectories, rewards = sampled(8)
    halves = [batch(trajectories[:4], rewards[:4]), batch(trajectories[4:], rewards[4:])]

    def output_of(half: Batch) -> PolicyOutput:
        return policy.forward(unpacked(half.trajectories), LogitsWarper())

    with torch.no_grad():
        starts = [output_of(half).logprobs for half in halves]
    losses = []
    for half, start in [*zip(halves, starts, strict=True)] * 2:
        counts = GlobalCounts(half.trajectory.size, 4, 1)
        loss = policy_loss(settings.loss_fn, output_of(half), by_hand(half, start), counts).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert metrics["loss"] == pytest.approx(float(np.mean(losses)), abs=1e-6)
    for name, tensor in policy.weights():
        torch.testing.assert_close(dict(learner.policy.weights())[name], tensor, atol=1e-5, rtol=0, msg=name)


def test_until_its_start_step_the_policy_stays_and_its_versions_go_on(tiny_model: Path) -> None:
    halving = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}}
    settings = ppo(tiny_model, algorithm={"policy_training_start_step": 2}, policy={"scheduler": halving})
    learner = Learner(settings)
    before = weights(learner)
    found = [train_step(learner, random_batch(8, seed)) for seed in range(2)]
    assert learner.version == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.policy.weights())
    assert all("loss" not in metrics and metrics["critic/loss"] > 0 for metrics in found)
    third, fourth = (train_step(learner, random_batch(8, seed)) for seed in (2, 3))
    assert any(not torch.equal(before[name], tensor) for name, tensor in learner.policy.weights())
    assert (third["lr"], fourth["lr"]) == (1e-3, 5e-4)  # the schedule counts steps that trained the policy


@pytest.mark.parametrize(("counts", "rates"), [("steps", (8e-3, 4e-3)), ("epochs", (6e-3, 1.5e-3))])
def test_a_schedule_counts_trainer_steps_or_epochs(
    tiny_model: Path, tmp_path: Path, counts: str, rates: tuple[float, float]
) -> None:
    """A step reports the mean of its two epochs. NeMo RL counts calls of `train()`, of which each epoch is one."""
    halving = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}}
    model = {"scheduler": halving, "optimizer": {"kwargs": {"lr": 8e-3}}}
    settings = ppo(tiny_model, algorithm={"scheduler_counts": counts, "ppo_epochs": 2}, policy=model, value=model)
    learner = Learner(settings)
    first = train_step(learner, random_batch(8))
    learner.snapshot()(tmp_path)
    second = train_step(Learner(settings, tmp_path), random_batch(8, 1))
    assert (first["lr"], second["lr"]) == pytest.approx(rates)
    assert (first["critic/lr"], second["critic/lr"]) == pytest.approx(rates)


def test_a_value_model_learns_what_rewards_to_expect(tiny_model: Path) -> None:
    algorithm = {"policy_training_start_step": 30, "ppo_epochs": 4}
    learner = Learner(ppo(tiny_model, algorithm=algorithm, policy={"train_global_batch_size": None}))
    trajectories, _ = sampled(8)
    rewards = [float(one.prompt_token_ids[0] % 2) for one in trajectories]
    explained = [train_step(learner, batch(trajectories, rewards))["critic/explained_var"] for _ in range(15)]
    assert explained[0] < 0.3  # over the four epochs of its first step
    assert explained[-1] > 0.6


PACKINGS: dict[str, dict[str, Any]] = {
    "one by one": {"train_micro_batch_size": 1, "logprob_batch_size": 2},
    "three": {"train_micro_batch_size": 3},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 100}},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 90, "sequence_length_round": 8}},
    "shared prompts": {"share_prompts": True, "train_micro_batch_size": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_packing_and_micro_batches_change_nothing(tiny_model: Path, kind: str) -> None:
    def run(packing: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        loss_fn = {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True}
        if kind == "ppo":
            settings = ppo(tiny_model, policy=packing, loss_fn=loss_fn)
        else:
            grpo = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "seq_logprob_error_threshold": 3.0}
            policy = {"train_global_batch_size": 4, "optimizer": SMOOTH, **packing}
            settings = config(tiny_model, grpo=grpo, policy=policy, loss_fn=loss_fn)
        learner = Learner(settings)
        return [train_step(learner, random_batch(8, seed, prompts=2)) for seed in range(2)], weights(learner)

    expected, reference = run({})
    for name, packing in PACKINGS.items():
        metrics, after = run(packing)
        for ours, theirs in zip(metrics, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-5), name
        for weight in reference:
            torch.testing.assert_close(after[weight], reference[weight], atol=2e-5, rtol=0, msg=f"{name}: {weight}")


def test_sequences_where_train_and_inference_disagree_are_left_out(tiny_model: Path) -> None:
    grpo = {"num_prompts_per_step": 1, "num_generations_per_prompt": 4, "seq_logprob_error_threshold": 1.5}
    learner = Learner(config(tiny_model, grpo=grpo))
    given = random_batch(4)
    said = [learner.probe(token_ids(one))[one.prompt_token_ids.size - 1 :] for one in given.trajectories]
    own = [logprobs[one.loss_mask > 0] for logprobs, one in zip(said, given.trajectories, strict=True)]
    own[2] = own[2] - 1  # exp(1) > 1.5
    given.rollout_logprobs = np.concatenate(own)
    metrics = train_step(learner, given)
    assert metrics["num_masked_seqs_by_logprob_error"] == 1
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(np.e, rel=1e-3)
    assert metrics["max_seq_mult_prob_error_after_mask"] == pytest.approx(1, abs=1e-3)
    assert metrics["global_valid_seqs"] == metrics["num_valid_samples"] == 3
    assert metrics["global_valid_toks"] == sum(given.lengths) - given.lengths[2]
    assert list(given.multipliers) == [1, 1, 0, 1]
    assert given.advantages is not None
    assert all(tokens.any() for tokens in given.split(given.advantages))  # it stays in the baseline


def test_what_was_cut_off_leaves_the_loss_and_stays_in_the_baseline(tiny_model: Path) -> None:
    grpo = {"num_prompts_per_step": 1, "num_generations_per_prompt": 4, "normalize_rewards": False}
    trajectories, rewards = sampled(4)
    trajectories[1] = msgspec.structs.replace(trajectories[1], finish_reason="length")
    kept, filtered = batch(trajectories, rewards), batch(trajectories, rewards)
    everything = train_step(Learner(config(tiny_model, grpo=grpo)), kept)
    rest = train_step(Learner(config(tiny_model, grpo={**grpo, "overlong_filtering": True})), filtered)
    assert list(filtered.multipliers) == [1, 0, 1, 1]
    np.testing.assert_array_equal(kept.advantages, filtered.advantages)
    assert rest["global_valid_toks"] == everything["global_valid_toks"] - own_tokens(trajectories[1])


@pytest.mark.parametrize(
    ("loss_fn", "loaded"),
    [
        ({"reference_policy_kl_penalty": 0}, 0),
        ({"reference_policy_kl_penalty": 0.1}, 1),
        ({"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True}, 1),
    ],
    ids=["none", "loss", "reward"],
)
def test_a_reference_policy_is_only_where_it_is_compared(
    tiny_model: Path, loss_fn: dict[str, Any], loaded: int
) -> None:
    given = random_batch(8)
    train_step(Learner(ppo(tiny_model, loss_fn=loss_fn)), given)
    found = None if given.ref_logprobs is None else given.ref_logprobs.shape
    assert found == (given.trajectory.shape if loaded else None)


def test_a_step_adds_to_its_batch_what_it_knew_of_each_token(tiny_model: Path) -> None:
    learner = Learner(config(tiny_model))  # one optimizer step: the start of the step is its own pass
    given, (trajectories, rewards) = random_batch(4), sampled(4)
    expected = [learner.probe(token_ids(one))[one.prompt_token_ids.size - 1 :] for one in trajectories]
    train_step(learner, given)
    assert [own_tokens(one) for one in given.trajectories] == [own_tokens(one) for one in trajectories]
    old, advantages = given.split(given.old_logprobs), given.split(given.advantages)
    for i, (one, logprobs, reward) in enumerate(zip(trajectories, expected, rewards, strict=True)):
        np.testing.assert_array_equal(token_ids(given.trajectories[i]), token_ids(one))
        np.testing.assert_allclose(old[i], logprobs[one.loss_mask > 0], atol=2e-5)
        np.testing.assert_array_equal(advantages[i], np.full(own_tokens(one), reward))
    assert (given.ref_logprobs, given.values, given.returns) == (None, None, None)


def test_a_batch_is_trained_once(tiny_model: Path) -> None:
    """Its columns are those of its step: a second one would train on rewards that were shaped twice."""
    learner, given = Learner(config(tiny_model)), random_batch(4)
    train_step(learner, given)
    with pytest.raises(ValueError, match="through a trainer step"):
        train_step(learner, given)
    assert learner.version == 1


def test_a_resumed_run_gives_the_same_bits_of_both_models(tiny_model: Path, tmp_path: Path) -> None:
    settings = ppo(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.1})
    straight = Learner(settings)
    for seed in range(2):
        train_step(straight, random_batch(8, seed))
    straight.snapshot()(tmp_path)
    resumed = Learner(settings, tmp_path)
    assert resumed.counters == straight.counters
    for seed in range(2, 4):
        assert train_step(straight, random_batch(8, seed)) == train_step(resumed, random_batch(8, seed))
    for (name, ours), (_, theirs) in zip(straight.policy.weights(), resumed.policy.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_value_model_is_loaded_and_may_start_another_run(tiny_model: Path, tmp_path: Path) -> None:
    settings = ppo(tiny_model)
    learner = Learner(settings)
    train_step(learner, random_batch(8))
    learner.snapshot()(tmp_path)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(tmp_path / "value").eval()(input_ids=ids).last_hidden_state
        started = ValueModel(config(tiny_model, value={"model_name": str(tmp_path / "value")}))
        found = started.forward(unpacked([trajectory([0], range(1, 10))]))
        torch.testing.assert_close(found, started.root.head(hidden)[0, :-1, 0], atol=2e-5, rtol=1e-5)
    assert found.any()
    (tmp_path / "value" / HEAD).unlink()
    with pytest.raises(ServiceError, match="head of a value model"):
        Learner(settings, tmp_path)


def test_a_checkpoint_without_a_value_model_is_refused_under_ppo(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(config(tiny_model))
    train_step(learner, random_batch(4))
    learner.snapshot()(tmp_path)
    with pytest.raises(ServiceError, match="value model"):
        Learner(ppo(tiny_model), tmp_path)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_token_that_top_k_leaves_out_now_is_in_no_ratio(tiny_model: Path, algorithm: str) -> None:
    """It was in when it was sampled: the step neither fails nor learns from it, and the KL terms still see it."""
    generation = {"max_new_tokens": 16, "top_k": 3}
    loss_fn = {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": algorithm == "ppo"}
    grpo = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "seq_logprob_error_threshold": 1e9}
    policy = {"generation": generation, "train_global_batch_size": 4}
    if algorithm == "ppo":
        settings = ppo(tiny_model, policy={"generation": generation}, loss_fn=loss_fn)
    else:
        settings = config(tiny_model, grpo=grpo, policy=policy, loss_fn=loss_fn)
    given = random_batch(8)
    metrics = train_step(Learner(settings), given)
    left_out = given.split(np.isneginf(given.old_logprobs))
    assert any(one.any() for one in left_out)
    assert not all(one.all() for one in left_out)
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["num_masked_seqs_by_logprob_error"] == 0
    assert metrics["probs_ratio_min"] > 0
    assert metrics["global_valid_toks"] == sum(given.lengths)
