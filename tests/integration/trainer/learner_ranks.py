"""Process of the tests, under torchrun: the steps of several ranks. Arguments: model, folder for what came out."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from learner_cases import config, experiences

from headrace.errors import ServiceError
from services.trainer.experience import Experience
from services.trainer.learner import Learner

SETTINGS = {
    # an eps above the rounding errors of the smallest gradients, which AdamW otherwise blows up to lr
    "policy": {"train_micro_batch_size": 2, "optimizer": {"kwargs": {"lr": 1e-3, "eps": 1e-4}}},
    "loss_fn": {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True},
}
STEPS, COUNT = 4, 9


def share(batch: list[Experience]) -> list[Experience]:
    """Unequal shares, so that one rank has more micro-batches; in the last step the second has none at all."""
    cut = COUNT if len(batch) == COUNT - 1 else 6
    return batch[:cut] if dist.get_rank() == 0 else batch[cut:]


def batches() -> list[list[Experience]]:
    whole = [experiences(COUNT, seed) for seed in range(STEPS)]
    return [*whole[:-1], whole[-1][:-1]]


def main(model: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    learner = Learner(config(model, **SETTINGS))
    ids = np.arange(20, dtype=np.int32)
    metrics = [learner.step(share(batch)) for batch in batches()[:2]]
    if dist.get_rank() == 0:
        (folder / "saved").mkdir()
    dist.barrier()
    learner.save(folder / "saved")
    metrics += [learner.step(share(batch)) for batch in batches()[2:]]
    resumed = Learner(config(model, **SETTINGS), folder / "saved")
    again = [resumed.step(share(batch)) for batch in batches()[2:]]
    refused = []
    for bad in ({"reward": float("nan")}, {"gen": -1e30}):
        overflow = Learner(config(model, loss_fn={"prev_logprobs_source": "generation"}))
        own = experiences(6, 5)[:3] if dist.get_rank() == 0 else experiences(6, 5)[3:]
        if dist.get_rank() == 1:
            change = {"reward": -1.0, **bad}
            if "gen" in change:
                change["gen"] = np.full_like(own[1].gen, change["gen"])
            own[1] = dataclasses.replace(own[1], **change)
        try:
            overflow.step(own)
        except ServiceError as error:
            refused.append(str(error))
    weights = {name: tensor.cpu() for name, tensor in learner.iter_weights()}
    probe = learner.probe(ids)
    out = {"metrics": metrics, "again": again, "probe": probe.tolist(), "refused": refused, "version": learner.version}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(out))
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
