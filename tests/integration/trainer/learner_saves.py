"""Process of the tests: train and publish checkpoints until something stops it. Arguments: model, folder, file size limit.

With a value model beside the policy.
"""

import resource
import sys
from pathlib import Path

from headrace.config.services import CheckpointingConfig
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import config, random_batch

PPOConfig = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "ppo_epochs": 1}


def main(model: str, folder: str, limit: int) -> None:
    """With `limit` above 0, no file may grow past so many bytes once the first checkpoint is there."""
    learner = Learner(config(model, ppo=PPOConfig))
    checkpoints = Checkpoints(Path(folder), CheckpointingConfig(keep_top_k=2, metric_name=None))
    checkpoints.start("t", learner.version)
    while True:
        train_step(learner, random_batch(4, learner.version))
        learner.save(checkpoints.begin(learner.version, "t"))
        state = CheckpointState(version=learner.version, timeline="t", cursor=0, run_id="r")
        checkpoints.publish(state, {learner.version - 1: ["g"]})
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
