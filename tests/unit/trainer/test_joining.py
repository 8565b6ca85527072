"""What a rank does before it meets the others."""

from __future__ import annotations

import os

import pytest

from headrace.base.errors import Restartable
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
