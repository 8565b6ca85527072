"""The receiving end of the weight channel in vLLM's workers: an engine for vLLM's weight-transfer API.

vLLM imports `WeightChannelExtension` in every worker before it loads the model (`worker_extension_cls`), which registers the engine in
time. One engine serves `gloo` and `nccl`, which differ only in how the communicator is made.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from headrace.errors import WeightChannelError
from headrace.weights.manifest import Manifest
from headrace_services.rollout.weight_receiver import BACKEND, INTERRUPTED
from headrace_services.weight_channel.transport import Backend, Channel, GroupRank, receive


@dataclass
class JoinGroup(WeightTransferInitInfo):
    """The group to form. This worker's rank is `rank_offset` plus its rank in the replica."""

    group_id: str
    backend: Backend
    host: str
    port: int
    secret: str  # hexadecimal
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class WeightUpdate(WeightTransferUpdateInfo):
    """The contents of a broadcast (an encoded `Manifest`), and its timeout in seconds."""

    manifest: dict[str, Any]
    timeout_s: float


class WeightChannelEngine(WeightTransferEngine[JoinGroup, WeightUpdate]):
    """Receives checkpoint-format weights bucket by bucket and loads them by vLLM's layerwise reload.

    The model is on the meta device during a reload, and a generation step then would kill the engine. So the
    whole reload happens inside `update_weights`, a single uninterrupted call; `start_weight_update` and
    `finish_weight_update` only mark vLLM's session. If the call fails, the model is structurally complete again, but contains a mixture of
    old and new weights: it must not generate until an update succeeds.
    """

    init_info_cls = JoinGroup
    update_info_cls = WeightUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # each reload logs "failed to load weights" for layers without weights of their own (a tied head, rotary tables);
        # the probe shows whether all weights were loaded
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        self._channel: Channel | None = None

    def init_transfer_engine(self, init_info: JoinGroup) -> None:
        self.shutdown()
        membership = GroupRank(
            group_id=init_info.group_id,
            backend=init_info.backend,
            host=init_info.host,
            port=init_info.port,
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            device=torch.device(self.device if init_info.backend == "nccl" else "cpu"),
            secret=bytes.fromhex(init_info.secret),
        )
        with _mark_interrupted():
            self._channel = Channel.follow(membership, time.monotonic() + init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Do nothing: see the class."""

    def finish_weight_update(self) -> None:
        """Do nothing: see the class."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the base class ends with torch.accelerator.synchronize(), which raises on a CPU; `receive` has synchronised
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightUpdate) -> None:
        channel, manifest, deadline = self._transfer(update_info)
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                buckets = receive(channel, manifest, deadline)
                while bucket := self._next(buckets):
                    self.model.load_weights(bucket)
            finalize_layerwise_reload(self.model, self.model_config)
            self.repack_tied_head()
        except BaseException:
            self.shutdown()
            self._abandon_reload()
            raise

    def discard_weights(self, update_info: dict[str, Any]) -> None:
        """Take part in a broadcast without loading it, because this worker already holds the weights."""
        channel, manifest, deadline = self._transfer(self.parse_update_info(update_info))
        buckets = receive(channel, manifest, deadline)
        while self._next(buckets):
            pass

    def repack_tied_head(self) -> None:
        """Repack a tied head.

        On a CPU, vLLM multiplies by a packed copy of the head. A tied head is loaded as the embedding, so a reload does not
        update that copy, and the head would silently keep computing with the old weights, although names and checksums agree.
        """
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _transfer(self, update_info: WeightUpdate) -> tuple[Channel, Manifest, float]:
        if self._channel is None:
            raise WeightChannelError("this worker is in no group; the trainer must form one")
        return self._channel, Manifest.decode(update_info.manifest), time.monotonic() + update_info.timeout_s

    def _next(self, buckets: Iterator[list[tuple[str, torch.Tensor]]]) -> list[tuple[str, torch.Tensor]] | None:
        with _mark_interrupted():
            return next(buckets, None)

    def _abandon_reload(self) -> None:
        """Put the parameters of incomplete layers back in place, and forget what they had received.

        Otherwise the next reload would continue with half-filled layers.
        """
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)


class WeightChannelExtension:
    """A mixin for vLLM's worker class, for what the weight-transfer API has no call for."""

    weight_transfer_engine: WeightChannelEngine

    def discard_weights(self, update_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.discard_weights(update_info)


@contextlib.contextmanager
def _mark_interrupted() -> Iterator[None]:
    """Mark errors of the collective in their text: only the text reaches the service, and the trainer must know whether this replica is at
    fault."""
    try:
        yield
    except WeightChannelError as error:
        raise WeightChannelError(f"{INTERRUPTED}: {error}") from error


WeightTransferEngineFactory.register_engine(BACKEND, WeightChannelEngine)
