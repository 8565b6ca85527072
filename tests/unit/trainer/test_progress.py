"""Whether a rank's work stands still, and which rank the others wait for."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_services.trainer.control.context import TrainerContext
from headrace_services.trainer.distributed.liveness import Heartbeat, Progress, silent_ranks
from headrace_services.trainer.distributed.ranks import Ranks


def test_idle_is_never_silence_and_each_mark_is_a_sign_of_life() -> None:
    now = 0.0
    progress = Progress(lambda: now)
    now = 1e6
    assert progress.silent_s == 0
    with progress.working():
        now += 5
        assert progress.silent_s == 5
        progress.mark()
        assert (progress.silent_s, progress.marks) == (0, 1)
        now += 7
        assert progress.silent_s == 7
    assert progress.silent_s == 0
    progress.mark()
    now += 100
    assert (progress.silent_s, progress.marks) == (0, 2)


@pytest.mark.parametrize(
    ("before", "after", "silent"),
    [
        ([(3, 9), (3, 9)], [(6, 9), (3, 9)], [1]),  # its process stands still
        ([(3, 9), (3, 8)], [(6, 9), (6, 8)], [1]),  # its work does
        ([(3, 9), (3, 8), (3, 9)], [(6, 9), (6, 8), (3, 9)], [2]),
        ([(3, 9), (3, 9)], [(6, 9), (6, 9)], []),  # in the collective, both of them
        ([(3, 9), (3, 9), (3, 9)], [(6, 9), (3, 9), (3, 9)], [1, 2]),
    ],
)
def test_the_rank_that_stands_still_is_named_before_one_behind(
    before: list[tuple[int, int]], after: list[tuple[int, int]], silent: list[int]
) -> None:
    assert silent_ranks([Heartbeat(*beat) for beat in before], [Heartbeat(*beat) for beat in after]) == silent


def test_all_that_the_loop_has_torch_do_is_watched() -> None:
    now = 0.0
    progress = Progress(lambda: now)

    def work() -> float:
        nonlocal now
        now += 5
        return progress.silent_s

    with ThreadPoolExecutor(1) as thread:
        trainer: Any = SimpleNamespace(lead=SimpleNamespace(ranks=Ranks(progress=progress)), torch_thread=thread)
        assert asyncio.run(TrainerContext.torch(trainer, work)) == 5
    assert progress.silent_s == 0
