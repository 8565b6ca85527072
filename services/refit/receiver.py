"""The replica's side of a refit: acknowledge the epoch, receive the weights, and report the log-probabilities of the probe.

Functions import vLLM themselves, after the service has set its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np

from headrace.base.errors import CodecError, Fenced, Restartable, WeightChannelError
from headrace.config import Config
from headrace.records.trajectory import Float32, Int32
from headrace.replay import Epoch, RefitVerdict, ReplayClient

from .rendezvous import Announcement, Pulled, Rendezvous
from .states import Sketches, first_difference

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

EXTENSION = "headrace_services.refit.engine_extension.WeightChannelExtension"
# vLLM's id of the only adapter that an engine has
ADAPTER_ID = 1
# These kernels for experts on a GPU compute with the parameters as they are loaded. vLLM's others use a copy in their own layout.
MOE_BACKEND = "triton"
# A worker gives up at its own deadline. An engine that is silent for this much longer hangs.
ANSWER_S = 30.0

T = TypeVar("T")


class RefitFailure(msgspec.Struct, frozen=True):
    """Why a worker of the engine did not complete a step of a refit: the answer of `WeightChannelExtension`.

    `kind` decides who is to blame. failed: this replica. interrupted: the collective, through no fault of this replica. hangs: a call of
    the collective never ended, so the process must be restarted.
    """

    kind: Literal["failed", "interrupted", "hangs"]
    reason: str


class WatchedStates(msgspec.Struct, frozen=True):
    """What a worker saw between the model's layers: the answer of `WeightChannelExtension.read_states`. `layers` is the name of the list of
    layers. `problem` is why there are no sketches."""

    layers: str = ""
    sketches: Sketches = []
    problem: str | None = None


class TransferInterrupted(WeightChannelError):
    """Raised when the collective failed through no fault of this replica, which may take part in the next one."""


def engine_arguments() -> dict[str, Any]:
    """Return the `AsyncEngineArgs` that the weight channel needs.

    The prefix cache is on, so that a conversation is not recomputed at each turn. `WeightReceiver.cache_salt` keeps entries of older
    weights from new requests. By priority, the probe overtakes waiting requests (`SequenceSlots` keeps a slot free for it), and the run's
    own requests those of the HTTP API.
    """
    from vllm.platforms import current_platform

    on_gpu = {} if current_platform.is_cpu() else {"moe_backend": MOE_BACKEND}
    return {
        **on_gpu,
        "worker_extension_cls": EXTENSION,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
    }


def refit_problem(vllm_config: Any) -> str | None:
    """Return why vLLM can't safely take new weights in this configuration (a `VllmConfig`), or None if it can."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    sizes = {"pipeline": parallel.pipeline_parallel_size, "data": parallel.data_parallel_size}
    if wrong := [f"{kind} parallel ({size} ways)" for kind, size in sizes.items() if size > 1]:
        return (
            f"the replica is {' and '.join(wrong)}; only tensor parallel replicas can be refitted. Start more replicas"
        )
    if parallel.enable_expert_parallel:
        return "the replica is expert parallel; only tensor parallel replicas can be refitted. Start more replicas"
    if model.quantization is not None:
        return (
            f"policy.model_name: {model.model} is quantised ({model.quantization}), the trainer's weights are not, and no refit could be "
            "verified; give the unquantised model"
        )
    if vllm_config.lora_config is not None:
        untried = {
            "a mixture of experts": model.is_moe,
            "a model with latent attention (MLA)": model.use_mla,
            f"tensor parallel ({parallel.tensor_parallel_size} ways)": parallel.tensor_parallel_size > 1,
        }
        if found := [what for what, so in untried.items() if so]:
            return f"policy.lora_cfg.refit adapter: the replica is {' and '.join(found)}, where this is not proved; set it to merged"
    if model.enforce_eager or vllm_config.device_config.device_type == "cpu":
        return None
    remedy = "set policy.generation.vllm_cfg.enforce_eager=true"
    if model.use_mla:
        return (
            f"policy.model_name: {model.model} has latent attention (MLA), whose derived matrices vLLM recreates in a refit while CUDA "
            f"graphs keep the old ones; {remedy}"
        )
    backend = vllm_config.kernel_config.moe_backend
    if model.is_moe and backend != MOE_BACKEND:
        return (
            f"policy.model_name: {model.model} is a mixture of experts computed by vLLM's moe_backend {backend}, which may keep old "
            f"weights in CUDA graphs after a refit; leave moe_backend at {MOE_BACKEND}, or {remedy}"
        )
    return None


