"""A rank that hangs in a step: the others end within `trainer.collective_timeout_s`, with a code that restarts them, and name it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.service import EXIT_INTERNAL_ERROR
from tests.support.ports import free_port

REPOSITORY = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("frozen", [1, pytest.param(0, marks=pytest.mark.nightly)])  # the other way round
def test_a_rank_that_is_stopped_in_a_step_ends_the_others_and_is_named(tiny_model: Path, frozen: int) -> None:
    settings = {
        "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2},
        "loss_fn": {"reference_policy_kl_penalty": 0},
        "policy": {"model_name": str(tiny_model), "precision": "float32", "max_total_sequence_length": 32},
        "trainer": {"num_processes": 2, "device": "cpu", "fleet_deadline_s": 1, "collective_timeout_s": 8},
        "weight_channel": {"timeout_s": 1},
    }
    port = str(free_port())
    processes = []
    try:
        for rank in range(2):
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.integration.trainer.frozen_ranks", json.dumps(settings), str(frozen)],
                    cwd=REPOSITORY,
                    env={
                        **os.environ,
                        **places,
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                        "OMP_NUM_THREADS": "1",
                        "GLOO_SOCKET_IFNAME": "lo",
                    },
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        waiting = processes[1 - frozen]
        said = waiting.communicate(timeout=240)[1]
        assert waiting.returncode == EXIT_INTERNAL_ERROR, said
        assert f"it waits for rank {frozen} of its 2 ranks" in said
        assert processes[frozen].poll() is None, "it is stopped, not dead"
        processes[frozen].send_signal(signal.SIGCONT)
        assert processes[frozen].wait(240) != 0, "a rank that wakes up too late ends as well"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
