"""A rollout replica on the real buffer and the real weight channel, with transformers in place of vLLM.

    python -m benchmarks.light_replica CONFIG

It keeps a model of its own, receives each version over gloo, proves it on the probe, leases, and pushes completions of random tokens with
the log-probabilities that its weights give them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.base.errors import Fenced, NotVerified, WeightChannelError
from headrace.config import Config, load
from headrace.records.trajectory import Float32, Int32, Span, Trajectory
from headrace.replay import Epoch, Lease, ReplayClient
from headrace_services.refit.channel import Channel, GroupRank
from headrace_services.refit.rendezvous import Announcement, Rendezvous
from headrace_services.refit.transfer import receive

TOKENS = 4


class LightReplica:
    """`most`: groups that it leases at a time."""

    def __init__(self, replay: ReplayClient, model: Path, *, most: int = 4) -> None:
        self.id = secrets.token_hex(6)
        self.installed: list[int] = []
        self.changed = asyncio.Condition()
        self._replay = replay
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._most = most
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
                    if self.id not in Announcement.decode(epoch.rendezvous).excluded:
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
        logprobs = self._prove(rendezvous.probe_token_ids)
        with contextlib.suppress(Fenced):
            if (await self._replay.verify(self.id, epoch.id, logprobs.tolist())).verified:
                async with self.changed:
                    self.installed.append(epoch.version)
                    self.changed.notify_all()

    def _receive(self, epoch: Epoch, rendezvous: Rendezvous) -> None:
        deadline = time.monotonic() + rendezvous.timeout_s
        group = rendezvous.derive_group(epoch.members)
        if self._channel is None or self._channel[0] != group:
            rank = rendezvous.ranks_of(self.id, epoch.members).start
            place = GroupRank(**rendezvous.place(rank, epoch.members), device=torch.device("cpu"))
            self._channel = group, Channel.follow(place, deadline)
        buckets = receive(self._channel[1], rendezvous.manifest, deadline)
        self.load({name: tensor.clone() for bucket in buckets for name, tensor, _ in bucket})

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        left = self._model.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys
        assert set(left.missing_keys) <= {"lm_head.weight"}

    def _prove(self, probe: Int32) -> Float32:
        return self._logprobs(probe, 1)

    def _logprobs(self, ids: np.ndarray, start: int) -> Float32:
        """Log-probabilities of `ids[start:]`."""
        tokens = torch.tensor(ids, dtype=torch.int64)
        with torch.no_grad():
            logits = self._model(input_ids=tokens[None]).logits[0]
        picked = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
        return picked[start - 1 :].numpy()

    async def _generate(self) -> bool:
        try:
            leases = await self._lease()
        except NotVerified:
            return False
        for lease in leases:
            with contextlib.suppress(Fenced):
                await self._answer(lease)
        return bool(leases)

    async def _lease(self) -> Sequence[Lease]:
        return await self._replay.lease(self.id, self._most)

    async def _answer(self, lease: Lease) -> None:
        for index in lease.missing:
            await self._replay.push(lease, self._trajectory(lease, index))

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
            logprobs=self._logprobs(np.concatenate([prompt, completion]), prompt.size),
            loss_mask=np.ones(completion.size, dtype=np.uint8),
            spans=(Span(lease.version, 0, completion.size),),
            finish_reason="length" if completion.size == TOKENS else "stop",
            text=" ".join(map(str, completion)),
            replica=self.id,
        )


async def main(config: Config) -> None:
    """Generate until SIGTERM."""
    async with contextlib.aclosing(await ReplayClient.connect(config.redis_url, config.run.id)) as replay:
        await LightReplica(replay, Path(config.policy.model_name)).run()


if __name__ == "__main__":
    asyncio.run(main(load(Path(sys.argv[1]), [], {})))
