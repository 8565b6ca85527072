"""However trajectories are packed, log-probabilities and gradients are those of each trajectory alone."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from headrace.base.errors import ServiceError
from headrace.records.trajectory import Trajectory
from headrace_services.trainer.network.packing import PackedRows, Packing, Rows, pack, plan
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel
from tests.integration.trainer.learner_cases import token_ids
from tests.integration.trainer.policy_cases import MODES, SIZES, factors, groups, own_tokens, settings, weights_of
from tests.integration.trainer.policy_ranks import run_rank
from tests.support.forks import fork_ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    made = {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "mistral": MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
        "qwen3_next": Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, num_experts=2, num_experts_per_tok=1)),
    }
    folders = {}
    for name, model in made.items():
        folders[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folders[name])
    return folders


def by_trajectory(values: Tensor, order: Sequence[int], trajectories: Sequence[Trajectory]) -> dict[int, Tensor]:
    """Values [N] of a micro-batch's policy tokens, cut into those of each trajectory, by its place."""
    parts = values.split([own_tokens(trajectories[i]) for i in order])
    return dict(zip(order, parts, strict=True))


def run(
    model: Path, mode: dict[str, Any], trajectories: Sequence[Trajectory], warper: LogitsWarper
) -> tuple[list[np.ndarray], dict[str, Tensor], int]:
    """Log-probabilities of each trajectory, the gradient of a random sum of them in float64, and the places that were computed."""
    chosen = settings(model, mode)
    policy = PolicyModel(chosen)
    policy.model.double()
    packing = Packing.of(chosen.policy, training=True)
    found: list[np.ndarray] = [np.empty(0)] * len(trajectories)
    places = 0
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing)
        places += packed.input_ids.numel()
        values = policy.forward(packed, warper).logprobs
        weighted = torch.where(values.isneginf(), 0.0, values) * factors(weights_of(trajectories), packed.indices)
        weighted.sum().backward()
        for i, own in by_trajectory(values.detach(), packed.indices, trajectories).items():
            found[i] = own.numpy()
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return found, gradients, places


def alone(model: Path, trajectories: Sequence[Trajectory]) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    """The same by transformers alone: each trajectory whole in a batch of its own, with all its logits."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    found = []
    for one, weights in zip(trajectories, weights_of(trajectories), strict=True):
        ids = torch.from_numpy(token_ids(one))
        logp = plain(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        own = logp[one.prompt_token_ids.size - 1 :][torch.from_numpy(one.loss_mask).bool()]
        (own * torch.from_numpy(weights)).sum().backward()
        found.append(own.detach().numpy())
    return found, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["qwen2", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_every_packing_gives_each_trajectory_its_own_gradients(models: dict[str, Path], name: str, mode: str) -> None:
    trajectories = groups()
    expected, gradients = alone(models[name], trajectories)
    found, own, _ = run(models[name], MODES[mode], trajectories, LogitsWarper())
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert own.keys() == gradients.keys()
    for key in gradients:
        torch.testing.assert_close(own[key], gradients[key], atol=1e-5, rtol=1e-5, msg=key)


def test_packing_computes_fewer_places_than_padding(models: dict[str, Path]) -> None:
    places = {
        mode: run(models["qwen2"], MODES[mode], groups(), LogitsWarper())[2] for mode in ("padded", "packed", "shared")
    }
    assert places["packed"] < places["padded"]
    assert places["shared"] < places["padded"]


@pytest.mark.parametrize("mode", ["dynamic", "packed", "shared", "shared-dynamic", "shared-packed"])
def test_no_trajectory_sees_padding_or_another_trajectory(models: dict[str, Path], mode: str) -> None:
    """Poison: every token of all but one trajectory, and the padding, is replaced; that one's values stay as they are, to the bit."""
    trajectories = groups()
    chosen = settings(models["qwen2"], MODES[mode])
    policy, packing = PolicyModel(chosen), Packing.of(chosen.policy, training=True)
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing)
        with torch.no_grad():
            before = by_trajectory(policy.forward(packed, LogitsWarper()).logprobs, packed.indices, trajectories)
            for i in packed.indices:
                values = policy.forward(poison_all_but(packed, rows, i), LogitsWarper()).logprobs
                poisoned = by_trajectory(values, packed.indices, trajectories)
                assert torch.equal(poisoned[i], before[i]), (mode, i)


