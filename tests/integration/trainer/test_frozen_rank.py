"""A rank that hangs in a step: the others end within `trainer.collective_timeout_s`, with a code that restarts them, and name it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from headrace.net.service import EXIT_INTERNAL_ERROR
from tests.integration.trainer import frozen_ranks
from tests.support.forks import fork_ranks
from tests.support.processes import is_stopped

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("frozen", [1, pytest.param(0, marks=pytest.mark.nightly)])  # the other way round
def test_a_rank_stopped_in_a_step_is_named_and_ends_the_others(tiny_model: Path, tmp_path: Path, frozen: int) -> None:
    settings = {
        "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2},
        "loss_fn": {"reference_policy_kl_penalty": 0},
        "policy": {"model_name": str(tiny_model), "precision": "float32", "max_total_sequence_length": 32},
        "trainer": {"num_processes": 2, "device": "cpu", "fleet_deadline_s": 1, "collective_timeout_s": 8},
        "weight_channel": {"timeout_s": 1},
    }
    log = tmp_path / "ranks.log"
    with fork_ranks(2, frozen_ranks.run, json.dumps(settings), frozen, log=log) as ranks:
        stopped, waiting = ranks[frozen], ranks[1 - frozen]
        code, said = waiting.wait(240), log.read_text()
        assert code == EXIT_INTERNAL_ERROR, said
        assert f"waits for rank {frozen} of its 2" in said
        assert is_stopped(stopped.pid), "it is stopped, not dead"
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.wait(240) != 0, "a rank that wakes up too late ends as well"
