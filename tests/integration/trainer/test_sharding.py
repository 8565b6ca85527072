"""What several ranks hold, read and reduce: no rank a whole model, none of them a copy in bfloat16, each gradient once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.base.devices import Site
from headrace.base.errors import ServiceError
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.memory.fit import apply_changes, phases
from headrace_services.trainer.network.backbone import fill, load_on_meta, reduces_once
from headrace_services.trainer.network.packing import PackedRows
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel
from tests.integration.trainer.learner_cases import SMALL, config, random_batch
from tests.integration.trainer.shard_ranks import COUNT, GRPO, IDS, STEPS, alone, copies, measured, sized, two
from tests.support.forks import fork_ranks

SIZES: dict[str, Any] = {**SMALL, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    large = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_key_value_heads": 4}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    made = {
        "large": Qwen2ForCausalLM(Qwen2Config(**large)).bfloat16(),
        "deep": Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "num_hidden_layers": 12}, tie_word_embeddings=True)),
        "halved": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).bfloat16(),
        "experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)),
        "one expert": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **{**experts, "num_experts": 1})),
    }
    folders = {name: tmp_path_factory.mktemp("models") / name for name in made}
    for name, model in made.items():
        # several files, and tensors of a layer in more than one of them
        model.save_pretrained(folders[name], max_shard_size="20MB" if name == "large" else "20KB")
    return folders


def run(count: int, target: Any, *arguments: Any, folder: Path) -> list[dict[str, Any]]:
    log = folder / "log"
    with fork_ranks(count, target, *arguments, folder, log=log) as ranks:
        for rank in ranks:
            assert rank.wait() == 0, log.read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    return run(2, two, models, folder=folder)


pytestmark = pytest.mark.slow


def test_no_rank_takes_the_memory_of_a_whole_model_to_load_it(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert 0.4 < found["loading"]["held"] < 0.65
        # half of it, and at most all pages of its files, which are half as long; who holds all of it before it is sharded takes 1.5
        assert found["loading"]["peak"] < 1.2


@pytest.mark.parametrize("name", ["experts", "halved"])
def test_the_ranks_together_read_what_the_files_hold(
    two_ranks: list[dict[str, Any]], models: dict[str, Path], folder: Path, name: str
) -> None:
    """Also where the files hold a tensor per expert and the model one of all, or bfloat16."""
    saved = {key: tensor for file in models[name].glob("*.safetensors") for key, tensor in load_file(file).items()}
    found = torch.load(folder / f"{name}.pt")
    assert len(list(models[name].glob("*.safetensors"))) > 1
    assert found.keys() == saved.keys()
    for key, tensor in saved.items():
        assert found[key].dtype == torch.float32
        assert torch.equal(found[key], tensor.float()), key


def test_a_rank_without_an_expert_is_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert "1 experts, sharded in equal numbers over 2 ranks" in found["one expert"]


def test_no_rank_keeps_the_layers_that_it_gathered_in_bfloat16(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["kept"] <= 0.05
        assert found["layers"] == ["torch.bfloat16"]
        assert found["gradients"] == ["torch.float32"]


def check_rounding(found: dict[str, Any]) -> None:
    largest, mean = found["apart"]
    assert 1e-3 < mean < largest < 0.2
    assert found["same_after"]


def test_rounding_of_a_sharded_model_is_the_same_on_each_rank(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        check_rounding(found["rounding"])
        assert found["rounding"] == two_ranks[0]["rounding"]


def test_what_a_pass_gathers_is_not_taken_for_the_weights(two_ranks: list[dict[str, Any]]) -> None:
    assert all(found["same_after_a_pass"] for found in two_ranks)


def test_gathering_in_the_replicas_dtype_equals_a_cast_afterwards(two_ranks: list[dict[str, Any]]) -> None:
    assert all(found["sent"] for found in two_ranks)


def test_the_value_head_is_computed_in_float32(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["head"] for found in two_ranks] == 2 * [["torch.float32", "torch.float32"]]


def test_gradients_are_reduced_once_a_step_to_the_same(
    two_ranks: list[dict[str, Any]], models: dict[str, Path], folder: Path
) -> None:
    assert [(found["micro_batch"], found["step"]) for found in two_ranks] == 2 * [(True, False)]
    policy = PolicyModel(config(models["deep"]))
    for shift in (0, 2, 5, 7):
        policy.forward(PackedRows.of_tokens((IDS + shift) % 20), LogitsWarper()).logprobs.sum().backward()
    for how in ("micro_batch", "step"):
        found = torch.load(folder / f"{how}.pt")
        for name, parameter in policy.model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(
                found[name], parameter.grad, atol=1e-6 * float(parameter.grad.abs().max()), rtol=1e-6
            )


def test_a_whole_gradient_is_held_where_it_is_small() -> None:
    gib = 2**30
    assert reduces_once("auto", 10**12, None)
    assert reduces_once("auto", 2 * gib, 80 * gib)  # 8 GiB of 80
    assert not reduces_once("auto", 3 * gib, 80 * gib)
    assert reduces_once("step", 3 * gib, 80 * gib)
    assert not reduces_once("micro_batch", 1, None)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["deep", "experts", "adapter"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_planned_memory_is_what_is_taken(
    two_ranks: list[dict[str, Any]], models: dict[str, Path], ranks: int, name: str, precision: str
) -> None:
    """To the byte; activations to a sixth, under autocast to a third (experts: to half), which keeps both what it cast and the original."""
    found = measured(models, name, precision) if ranks == 1 else two_ranks[0]["measured"][f"{name} {precision}"]
    trainer = phases(
        apply_changes(sized(models, name, precision), {"trainer.num_processes": ranks}), Site(None, None, ranks, ranks)
    )
    trainer = trainer["policy: layers"]
    assert trainer["policy: parameters, float32"] == found["parameters"]
    assert trainer["policy: gradients, float32"] == found["gradients"]
    assert trainer["policy: optimizer's moments, float32"] == found["moments"]
    autocast = (ranks, precision) == (1, "bfloat16")
    share = {(True, "deep"): 1 / 3, (True, "experts"): 1 / 2}.get((autocast, name), 1 / 6)
    assert trainer["policy: activations"] == pytest.approx(found["activations"], rel=share)


def test_one_rank_that_shards_trains_bfloat16_experts(
    models: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """As on a GPU: the gradients are autocast's, up to the rounding of bfloat16, and a checkpoint is continued to the bit."""
    (found,) = run(1, alone, models, tiny_model, folder=tmp_path)
    assert found["ranks"] == 1
    assert found["autocast"][0] == "torch.float32", "what sharding is for"
    assert found["sharded"] == ["torch.bfloat16"] * 2
    assert all(apart < 0.05 for apart in found["apart"].values()), found["apart"]
    for kind in ("whole", "adapter"):
        assert found[kind]["shards"]
        assert found[kind]["names"]
        check_rounding(found[kind]["rounding"])
        assert found[kind]["again"] == found[kind]["on"]
        (state,) = (tmp_path / kind / "training").glob("*.safetensors")
        assert state.name == "rank_0_of_1.safetensors"