def poison_all_but(packed: PackedRows, rows: Rows, kept: int) -> PackedRows:
    ids = (packed.input_ids + 7) % 20
    for r, row in enumerate(rows):
        for tree, span in zip(row, packed.spans[r], strict=True):
            begin = span.start + span.prompt
            for i, length in zip(tree, span.completions, strict=True):
                if i == kept:
                    for mine in (slice(span.start, span.start + span.prompt), slice(begin, begin + length)):
                        ids[r, mine] = packed.input_ids[r, mine]
                begin += length
    return dataclasses.replace(packed, input_ids=ids)


@pytest.mark.parametrize("mode", ["packed", "packed-first-fit"])
def test_packed_rows_keep_a_sliding_window(models: dict[str, Path], mode: str) -> None:
    trajectories = groups()
    expected, _ = alone(models["mistral"], trajectories)
    found, _, _ = run(models["mistral"], MODES[mode], trajectories, LogitsWarper())
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_a_model_that_does_not_pass_the_trees_on_is_an_error(models: dict[str, Path]) -> None:
    policy = PolicyModel(settings(models["qwen2"], MODES["packed"]))
    with pytest.raises(ServiceError, match=r"tree by tree.*policy\.share_prompts"):
        policy.model(input_ids=torch.ones(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "mode", "says"),
    [
        ("mistral", "shared", r"policy\.share_prompts true: MistralForCausalLM has layers of sliding_attention"),
        ("qwen3_next", "shared", r"policy\.share_prompts true: Qwen3NextForCausalLM carries a state"),
        ("qwen3_next", "packed", r"policy\.sequence_packing\.enabled true: Qwen3NextForCausalLM carries a state"),
    ],
)
def test_a_model_that_mixes_trajectories_is_refused(models: dict[str, Path], name: str, mode: str, says: str) -> None:
    with pytest.raises(ServiceError, match=says):
        PolicyModel(settings(models[name], MODES[mode]))


def test_logits_of_a_chunk_alone_are_held(models: dict[str, Path]) -> None:
    """In the forward and in the backward pass."""
    chosen = settings(models["llama"], {"logprob_chunk_size": 6})
    policy, packing = PolicyModel(chosen), Packing.of(chosen.policy, training=True)
    trajectories = groups()
    held = []

    def hold(tensor: Tensor) -> Tensor:
        held.append(tuple(tensor.shape))
        return tensor

    projected = []
    policy.model.lm_head.register_forward_hook(lambda *hook: projected.append(hook[2].shape[:-1].numel()))
    packed = pack(trajectories, plan(trajectories, packing)[0], packing)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        values = policy.forward(packed, LogitsWarper()).logprobs
    chunks = len(projected)
    values.sum().backward()
    assert len(values) > 6
    assert max(projected) == 6
    assert len(projected) == 2 * chunks  # each computed again, alone
    assert not [shape for shape in held if shape[-1:] == (20,) and shape[0] != 20]


