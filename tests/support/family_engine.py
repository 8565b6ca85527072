"""A model of a family in a learner and in a real engine, in one process and without a buffer: what a refit and the probe say of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.records.trajectory import Float32
from headrace_services.refit import receiver
from headrace_services.refit.checksum import checksum
from headrace_services.refit.probe import choose_token_ids
from headrace_services.refit.transfer import ReceivedTensor
from headrace_services.rollout import engine as rollout_engine
from headrace_services.trainer.learning.learner import Learner
from tests.integration.trainer.learner_cases import config

LENGTH = 96  # longer than the windows


def try_family(model: str, answer: str) -> None:
    """Write to the file `answer` by how much the engine differs from the learner on the probe with its own weights (`initial`) and after a
    refit with others (`refitted`), in nats, or why the refit was refused (`refused`)."""
    Path(answer).write_text(json.dumps(_found(Path(model))))


def _found(model: Path) -> dict[str, float | str]:
    chosen = config(
        model,
        policy={
            "max_total_sequence_length": 1024,
            "generation": {"max_new_tokens": 16, "vllm_cfg": {"kv_cache_memory_bytes": 64 * 2**20}},
        },
    )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    rollout_engine.prepare_environment(chosen, model / "report")
    torch._dynamo.config.disable = True
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.engine.llm_engine import LLMEngine

    # it would ask a new interpreter what it is about to import, for 10 s of a core
    registry._run_in_subprocess = lambda asked: asked()
    # before the engine: of some families vLLM uses transformers' classes, and changes them
    learner = Learner(chosen)
    ids = choose_token_ids(learner.policy.vocab_size, LENGTH)
    own = learner.probe(ids)
    for tensor in learner.policy.model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.randn_like(tensor) * 0.02)
    others, sent = learner.probe(ids), list(learner.policy.weights())
    arguments = rollout_engine.engine_arguments(chosen, on_cpu=True) | receiver.engine_arguments()
    engine = LLMEngine.from_engine_args(EngineArgs(**{**arguments, "distributed_executor_backend": "uni"}))
    initial = _apart(_probe(engine, ids.tolist()), own)
    try:
        engine.collective_rpc(_load, args=(sent,))
    except Exception as error:  # noqa: BLE001 - what the test is about
        return {"initial": initial, "refused": str(error)}
    return {"initial": initial, "refitted": _apart(_probe(engine, ids.tolist()), others)}


def _apart(one: Float32, other: Float32) -> float:
    return float(np.abs(one - other).max())


def _load(worker: Any, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    from vllm.config import set_current_vllm_config

    bucket = [ReceivedTensor(name, tensor.clone(), checksum(tensor)) for name, tensor in tensors]
    with set_current_vllm_config(worker.vllm_config):
        worker._reload_model(iter([bucket]))


def _probe(engine: Any, ids: list[int]) -> Float32:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    engine.add_request("probe", {"prompt_token_ids": ids}, params)
    rows: list[Any] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            rows = output.prompt_logprobs or rows
    return np.array([row[token].logprob for row, token in zip(rows[1:], ids[1:], strict=True)], dtype=np.float32)
