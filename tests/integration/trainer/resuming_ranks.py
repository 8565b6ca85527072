"""Process of the tests: one of two ranks that load the newest checkpoint that is whole."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.config.services import CheckpointingConfig
from headrace_services.trainer.control.checkpoint import Checkpoints
from headrace_services.trainer.control.rank import LeadRank, TrainerRank, dismiss, follow
from headrace_services.trainer.distributed.ranks import join_ranks


def no_read(keys: Sequence[str]) -> list[Any]:
    raise NotImplementedError


def run(settings: str, folder: Path) -> None:
    """With a configuration as JSON. Each rank writes which version it loaded. The ranks share a host."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": "2"}
    config = Config.model_validate_json(settings)
    with join_ranks(config) as ranks:
        if ranks.rank:
            rank = TrainerRank(config, ranks, no_read)
            follow(rank)
        else:
            rank = lead = LeadRank(config, ranks, no_read)
            checkpoints = Checkpoints(folder, CheckpointingConfig())
            newest = checkpoints.newest(lambda path: lead.damage(str(path)))
            lead.load(None if newest is None else str(checkpoints.path(newest)))
            dismiss(ranks)
        (folder / f"loaded_by_{ranks.rank}").write_text(str(rank.learner.version))