class WeightReceiver:
    """One replica's receiver. Its calls must not overlap. `weights` are timeline and version of the engine's weights if they are verified,
    else None.

    During `take_part`, running requests are paused and then continue under weights that are not yet verified. The caller must hold back
    the requests that finish in the meantime. If the result is False, it must discard them and everything that is still running.
    """

    def __init__(self, config: Config, engine: AsyncLLM, replay: ReplayClient, replica: str) -> None:
        self.weights: tuple[str, int] | None = None
        self._engine = engine
        self._replay = replay
        self._replica = replica
        asynchrony = config.algorithm.asynchrony
        # else running requests keep the KV cache of older weights after a refit
        self._clear_cache = (
            not asynchrony.in_flight_weight_updates or asynchrony.recompute_kv_cache_after_weight_updates
        )
        self._cache_salt = secrets.token_hex(8)
        self._group: str | None = None
        # durations of the parts of the last `take_part`, in order
        self.seconds: dict[str, float] = {}
        self.verdict: RefitVerdict | None = None  # on the last probe

    @property
    def cache_salt(self) -> str | None:
        """The salt that a request must carry, so that it finds only prefix-cache entries of the current weights. None: no salt is needed.

        vLLM can drop the prefix cache only together with the KV cache of running requests. If those requests keep their KV cache across a
        refit, entries of older weights stay in the prefix cache, but no new request has their salt. If a refit drops both, there is no
        salt. A request that is already in the engine at the refit, running or waiting, continues with what was computed for it.
        """
        return None if self._clear_cache else self._cache_salt

    async def acknowledge(self, epoch: Epoch) -> None:
        """Report to the buffer that this replica can take part, unless the epoch excludes it or is no longer announced. Refuse an epoch
        whose announcement can't be read."""
        with contextlib.suppress(Fenced):
            try:
                excluded = Announcement.decode(epoch.rendezvous).excluded
            except CodecError as error:
                logger.warning("epoch %s is refused: %s", epoch.id, error)
                await self._replay.refuse(self._replica, epoch.id, str(error))
                return
            if self._replica in excluded:
                logger.info("epoch %s continues without this replica, which broke an earlier attempt", epoch.id)
                return
            await self._replay.acknowledge(self._replica, epoch.id)

    async def take_part(self, epoch: Epoch) -> bool:
        """Receive the epoch's weights, or load those that were pulled, compute the probe with them and report it. Return True if that makes
        the replica HEALTHY.

        On failure the replica refuses the epoch with the reason and becomes STALE. If its weights are then incomplete or unverified, the
        engine stays paused until a later epoch succeeds. Raises `Restartable` if the engine hangs, vLLM's `EngineDeadError` if it died,
        and `ReplayUnavailable`.
        """
        self.seconds = {}
        try:
            rendezvous = epoch.rendezvous
            if not isinstance(rendezvous, Pulled):
                rendezvous = Rendezvous.decode(rendezvous)
                await self._join(epoch, rendezvous)
            await self._install(epoch, rendezvous)
            logprobs = await self._probe(epoch, rendezvous)
            finding = await self._compare_states(epoch, rendezvous)
        except (WeightChannelError, CodecError) as error:
            logger.warning("version %d was not installed: %s", epoch.version, error)
            if self.weights is None:
                await self._pause()
            with contextlib.suppress(Fenced):
                interrupted = isinstance(error, TransferInterrupted)
                await self._replay.refuse(self._replica, epoch.id, str(error), interrupted=interrupted)
            return False
        return await self._prove(epoch, logprobs, finding)

    async def _prove(self, epoch: Epoch, logprobs: Float32, finding: str) -> bool:
        """Report the probe. Pause the engine unless that verifies the weights."""
        verdict: RefitVerdict | None = None
        verified, self.weights = False, None
        try:
            with contextlib.suppress(Fenced):
                verdict = await self._replay.verify(self._replica, epoch.id, logprobs.tolist(), finding)
                self.verdict = verdict
                verified = verdict.verified
        finally:
            if not verified:
                await self._pause()
        if verified:
            self.weights = (epoch.timeline, epoch.version)
            logger.info("version %d is verified: %s", epoch.version, self.seconds)
        elif verdict is not None:
            logger.warning(
                "version %d is not verified: on the probe, log-probabilities differ from the trainer's by up to %.3g, on average by %.3g%s",
                epoch.version,
                verdict.difference,
                verdict.mean,
                finding and f"; {finding}",
            )
        else:
            logger.warning("version %d is not verified: its epoch is over", epoch.version)
        return verified

    async def _join(self, epoch: Epoch, rendezvous: Rendezvous) -> None:
        group = rendezvous.derive_group(epoch.members)
        if group == self._group:
            return
        if group == rendezvous.previous_group:
            raise TransferInterrupted(f"joining the group was interrupted: this replica is no longer in group {group}")
        self._group = None
        place = rendezvous.place(rendezvous.ranks_of(self._replica, epoch.members).start, epoch.members)
        await self._workers("joining the group", "join_group", rendezvous.timeout_s, place=place)
        self._group = group

    async def _install(self, epoch: Epoch, rendezvous: Rendezvous | Pulled) -> None:
        """Pause, receive, resume. After an error the engine stays paused, because its weights are a mixture of versions."""
        self.weights = None
        await self._pause()
        # Not before the pause: until then the engine computes with the old weights. Random, because versions repeat after a rewind.
        self._cache_salt = secrets.token_hex(8)
        group, self._group = self._group, None
        timeout_s, manifest = rendezvous.timeout_s, rendezvous.manifest.encode()
        if isinstance(rendezvous, Pulled):
            of_file = {"file": rendezvous.file, "checksums": rendezvous.checksums}
            await self._workers("loading weights", "receive_weights", timeout_s, manifest=manifest, **of_file)
        else:
            await self._workers("receiving weights", "receive_weights", timeout_s, manifest=manifest)
        self._group = group  # a group that lost a transfer is never used again
        version = self._engine.update_weight_version(str(epoch.version))
        await self._call("naming the version", version, timeout_s)
        await self._call("resuming", self._engine.resume_generation(), timeout_s)

    async def _workers(self, what: str, method: str, timeout_s: float, **arguments: Any) -> None:
        """Run `method` of the extension in every worker of the engine. Once all have answered, raise the worst failure: "hangs", then
        "failed", then "interrupted"."""
        calls = self._engine.collective_rpc(method, kwargs={"timeout_s": timeout_s, **arguments})
        # vLLM's RPC returns a struct as a plain map, unless pickles are allowed (VLLM_ALLOW_INSECURE_SERIALIZATION)
        answers = msgspec.convert(await self._call(what, calls, timeout_s), list[RefitFailure | None])
        failures = {answer.kind: answer.reason for answer in reversed(answers) if answer is not None}
        if "hangs" in failures:
            raise Restartable(f"{what}: {failures['hangs']}")
        # a failed worker interrupts the replica's other workers, so its failure is the one that counts
        if "failed" in failures:
            raise WeightChannelError(f"{what}: {failures['failed']}")
        if "interrupted" in failures:
            raise TransferInterrupted(f"{what} was interrupted: {failures['interrupted']}")

    async def _pause(self) -> None:
        """Pause the engine until an update has succeeded (idempotent)."""
        await self._call("pausing", self._stop_scheduling(), 0.0)

    async def _stop_scheduling(self) -> None:
        """Do what vLLM's `pause_generation` does, without its final sleep of 20 ms. It sleeps so that tokens sampled before come back
        first, but here they carry their version whenever they come."""
        if self._clear_cache:
            await self._engine.renderer.clear_mm_cache_async()
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._clear_cache)

    async def _probe(self, epoch: Epoch, rendezvous: Rendezvous | Pulled) -> Float32:
        probe = self._prompt_logprobs(f"probe-{epoch.id}", rendezvous.probe_token_ids)
        logprobs = await self._call("computing the probe", probe, rendezvous.timeout_s)
        if not np.isfinite(logprobs).all():
            self.weights = None  # these can't be the trainer's weights
            raise WeightChannelError("computing the probe: its log-probabilities are not finite")
        return logprobs

    async def _compare_states(self, epoch: Epoch, rendezvous: Rendezvous | Pulled) -> str:
        """Say where the engine's states begin to differ from the trainer's, if the last probe failed and the trainer has sent its own. The
        engine computes the probe once more, without compiled code and CUDA graphs, in which no layer can be watched. Nothing else runs
        in it: the failure discarded what ran, and unverified weights get no new work."""
        reference, length = rendezvous.states, rendezvous.probe_token_ids.size
        if reference is None or self.verdict is None or self.verdict.verified:
            return ""
        asked = {"count": reference.layers, "length": length}
        try:
            watch = self._engine.collective_rpc("watch_states", kwargs=asked)
            await self._call("watching the layers", watch, rendezvous.timeout_s)
            try:
                probe = self._prompt_logprobs(f"states-{epoch.id}", rendezvous.probe_token_ids)
                await self._call("computing the states", probe, rendezvous.timeout_s)
            finally:
                read = self._engine.collective_rpc("read_states")
                answers = await self._call("reading the states", read, rendezvous.timeout_s)
        except WeightChannelError as error:
            return f"which layer differs first can't be told: {error}"
        # after each layer, all workers have the same states
        seen = msgspec.convert(answers, list[WatchedStates])[0]
        if seen.problem is not None:
            return f"which layer differs first can't be told: {seen.problem}"
        return first_difference(reference, seen.sketches, seen.layers)

    async def _prompt_logprobs(self, request_id: str, token_ids: Int32) -> Float32:
        """Return the log-probabilities [len - 1] of tokens 1.., computed by the engine and never read from the prefix cache."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        ids = token_ids.tolist()
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        rows: list[Any] = []
        async for output in self._engine.generate(tokens_input(ids), params, request_id, priority=-1):
            rows = output.prompt_logprobs or rows
        return np.array([row[token].logprob for row, token in zip(rows[1:], ids[1:], strict=True)], dtype=np.float32)

    async def _call(self, what: str, call: Awaitable[T], timeout_s: float) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s + ANSWER_S):
                return await call
        except TimeoutError as error:
            raise Restartable(f"{what}: the engine does not answer") from error
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM reports a failure as a bare Exception
            raise WeightChannelError(f"{what}: {error}") from error
        finally:
            self.seconds[what] = time.monotonic() - started
