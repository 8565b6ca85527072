"""Processes of the tests: log-probabilities and gradients of two ranks with micro-batches of their own."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headrace_services.trainer.network.packing import Packing, pack, plan
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel
from tests.integration.trainer.policy_cases import MODES, factors, groups, settings, weights_of

CUT = 10  # trajectories of the first rank; the second has 3 and keeps pace


def run_rank(model: Path, folder: Path) -> None:
    """The gradients go to `folder`."""
    dist.init_process_group("gloo")
    for name, mode in MODES.items():
        chosen = settings(model, mode)
        policy, packing = PolicyModel(chosen), Packing.of(chosen.policy, training=True)
        everyone, weights = groups(), weights_of(groups())
        own = slice(CUT) if dist.get_rank() == 0 else slice(CUT, None)
        trajectories, weights = everyone[own], weights[own]
        micro_batches = plan(trajectories, packing)
        rounds = torch.tensor(len(micro_batches))
        dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
        micro_batches += [()] * (int(rounds) - len(micro_batches))
        for rows in micro_batches:
            packed = pack(trajectories, rows, packing)
            values = policy.forward(packed, LogitsWarper()).logprobs
            (2 * (values * factors(weights, packed.indices).float()).sum()).backward()  # FSDP averages over ranks
        gradients = {}
        for key, parameter in policy.model.named_parameters():
            assert isinstance(parameter.grad, DTensor), key
            gradients[key] = parameter.grad.full_tensor()
        if dist.get_rank() == 0:
            torch.save(gradients, folder / f"{name}.pt")
    dist.destroy_process_group()
