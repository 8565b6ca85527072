"""Processes of the tests: what each of several ranks holds, gathers and reduces."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.refit.probe import differences
from headrace_services.trainer.distributed import sharding
from headrace_services.trainer.distributed.sharding import full_tensor, local_part
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.optimizer import ModelOptimizer
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.network import backbone
from headrace_services.trainer.network.packing import PackedRows
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel
from headrace_services.trainer.network.value_model import ValueModel
from tests.integration.trainer.learner_cases import config, random_batch

IDS = np.arange(7, dtype=np.int32)
STEPS, COUNT = 2, 8
GRPO = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}


def settings(model: Path, **policy: Any) -> Config:
    return config(model, policy={"max_total_sequence_length": 16, **policy})


def resident(what: str) -> int:
    """Bytes of this process, by /proc: VmRSS now, RssAnon of it not of files, VmHWM at most since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def loading(large: Path) -> dict[str, float]:
    """How much more memory this rank takes while it loads a model, and afterwards, as a share of the model in float32."""
    forget()
    before, own = resident("VmRSS"), resident("RssAnon")
    policy = PolicyModel(settings(large))
    whole = sum(4 * parameter.numel() for parameter in policy.model.parameters())
    return {"peak": (resident("VmHWM") - before) / whole, "held": (resident("RssAnon") - own) / whole}


def read(model: Path) -> dict[str, Tensor]:
    """The weights that the ranks read, put together again."""
    return dict(PolicyModel(settings(model)).weights())


