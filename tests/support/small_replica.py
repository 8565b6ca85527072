"""A rollout replica and a scorer on the real buffer and the real weight channel, with transformers in place of vLLM.

The replica keeps a model of its own, receives each version over gloo, proves it on the probe, leases, and pushes completions of random
tokens with the log-probabilities its weights give them. Rewards are a function of the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.errors import Fenced, InvalidCall, NotVerified, WeightChannelError
from headrace.replay import Epoch, Lease, ReplayClient
from headrace.trajectory import Float32, Score, Span, Trajectory
from headrace.weights.rendezvous import Rendezvous
from headrace_services.weight_channel.transport import Channel, GroupRank, receive

TOKENS = 4


class SmallReplica:
    """`faulty`: it computes the probe so many nats off. `off`: it reports log-probabilities of its tokens that are so many nats lower.
    `mute`: it leases validation prompts and never answers them. `doomed`: data set indices whose groups it rejects. `poison`: the data set
    index of a prompt that kills its process. `most`: groups it leases at a time."""

    def __init__(
        self,
        replay: ReplayClient,
        model: Path,
        *,
        faulty: float = 0.0,
        off: float = 0.0,
        mute: bool = False,
        doomed: frozenset[int] = frozenset(),
        poison: int | None = None,
        most: int = 4,
    ) -> None:
        self.id = secrets.token_hex(6)
        self.installed: list[int] = []
        self.changed = asyncio.Condition()
        self._replay = replay
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._faulty, self._off, self._mute, self._doomed = faulty, off, mute, doomed
        self._poison, self._most = poison, most
        self._channel: tuple[str, Channel] | None = None

    async def run(self) -> None:
        await self._replay.register(self.id, {"device": "cpu"})
        acknowledged = taken = ""
        while True:
            reply = await self._replay.heartbeat(self.id, [])
            if reply.state == "DEAD":  # a restored buffer knows no replica
                self.id = secrets.token_hex(6)
                await self._replay.register(self.id, {"device": "cpu"})
                continue
            epoch = reply.epoch
            if epoch is not None and self.id in epoch.members:
                if epoch.state == "announced" and epoch.id != acknowledged:
                    acknowledged = epoch.id
                    with contextlib.suppress(Fenced):
                        await self._replay.acknowledge(self.id, epoch.id)
                elif epoch.state == "transfer" and epoch.id != taken:
                    taken = epoch.id
                    await self._take_part(epoch)
            if not await self._generate():
                await self._replay.wait_work(0.2)

    async def _take_part(self, epoch: Epoch) -> None:
        rendezvous = Rendezvous.decode(epoch.rendezvous)
        try:
            await asyncio.to_thread(self._receive, epoch, rendezvous)
        except WeightChannelError as error:
            self._channel = None
            with contextlib.suppress(Fenced):
                await self._replay.refuse(self.id, epoch.id, str(error), interrupted=True)
            return
        probe = rendezvous.probe_token_ids
        logprobs = self._logprobs(probe, 1) - self._faulty
        with contextlib.suppress(Fenced):
            if (await self._replay.verify(self.id, epoch.id, logprobs.tolist())).verified:
                async with self.changed:
                    self.installed.append(epoch.version)
                    self.changed.notify_all()

    def _receive(self, epoch: Epoch, rendezvous: Rendezvous) -> None:
        deadline = time.monotonic() + rendezvous.timeout_s
        group = rendezvous.group_of(epoch.members)
        if self._channel is None or self._channel[0] != group:
            place = GroupRank(
                group_id=group,
                backend="gloo",
                host=rendezvous.host,
                port=rendezvous.port,
                rank=rendezvous.first_rank(self.id, epoch.members),
                world_size=rendezvous.world_size(epoch.members),
                device=torch.device("cpu"),
                secret=rendezvous.secret,
            )
            self._channel = group, Channel.follow(place, deadline)
        buckets = receive(self._channel[1], rendezvous.manifest, deadline)
        self.load({name: tensor.clone() for bucket in buckets for name, tensor, _ in bucket})

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        left = self._model.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys
        assert set(left.missing_keys) <= {"lm_head.weight"}

    def _logprobs(self, ids: np.ndarray, start: int) -> Float32:
        """Log-probabilities of `ids[start:]`."""
        tokens = torch.tensor(ids, dtype=torch.int64)
        with torch.no_grad():
            logits = self._model(input_ids=tokens[None]).logits[0]
        picked = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
        return picked[start - 1 :].numpy()

    async def _generate(self) -> bool:
        try:
            leases = await self._replay.lease(self.id, self._most)
        except NotVerified:
            return False
        if self._poison in {lease.group.dataset_index for lease in leases if lease.group.lane == "train"}:
            os.kill(os.getpid(), signal.SIGKILL)
        for lease in leases:
            with contextlib.suppress(Fenced):
                if lease.group.lane == "validation" and self._mute:
                    continue
                if lease.group.lane == "train" and lease.group.dataset_index in self._doomed:
                    await self._replay.reject(lease, "this problem is doomed")
                    continue
                for index in lease.missing:
                    await self._replay.push(lease, self._trajectory(lease, index))
        return bool(leases)

    def _trajectory(self, lease: Lease, index: int) -> Trajectory:
        group = lease.group
        draw = np.random.default_rng([zlib.crc32(group.id.encode()), index])
        completion = draw.integers(5, 15, size=1 + index % TOKENS).astype(np.int32)
        prompt = group.prompt_token_ids
        return Trajectory(
            group_id=group.id,
            attempt=lease.attempt,
            index=index,
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            logprobs=self._logprobs(np.concatenate([prompt, completion]), prompt.size) - np.float32(self._off),
            loss_mask=np.ones(completion.size, dtype=np.uint8),
            spans=(Span(lease.version, 0, completion.size),),
            finish_reason="length" if completion.size == TOKENS else "stop",
            text=" ".join(map(str, completion)),
            replica=self.id,
        )


async def installed(replica: SmallReplica, version: int) -> None:
    async with replica.changed:
        await replica.changed.wait_for(lambda: version in replica.installed)


async def score_all(replay: ReplayClient, equal_every: int = 0) -> None:
    """Score what waits, for ever; of each `equal_every` prompts, the rewards of the first are all equal."""
    while True:
        jobs = await replay.take_scoring({"math": 64, "sums": 64})
        for job in jobs:
            reward = float(job.trajectory.completion_token_ids.mean() - 9.5)
            if equal_every and job.group.order % equal_every == 0:
                reward = 1.0
            with contextlib.suppress(Fenced, InvalidCall):
                await replay.score(job, Score("SCORED", reward))
        if not jobs:
            await replay.wait_scoring(0.1)


@contextlib.asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Tasks that run while the context is open; one that fails meanwhile fails the test at once."""
    tasks: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def repeated(items: list[str]) -> list[str]:
    return [item for item, count in Counter(items).items() if count > 1]