def naive_filter(logits: np.ndarray, warper: LogitsWarper) -> np.ndarray:
    """Ids that may be sampled: of those not `excluded` the largest `top_k`, and of them, largest first, until their probability is
    `top_p`."""
    top_k, top_p = warper.top_k, warper.top_p
    order = np.array([token for token in np.argsort(-logits) if token not in warper.excluded])[:top_k]
    share = np.exp(logits[order] - logits[order].max())
    reached = np.cumsum(share / share.sum())
    return order[: int(np.searchsorted(reached, top_p - 1e-12)) + 1]


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize(
    "warper",
    [
        LogitsWarper(0.7, top_k=6),
        LogitsWarper(1.0, top_p=0.7),
        LogitsWarper(1.5, top_k=9, top_p=0.9),
        LogitsWarper(excluded=(3, 5, 8, 11, 12)),
        LogitsWarper(1.5, top_k=9, top_p=0.95, excluded=(3, 5)),
    ],
    ids=str,
)
def test_filtered_values_and_gradients_are_those_of_the_formula(
    models: dict[str, Path], warper: LogitsWarper, chunk: int | None
) -> None:
    """log p of a token among those that may be sampled; -inf for one that may not."""
    trajectories = groups()
    found, own, _ = run(models["llama"], {"logprob_chunk_size": chunk}, trajectories, warper)
    plain = AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float64).eval()
    outside = 0
    for one, weights, ours in zip(trajectories, weights_of(trajectories), found, strict=True):
        ids = torch.from_numpy(token_ids(one))
        logits = plain(input_ids=ids[None]).logits[0] / warper.temperature
        places = one.prompt_token_ids.size + np.flatnonzero(one.loss_mask)
        for place, weight, value in zip(places, weights, ours, strict=True):
            x, target = logits[place - 1], int(ids[place])
            among = naive_filter(x.detach().numpy(), warper)
            if target not in among:
                outside += 1
                assert value == -np.inf
                continue
            expected = x[target] - x[torch.from_numpy(among)].logsumexp(0)
            assert value == pytest.approx(expected.item(), abs=2e-6)
            (expected * weight).backward(retain_graph=True)
    assert outside > 3
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(own[key], parameter.grad, atol=1e-5, rtol=1e-5, msg=key)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_entropy_is_that_of_the_distribution_sampled_from(models: dict[str, Path], precision: str) -> None:
    chosen = settings(models["llama"], {"logprob_chunk_size": 6, "precision": precision})
    policy, packing = PolicyModel(chosen), Packing.of(chosen.policy, training=True)
    trajectories = groups()
    packed = pack(trajectories, plan(trajectories, packing)[0], packing)
    hidden = []
    policy.model.lm_head.register_forward_hook(lambda *hook: hidden.append(hook[2][0].double()))
    with torch.no_grad():
        found = policy.forward(packed, LogitsWarper(0.7, top_k=5), entropy=True)
    logits = torch.cat(hidden) / 0.7
    top = logits.topk(5).values.log_softmax(-1)
    torch.testing.assert_close(found.entropy.double(), -(top.exp() * top).sum(-1), atol=1e-5, rtol=0)
    assert found.unfiltered is not None
    assert policy.forward(packed, LogitsWarper(0.7)).entropy is None


@pytest.mark.parametrize(("recompute", "forwards"), [(False, 1), (True, 2)])
def test_activation_checkpointing_reruns_each_layer(models: dict[str, Path], recompute: bool, forwards: int) -> None:
    chosen = settings(models["llama"], {"activation_checkpointing": recompute})
    policy, packing = PolicyModel(chosen), Packing.of(chosen.policy, training=True)
    runs = []
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    trajectories = groups()
    packed = pack(trajectories, plan(trajectories, packing)[0], packing)
    policy.forward(packed, LogitsWarper()).logprobs.sum().backward()
    assert len(runs) == forwards
    assert not policy.model.training


@pytest.mark.slow
def test_two_ranks_with_their_own_micro_batches_give_one_gradient(models: dict[str, Path], tmp_path: Path) -> None:
    """Under FSDP2, with a tied head, in every packing; one rank has more micro-batches, chunks and trees than the other."""
    log = tmp_path / "log"
    with fork_ranks(2, run_rank, models["qwen2"], tmp_path, log=log) as ranks:
        for rank in ranks:
            assert rank.wait() == 0, log.read_text()
    _, expected = alone(models["qwen2"], groups())
    for mode in MODES:
        gradients = torch.load(tmp_path / f"{mode}.pt")
        assert gradients.keys() == expected.keys()
        for key, theirs in expected.items():
            torch.testing.assert_close(
                gradients[key].double(),
                theirs,
                atol=1e-3,
                rtol=1e-4,
                msg=lambda m, key=key, mode=mode: f"{mode} {key}: {m}",
            )


