"""One learner in one process, on real models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from headrace.base.errors import ServiceError
from headrace.records.trajectory import Trajectory
from headrace.replay import Reservation
from headrace_services.trainer.control.rank import TrainerRank
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.batch import Batch, BatchRejected, GlobalCounts
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.losses import policy_loss
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel
from tests.integration.trainer import learner_ranks
from tests.integration.trainer.learner_cases import (
    SMALL,
    by_hand,
    config,
    random_batch,
    sampled,
    token_ids,
    unpacked,
    weights,
)
from tests.integration.trainer.policy_cases import MODES, own_tokens
from tests.support.trainer import batch, trajectory


@pytest.fixture(scope="module")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose heads differ: tied, of its own, behind a soft cap; one that calls its backbone by position (GPT-2), and one whose files
    name its weights otherwise."""
    torch.manual_seed(0)
    models = {
        "tied": Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
        "untied": Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=False)),
        "soft cap": Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=1.5)),
        "positional": GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
        "experts": MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)),
    }
    folders = {}
    for name, model in models.items():
        folders[name] = tmp_path_factory.mktemp("architectures") / name.replace(" ", "_")
        model.save_pretrained(folders[name])
    return folders


def plain_logprobs(folder: Path, one: Trajectory, temperature: float) -> torch.Tensor:
    """Every completion token's log-probability from a forward of the whole trajectory alone, with all its logits."""
    # the default implementation ignores soft caps of attention
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.from_numpy(token_ids(one))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0] / temperature
    start = one.prompt_token_ids.size
    return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[start - 1 :, 0]


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", ["tied", "untied", "soft cap", "positional", "experts"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_transformers_forward(architectures: dict[str, Path], name: str, temperature: float) -> None:
    trajectories, _ = sampled(6)
    with torch.no_grad():
        policy = PolicyModel(config(architectures[name]))
        found = policy.forward(unpacked(trajectories), LogitsWarper(temperature)).logprobs
    expected = torch.cat(
        [
            plain_logprobs(architectures[name], one, temperature)[torch.from_numpy(one.loss_mask).bool()]
            for one in trajectories
        ]
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_probe_equals_a_full_forward_at_temperature_one(tiny_model: Path) -> None:
    learner = Learner(config(tiny_model, policy={"generation": {"max_new_tokens": 16, "temperature": 0.5}}))
    ids = np.random.default_rng(0).integers(0, learner.policy.vocab_size, 40).astype(np.int32)
    whole = trajectory(ids[:1], ids[1:])
    found = learner.probe(ids)
    assert found.shape == (39,)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain_logprobs(tiny_model, whole, 1.0).numpy(), atol=2e-5)


def test_only_counted_positions_pass_the_vocabulary_projection(tiny_model: Path) -> None:
    policy = PolicyModel(config(tiny_model))
    projected = []
    policy.model.get_output_embeddings().register_forward_hook(
        lambda *hook: projected.append(hook[2].shape[:-1].numel())
    )
    trajectories, _ = sampled(6)
    with torch.no_grad():
        policy.forward(unpacked(trajectories), LogitsWarper())
    assert projected == [sum(map(own_tokens, trajectories))]


