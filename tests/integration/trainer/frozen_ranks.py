"""Process of the tests: one of two ranks that take a step."""

import logging
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.config import Config
from headrace.records.score import Score
from headrace.replay import Reservation, ReservedTrajectory
from headrace_services.trainer.control.rank import LeadRank, TrainerRank, follow
from headrace_services.trainer.distributed.ranks import join_ranks
from tests.support.trainer import trajectory


def _main(config: Config, frozen: int) -> None:
    def read(keys: Sequence[str]) -> list[tuple[Any, Score]]:
        if int(os.environ["RANK"]) == frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        own = [trajectory([1, 2], [3, 4], group="g", index=int(key)) for key in keys]
        return [(one, Score("SCORED", 1.0, environment="e")) for one in own]

    with join_ranks(config) as ranks:
        if ranks.rank:
            follow(TrainerRank(config, ranks, read))
            return
        lead = LeadRank(config, ranks, read)
        lead.load(None)
        reserved = tuple(ReservedTrajectory("g", i, str(i), 1.0, 2, 0, 0) for i in range(2))
        with ranks.progress.working():
            assert np.isfinite(lead.probe([1, 2, 3])).all()  # both ranks are at work
            lead.step(Reservation(0, ("g",), reserved), [1.0], [[0], [1]])


def run(settings: str, frozen: int) -> None:
    """With a configuration as JSON; the rank `frozen` stops itself in the step."""
    logging.basicConfig(level=logging.INFO)
    _main(Config.model_validate_json(settings), frozen)
