"""The group that a worker of vLLM joins."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_services.refit.channel import Channel

pytestmark = pytest.mark.slow


def test_vllms_settings_of_nccl_do_not_reach_the_trainers_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with VLLM_BATCH_INVARIANT: ranks that differ in it would wait for each other for ever."""
    from vllm.utils import nccl

    from headrace_services.refit.engine_extension import WeightChannelEngine

    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setattr(
        nccl, "_unpinned_env", {"NCCL_PROTO": None}
    )  # as `pin_nccl_env` leaves it where NCCL reads it again
    found = []

    def follow(*_: Any) -> SimpleNamespace:
        found.append(os.environ.get("NCCL_PROTO"))
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(Channel, "follow", follow)
    engine = WeightChannelEngine.__new__(WeightChannelEngine)
    engine._channel, engine._closed = None, SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    engine.parallel_config, engine.device = SimpleNamespace(rank=0), "cpu"  # type: ignore[assignment]
    place = {"host": "127.0.0.1", "port": 1, "rank": 1, "world_size": 2, "secret": b"0", "connect_s": 0.5}
    engine.join({"group_id": "g", "backend": "nccl", **place}, 1.0)
    assert found == [None]
    assert os.environ["NCCL_PROTO"] == "Simple"
