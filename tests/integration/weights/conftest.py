from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace_services.refit.channel import Channel
from tests.support.nccl_stand_in import Nccl


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    """What groups of NCCL are in this process."""
    nccl = Nccl()
    own = Channel._process_group
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Channel, "_process_group", lambda channel, seconds: nccl.make(own, channel, seconds))
    yield nccl
    nccl.over.set()
