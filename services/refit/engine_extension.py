"""The receiving end of the weight channel in vLLM's workers.

vLLM adds `WeightChannelExtension` to the class of its worker (`worker_extension_cls`). So its methods are the worker's, and it has the
worker's attributes. What needs none of them is a function of this module: vLLM refuses an extension that has a name of its own.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any, Concatenate, ParamSpec

import torch
from torch.utils._pytree import tree_map_only
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
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

from .channel import ABORT_S, Channel, Channels, GroupRank
from .manifest import ADAPTER, Manifest
from .proof import AdapterProof, WeightProof
from .receiver import ADAPTER_ID, RefitFailure, TransferInterrupted, WatchedStates
from .state_watch import StateWatch, find_layers
from .transfer import ReceivedTensor, read, receive

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Buckets = Iterator[list[ReceivedTensor]]
# the tensors of an adapter by name, each with its checksum
Adapter = dict[str, tuple[torch.Tensor, torch.Tensor]]

# Each reload logs "failed to load weights" for layers without their own weights (a tied head, rotary tables). The proof shows whether all
# weights were loaded.
logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)


def returning_failure(
    method: Callable[Concatenate[Any, P], None],
) -> Callable[Concatenate[Any, P], RefitFailure | None]:
    """Make a method of a worker return a `RefitFailure`, or None, and never raise. If one worker raised, vLLM would raise at once and leave
    the other workers' answers in their queues, where the next call would take them for its own."""

    @functools.wraps(method)
    def answering(self: Any, *arguments: P.args, **named: P.kwargs) -> RefitFailure | None:
        try:
            with set_current_vllm_config(self.vllm_config):
                method(self, *arguments, **named)
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

    return answering


class WeightChannelExtension:
    """What a replica's service calls in each worker of its engine.

    Weights arrive in checkpoint format, bucket by bucket. vLLM's layerwise reload loads each bucket while the next one travels. During a
    reload the model is on the meta device, where a generation step would kill the engine, so the whole reload is one uninterrupted call
    (vLLM's own API for weights, `weight_transfer_config`, makes it several). If it fails, the model is structurally complete again, but
    holds a mixture of old and new weights: it must not generate until an update succeeds.
    """

    # of vLLM's worker
    vllm_config: VllmConfig
    device: torch.device
    get_model: Callable[[], Any]

    _watching: tuple[str, StateWatch, contextlib.ExitStack] | None = None

    @functools.cached_property
    def _channels(self) -> Channels:
        """Those of this worker. They are left when its process ends, because vLLM doesn't tell an extension of that. At the exit of the
        interpreter it would be too late: forked processes skip that, and no thread could abort a group."""
        channels = Channels()
        Finalize(None, channels.leave, (ABORT_S,), exitpriority=0)
        return channels

    # -- a refit ---------------------------------------------------------------------------------------------------------

    @returning_failure
    def join_group(self, place: dict[str, Any], timeout_s: float) -> None:
        """Join a group. `place` is that of the replica's first worker (`Rendezvous.place`)."""
        self._channels.close()
        self._channels.check()
        device = torch.device("cpu" if place["backend"] == "gloo" else self.device)
        rank = place["rank"] + self.vllm_config.parallel_config.rank
        # With VLLM_BATCH_INVARIANT, vLLM sets NCCL variables for its own groups. All ranks of a group must agree on them.
        with unpinned_nccl_env(), _interrupting():
            own = GroupRank(**{**place, "rank": rank}, device=device)
            self._channels.open = Channel.follow(own, time.monotonic() + timeout_s)

    @returning_failure
    def receive_weights(
        self, manifest: dict[str, Any], timeout_s: float, file: str = "", checksums: Sequence[int] = ()
    ) -> None:
        """Load a broadcast, or a `file` whose tensors have these `checksums` (the model, its adapter or both), and prove that the model
        holds it and computes with it. `manifest` is encoded.

        A failure here does not end the collective: this worker still receives the rest of the broadcast, for the other members and this
        replica's other workers.
        """
        deadline, described = time.monotonic() + timeout_s, Manifest.decode(manifest)
        arrived: Adapter = {}
        sent = read(file, described, checksums) if file else self._receive(described, deadline)
        buckets = _setting_aside(sent, arrived)
        if all(name.startswith(ADAPTER) for name in described.names):
            collections.deque(buckets, maxlen=0)
        else:
            with _without_adapter(self.get_model()):
                self._reload_model(buckets)
        if (self.vllm_config.lora_config is None) == bool(arrived):
            raise WeightChannelError(
                "trainer and replica were started with different values of policy.lora_cfg.refit; start both with the same configuration"
            )
        if arrived:
            self._load_adapter(arrived)

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
            self._channels.close()
            raise

    def _reload_model(self, buckets: Buckets) -> None:
        model = self.get_model()
        initialize_layerwise_reload(model)
        proof = WeightProof(model)
        failure: Exception | None = None
        try:
            for bucket in buckets:
                if failure is None:
                    try:
                        with disable_mtp_completeness_check(), _counting_by(proof.watch):
                            proof.load(bucket)
                        _copy_kept(model, bucket)
                    except Exception as error:  # noqa: BLE001 - raised below
                        failure = error
            if failure is not None:
                raise failure
            self._finish_reload()
        except BaseException:
            _abandon_reload(model, self.vllm_config.model_config)
            raise
        proof.check_parameters()
        self._renew_copies()
        proof.check_copies()

    def _finish_reload(self) -> None:
        finalize_layerwise_reload(self.get_model(), self.vllm_config.model_config)

    def _renew_copies(self) -> None:
        """Recreate what the engine derives from its parameters and a reload does not update.

        On a CPU, vLLM multiplies by a packed copy of the head. A tied head is loaded as the embedding, so a reload does not update that
        copy. The head would silently keep computing with the old weights, although the names and checksums of the parameters agree.
        Experts are packed in place, and only when they are first loaded: a reload leaves them unpacked.
        """
        tied = getattr(self.vllm_config.model_config.hf_text_config, "tie_word_embeddings", False)
        for module in self.get_model().modules():
            if isinstance(module, ParallelLMHead) and tied:
                module.quant_method.process_weights_after_loading(module)
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)

    def _load_adapter(self, arrived: Adapter) -> None:
        """Replace the current adapter with this one, and prove that the engine computes with it."""
        arrived = {name: (tensor.to(self.device), known.to(self.device)) for name, (tensor, known) in arrived.items()}
        dim = next(len(tensor) for name, (tensor, _) in arrived.items() if ".lora_A." in name)
        mapper = getattr(self.get_model(), "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor for name, (tensor, _) in arrived.items()},
            PEFTHelper(r=dim, lora_alpha=dim, target_modules=[]),  # B comes scaled
            device=self.device,
            dtype=self.vllm_config.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        proof = AdapterProof(dict(stacked(self.get_model())), arrived)
        with proof:
            self._put_adapter(adapter)
        proof.check()

    def _put_adapter(self, adapter: LoRAModel) -> None:
        manager = self.get_model().lora_manager
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    # -- what a failed probe asks for ------------------------------------------------------------------------------------

    def watch_states(self, count: int, length: int) -> None:
        """Sketch the states between the `count` layers of the model for the next `length` tokens, until `read_states`."""
        model = self.get_model()
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

    # -- what the engine computes with -----------------------------------------------------------------------------------

    def attention_backends(self) -> list[str]:
        """Return the names of the backends that compute this worker's attention."""
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})

    def environment_variable(self, name: str) -> str:
        """Return the variable as this worker's process has it; empty if it isn't set."""
        return os.environ.get(name, "")


