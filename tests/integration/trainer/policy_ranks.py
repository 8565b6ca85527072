"""Process of the tests, under torchrun: log-probabilities and gradients of two ranks with rows of their own. Arguments: model, folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from policy_cases import MODES, groups, settings, weights_of
from torch.distributed.tensor import DTensor

from services.trainer.network.policy import Policy
from services.trainer.network.projection import Warp
from services.trainer.network.rows import Layout, MicroBatch, build, join, plan

CUT = 10  # sequences of the first rank; the second has 3 and keeps pace


def main(model: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    for name, mode in MODES.items():
        chosen = settings(Path(model), mode)
        policy, layout = Policy(chosen), Layout.of(chosen.policy, training=True)
        everyone, weights = groups(), weights_of(groups())
        own = slice(CUT) if dist.get_rank() == 0 else slice(CUT, None)
        sequences, weights = everyone[own], weights[own]
        batches = plan(sequences, layout)
        rounds = torch.tensor(len(batches))
        dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
        batches += [MicroBatch()] * (int(rounds) - len(batches))
        for batch in batches:
            values = policy.logprobs(build(sequences, batch, layout), Warp()).curr
            factor = torch.from_numpy(join(batch, weights.__getitem__)).float()
            (2 * (values * factor).sum()).backward()  # FSDP averages over ranks
        gradients = {}
        for key, parameter in policy.model.named_parameters():
            assert isinstance(parameter.grad, DTensor), key
            gradients[key] = parameter.grad.full_tensor()
        if dist.get_rank() == 0:
            torch.save(gradients, folder / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
