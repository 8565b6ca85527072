"""A process of the tests: a learner, with a value model beside the policy, that saves until something stops it."""

import resource
from pathlib import Path

from headrace.config.services import CheckpointingConfig
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import config, random_batch

PPOConfig = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "ppo_epochs": 1}


def train_and_save(model: Path, folder: Path, limit: int | None = None) -> None:
    """Publish a checkpoint of every step. `limit`: once the first is there, no file may grow past so many bytes."""
    learner = Learner(config(model, ppo=PPOConfig))
    checkpoints = Checkpoints(folder, CheckpointingConfig(keep_top_k=2, metric_name=None))
    checkpoints.start("t", learner.version)
    while True:
        train_step(learner, random_batch(4, learner.version))
        learner.snapshot()(checkpoints.begin(learner.version, "t"))
        state = CheckpointState(version=learner.version, timeline="t", cursor=0, run_id="r")
        checkpoints.publish(state, {learner.version - 1: ["g"]})
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
