"""A runner's calls: leases of episodes, their calls as they are made, and how each episode ends."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.base.errors import Unstaged
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Call
from headrace.replay.leases import CARRIED_BYTES, LeaseClient, encode_payload, fence, renewed
from headrace.replay.records import Lease, RunnerReply, select_fields, unpack


class EpisodesClient(LeaseClient):
    async def register_runner(self, runner: str, info: Mapping[str, Any]) -> None:
        """Register a runner. `runner` is a nonce: one that has left or died can't register again. `info` is for people: each value is a
        text, a finite number or a flag. Raises `Fenced`, `InvalidCall`."""
        await self._enter("register_runner", runner=runner, info=info)

    async def deregister_runner(self, runner: str, *, died: bool = False) -> None:
        """Deregister a runner. Leases that it still holds are passed on at once, without costing an attempt. `died`: an error ends the
        runner, and any group that it holds may be the cause, so these are leased apart from others, as after a lost heartbeat."""
        await self._until_done("deregister_runner", runner=runner, died=died)

    async def runner_heartbeat(self, runner: str, tokens: Sequence[str], progress: Sequence[int] = ()) -> RunnerReply:
        """Renew the runner and these leases (never past a group's deadline, law 6). `progress` as for a replica's heartbeat."""
        reply = await self._connection.call(
            "runner_heartbeat", runner=runner, number=next(self._numbers), **renewed(tokens, progress)
        )
        return msgspec.convert(unpack(reply), RunnerReply)

    async def lease_episodes(self, runner: str, slots: int, validation_slots: int = 0) -> list[Lease]:
        """Lease groups of episodes. Each is leased only if all its missing episodes fit into the remaining `slots` (or, for a validation's
        group, into the `validation_slots`). Groups that another runner has begun come first, then validation, then training prompts as
        admission allows. If the result is empty, wait: there may be no HEALTHY replica.

        Raises `Fenced` if the runner must register under a new name.
        """
        number, nonce = next(self._numbers), secrets.token_hex(8)
        return await self._read_leases(
            await self._connection.call(
                "lease_episodes",
                runner=runner,
                slots=slots,
                validation_slots=validation_slots,
                number=number,
                nonce=nonce,
            )
        )

    async def append(
        self, lease: Lease, index: int, number: int, nonce: str, call: Call, timeline: str | None = None
    ) -> None:
        """Store call `number` of an episode, before the program gets its answer. The same call under the same nonce is a no-op.
        `timeline` is of the weights that wrote it, if not the lease's, which may have outlived its own.

        Raises `LeaseLost`, `WrongTimeline`; `Surplus` if the episode has ended, or its group is complete without it; `InvalidCall` if it is
        out of order, its parent is missing, or a rewind undid the weights that wrote it; `EpisodeTooLarge`.
        """
        versions = [span.version for span in call.spans]
        await self._connection.call(
            "append",
            call.encode(),
            **_episode(lease, index) | {"timeline": timeline or lease.timeline},
            number=number,
            parent=call.parent,
            nonce=nonce,
            oldest=min(versions),
            newest=max(versions),
        )

    async def finish(
        self, lease: Lease, index: int, trajectory: AnyTrajectory | None, score: Score | None
    ) -> Lease | None:
        """End an episode. Pass its trajectory if its score is SCORED, or None because a grader scores it; else pass none.

        FAILED and TIMED_OUT cost the episode one of its `max_attempts`, NOT_STARTED and INTERRUPTED nothing; INVALID fails the group.
        Returns the lease under which the episode must start over; None if the episode or its group has ended. Repeating the call is a
        no-op. Raises `LeaseLost`, `Surplus`, `WrongTimeline`, `InvalidCall`, `EpisodeTooLarge`; a refused trajectory leaves nothing
        behind.
        """
        payload = b"" if trajectory is None else encode_payload(lease, trajectory)
        try:
            again = await self._finish(lease, index, trajectory, score, payload, CARRIED_BYTES)
        except Unstaged:  # the server lost the payload, or its time ran out
            again = await self._finish(lease, index, trajectory, score, payload, math.inf)
        tries = {**lease.tries, index: lease.tries.get(index, 0) + 1}
        return msgspec.structs.replace(lease, tries=tries) if again else None

    async def _finish(
        self,
        lease: Lease,
        index: int,
        trajectory: AnyTrajectory | None,
        score: Score | None,
        payload: bytes,
        carried_bytes: float,
    ) -> bool:
        nonce = secrets.token_hex(8)
        if len(payload) > carried_bytes:
            await self._connection.command(*self._staging(lease, nonce, payload))
        written = (0, 0, 0)
        if trajectory is not None:
            written = trajectory.length, trajectory.oldest_version, trajectory.newest_version
        scores = [] if score is None else [score]
        return bool(
            await self._connection.call(
                "finish",
                payload if len(payload) <= carried_bytes else b"",
                *(each.encode() for each in scores),
                **_episode(lease, index),
                order=lease.group.order if lease.group.lane == "train" else -1,
                nonce=nonce,
                bytes=len(payload),
                **dict(zip(("length", "oldest", "newest"), written, strict=True)),
                scores=[select_fields(each) for each in scores],
            )
        )


def _episode(lease: Lease, index: int) -> dict[str, Any]:
    """Return the arguments that identify an episode and its try in a call."""
    return {**fence(lease), "index": index, "tries": lease.tries.get(index, 0)}
