"""The trainer's calls: the queue, batches, checkpoints, validation, epochs of the weight channel."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.base.errors import CodecError, InvalidCall
from headrace.records.score import SCORE_BYTES, Score
from headrace.records.trajectory import AnyTrajectory, Group, decode_trajectory
from headrace.replay.base_client import BATCH, PAYLOADS, BufferClient, chunks, of_bounded_size, transfer_all
from headrace.replay.records import (
    BatchReply,
    End,
    Ended,
    Epoch,
    Evaluated,
    Reservation,
    RunState,
    Waiting,
    decode_epoch,
    decode_reserve,
    score_key,
    unpack,
)

# Bytes per token of a payload (id, log-probability, mask, text), and per trajectory (field names, spans, timings; its score).
_TOKEN_BYTES, _OVERHEAD_BYTES = 15, 2048 + SCORE_BYTES


class TrainerClient(BufferClient):
    async def rewind(self, version: int, timeline: str) -> RunState:
        """Take the buffer back to checkpoint `version`, on the new `timeline` (a nonce of the caller: a repetition is a no-op).

        Commits reserved steps < version. If the checkpoint is older than the newest, takes back what was committed since (`refill` is then
        true in the state). Reopens steps >= version, unchanged if all their trajectories survive. Voids all leases, drops the validation
        lane, discards every trajectory with a token newer than `version`, and marks every replica STALE.
        """
        state = self._note(await self._connection.call("rewind", version=version, timeline=timeline))
        await self._until_done("commit", version=version, timeline=timeline, trained="")
        return state

    async def restore(
        self, version: int, timeline: str, incarnation: str, enqueued: int, ended: Ended | None = None
    ) -> RunState:
        """Rebuild the buffer after lost writes: install a new incarnation that knows only checkpoint `version`, that the prompts up to
        order `enqueued` were taken, and which of them `ended`. `refill` is then true in the state: the caller must enqueue again those that
        are not in its ledger."""
        ended = ended or Ended()
        state = self._note(
            await self._connection.call(
                "restore",
                ended.bitmap,
                ended.failures,
                version=version,
                timeline=timeline,
                incarnation=incarnation,
                enqueued=enqueued,
                failed=ended.failed,
                filtered=ended.filtered,
            )
        )
        await self._sweep_old_incarnations()
        return state

    async def end_refill(self, timeline: str) -> None:
        """Tell the buffer that the refill is complete (idempotent)."""
        await self._connection.call("refilled", timeline=timeline)

    async def read_ended(self) -> Ended:
        """Return the train groups that ended without being trained, for `restore`: their orders are never enqueued again, unless a failed
        one is retried."""
        counts, bitmap, failures = await self._connection.call("ended")
        fields = unpack(counts)
        retries = {int(order): times for order, times in fields.pop("retries", {}).items()}
        return Ended(**fields, bitmap=bitmap, failures=failures, retries=retries)

    async def read_wanted(self) -> list[int]:
        """Return the lowest orders of the prompts to enqueue again (`refill`) because their failed groups are retried."""
        return [int(order) for order in await self._connection.call("wanted")]

    async def enqueue(self, groups: Sequence[Group], timeline: str, refill: bool = False, validation: int = 0) -> int:
        """Append groups to the queues of their lanes; returns how many were new. A group at or below `enqueued` order, or with a known id,
        or among those that ended, is not new (idempotent). `refill` also accepts groups at or below `enqueued` that are `wanted`, and any
        while `refill` is true in the state. `validation` is the version that validation groups evaluate. Raises `WrongTimeline`, and
        `WrongStep` for groups beyond the next order: the server lost the writes of those in between."""
        if self._incarnation is None:
            await self.state()
        records = [(group, group.encode()) for group in sorted(groups, key=lambda group: group.order)]
        new = 0
        for batch in of_bounded_size(records, lambda item: len(item[1])):
            new += await self._connection.call(
                "enqueue",
                *(record for _, record in batch),
                timeline=timeline,
                incarnation=self._incarnation,
                refill=refill,
                validation=validation,
                groups=[_select_fields(group) for group, _ in batch],
            )
        return new

    async def close(self, timeline: str) -> None:
        """Close the queue: no more training prompts will come (idempotent). A rewind opens it again."""
        await self._connection.call("close", timeline=timeline)

    async def reserve(self, step: int, timeline: str) -> Reservation | Waiting | End:
        """Reserve the batch of `step` by laws 2, 3 and 5; `step` must be `next_step` (repeating the last reserve returns the same
        batch).

        Raises `WrongStep`, `WrongTimeline`. If it would have to wait, raises `SamplingStarved` if dynamic sampling has reached its limit,
        and `EnvironmentBroken` if an environment has been broken for longer than its `give_up_after`.
        """
        answer = await self._connection.call("reserve", **self._number(), step=step, timeline=timeline)
        reply = decode_reserve(answer)
        return reply.reservation() if isinstance(reply, BatchReply) else reply

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the answer of `reserve` may have changed, or after `timeout_s`."""
        await self._wakeups.wait("ready", timeout_s)

    async def read(self, keys: Sequence[str]) -> list[tuple[AnyTrajectory, Score]]:
        """Return payloads and scores of reserved trajectories, in the order of `keys` (`ReservedTrajectory.key`). Raises `CodecError` if
        one can't be decoded, `InvalidCall` if one is no longer held."""
        found = []
        for pair in await self.read_each(keys):
            if isinstance(pair, CodecError):
                raise pair
            found.append(pair)
        return found

    async def read_each(self, keys: Sequence[str]) -> list[tuple[AnyTrajectory, Score] | CodecError]:
        """Return what `read` returns, with the error in place of each trajectory that can't be decoded."""

        async def read_batch(batch: Sequence[str]) -> list[tuple[AnyTrajectory, Score] | CodecError]:
            values = await self._held([*batch, *map(score_key, batch)])
            return list(map(_decode, values[: len(batch)], values[len(batch) :]))

        return await transfer_all(read_batch, chunks(keys, PAYLOADS), self._reads)

    async def read_groups(self, ids: Sequence[str]) -> list[Group]:
        records = []
        for batch in chunks(ids, PAYLOADS):
            calls = [self._connection.fcall("group", group=group_id) for group_id in batch]
            for group_id, reply in zip(batch, await self._connection.pipeline(calls), strict=True):
                if reply is None:
                    raise InvalidCall(f"group {group_id!r} is not held; it was committed or never enqueued")
                records.append(unpack(reply)["record"])
        return [Group.decode(record) for record in await self._held(records)]

    async def reject_step(self, step: int, timeline: str, nonce: str, attempts: Mapping[str, int], reason: str) -> None:
        """Give the batch of `step` back, because trajectories of these groups (the attempt of each, by id) can't be trained on. The step is
        reopened as by a rewind to it, but nothing else is: its other groups keep it, and these are generated again, at the cost of an
        attempt.

        At most 256 groups are named. `nonce` is the caller's: a repetition is a no-op. Raises `WrongStep` unless it is the newest reserved
        step with these groups in these attempts, `WrongTimeline`.
        """
        groups = [{"id": group, "attempt": attempt} for group, attempt in attempts.items()]
        await self._connection.call("reject", step=step, timeline=timeline, nonce=nonce, reason=reason, groups=groups)

    async def commit(self, version: int, timeline: str, trained: Mapping[int, Sequence[str]] | None = None) -> None:
        """Commit steps < version, because checkpoint `version` is published: their groups are trained, and the payloads of all but the
        newest `retain_steps` steps are freed (idempotent).

        `trained` has the groups of each step since the previous commit. Raises `WrongStep` if the buffer holds others, because its server
        lost writes.
        """
        await self._until_done(
            "commit", version=version, timeline=timeline, trained=_digest_ledger(trained) if trained else ""
        )

    async def read_history(self, count: int) -> tuple[list[tuple[str, Mapping[bytes, bytes]]], int]:
        """Return the oldest `count` entries of the history of groups that were not cleared, each with its id, for `expand_entry`; and how
        many entries were ever cut off unread."""
        key = self._connection.key
        lost = await self._connection.command("HGET", key, "history_lost")
        entries = await self._connection.command("XRANGE", f"{key}:history", "-", "+", "COUNT", count)
        return [(entry.decode(), fields) for entry, fields in entries], int(lost or 0)

    async def clear_history(self, timeline: str, last: str) -> None:
        """Delete the entries of the history up to the one with id `last` (idempotent)."""
        await self._connection.call("drained", timeline=timeline, last=last)

    async def record_masked(self, step: int, timeline: str, tokens: int) -> None:
        """Record that `tokens` > 0 tokens over age were left out of the policy loss of `step`; counted once per step."""
        await self._connection.call("masked", step=step, timeline=timeline, tokens=tokens)

    async def read_evaluated(self, ids: Sequence[str]) -> tuple[list[Evaluated], dict[str, str], list[str]]:
        """Return the state of these validation groups: (those evaluated, reasons of failed ones by id, ids that the buffer does not know).
        The others are pending. A group with a trajectory that can't be decoded counts as failed."""
        replies: list[Any] = []
        for batch in chunks(ids, BATCH):
            replies += unpack(await self._connection.call("evaluated", groups=batch))
        done: list[Evaluated] = []
        failed: dict[str, str] = {}
        for group_id, reply in zip(ids, replies, strict=True):
            if reply["state"] == "evaluated":
                (record,) = await self._held([reply["record"]])
                try:
                    done.append(Evaluated(Group.decode(record), tuple(await self.read(reply["keys"]))))
                except CodecError as error:
                    failed[group_id] = f"its trajectories can't be read: {error}"
            elif reply["state"] == "failed":
                failed[group_id] = reply["reason"]
        return done, failed, [id_ for id_, reply in zip(ids, replies, strict=True) if reply["state"] == "unknown"]

    async def drop_validation(self, timeline: str, before: int, validators: Sequence[str] = ()) -> None:
        """Delete every group of validations of versions < `before`, leased or not, with its payloads. The buffer accepts no more of
        them. The `validators` alone lease the groups of version `before` that are enqueued after this, and keep their weights until all are
        evaluated; of those named, the ones that hold that version."""
        await self._until_done(
            "drop_validation", **self._number(), timeline=timeline, before=before, validators=list(validators)
        )

    # -- epochs of the weight channel --------------------------------------------------------------------------------------

    async def open_epoch(self, epoch: str, version: int, timeline: str, rendezvous: Mapping[str, Any]) -> Epoch:
        """Announce epoch `epoch` (a nonce) to every replica that is HEALTHY or STALE and lacks its weights;
        ends any epoch before it. Raises `WrongTimeline`."""
        packed = msgspec.msgpack.encode(rendezvous)
        return decode_epoch(
            await self._connection.call("open_epoch", packed, epoch=epoch, version=version, timeline=timeline)
        )

    async def begin_epoch(
        self,
        epoch: str,
        rendezvous: Mapping[str, Any],
        logprobs: Sequence[float],
        tolerance: float,
        mean_tolerance: float | None = None,
    ) -> Epoch:
        """Move the epoch from announced to transfer, with the members that acknowledged; other replicas become STALE unless they hold its
        weights. To be verified, a member's log-probabilities of the probe must equal the trainer's `logprobs` within `tolerance` nats, and
        in the mean within `mean_tolerance` (default: `tolerance`). Members don't learn any of these values."""
        packed = msgspec.msgpack.encode(rendezvous)
        return decode_epoch(
            await self._connection.call(
                "begin_epoch",
                packed,
                epoch=epoch,
                logprobs=logprobs,
                tolerance=tolerance,
                mean_tolerance=tolerance if mean_tolerance is None else mean_tolerance,
            )
        )

    async def offer(
        self,
        offer: str,
        version: int,
        timeline: str,
        rendezvous: Mapping[str, Any],
        logprobs: Sequence[float],
        tolerance: float,
        mean_tolerance: float,
    ) -> None:
        """Tell replicas that pull that a version is in the store, as offer `offer` (a nonce). Replicas learn `rendezvous`; the other
        arguments are those of `begin_epoch`. Raises `WrongTimeline`."""
        await self._connection.call(
            "offer",
            msgspec.msgpack.encode(rendezvous),
            offer=offer,
            version=version,
            timeline=timeline,
            logprobs=logprobs,
            tolerance=tolerance,
            mean_tolerance=mean_tolerance,
        )

    async def end_epoch(self, epoch: str, *, aborted: bool) -> Epoch:
        """Move the epoch from transfer to done or aborted. Members that did not verify are STALE."""
        return decode_epoch(await self._connection.call("end_epoch", epoch=epoch, aborted=aborted))

    async def disagreements(self, step: int, timeline: str, errors: Mapping[str, float]) -> None:
        """Store, for people, the `logprob_error` of replicas whose tokens `step` trained on (`Replica`). Store each step once, in order."""
        await self._connection.call(
            "disagreements", step=step, timeline=timeline, replicas=list(errors), errors=list(errors.values())
        )

    async def quarantine(self, replica: str, timeline: str, reason: str) -> bool:
        """Leave a replica out until it registers under a new name: it takes part in no epoch and gets no lease, and its leases are passed
        on, without costing an attempt. Returns False, and changes nothing, if no other replica is HEALTHY, or it is DEAD or gone."""
        return bool(
            await self._connection.call(
                "quarantine", **self._number(), replica=replica, timeline=timeline, reason=reason
            )
        )

    async def wait_epoch(self, timeout_s: float) -> None:
        """Return when an acknowledgement, a verification or a membership may have changed, or after `timeout_s`."""
        await self._wakeups.wait("epoch", timeout_s)