def kept(run: Callable[[], Tensor], weights: list[Tensor]) -> tuple[int, int]:
    """Bytes kept for the backward pass of what `run` gives, once it has run: those of what has a weight's shape, and of all else."""
    own = {
        tuple(weight.shape)[dim:] for weight in weights for dim in range(weight.dim() - 1)
    }  # also those of one expert
    shapes = own | {shape[::-1] for shape in own}
    found: dict[bool, dict[int, torch.UntypedStorage]] = {True: {}, False: {}}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[tuple(tensor.shape) in shapes][storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    copies, rest = found[True], {key: storage for key, storage in found[False].items() if key not in found[True]}
    held = tuple(sum(storage.nbytes() for storage in storages.values()) for storages in (copies, rest))
    output.sum().backward()
    return held[0], held[1]


def measured(models: dict[str, Path], name: str, precision: str) -> dict[str, int]:
    """Bytes of each part of the training of a model on this rank, in micro-batches of one sequence of 45 tokens."""
    chosen = sized(models, name, precision)
    policy = PolicyModel(chosen)
    optimizer = ModelOptimizer(policy.model, chosen.policy.optimizer, [], 1.0, "policy")
    parameters = sum(local_part(parameter).nbytes for parameter in policy.model.parameters())
    rows = PackedRows.of_tokens(np.arange(45, dtype=np.int32) % 20)
    shapes = [torch.empty(shape, device="meta") for _, shape in policy.weight_shapes()]
    shapes += [torch.empty(parameter.shape, device="meta") for parameter in policy.model.parameters()]
    _, activations = kept(lambda: policy.forward(rows, LogitsWarper()).logprobs, shapes)
    gradients = sum(local_part(p.grad).nbytes for p in policy.model.parameters() if p.grad is not None)
    optimizer.step(1.0)
    moments = sum(moment.nbytes for moment in optimizer.moments().values())
    return {"parameters": parameters, "gradients": gradients, "moments": moments, "activations": activations}


def sized(models: dict[str, Path], name: str, precision: str) -> Config:
    """Of one of the models, or of `adapter`: one beside the deep one."""
    policy = {"max_total_sequence_length": 45, "train_micro_batch_size": 1, "activation_checkpointing": False}
    lora = {"enabled": name == "adapter", "dim": 3}
    return config(models.get(name, models["deep"]), policy={**policy, "precision": precision, "lora_cfg": lora})


def in_bfloat16(model: Path) -> dict[str, Any]:
    chosen = settings(model, precision="bfloat16")
    policy, rows = PolicyModel(chosen), PackedRows.of_tokens(IDS)
    exact = dict(policy.weights())
    weights = [weight for weight in exact.values() if weight.dim() == 2]
    computed: list[torch.dtype] = []
    policy.model.model.layers[0].mlp.register_forward_hook(lambda mlp, given, out: computed.append(out.dtype))
    held, _ = kept(lambda: policy.forward(rows, LogitsWarper()).logprobs, weights)
    with torch.no_grad():
        policy.forward(rows, LogitsWarper())
    after = dict(policy.weights())
    sent = dict(policy.weights(torch.bfloat16))
    value, seen = ValueModel(chosen), []
    value.root.head.register_forward_hook(lambda head, given, out: seen.extend([given[0].dtype, head.weight.dtype]))
    value.forward(rows).sum().backward()
    return {
        "kept": held / sum(2 * weight.numel() for weight in exact.values()),
        "sent": all(torch.equal(sent[name], exact[name].bfloat16()) for name in exact),
        "same_after_a_pass": all(torch.equal(exact[name], after[name]) for name in exact),
        "gradients": sorted(
            {str(parameter.grad.dtype) for parameter in policy.model.parameters() if parameter.grad is not None}
        ),
        "layers": sorted({str(dtype) for dtype in computed}),
        "head": [str(dtype) for dtype in seen],
        "rounding": rounding_of(Learner(chosen)),
    }


def gradients(model: Path, how: str) -> tuple[bool, dict[str, Tensor]]:
    """Those of two micro-batches a rank, each of other tokens; and whether there were any after the first."""
    chosen = config(model, trainer={"reduce_gradients": how})
    policy = PolicyModel(chosen)
    early = False
    for last in (False, True):
        policy.placed.expect_backward(last=last)
        rows = PackedRows.of_tokens((IDS + 5 * dist.get_rank() + 2 * last) % 20)
        (dist.get_world_size() * policy.forward(rows, LogitsWarper()).logprobs.sum()).backward()
        early = early or (not last and any(isinstance(p.grad, DTensor) for p in policy.model.parameters()))
    found = {name: full_tensor(p.grad) for name, p in policy.model.named_parameters() if p.grad is not None}
    return early, found


def two(models: dict[str, Path], folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name in ("experts", "halved"):
        weights = read(models[name])
        if rank == 0:
            torch.save(weights, folder / f"{name}.pt")
    try:
        PolicyModel(settings(models["one expert"]))
    except ServiceError as error:
        found["one expert"] = str(error)
    found["loading"] = loading(models["large"])  # by now all that loads a model is imported
    found |= in_bfloat16(models["deep"])
    found["measured"] = {
        f"{name} {precision}": measured(models, name, precision)
        for name in ("deep", "experts", "adapter")
        for precision in ("float32", "bfloat16")
    }
    for how in ("micro_batch", "step"):
        found[how], grads = gradients(models["deep"], how)
        if rank == 0:
            torch.save(grads, folder / f"{how}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def passed(chosen: Config) -> tuple[list[str], dict[str, Tensor]]:
    """A pass forward and backward: the dtypes of the experts' weights and inputs in it, and the gradients."""
    policy, seen = PolicyModel(chosen), list[str]()

    def look(experts: Any, given: Any) -> None:
        seen.extend(str(tensor.dtype) for tensor in (experts.gate_up_proj, given[0]))

    policy.model.model.layers[0].mlp.experts.register_forward_pre_hook(look)
    policy.placed.expect_backward(last=True)
    policy.forward(PackedRows.of_tokens(IDS), LogitsWarper()).logprobs.sum().backward()
    return seen, {name: full_tensor(p.grad) for name, p in policy.model.named_parameters() if p.grad is not None}


def rounding_of(learner: Learner) -> dict[str, Any]:
    """What rounding changes in the probe, and whether it leaves nothing behind."""
    probe, rounded, after = learner.probe(IDS), learner.probe_rounded(IDS), learner.probe(IDS)
    assert rounded is not None
    return {"apart": differences(probe, rounded), "same_after": bool((probe == after).all())}


def alone(models: dict[str, Path], tiny_model: Path, folder: Path) -> None:
    """One rank, without a process group, that shards its models over itself as it does on a GPU."""
    experts = settings(models["experts"], precision="bfloat16")
    seen, exact = passed(experts)
    sharding.shards_alone = backbone.shards_alone = lambda device, *, bfloat16: bfloat16
    now, gradients = passed(experts)
    apart = {name: float((gradients[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in exact}
    found: dict[str, Any] = {"autocast": seen, "sharded": now, "apart": apart, "ranks": dist.get_world_size()}
    for kind, lora in (("whole", {}), ("adapter", {"lora_cfg": {"enabled": True, "dim": 3}})):
        chosen = config(tiny_model, grpo=GRPO, policy={"precision": "bfloat16", "train_micro_batch_size": 3, **lora})
        learner, saved = Learner(chosen), folder / kind
        rounding = rounding_of(learner)
        train_step(learner, random_batch(COUNT, 0, prompts=2))
        learner.probe(IDS)
        saved.mkdir()
        learner.snapshot()(saved)
        batches = [random_batch(COUNT, 1, prompts=2) for _ in range(2)]
        on, again = train_step(learner, batches[0]), train_step(Learner(chosen, saved), batches[1])
        shards = any(isinstance(parameter, DTensor) for parameter in learner.policy.model.parameters())
        names = [name for name, _ in learner.policy.weight_shapes()] == [name for name, _ in learner.policy.weights()]
        found[kind] = {"on": on, "again": again, "shards": shards, "names": names, "rounding": rounding}
    (folder / "0.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def copies(model: Path, folder: Path) -> None:
    """Two hosts of two ranks, each host with a copy."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    chosen = config(
        model,
        grpo=GRPO,
        policy={"train_micro_batch_size": 1},
        trainer={"shard_within_host": True, "reduce_gradients": "micro_batch"},
    )
    learner = Learner(chosen)

    def step(learner: Learner, seed: int) -> dict[str, float]:
        return train_step(learner, random_batch(COUNT, seed, prompts=2).take(range(2 * rank, 2 * rank + 2)))

    metrics = [step(learner, seed) for seed in range(STEPS)]
    held = sum(p.to_local().numel() for p in learner.policy.model.parameters() if isinstance(p, DTensor))
    share = held / sum(p.numel() for p in learner.policy.model.parameters())
    saved = folder / "checkpoint"
    if rank == 0:
        saved.mkdir()
    dist.barrier()
    learner.probe(IDS)  # what a pass leaves behind is no weight to be saved
    learner.snapshot()(saved)
    dist.barrier()  # all ranks read what each has written
    again, on = step(Learner(chosen, saved), STEPS), step(learner, STEPS)
    (folder / f"{rank}.json").write_text(json.dumps({"metrics": metrics, "share": share, "again": again, "on": on}))
    weights = dict(learner.policy.weights())
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()
