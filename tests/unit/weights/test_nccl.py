"""What is in the environment before torch makes a group of NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from headrace_services.refit import nccl


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    return environment


def test_a_group_that_fails_neither_ends_the_process_nor_waits(environment: dict[str, str]) -> None:
    nccl.prepare_environment(60.0)
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"


@pytest.mark.parametrize(("configured", "there"), [(60.0, "60"), (90.4, "90"), (0.1, "1")])
def test_peers_connect_within_the_refits_deadline(environment: dict[str, str], configured: float, there: str) -> None:
    assert nccl.connect_timeout_s() == 1800  # torch's own
    nccl.prepare_environment(configured)
    assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == there
    assert nccl.connect_timeout_s() == float(there)


def test_what_is_set_already_stays(environment: dict[str, str]) -> None:
    given = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7"}
    environment |= given
    nccl.prepare_environment(60.0)
    assert given.items() <= environment.items()
    assert nccl.connect_timeout_s() == 7