def _decode(payload: bytes, score: bytes) -> tuple[AnyTrajectory, Score] | CodecError:
    try:
        return decode_trajectory(payload), Score.decode(score)
    except CodecError as error:
        return error


def _select_fields(group: Group) -> dict[str, Any]:
    """Return the fields of a group that the buffer reads, besides its opaque record (enqueue.lua)."""
    return {
        "id": group.id,
        "lane": group.lane,
        "order": group.order,
        "env": group.env_name,
        "n": group.n,
        "worst": worst_case_bytes(group.n, group.prompt_token_ids.size, group.sampling.max_new_tokens),
        "nonce": secrets.token_hex(8),
    }


def worst_case_bytes(n: int, prompt_tokens: int, max_new_tokens: int) -> int:
    """Return the most bytes that a group of `n` trajectories may take in the buffer; a lease reserves them of `Limits.max_bytes`."""
    return n * (max_new_tokens * _TOKEN_BYTES + prompt_tokens * 4 + _OVERHEAD_BYTES)


def _digest_ledger(trained: Mapping[int, Sequence[str]]) -> str:
    """Return the digest that commit.lua computes from the steps that it holds."""
    steps = [f"{step}\n" + "\n".join(sorted(groups)) for step, groups in sorted(trained.items())]
    return hashlib.sha1("\n".join(steps).encode(), usedforsecurity=False).hexdigest()