def stacked(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the engine keeps of an adapter: A and B of each part of each of its layers."""
    for name, module in model.lora_manager.modules.items():
        for part in ("lora_a_stacked", "lora_b_stacked"):
            tensors = getattr(module, part, ())
            for i, tensor in enumerate((tensors,) if isinstance(tensors, torch.Tensor) else tensors):
                yield f"{name}.{part}.{i}", tensor


@contextlib.contextmanager
def _without_adapter(model: torch.nn.Module) -> Iterator[None]:
    """While the context is open, replace the modules that vLLM wrapped for adapters with the original ones that it loaded."""
    around = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, BaseLayerWithLoRA)
    ]

    def put(name: str, module: torch.nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)

    for name, module in around:
        put(name, module.base_layer)
    try:
        yield
    finally:
        for name, module in around:
            put(name, module)


def _setting_aside(buckets: Buckets, arrived: Adapter) -> Buckets:
    """Yield the buckets without their adapter tensors, and put copies of those into `arrived`."""
    for bucket in buckets:
        arrived |= {name: (tensor.clone(), known) for name, tensor, known in bucket if name.startswith(ADAPTER)}
        yield [one for one in bucket if not one.name.startswith(ADAPTER)]


def _copy_kept(model: torch.nn.Module, bucket: list[ReceivedTensor]) -> None:
    """Give vLLM copies of the tensors that it keeps for incomplete layers, because the bucket's memory is reused."""
    storages = {one.tensor.untyped_storage()._cdata for one in bucket}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage()._cdata in storages else tensor

    for layer in model.modules():
        for _, kept in get_layerwise_info(layer).loaded_weights:
            kept.arguments.update(tree_map_only(torch.Tensor, copy, kept.arguments))


def _abandon_reload(model: torch.nn.Module, model_config: ModelConfig) -> None:
    """Put the parameters of incomplete layers back in place, and drop what they had received. Otherwise the next reload would continue with
    half-filled layers."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)


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
