"""Policy and value model in one process: several optimizer steps a batch, on a real model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import config, experience, experiences
from transformers import AutoModel

from headrace.config import Config
from headrace.errors import ServiceError
from services.trainer.learning.experience import Experience
from services.trainer.learning.learner import Learner
from services.trainer.learning.losses import policy_loss
from services.trainer.learning.tokens import GlobalCounts, Logprobs, Tokens
from services.trainer.network.policy import Policy
from services.trainer.network.projection import Warp
from services.trainer.network.rows import Layout, MicroBatch, Rows, TokenSequence, build
from services.trainer.network.value import HEAD, Value

# an eps above the rounding errors of the smallest gradients, which AdamW otherwise blows up to lr
SMOOTH = {"kwargs": {"lr": 1e-3, "eps": 1e-4}}
PLAIN = Layout(mode="padded", sequences=64, tokens=None, algorithm="", multiple=1, share_prompts=False)


def ppo(model: Path, *, algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    policy = {"train_global_batch_size": 4, "optimizer": SMOOTH, **sections.pop("policy", {})}
    given = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "ppo_epochs": 2, **(algorithm or {})}
    value = {"optimizer": SMOOTH, **sections.pop("value", {})}
    return config(model, ppo=given, policy=policy, value=value, **sections)


def rows_of(batch: list[Experience]) -> Rows:
    return build([e.tokens for e in batch], MicroBatch(tuple(((i,),) for i in range(len(batch)))), PLAIN)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.iter_weights()}


def test_a_value_is_the_head_on_what_came_before_the_token(tiny_model: Path) -> None:
    value = Value(config(tiny_model))
    torch.nn.init.normal_(value.root.head.weight, generator=torch.Generator().manual_seed(0))
    batch = experiences(5)
    with torch.no_grad():
        found = value.values(rows_of(batch))
    backbone = AutoModel.from_pretrained(tiny_model, dtype=torch.float32).eval()
    expected = []
    for e in batch:
        ids = torch.from_numpy(np.concatenate([e.tokens.prompt, e.tokens.completion]).astype(np.int64))
        with torch.no_grad():
            hidden = backbone(input_ids=ids[None]).last_hidden_state[0]
        places = e.tokens.prompt.size + np.flatnonzero(e.tokens.policy)
        expected.append(hidden[places - 1] @ value.root.head.weight[0] + value.root.head.bias)
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-5)


def test_a_value_does_not_see_its_token(tiny_model: Path) -> None:
    value = Value(config(tiny_model))
    torch.nn.init.normal_(value.root.head.weight, generator=torch.Generator().manual_seed(0))

    def values(completion: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return value.values(rows_of([experience([1, 2], completion, [-1.0] * len(completion))]))

    one, other = values([3, 4, 5, 6, 7]), values([3, 4, 9, 6, 7])
    assert torch.equal(one[:3], other[:3])  # up to the token that differs, whose value comes before it
    assert (one[3:] != other[3:]).all()


def test_a_new_value_model_has_no_say(tiny_model: Path) -> None:
    with torch.no_grad():
        assert not Value(config(tiny_model)).values(rows_of(experiences(3))).any()


def test_the_loss_s_gradient_is_that_of_values_before_their_tokens(tiny_model: Path) -> None:
    """Half the squared error against rewards to go (lambda 1, values 0 at the start), by hand."""
    estimator = {"gae_lambda": 1.0}
    settings = ppo(
        tiny_model,
        algorithm={"adv_estimator": estimator, "ppo_epochs": 1, "policy_training_start_step": 1},
        policy={"train_global_batch_size": None},
        value_loss_fn={"scale": 1.0, "cliprange": None},
    )
    batch = experiences(8)
    metrics = Learner(settings).step(batch)
    value = Value(settings)
    whole = rows_of(batch)
    returns = torch.tensor([e.reward for e in batch])[whole.sequence]
    loss = 0.5 * (value.values(whole) - returns).square().mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in value.root.parameters() if p.grad is not None])
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("source", ["recompute", "generation"])
def test_several_optimizer_steps_clip_against_the_start_of_the_step(tiny_model: Path, source: str) -> None:
    """The same with torch's AdamW by hand: two mini-batches in their order, twice, and `prev` of before the first of them."""
    reward = {"adv_estimator": {"name": "raw_reward", "normalize_advantages": False}}
    settings = ppo(tiny_model, algorithm=reward, loss_fn={"prev_logprobs_source": source})
    batch = experiences(8)
    learner = Learner(settings)
    metrics = learner.step(batch)

    policy = Policy(settings)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3, eps=1e-4)
    halves = [batch[:4], batch[4:]]
    with torch.no_grad():
        starts = [policy.logprobs(rows_of(half), Warp()).curr for half in halves]
    losses = []
    for half, start in [*zip(halves, starts, strict=True)] * 2:
        whole, rewards, each = rows_of(half), torch.tensor([e.reward for e in half]), torch.ones(4)
        ones = torch.ones(whole.targets.numel())
        tokens = Tokens(whole.sequence, rewards[whole.sequence], ones, 0 * ones, each, rewards)
        gen = torch.from_numpy(np.concatenate([e.gen for e in half]))
        curr = policy.logprobs(whole, Warp()).curr
        logprobs = Logprobs(curr, start if source == "recompute" else gen, gen, start)
        loss = policy_loss(settings.loss_fn, tokens, logprobs, GlobalCounts(ones.numel(), 4, 1)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert metrics["loss"] == pytest.approx(float(np.mean(losses)), abs=1e-6)
    for name, tensor in policy.weights():
        torch.testing.assert_close(dict(learner.iter_weights())[name], tensor, atol=1e-5, rtol=0, msg=name)


def test_until_its_start_step_the_policy_stays_and_its_versions_go_on(tiny_model: Path) -> None:
    halving = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}}
    settings = ppo(tiny_model, algorithm={"policy_training_start_step": 2}, policy={"scheduler": halving})
    learner = Learner(settings)
    before = weights(learner)
    found = [learner.step(experiences(8, seed)) for seed in range(2)]
    assert learner.version == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.iter_weights())
    assert all("loss" not in metrics and metrics["critic/loss"] > 0 for metrics in found)
    third, fourth = learner.step(experiences(8, 2)), learner.step(experiences(8, 3))
    assert any(not torch.equal(before[name], tensor) for name, tensor in learner.iter_weights())
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
    first = learner.step(experiences(8))
    learner.save(tmp_path)
    second = Learner(settings, tmp_path).step(experiences(8, 1))
    assert (first["lr"], second["lr"]) == pytest.approx(rates)
    assert (first["critic/lr"], second["critic/lr"]) == pytest.approx(rates)


