"""The trainer's calls: the queue, batches, checkpoints, validation."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from headrace.errors import InvalidCall
from headrace.replay.calls import BATCH, PAYLOADS, Calls, chunks, of_bounded_size
from headrace.replay.records import End, Ended, Evaluated, Reservation, RunState, Waiting
from headrace.replay.replies import reservation, score_key
from headrace.trajectory import Group, Score, Trajectory

# Of a token in a payload: id, log-probability, mask, and text. Of a trajectory: field names, spans, timings, score.
_TOKEN_BYTES, _OVERHEAD_BYTES = 15, 2048


class TrainerCalls(Calls):
    async def rewind(self, version: int, timeline: str) -> RunState:
        """The trainer goes on from checkpoint `version` on the new `timeline` (a nonce of the caller: a repeat is a no-op).

        Commits reserved steps < version, or takes back what was committed from a checkpoint older than the newest (the state then says
        `refill`). Reopens steps >= version for `reserve` unchanged where all trajectories survive, voids
        all leases, drops the validation lane, discards every trajectory with a token newer than `version`, marks every replica STALE.
        """
        state = self._note(await self._wire.call("rewind", version, timeline))
        await self._until_done("commit", version, timeline)
        return state

    async def restore(
        self, version: int, timeline: str, incarnation: str, enqueued: int, ended: Ended | None = None
    ) -> RunState:
        """The store lost writes: install a new incarnation that knows of nothing but checkpoint `version`, of the prompts up to order
        `enqueued` as already taken, and of those that `ended`. The state says `refill`: the caller enqueues again those among them that
        its ledger does not hold.
        """
        ended = ended or Ended()
        state = self._note(
            await self._wire.call(
                "restore", version, timeline, incarnation, enqueued, ended.failed, ended.filtered, ended.bitmap
            )
        )
        await self._sweep_old_incarnations()
        return state

    async def refilled(self, timeline: str) -> None:
        """Every prompt that the state's `refill` asked for is enqueued again (idempotent)."""
        await self._wire.call("refilled", timeline)

    async def ended(self) -> Ended:
        """The train groups that ended without being trained, for `restore`: an order among them is never enqueued again."""
        failed, filtered, bitmap = await self._wire.call("ended")
        return Ended(failed, filtered, bitmap)

    async def enqueue(self, groups: Sequence[Group], timeline: str, refill: bool = False) -> int:
        """Append to the queue of each group's lane; returns how many were new. A group at or below `enqueued` order, or known
        by id, or among those that ended, is not new (idempotent). `refill` takes groups at or below `enqueued` as well,
        while the state says `refill`. Raises
        `WrongTimeline`, and `WrongStep` for groups beyond the next order: the server lost the writes of those in between."""
        if self._incarnation is None:
            await self.state()
        records = [(group, group.encode()) for group in sorted(groups, key=lambda group: group.order)]
        new = 0
        for batch in of_bounded_size(records, lambda item: len(item[1])):
            args: list[Any] = []
            for group, record in batch:
                worst = worst_case_bytes(group.n, group.prompt_token_ids.size, group.sampling.max_new_tokens)
                args += [group.id, group.lane, group.order, group.n, worst, secrets.token_hex(8), record]
            new += await self._wire.call("enqueue", timeline, self._incarnation, int(refill), *args)
        return new

    async def close(self, timeline: str) -> None:
        """No more training prompts will come (idempotent); a rewind opens the queue again."""
        await self._wire.call("close", timeline)

    async def reserve(self, step: int, timeline: str) -> Reservation | Waiting | End:
        """Laws 2, 3 and 5: the batch of `step`, which must be `next_step` (repeating the last reserve gives the same batch).

        Raises `WrongStep`, `WrongTimeline`, and `SamplingStarved` where it would wait, but dynamic sampling has had its share.
        """
        reply = await self._wire.call("reserve", step, timeline)
        match reply[0]:
            case b"waiting":
                return Waiting(ready=reply[1], needed=reply[2])
            case b"end":
                return End(unused=reply[1])
        return reservation(reply)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when something that `reserve` waits for may have changed, or after `timeout_s`."""
        await self._wakeups.wait("ready", timeout_s)

    async def read(self, keys: Sequence[str]) -> list[tuple[Trajectory, Score]]:
        """Payloads and scores of reserved trajectories, in the order of `keys` (`ReservedTrajectory.key`)."""

        async def read_batch(batch: Sequence[str]) -> list[tuple[Trajectory, Score]]:
            values = await self._held([*batch, *map(score_key, batch)])
            pairs = zip(values[: len(batch)], values[len(batch) :], strict=True)
            return [(Trajectory.decode(payload), Score.decode(score)) for payload, score in pairs]

        return await self._read_batches(read_batch, keys)

    async def read_groups(self, ids: Sequence[str]) -> list[Group]:
        records = []
        for batch in chunks(ids, PAYLOADS):
            for group_id, reply in zip(batch, await self._pipeline_calls("group", batch), strict=True):
                if reply is None:
                    raise InvalidCall(f"group {group_id!r} is not held; it was committed or never enqueued")
                records.append(reply[1])
        return [Group.decode(record) for record in await self._held(records)]

    async def commit(self, version: int, timeline: str) -> None:
        """Checkpoint `version` is published: steps < version are trained, and the payloads of all but the newest `retain_steps` of them
        are freed (idempotent)."""
        await self._until_done("commit", version, timeline)

    async def masked(self, step: int, timeline: str, tokens: int) -> None:
        """Of the policy loss of `step`, `tokens` > 0 tokens were left out for their age: metered, once a step."""
        await self._wire.call("masked", step, timeline, tokens)

    async def evaluated(self, ids: Sequence[str]) -> tuple[list[Evaluated], dict[str, str], int]:
        """Of these validation groups: (those evaluated, reasons of those failed, number still pending)."""
        replies: list[Any] = []
        for batch in chunks(ids, BATCH):
            replies += await self._wire.call("evaluated", *batch)
        done: list[Evaluated] = []
        failed: dict[str, str] = {}
        for group_id, (state, reason, record, keys) in zip(ids, replies, strict=True):
            if state == b"evaluated":
                (group,) = await self._held([record])
                pairs = await self.read([key.decode() for key in keys])
                done.append(Evaluated(Group.decode(group), tuple(pairs)))
            elif state == b"failed":
                failed[group_id] = reason.decode()
        return done, failed, len(replies) - len(done) - len(failed)

    async def drop_validation(self, timeline: str) -> None:
        """Forget every group of the validation lane, leased or not, with its payloads."""
        await self._until_done("drop_validation", timeline)


def worst_case_bytes(n: int, prompt_tokens: int, max_new_tokens: int) -> int:
    """What a group of `n` trajectories may take in the buffer: what a lease reserves of `Limits.max_bytes`."""
    return n * (max_new_tokens * _TOKEN_BYTES + prompt_tokens * 4 + _OVERHEAD_BYTES)
