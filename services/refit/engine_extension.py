"""The receiving end of the weight channel in vLLM's workers: an engine for vLLM's weight-transfer API.

vLLM imports `WeightChannelExtension` in every worker before it loads the model (`worker_extension_cls`), which registers the engine in
time. One engine serves both `gloo` and `nccl`: they differ only in how the communicator is made.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.utils.nccl import unpinned_nccl_env

from headrace.base.errors import Restartable, WeightChannelError

from .channel import Channel, Channels, GroupRank
from .manifest import ADAPTER, Manifest
from .proof import AdapterProof, WeightProof
from .receiver import ADAPTER_ID, BACKEND, RefitFailure, TransferInterrupted, WatchedStates
from .state_watch import StateWatch, find_layers
from .transfer import ReceivedTensor, read, receive

logger = logging.getLogger(__name__)

Buckets = Iterator[list[ReceivedTensor]]
# the tensors of an adapter by name, each with its checksum
Adapter = dict[str, tuple[torch.Tensor, torch.Tensor]]


class WeightChannelEngine(WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):
    """Receives checkpoint-format weights bucket by bucket. vLLM's layerwise reload loads each bucket while the next one travels.

    During a reload the model is on the meta device, where a generation step would kill the engine. So the whole reload happens inside
    `load`, one uninterrupted call, and vLLM's own calls do nothing. If it fails, the model is structurally complete again, but holds a
    mixture of old and new weights: it must not generate until an update succeeds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Each reload logs "failed to load weights" for layers without their own weights (a tied head, rotary tables). The proof shows
        # whether all weights were loaded.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        self._channels = Channels()

    def join(self, place: dict[str, Any], timeout_s: float) -> None:
        """Join a group. `place` is that of the replica's first worker (`Rendezvous.place`)."""
        self._channels.close()
        self._channels.check()
        device = torch.device("cpu" if place["backend"] == "gloo" else self.device)
        own = GroupRank(**{**place, "rank": place["rank"] + self.parallel_config.rank}, device=device)
        # With VLLM_BATCH_INVARIANT, vLLM sets NCCL variables for its own groups. All ranks of a group must agree on them.
        with unpinned_nccl_env(), _interrupting():
            self._channels.use(Channel.follow(own, time.monotonic() + timeout_s))

    def _do_nothing(self, *_: Any) -> None:
        """Stand for vLLM's own calls: see the class."""

    init_transfer_engine = start_weight_update = receive_weights = finish_weight_update = _do_nothing

    def load(self, manifest: Manifest, timeout_s: float, file: str, checksums: Sequence[int]) -> None:
        """Load a broadcast, or a `file` whose tensors have these `checksums` (the model, its adapter or both), and prove that the model
        holds it and computes with it.

        A failure here does not end the collective: this worker still receives the rest of the broadcast, for the other members and this
        replica's other workers.
        """
        arrived: Adapter = {}
        sent = read(file, manifest, checksums) if file else self._receive(manifest, time.monotonic() + timeout_s)
        buckets = self._setting_aside(sent, arrived)
        if all(name.startswith(ADAPTER) for name in manifest.names):
            collections.deque(buckets, maxlen=0)
        else:
            with self._without_adapter():
                self._load_model(buckets)
        if (self.vllm_config.lora_config is None) == bool(arrived):
            raise WeightChannelError(
                "trainer and replica were started with different values of policy.lora_cfg.refit; start both with the same configuration"
            )
        if arrived:
            self.load_adapter(arrived)

    def load_adapter(self, arrived: Adapter) -> None:
        """Replace the current adapter with this one, and prove that the engine computes with it."""
        arrived = {name: (tensor.to(self.device), known.to(self.device)) for name, (tensor, known) in arrived.items()}
        dim = next(len(tensor) for name, (tensor, _) in arrived.items() if ".lora_A." in name)
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor for name, (tensor, _) in arrived.items()},
            PEFTHelper(r=dim, lora_alpha=dim, target_modules=[]),  # B comes scaled
            device=self.device,
            dtype=self.vllm_config.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        proof = AdapterProof(dict(self.read_stacked()), arrived)
        with proof:
            self.put_adapter(adapter)
        proof.check()

    def put_adapter(self, adapter: LoRAModel) -> None:
        manager = self.model.lora_manager
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    def read_stacked(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the engine keeps of an adapter: A and B of each part of each of its layers."""
        for name, module in self.model.lora_manager.modules.items():
            for part in ("lora_a_stacked", "lora_b_stacked"):
                tensors = getattr(module, part, ())
                for i, tensor in enumerate((tensors,) if isinstance(tensors, torch.Tensor) else tensors):
                    yield f"{name}.{part}.{i}", tensor

    def _load_model(self, buckets: Buckets) -> None:
        initialize_layerwise_reload(self.model)
        proof = WeightProof(self.model)
        failure: Exception | None = None
        try:
            for bucket in buckets:
                if failure is None:
                    try:
                        with disable_mtp_completeness_check(), _counting_by(proof.watch):
                            proof.load(bucket)
                        self._copy_kept(bucket)
                    except Exception as error:  # noqa: BLE001 - raised below
                        failure = error
            if failure is not None:
                raise failure
            self.finish_reload()
        except BaseException:
            self._abandon_reload()
            raise
        proof.check_parameters()
        self.renew_copies()
        proof.check_copies()

    def finish_reload(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def renew_copies(self) -> None:
        """Recreate what the engine derives from its parameters and a reload does not update.

        On a CPU, vLLM multiplies by a packed copy of the head. A tied head is loaded as the embedding, so a reload does not update that
        copy. The head would silently keep computing with the old weights, although the names and checksums of the parameters agree.
        Experts are packed in place, and only when they are first loaded: a reload leaves them unpacked.
        """
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and tied:
                module.quant_method.process_weights_after_loading(module)
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self._channels.close()

    @contextlib.contextmanager
    def _without_adapter(self) -> Iterator[None]:
        """While the context is open, replace the modules that vLLM wrapped for adapters with the original ones that it loaded."""
        around = [
            (name, module)
            for name, module in self.model.named_modules(remove_duplicate=False)
            if isinstance(module, BaseLayerWithLoRA)
        ]

        def put(name: str, module: torch.nn.Module) -> None:
            parent, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(parent), child, module)

        for name, module in around:
            put(name, module.base_layer)
        try:
            yield
        finally:
            for name, module in around:
                put(name, module)

    @staticmethod
    def _setting_aside(buckets: Buckets, arrived: Adapter) -> Buckets:
        """Yield the buckets without their adapter tensors, and put copies of those into `arrived`."""
        for bucket in buckets:
            arrived |= {name: (tensor.clone(), known) for name, tensor, known in bucket if name.startswith(ADAPTER)}
            yield [one for one in bucket if not one.name.startswith(ADAPTER)]

    def _receive(self, manifest: Manifest, deadline: float) -> Buckets:
        """Yield the tensors of a broadcast, a bucket at a time."""
        if self._channels.open is None:
            raise WeightChannelError("this worker has not joined a group; the trainer must form one")
        buckets = receive(self._channels.open, manifest, deadline)
        try:
            while True:
                with _interrupting():
                    bucket = next(buckets, None)
                if bucket is None:
                    return
                yield bucket
        except WeightChannelError:
            self.shutdown()
            raise

    def _copy_kept(self, bucket: list[ReceivedTensor]) -> None:
        """Give vLLM copies of the tensors that it keeps for incomplete layers, because the bucket's memory is reused."""
        storages = {one.tensor.untyped_storage()._cdata for one in bucket}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.untyped_storage()._cdata in storages else tensor

        for layer in self.model.modules():
            for _, kept in get_layerwise_info(layer).loaded_weights:
                kept.arguments.update(tree_map_only(torch.Tensor, copy, kept.arguments))

    def _abandon_reload(self) -> None:
        """Put the parameters of incomplete layers back in place, and drop what they had received. Otherwise the next reload would continue
        with half-filled layers."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)


class WeightChannelExtension:
    """A mixin for vLLM's worker class.

    The calls of a refit never raise. They return a `RefitFailure`, or None. If one worker raised, vLLM would raise at once and leave the
    other workers' answers in their queues, where the next call would take them for its own.
    """

    weight_transfer_engine: WeightChannelEngine
    vllm_config: VllmConfig
    _watching: tuple[str, StateWatch, contextlib.ExitStack] | None = None

    def join_group(self, place: dict[str, Any], timeout_s: float) -> RefitFailure | None:
        return self._catch_failure(lambda: self.weight_transfer_engine.join(place, timeout_s))

    def receive_weights(
        self, manifest: dict[str, Any], timeout_s: float, file: str = "", checksums: Sequence[int] = ()
    ) -> RefitFailure | None:
        """Call `WeightChannelEngine.load`, with an encoded `manifest`."""
        load = self.weight_transfer_engine.load
        return self._catch_failure(lambda: load(Manifest.decode(manifest), timeout_s, file, checksums))

    def watch_states(self, count: int, length: int) -> None:
        """Sketch the states between the `count` layers of the model for the next `length` tokens, until `read_states`."""
        model = self.weight_transfer_engine.model
        if (found := find_layers(model, count)) is None:
            return
        name, layers, backbone = found
        watch, stack = StateWatch(layers, backbone, length), contextlib.ExitStack()
        for module in model.modules():
            if getattr(module, "do_not_compile", True) is False:  # vLLM's mark of a compiled module
                module.do_not_compile = True
                stack.callback(setattr, module, "do_not_compile", False)
        stack.enter_context(watch.watching())
        self._watching = name, watch, stack

    def read_states(self) -> WatchedStates:
        """Return what was seen since `watch_states`, which ends here."""
        if self._watching is None:
            return WatchedStates(problem="the engine's model has no list of as many layers as the trainer's")
        (name, watch, stack), self._watching = self._watching, None
        stack.close()
        return WatchedStates(name, [], watch.problem) if watch.problem else WatchedStates(name, watch.sketches)

    def attention_backends(self) -> list[str]:
        """Return the names of the backends that compute this worker's attention."""
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})

    def environment_variable(self, name: str) -> str:
        """Return the variable as this worker's process has it; empty if it isn't set."""
        return os.environ.get(name, "")

    def _catch_failure(self, call: Callable[[], None]) -> RefitFailure | None:
        try:
            with set_current_vllm_config(self.vllm_config):
                call()
        except TransferInterrupted as error:
            return RefitFailure("interrupted", str(error))
        except WeightChannelError as error:
            return RefitFailure("failed", str(error))
        except Restartable as error:
            return RefitFailure("hangs", str(error))
        except Exception as error:
            logger.exception("a refit failed")
            return RefitFailure("failed", f"{type(error).__name__}: {error}")
        return None


@contextlib.contextmanager
def _counting_by(count: Callable[..., tuple[int, Any]]) -> Iterator[None]:
    """Replace vLLM's function that counts what a loader copies in a layerwise reload, while the context is open."""
    own = layerwise.get_numel_loaded
    layerwise.get_numel_loaded = count
    try:
        yield
    finally:
        layerwise.get_numel_loaded = own


@contextlib.contextmanager
def _interrupting() -> Iterator[None]:
    """Raise an error of the collective as `TransferInterrupted`: it is not this replica's fault."""
    try:
        yield
    except WeightChannelError as error:
        raise TransferInterrupted(str(error)) from error


WeightTransferEngineFactory.register_engine(BACKEND, WeightChannelEngine)