def test_a_preference_is_learnt_and_the_loss_falls(tiny_model: Path) -> None:
    """Of two answers to one prompt, one has a positive advantage and one a negative."""
    policy = {"optimizer": {"kwargs": {"lr": 1e-4}}}  # the clip holds the loss above -0.2
    learner = Learner(config(tiny_model, policy=policy, loss_fn={"prev_logprobs_source": "generation"}))
    ids = [np.array(answer, np.int32) for answer in ([3, 4, 5, 6], [7, 8, 9, 10])]
    prompt = np.array([1, 2, 11], np.int32)

    def logprobs(answer: np.ndarray) -> np.ndarray:
        return learner.probe(np.concatenate([prompt, answer]))[-answer.size :]

    answers = [trajectory(prompt, answer, logprobs(answer), index=place) for place, answer in enumerate(ids)]
    before = [logprobs(answer).sum() for answer in ids]
    losses = [train_step(learner, batch(answers, [1.0, -1.0]))["loss"] for _ in range(4)]
    assert losses[0] == pytest.approx(0, abs=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < -0.05
    assert logprobs(ids[0]).sum() > before[0] + 0.2
    assert logprobs(ids[1]).sum() < before[1] - 0.2
    assert learner.version == 4


@pytest.mark.parametrize("source", ["recompute", "generation"])
def test_gradient_is_that_of_the_loss_over_the_whole_batch(tiny_model: Path, source: str) -> None:
    loss_fn = {"prev_logprobs_source": source, "use_importance_sampling_correction": source == "recompute"}
    settings = config(tiny_model, loss_fn=loss_fn, policy={"train_micro_batch_size": 3})
    whole = random_batch(8)
    metrics = train_step(Learner(settings), random_batch(8))

    policy = PolicyModel(settings)
    output = policy.forward(unpacked(whole.trajectories), LogitsWarper())
    tokens = by_hand(whole, output.logprobs.detach())
    count = whole.trajectory.size
    parts = policy_loss(settings.loss_fn, output, tokens, GlobalCounts(count, len(whole), 1.0))
    parts.loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.model.parameters()])
    assert metrics["loss"] == pytest.approx(parts.loss.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["global_valid_toks"] == count


@pytest.mark.parametrize("size", [1, 3, 64])
def test_micro_batching_changes_nothing(tiny_model: Path, size: int) -> None:
    def run(size: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        # an eps above the rounding errors of the smallest gradients, which AdamW otherwise blows up to lr
        policy = {"train_micro_batch_size": size, "optimizer": {"kwargs": {"lr": 1e-3, "eps": 1e-4}}}
        loss_fn = {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True}
        learner = Learner(config(tiny_model, policy=policy, loss_fn=loss_fn))
        return [train_step(learner, random_batch(7, seed)) for seed in range(3)], weights(learner)

    metrics, after = run(size)
    expected, reference = run(7)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name in reference:
        torch.testing.assert_close(after[name], reference[name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("mode", ["padded", "dynamic", "shared-packed", "all"])
def test_the_entropy_is_the_mean_over_counted_tokens_in_any_packing(tiny_model: Path, mode: str) -> None:
    """Of the distribution after temperature and top-k, against float64 by transformers alone; tokens weigh what they weigh in the loss."""
    given = random_batch(8, prompts=2)
    given.multipliers[1:3] = 0.5, 0.0
    given.mask[given.tokens_of([5])[::2]] = False
    generation = {"max_new_tokens": 16, "temperature": 0.7, "top_k": 5}
    policy = {"train_micro_batch_size": 3, "generation": generation, **MODES[mode]}
    metrics = train_step(Learner(config(tiny_model, policy=policy)), given)

    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    total = count = 0.0
    for one, multiplier, mask in zip(given.trajectories, given.multipliers, given.split(given.mask), strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(token_ids(one))[None]).logits[0] / 0.7
        before = logits[one.prompt_token_ids.size - 1 : -1]
        p = before[torch.from_numpy(one.loss_mask).bool()].topk(5).values.softmax(-1)
        counted = multiplier * torch.from_numpy(mask).double()
        total += float((torch.special.entr(p).sum(-1) * counted).sum())
        count += float(counted.sum())
    assert metrics["entropy"] == pytest.approx(total / count, abs=1e-5)
    assert 0.5 < metrics["entropy"] < np.log(5)


def test_same_batch_gives_the_same_bits(tiny_model: Path) -> None:
    settings = config(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.1}, policy={"train_micro_batch_size": 3})
    learners = Learner(settings), Learner(settings)
    for seed in range(3):
        first, second = (train_step(learner, random_batch(8, seed)) for learner in learners)
        assert first == second
    assert_same_weights(*map(weights, learners))


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_the_order_of_a_rank_s_trajectories_changes_no_bit(tiny_model: Path, kind: str) -> None:
    """What is in which micro-batch follows from lengths and places in the whole batch."""
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    chosen = learner_ranks.settings(kind, tiny_model, "")
    one, other = Learner(chosen), Learner(chosen)
    for seed in (1, 7):
        straight, turned = random_batch(8, seed, prompts=2), random_batch(8, seed, prompts=2).take(order)
        assert len({token_ids(trajectory).size for trajectory in straight.trajectories}) == 8
        assert train_step(one, straight) == train_step(other, turned)
        np.testing.assert_array_equal(turned.advantages, straight.take(order).advantages)
        np.testing.assert_array_equal(turned.old_logprobs, straight.take(order).old_logprobs)
    assert_same_weights(weights(one), weights(other))


def test_reference_policy_stays_where_it_was(tiny_model: Path) -> None:
    learner = Learner(config(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.5}))
    penalties = [train_step(learner, random_batch(8))["kl_penalty"] for _ in range(3)]
    assert penalties[0] == 0
    assert 0 < penalties[1] < penalties[2]


@pytest.mark.parametrize("frozen", [True, False])
def test_routers_of_experts_are_trained_unless_they_are_frozen(
    architectures: dict[str, Path], tiny_model: Path, tmp_path: Path, frozen: bool
) -> None:
    policy = {"freeze_moe_router": frozen, "tokenizer": {"name": str(tiny_model)}}
    settings = config(architectures["experts"], policy=policy)
    learner = Learner(settings)
    before = weights(learner)
    train_step(learner, random_batch(8))
    moved = {name for name, tensor in weights(learner).items() if not torch.equal(tensor, before[name])}
    routers = {name for name in before if name.endswith("block_sparse_moe.gate.weight")}
    assert len(routers) == SMALL["num_hidden_layers"]
    assert moved >= before.keys() - routers
    assert moved.isdisjoint(routers) == frozen
    learner.snapshot()(tmp_path)
    again = Learner(settings, tmp_path)
    assert_same_weights(weights(again), weights(learner))
    for each in (learner, again):
        train_step(each, random_batch(8, 1))
    assert_same_weights(weights(again), weights(learner))


def test_weights_are_named_as_the_checkpoint_names_them(architectures: dict[str, Path]) -> None:
    for name, folder in architectures.items():
        policy = PolicyModel(config(folder))
        saved = load_file(folder / "model.safetensors")
        found = dict(policy.weights())
        assert found.keys() == saved.keys(), name
        assert all(torch.equal(found[key], saved[key]) for key in saved), name
        assert list(policy.weight_shapes()) == [(key, tuple(tensor.shape)) for key, tensor in found.items()]


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(tiny_model: Path) -> None:
    half = Learner(config(tiny_model, policy={"precision": "bfloat16"}))
    full = Learner(config(tiny_model))
    ids = np.arange(20, dtype=np.int32)
    difference = np.abs(half.probe(ids) - full.probe(ids)).max()
    assert 0 < difference < 0.2
    before = weights(half)
    train_step(half, random_batch(8))
    assert all(tensor.dtype == torch.float32 for tensor in before.values())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in half.policy.weights())


@pytest.mark.parametrize(
    ("bad", "reward", "says"),
    [
        (trajectory([1, 2], [3, 4, 5], index=2), float("nan"), "its reward is nan"),
        (trajectory([1, 2], [3, 4, 5], [np.inf] * 3, index=2), 1.0, "not finite"),
        (trajectory([1], [1, 99, 1], index=2), 1.0, "vocabulary of 20"),
        (trajectory([1] * 70, [1] * 3, index=2), 1.0, "73 tokens, more than policy.max_total_sequence_length 64"),
    ],
    ids=["reward", "behaviour", "vocabulary", "length"],
)
def test_a_bad_trajectory_is_named_and_not_trained(tiny_model: Path, bad: Trajectory, reward: float, says: str) -> None:
    learner = Learner(config(tiny_model))
    before = weights(learner)
    given = batch([*(trajectory([1, 2], [3, 4, 5], index=i) for i in range(2)), bad], [1.0] * 3)
    given.rewards[2] = reward
    with pytest.raises(BatchRejected, match=rf"step 0.*'g'\[2\].*{says}") as caught:
        train_step(learner, given)
    assert set(caught.value.groups) == {"g"}
    assert learner.version == 0
    assert_same_weights(weights(learner), before)


def overflowing(count: int, place: int) -> Batch:
    """With a negative advantage and the ratio against the behaviour policy, the loss of the trajectory at `place` is infinite."""
    given = random_batch(count)
    given.rollout_logprobs[given.tokens_of([place])] = -1e30
    given.rewards[place] = -1.0
    return given


def test_a_loss_that_is_not_finite_changes_nothing_and_names_why(tiny_model: Path) -> None:
    settings = config(tiny_model, loss_fn={"prev_logprobs_source": "generation"}, policy={"train_micro_batch_size": 4})
    learner, untouched = Learner(settings), Learner(settings)
    with pytest.raises(ServiceError, match=r"finite.*'g'\[3\]"):
        train_step(learner, overflowing(6, 3))
    assert learner.version == 0
    # the error left nothing behind that the next step could see
    assert train_step(learner, random_batch(6)) == train_step(untouched, random_batch(6))
    assert_same_weights(weights(learner), weights(untouched))


def test_weights_go_nowhere_after_a_later_step_that_is_not_finite(tiny_model: Path, tmp_path: Path) -> None:
    """They are of no version: neither a checkpoint nor the fleet may get them."""
    policy = {"train_global_batch_size": 2}
    settings = config(tiny_model, loss_fn={"prev_logprobs_source": "generation"}, policy=policy)
    rank = TrainerRank(settings, Ranks(), lambda keys: [])
    rank.load(None)
    learner = rank.learner
    says = r"because of trajectory 'g'\[3\].*1 optimizer steps of this step were taken before"
    with pytest.raises(ServiceError, match=says):
        train_step(learner, overflowing(4, 3))
    assert learner.version == 0
    for use in (
        lambda: rank.step(Reservation(0, (), ()), [], [[]]),
        lambda: rank.save(str(tmp_path)),
        lambda: rank.probe([0, 1, 2, 3, 4]),
        lambda: next(rank.weights(False)),
    ):
        with pytest.raises(ServiceError, match=says):
            use()
    assert not any(tmp_path.iterdir())


def test_a_batch_in_which_nothing_counts_has_no_loss(tiny_model: Path) -> None:
    learner = Learner(config(tiny_model))
    given = random_batch(3)
    given.multipliers[:] = 0.0
    metrics = train_step(learner, given)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["global_valid_toks"] == 0
    assert metrics["probs_ratio_max"] == -1


def test_a_model_that_is_not_there_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"policy\.model_name '.*nowhere'.*directory") as caught:
        Learner(config(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_an_error_with_the_remedy(tmp_path: Path, architectures: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_text((architectures["tied"] / "config.json").read_text())
    with pytest.raises(ServiceError, match=r"policy\.model_name.*directory"):
        PolicyModel(config(tmp_path))


def test_a_context_longer_than_the_model_s_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ServiceError, match=r"policy\.max_total_sequence_length 1000000.*positions"):
        Learner(config(tiny_model, policy={"max_total_sequence_length": 1_000_000}))
