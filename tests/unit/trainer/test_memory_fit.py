"""Whether a run fits on its devices, and the smallest change with which it does: functions of configuration and device lists."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig

from headrace.base.devices import DeviceMemory, Site
from headrace.base.errors import ServiceError
from headrace.config import Config, load
from headrace_services.trainer.memory import fit
from headrace_services.trainer.memory.models import KNOWN
from headrace_services.trainer.memory.parts import CUDA_PART, GIB, NCCL_PART, REPLICA_REFIT, total

EXAMPLES = Path(__file__).parents[3] / "examples"
ONE_GPU, TWO_NODES = EXAMPLES / "gpu_1_5b_1gpu.yaml", EXAMPLES / "gpu_32b_16gpus.yaml"
# A card sold as 80 GB has 79 GiB for programs.
SOLD = {16: 15.6, 24: 23.6, 40: 39.4, 48: 47.4, 80: 79.2, 141: 139.8, 192: 191.0}


def site(gib: float, gpus: int = 1, *, free: float | None = None, per_host: int = 8) -> Site:
    device = DeviceMemory("GPU 0", int(gib * GIB), int((gib if free is None else free) * GIB))
    return Site(device, device, gpus, per_host, shared=gpus == 1)


def judged(file: Path, place: Site, *overrides: str) -> fit.Verdict:
    return fit.judge(load(file, overrides), place)


def run_on(model: str, gpus: int, *overrides: str) -> Config:
    """A run of this model that takes so many GPUs: half of them, at least one, for the trainer."""
    ranks = max(1, gpus // 2)
    experts = "A3B" in model
    return load(
        EXAMPLES / "gpu_8b_8gpus.yaml",
        [
            f"policy.model_name={model}",
            f"trainer.num_processes={ranks}",
            f"rollout.replicas={max(1, gpus - ranks)}",
            *(["policy.lora_cfg.target_modules=[q_proj,k_proj,v_proj,o_proj]"] if experts else []),
            *overrides,
        ],
    )


MODELS = [name for name in KNOWN if name not in ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-32B")]


@pytest.mark.parametrize("model", MODELS)
def test_accepted_fits_and_what_is_proposed_is_accepted(model: str) -> None:
    seen = set()
    configs = {
        (gpus, lora): run_on(model, gpus, f"policy.lora_cfg.enabled={lora}")
        for gpus in (1, 2, 4, 8, 16)
        for lora in ("false", "true")
    }
    for sold, ((gpus, lora), config) in itertools.product(SOLD, configs.items()):
        place = site(SOLD[sold], gpus)
        verdict = fit.judge(config, place)
        seen.add((verdict.problem is None, verdict.change is None))
        if verdict.problem is None:
            parts = max(fit.phases(config, place).values(), key=total)
            fraction = verdict.shares[0] if verdict.shares else 1
            error = fit.ERROR if verdict.warnings else 0
            assert total(parts) - parts[CUDA_PART] <= (1 + error) * fraction * SOLD[sold] * GIB
        if verdict.change is not None:
            # as a user would give them: they are valid, and enough
            changed = run_on(model, gpus, f"policy.lora_cfg.enabled={lora}", *verdict.change)
            accepted = fit.judge(changed, place)
            assert (accepted.problem, accepted.warnings) == (None, ()), (sold, gpus, lora, verdict.change)
            assert changed.trainer.num_processes + changed.rollout.replicas * (
                changed.policy.generation.vllm_cfg.tensor_parallel_size
            ) <= max(gpus, 2)
        elif verdict.problem is not None:
            assert "No change" in verdict.problem
    assert {(True, True)} < seen, "something fits, something does not"


@pytest.mark.parametrize("per_host", [4, 8])
def test_what_is_proposed_has_a_place_on_its_hosts(per_host: int) -> None:
    hosts, proposed = 16 // per_host, 0
    for gib, ranks in itertools.product(SOLD.values(), (4, 12)):
        overrides = [f"trainer.num_processes={ranks}", "rollout.replicas=1"]
        change = judged(TWO_NODES, site(gib, 16, per_host=per_host), *overrides).change
        if change is None:
            continue
        proposed += 1
        changed = load(TWO_NODES, [*overrides, *change])
        ranks_of = [divmod(changed.trainer.num_processes, count) for count in range(1, hosts + 1)]
        parallel = changed.policy.generation.vllm_cfg.tensor_parallel_size
        room = [
            count * ((per_host - each) // parallel) + (hosts - count) * (per_host // parallel)
            for count, (each, over) in enumerate(ranks_of, 1)
            if not over and each <= per_host
        ]
        assert max(room, default=0) >= changed.rollout.replicas, (gib, ranks, change)
    assert proposed


def test_what_is_over_within_the_error_of_the_plan_is_a_warning() -> None:
    config = run_on("Qwen/Qwen3-8B", 8)
    needed = max(map(total, fit.phases(config, site(79.2, 8)).values())) / GIB
    trainer_alone = fit.apply_changes(config, {"rollout.device": "cpu"})
    for over, warned, refused in ((0.99, False, False), (1.09, True, False), (1.11, False, True)):
        place = dataclasses.replace(site(needed / over, 8), replica=None)
        verdict = fit.judge(trainer_alone, place)
        assert (bool(verdict.warnings), verdict.problem is not None) == (warned, refused), over
        assert (verdict.change is not None) == (warned or refused)
        if warned:
            assert "may fit" in verdict.warnings[0]
            assert " ".join(verdict.change or ()) in verdict.warnings[0]


def taken(gpus: int, *overrides: str, model: str = "Qwen/Qwen3-8B") -> dict[str, dict[str, int]]:
    return fit.phases(run_on(model, gpus, *overrides), site(79.2, gpus))


def test_filters_sort_the_logits_of_a_chunk() -> None:
    plain, filtered = (
        taken(8, f"policy.generation.top_p={top_p}")["policy: loss"]["policy: logits of a chunk"]
        for top_p in (1.0, 0.9)
    )
    assert (plain, filtered) == (12 * 1024 * 151_936, 32 * 1024 * 151_936)


def test_a_part_is_there_where_it_is_taken() -> None:
    alone, several = taken(1), taken(8)
    assert all(NCCL_PART not in parts for parts in alone.values())
    assert all(NCCL_PART in parts and CUDA_PART in parts for parts in several.values())
    # gradients are dropped before a refit; without other passes there is no inference
    assert not any("gradient" in part for part in several["refit"])
    assert not any("inference" in phase for phase in several)
    referred = taken(8, "loss_fn.reference_policy_kl_penalty=0.01")
    assert referred["reference: inference, layers"]["reference: parameters, float32"] > 0
    assert "policy: gradients of a layer, reduced in float32" in several["policy: layers"]
    once, each = (taken(4, f"trainer.reduce_gradients={how}") for how in ("step", "micro_batch"))
    whole = "policy: gradients of a step, unreduced"
    assert once["policy: layers"][whole] == 4 * 8_190_735_360
    assert whole not in each["policy: layers"]


def test_a_replica_waits_for_a_layer_larger_than_a_bucket() -> None:
    config = run_on("Qwen/Qwen3-30B-A3B", 8)
    small = fit.apply_changes(config, {"weight_channel.bucket_bytes": 16 * GIB})
    by_bucket = [fit.replica(each, 80 * GIB, 0.9)[REPLICA_REFIT] for each in (config, small)]
    layer = 2 * fit.list_models(config)["policy"].size.layer
    largest = 2 * fit.list_models(config)["policy"].size.largest
    assert by_bucket[1] == 2 * 16 * GIB + largest
    assert by_bucket[0] > layer + 2 * largest


def test_more_memory_never_turns_a_run_that_fits_away() -> None:
    for gpus in (1, 4):
        config = run_on("Qwen/Qwen2.5-1.5B", gpus)
        found = [fit.judge(config, site(gib, gpus)).problem is None for gib in range(8, 100, 4)]
        assert found == sorted(found)
        assert {True, False} == set(found)


def test_shares_of_a_shared_device_follow_from_the_plan() -> None:
    assert judged(ONE_GPU, site(79.2)).shares == (0.5, 0.45)
    for gib, adapter in ((39.4, "false"), (23.6, "true")):
        found = judged(ONE_GPU, site(gib), f"policy.lora_cfg.enabled={adapter}")
        assert found.problem is None
        assert found.shares not in (None, (0.5, 0.45))
        assert 0.5 < sum(found.shares or ()) < 1
    # what the user gave stays
    own = judged(ONE_GPU, site(39.4), "policy.lora_cfg.enabled=true", "trainer.gpu_memory_fraction=0.6")
    assert own.shares is not None
    assert own.shares[0] == 0.6


def test_a_refusal_names_the_numbers_and_the_largest_parts() -> None:
    verdict = judged(TWO_NODES, site(79.2, 16), "trainer.num_processes=4", "rollout.replicas=4")
    assert verdict.problem is not None
    assert "GiB on GPU 0" in verdict.problem
    assert "optimizer's moments" in verdict.problem
    assert verdict.change is not None
    assert " ".join(verdict.change) in verdict.problem


@pytest.mark.parametrize(
    ("gib", "gpus", "overrides", "key"),
    [
        (39.4, 1, ["trainer.gpu_memory_fraction=0.2"], fit.SHARE),
        (79.2, 8, ["policy.generation.vllm_cfg.gpu_memory_utilization=0.99"], fit.UTILIZATION),
        (79.2, 8, ["policy.sequence_packing.train_mb_tokens=120000"], "policy.sequence_packing.train_mb_tokens"),
        (79.2, 8, ["policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=64"], "policy.train_micro_batch_size"),
        (39.4, 8, ["policy.logprob_chunk_size=200000", "policy.sequence_packing.train_mb_tokens=4096"], "policy.logprob_chunk_size"),
        (79.2, 8, ["policy.activation_checkpointing=false", "policy.sequence_packing.train_mb_tokens=8192"], None),
        (79.2, 8, ["trainer.num_processes=1"], "trainer.num_processes"),
        (39.4, 3, ["trainer.num_processes=2", "rollout.replicas=1"], "policy.lora_cfg.enabled"),
    ],
)  # fmt: skip
def test_the_first_change_of_the_order_that_fits_is_proposed(
    gib: float, gpus: int, overrides: list[str], key: str | None
) -> None:
    file = ONE_GPU if gpus == 1 else EXAMPLES / "gpu_8b_8gpus.yaml"
    verdict = judged(file, site(gib, gpus), *overrides)
    assert verdict.problem or verdict.warnings
    assert verdict.change is not None
    if key is not None:
        assert verdict.change[0].partition("=")[0] == key
    assert judged(file, site(gib, gpus), *overrides, *verdict.change).problem is None


@pytest.mark.parametrize(("parallel", "can"), [(2, True), (3, False), (4, True), (6, True), (7, False), (16, False)])
def test_a_replica_has_whole_heads_on_each_gpu(parallel: int, can: bool) -> None:
    # 12 heads, and 2 of keys: vLLM ends at its start for any other number
    key = "policy.generation.vllm_cfg.tensor_parallel_size"
    over = ["policy.model_name=Qwen/Qwen2.5-1.5B", f"{key}={parallel}", "rollout.replicas=1"]
    found = judged(TWO_NODES, site(79.2, 32, per_host=32), *over).problem or ""
    assert found.startswith(f"{key} {parallel} ") is not can
    assert can or found.endswith("1, 2, 4, 6, 12")


def test_a_replica_too_large_for_its_gpus_is_spread_over_more() -> None:
    over = ["policy.lora_cfg.enabled=true", "policy.generation.vllm_cfg.tensor_parallel_size=1", "rollout.replicas=4"]
    assert judged(TWO_NODES, site(79.2, 16), *over).problem is None
    found = judged(TWO_NODES, site(47.4, 16), *over).change
    assert found is not None
    assert found[:2] == ("policy.generation.vllm_cfg.tensor_parallel_size=2", "rollout.replicas=2")


def test_a_busy_device_has_only_what_is_free() -> None:
    assert judged(ONE_GPU, site(79.2)).problem is None
    busy = judged(ONE_GPU, site(79.2, free=20))
    assert busy.problem is not None
    assert "on GPU 0" in busy.problem


def test_a_device_that_tells_no_memory_is_not_judged() -> None:
    assert fit.judge(load(ONE_GPU), Site(None, None, 1, 8, shared=True)) == fit.Verdict()


def test_a_model_that_must_be_downloaded_is_not_compared() -> None:
    verdict = fit.plan(load(ONE_GPU, ["policy.model_name=nobody/unknown-model"]), site(16)).judge()
    assert verdict.problem is None
    assert "nobody/unknown-model" in verdict.warnings[0]


def test_a_model_of_unknown_layers_is_trained_without_a_plan(tmp_path: Path) -> None:
    """A state-space model has no attention heads."""
    MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32).save_pretrained(tmp_path)
    verdict = judged(ONE_GPU, site(16), f"policy.model_name={tmp_path}")
    assert verdict.problem is None
    assert "Mamba" in verdict.warnings[0]


def test_a_rank_compares_its_own_gpu_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [60 * GIB]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 80 * GIB))
    fit.check_device(load(ONE_GPU), 1, 1)
    free[0] = 10 * GIB
    with pytest.raises(ServiceError, match=r"GiB on H100.*policy\."):
        fit.check_device(load(ONE_GPU), 1, 1)
    fit.check_device(load(ONE_GPU, ["trainer.device=cpu"]), 1, 1)


def test_a_gpu_whose_memory_cuda_does_not_tell_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def not_supported() -> Any:
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", not_supported)
    fit.check_device(load(ONE_GPU), 1, 1)
    assert "not supported" in caplog.text
