"""The group that a worker of vLLM joins."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace_services.refit.channel import Channel

pytestmark = pytest.mark.slow

PLACE = {"group_id": "g", "backend": "nccl", "host": "127.0.0.1", "port": 1, "rank": 1, "world_size": 2}
PATIENCE_S = 60.0


def join() -> None:
    """Have a worker join the group that `Channel.follow` returns."""
    from vllm.config import VllmConfig

    from headrace_services.refit.engine_extension import WeightChannelExtension

    worker = WeightChannelExtension()
    worker.vllm_config, worker.device = VllmConfig(), torch.device("cuda")
    assert worker.join_group({**PLACE, "secret": b"0", "connect_s": 0.5}, 1.0) is None


def test_vllms_settings_of_nccl_do_not_reach_the_trainers_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with VLLM_BATCH_INVARIANT: ranks that differ in it would wait for each other for ever."""
    from vllm.utils import nccl

    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setattr(
        nccl, "_unpinned_env", {"NCCL_PROTO": None}
    )  # as `pin_nccl_env` leaves it where NCCL reads it again
    found = []

    def follow(*_: Any) -> SimpleNamespace:
        found.append(os.environ.get("NCCL_PROTO"))
        return SimpleNamespace(close=lambda: None, join=lambda timeout_s: True)

    monkeypatch.setattr(Channel, "follow", follow)
    join()
    assert found == [None]
    assert os.environ["NCCL_PROTO"] == "Simple"


def test_a_worker_whose_process_ends_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM doesn't tell it. Its processes are those of `multiprocessing`, as here."""
    said, told = multiprocessing.Pipe(duplex=False)
    channel = SimpleNamespace(close=lambda: told.send("closed"), join=lambda timeout_s: told.send("waited for"))
    monkeypatch.setattr(Channel, "follow", lambda *_: channel)
    process = multiprocessing.get_context("fork").Process(target=join)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    told.close()
    assert [said.recv(), said.recv()] == ["closed", "waited for"]
    with pytest.raises(EOFError):
        said.recv()