def test_a_value_model_learns_what_rewards_to_expect(tiny_model: Path) -> None:
    algorithm = {"policy_training_start_step": 30, "ppo_epochs": 4}
    learner = Learner(ppo(tiny_model, algorithm=algorithm, policy={"train_global_batch_size": None}))
    batch = [dataclasses.replace(e, reward=float(e.tokens.prompt[0] % 2)) for e in experiences(8)]
    explained = [learner.step(batch)["critic/explained_var"] for _ in range(15)]
    assert explained[0] < 0.3  # over the four epochs of its first step
    assert explained[-1] > 0.6


LAYOUTS: dict[str, dict[str, Any]] = {
    "one by one": {"train_micro_batch_size": 1, "logprob_batch_size": 2},
    "three": {"train_micro_batch_size": 3},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 100}},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 90, "sequence_length_round": 8}},
    "shared prompts": {"share_prompts": True, "train_micro_batch_size": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_rows_and_micro_batches_change_nothing(tiny_model: Path, kind: str) -> None:
    def run(rows: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        loss_fn = {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True}
        if kind == "ppo":
            settings = ppo(tiny_model, policy=rows, loss_fn=loss_fn)
        else:
            grpo = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "seq_logprob_error_threshold": 3.0}
            policy = {"train_global_batch_size": 4, "optimizer": SMOOTH, **rows}
            settings = config(tiny_model, grpo=grpo, policy=policy, loss_fn=loss_fn)
        learner = Learner(settings)
        return [learner.step(experiences(8, seed, prompts=2)) for seed in range(2)], weights(learner)

    expected, reference = run({})
    for name, rows in LAYOUTS.items():
        metrics, after = run(rows)
        for ours, theirs in zip(metrics, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-5), name
        for weight in reference:
            torch.testing.assert_close(after[weight], reference[weight], atol=2e-5, rtol=0, msg=f"{name}: {weight}")


def test_sequences_on_which_train_and_inference_disagree_leave_the_loss(tiny_model: Path) -> None:
    grpo = {"num_prompts_per_step": 1, "num_generations_per_prompt": 4, "seq_logprob_error_threshold": 1.5}
    learner = Learner(config(tiny_model, grpo=grpo))
    batch = experiences(4)
    agreed = [learner.probe(np.concatenate([e.tokens.prompt, e.tokens.completion])) for e in batch]
    batch = [
        dataclasses.replace(e, gen=logprobs[e.tokens.prompt.size - 1 :][e.tokens.policy > 0])
        for e, logprobs in zip(batch, agreed, strict=True)
    ]
    batch[2] = dataclasses.replace(batch[2], gen=batch[2].gen - 1)  # exp(1) > 1.5
    metrics = learner.step(batch)
    assert metrics["num_masked_seqs_by_logprob_error"] == 1
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(np.e, rel=1e-3)
    assert metrics["max_seq_mult_prob_error_after_mask"] == pytest.approx(1, abs=1e-3)
    assert metrics["global_valid_seqs"] == metrics["num_valid_samples"] == 3
    assert metrics["global_valid_toks"] == sum(e.tokens.policy_tokens for e in batch) - batch[2].tokens.policy_tokens
    assert [trace.multiplier for trace in learner.traces] == [1, 1, 0, 1]
    assert all(trace.advantages.any() for trace in learner.traces)  # it stays in the baseline


def test_what_was_cut_off_leaves_the_loss_and_stays_in_the_baseline(tiny_model: Path) -> None:
    grpo = {"num_prompts_per_step": 1, "num_generations_per_prompt": 4, "normalize_rewards": False}
    batch = [dataclasses.replace(e, truncated=e.place == 1) for e in experiences(4)]
    kept, filtered = (
        Learner(config(tiny_model, grpo=grpo)),
        Learner(config(tiny_model, grpo={**grpo, "overlong_filtering": True})),
    )
    everything, rest = kept.step(batch), filtered.step(batch)
    assert [trace.multiplier for trace in filtered.traces] == [1, 0, 1, 1]
    for one, other in zip(kept.traces, filtered.traces, strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)
    assert rest["global_valid_toks"] == everything["global_valid_toks"] - batch[1].tokens.policy_tokens


@pytest.mark.parametrize(
    ("loss_fn", "loaded"),
    [
        ({"reference_policy_kl_penalty": 0}, 0),
        ({"reference_policy_kl_penalty": 0.1}, 1),
        ({"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True}, 1),
    ],
    ids=["none", "loss", "reward"],
)
def test_a_reference_policy_is_there_only_where_something_compares_with_it(
    tiny_model: Path, loss_fn: dict[str, Any], loaded: int
) -> None:
    learner = Learner(ppo(tiny_model, loss_fn=loss_fn))
    learner.step(experiences(8))
    assert [trace.ref is not None for trace in learner.traces] == [bool(loaded)] * 8


def test_the_traces_of_a_step_are_what_it_knew_of_each_token(tiny_model: Path) -> None:
    learner = Learner(config(tiny_model))  # one optimizer step: the start of the step is its own pass
    batch = experiences(4)
    expected = [
        learner.probe(np.concatenate([e.tokens.prompt, e.tokens.completion]))[e.tokens.prompt.size - 1 :] for e in batch
    ]
    learner.step(batch)
    for trace, e, logprobs in zip(learner.traces, batch, expected, strict=True):
        assert trace.experience is e
        np.testing.assert_allclose(trace.start, logprobs[e.tokens.policy > 0], atol=2e-5)
        np.testing.assert_array_equal(trace.advantages, np.full(e.tokens.policy_tokens, e.reward))
        assert (trace.ref, trace.values, trace.returns) == (None, None, None)


def test_going_on_from_a_checkpoint_gives_the_same_bits_of_both_models(tiny_model: Path, tmp_path: Path) -> None:
    settings = ppo(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.1})
    straight = Learner(settings)
    for seed in range(2):
        straight.step(experiences(8, seed))
    straight.save(tmp_path)
    resumed = Learner(settings, tmp_path)
    assert resumed.counters == straight.counters
    for seed in range(2, 4):
        assert straight.step(experiences(8, seed)) == resumed.step(experiences(8, seed))
    for (name, ours), (_, theirs) in zip(straight.iter_weights(), resumed.iter_weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_value_model_is_loaded_by_transformers_and_may_start_another_run(tiny_model: Path, tmp_path: Path) -> None:
    settings = ppo(tiny_model)
    learner = Learner(settings)
    learner.step(experiences(8))
    learner.save(tmp_path)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(tmp_path / "value").eval()(input_ids=ids).last_hidden_state
        started = Value(config(tiny_model, value={"model_name": str(tmp_path / "value")}))
        whole = TokenSequence(np.arange(1, dtype=np.int32), np.arange(1, 10, dtype=np.int32), np.ones(9, np.uint8))
        found = started.values(build([whole], MicroBatch((((0,),),)), PLAIN))
        torch.testing.assert_close(found, started.root.head(hidden)[0, :-1, 0], atol=2e-5, rtol=1e-5)
    assert found.any()
    (tmp_path / "value" / HEAD).unlink()
    with pytest.raises(ServiceError, match="can't load the head of a value model"):
        Learner(settings, tmp_path)


def test_a_checkpoint_without_a_value_model_is_refused_under_ppo(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(config(tiny_model))
    learner.step(experiences(4))
    learner.save(tmp_path)
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
    learner = Learner(settings)
    batch = experiences(8)
    metrics = learner.step(batch)
    left_out = [np.isneginf(trace.start) for trace in learner.traces]
    assert any(one.any() for one in left_out)
    assert not all(one.all() for one in left_out)
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["num_masked_seqs_by_logprob_error"] == 0
    assert metrics["probs_ratio_min"] > 0
    assert metrics["global_valid_toks"] == sum(e.tokens.policy_tokens for e in batch)