def test_bfloat16_multiplies_in_bfloat16_in_shared_packed_rows_too(models: dict[str, Path]) -> None:
    trajectories = groups()
    values = {}
    for precision in ("float32", "bfloat16"):
        chosen = settings(models["llama"], {**MODES["all"], "precision": precision})
        policy, packing = PolicyModel(chosen), Packing.of(chosen.policy, training=True)
        packed = pack(trajectories, plan(trajectories, packing)[0], packing)
        values[precision] = policy.forward(packed, LogitsWarper()).logprobs
        values[precision].sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in policy.model.parameters())
    difference = (values["bfloat16"] - values["float32"]).abs()
    assert values["bfloat16"].dtype == torch.float32
    assert 0 < difference.max() < 0.5
    assert difference.mean() < 0.05


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose soft caps matter: without that of attention, log-probabilities move by more than 0.01."""
    torch.manual_seed(0)
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 1}
    folder = tmp_path_factory.mktemp("gemma2")
    Gemma2ForCausalLM(Gemma2Config(**SIZES, **caps, head_dim=8, sliding_window=4)).save_pretrained(folder)
    return folder


def test_soft_caps_of_attention_are_computed(capped: Path) -> None:
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 30).astype(np.int32)
    exact, uncapped = (
        AutoModelForCausalLM.from_pretrained(capped, dtype=torch.float32, attn_implementation=kind).eval()
        for kind in ("eager", "sdpa")
    )
    tokens = torch.from_numpy(ids).long()[None]

    def logprobs(model: Any) -> Tensor:
        with torch.no_grad():
            return model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]

    assert (logprobs(exact) - logprobs(uncapped)).abs().max() > 0.01
    with torch.no_grad():
        rows = PackedRows.of_tokens(ids)
        ours = PolicyModel(settings(capped, {})).forward(rows, LogitsWarper()).logprobs
    torch.testing.assert_close(ours, logprobs(exact), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "other", "first"),
    [
        ("final_logit_softcapping", 2.0, 2),
        ("attn_logit_softcapping", 0.1, 3),
        ("query_pre_attn_scalar", 16, 3),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 50.0}, 3),
        ("sliding_window", 100, 6),
    ],
)
def test_the_first_token_that_an_engine_may_change_is_named(capped: Path, key: str, other: Any, first: int) -> None:
    policy = PolicyModel(settings(capped, {}))
    assert [one for one in policy.suspects if key in one and one.startswith(f"from token {first} on ")]
    changed = PolicyModel(settings(capped, {"hf_config_overrides": {key: other}}))
    rows = PackedRows.of_tokens(np.random.default_rng(0).integers(0, SIZES["vocab_size"], 30).astype(np.int32))
    with torch.no_grad():
        one, two = (model.forward(rows, LogitsWarper()).logprobs for model in (policy, changed))
    places = ((one - two).abs() > 1e-6).nonzero()
    assert 2 + int(places[0]) == first  # the first token has no log-probability


def test_several_sequences_in_a_row_are_refused_with_soft_caps(capped: Path) -> None:
    with pytest.raises(ServiceError, match=r"policy\.sequence_packing\.enabled true.*caps"):
        PolicyModel(settings(capped, MODES["packed"]))


@pytest.mark.parametrize("adapter", [False, True])
def test_what_is_saved_and_sent_has_the_biases_of_routers(tmp_path: Path, adapter: bool) -> None:
    routed = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **routed, moe_intermediate_size=16, num_experts_per_tok=2))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(tmp_path / "given")
    given = load_file(tmp_path / "given" / "model.safetensors")
    ours = PolicyModel(settings(tmp_path / "given", {"lora_cfg": {"enabled": adapter}}))
    sent = dict(ours.weights())
    assert [(name, tuple(tensor.shape)) for name, tensor in sent.items()] == list(ours.weight_shapes())
    (tmp_path / "saved").mkdir()
    ours.snapshot()(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert adapter or sent.keys() == saved.keys() == given.keys()
    biases = [name for name in given if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for tensors in (sent, saved):
        assert all(torch.equal(tensors[name], given[name]) for name in biases)