def test_copies_on_two_hosts_step_as_one_rank(models: dict[str, Path], tiny_model: Path, tmp_path: Path) -> None:
    found = run(4, copies, tiny_model, folder=tmp_path)
    learner = Learner(config(tiny_model, grpo=GRPO))
    expected = [train_step(learner, random_batch(COUNT, seed, prompts=2)) for seed in range(STEPS + 1)]
    for rank in found:
        assert 0.45 < rank["share"] < 0.55
        assert rank["again"] == rank["on"]
        for ours, theirs in zip([*rank["metrics"], rank["on"]], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-5)
    weights = torch.load(tmp_path / "weights.pt")
    for name, tensor in learner.policy.weights():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=0)
    assert sorted(path.name for path in (tmp_path / "checkpoint" / "training").iterdir()) == [
        "rank_0_of_2.safetensors",
        "rank_1_of_2.safetensors",
        "state.json",
    ]


def test_weights_that_no_file_holds_are_named(models: dict[str, Path], tmp_path: Path) -> None:
    asked = (AutoModelForCausalLM, "policy.model_name", str(models["deep"]), "a model")
    made = load_on_meta(*asked)
    made.name_or_path = str(tmp_path)
    with pytest.raises(ServiceError, match=r"model\.safetensors.*one rank"):
        fill(made, torch.device("cpu"))
    made = load_on_meta(*asked, {"num_hidden_layers": 13, "layer_types": ["full_attention"] * 13})
    with pytest.raises(ServiceError, match=r"12 weights.*model\.layers\.12"):
        fill(made, torch.device("cpu"))


def test_float32_is_no_tf32(tiny_model: Path) -> None:
    torch.set_float32_matmul_precision("high")
    Learner(config(tiny_model))
    assert torch.get_float32_matmul_precision() == "highest"
