"""The scorer's calls: trajectories that wait for a score, and their scores."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from headrace.base.errors import CodecError, LeaseLost, ReplayError
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Group, decode_trajectory
from headrace.replay.base_client import BATCH, PAYLOADS, BufferClient, chunks, transfer_all
from headrace.replay.connection import refusal
from headrace.replay.records import ScoringJob, select_fields, unpack


class ScoringClient(BufferClient):
    async def take_scoring(self, room: Mapping[str, int]) -> list[ScoringJob]:
        """Take pushed trajectories that wait for a score, oldest first, for each environment up to its `room` (the number that may be sent
        to it now). They belong to this client until `scoring_deadline_s` from now, or from when it renews them. Make one call at a time."""
        return await self._read_jobs(
            await self._connection.call(
                "take_scoring",
                **self._number(),
                environments=list(room),
                most=list(room.values()),
                nonce=secrets.token_hex(8),
            )
        )

    async def renew_scoring(self, jobs: Sequence[ScoringJob]) -> list[ScoringJob]:
        """Renew trajectories that are being scored. Returns those of `jobs` that no longer belong to this client."""
        lost: list[ScoringJob] = []
        for batch in chunks(jobs, BATCH):
            places = await self._connection.call(
                "renew_scoring",
                **self._number(),
                groups=[job.group.id for job in batch],
                indices=[job.trajectory.index for job in batch],
                tokens=[job.token for job in batch],
            )
            lost += [batch[place] for place in places]
        return lost

    async def _read_jobs(self, answer: bytes) -> list[ScoringJob]:
        reply = unpack(answer)
        token, prefix = reply["token"], reply["payload_prefix"]
        records = dict.fromkeys(taken["record"] for taken in reply["groups"])
        for record, data in zip(records, await self._fetch(list(records)), strict=True):
            records[record] = None if data is None else Group.decode(data)
        entries = [
            (records[taken["record"]], taken["group"], index, prefix + nonce, attempt, waited_ms / 1000)
            for taken in reply["groups"]
            for index, nonce, attempt, waited_ms in zip(
                taken["indices"], taken["nonces"], taken["scoring_attempts"], taken["waited_ms"], strict=True
            )
        ]
        payloads = await transfer_all(self._fetch, chunks([key for _, _, _, key, *_ in entries], PAYLOADS), self._reads)
        jobs = []
        for (group, group_id, index, _, attempt, waited_s), payload in zip(entries, payloads, strict=True):
            if payload is None or group is None:  # discarded meanwhile, so the token is void
                continue
            try:
                jobs.append(ScoringJob(group, _decode_trajectory(group_id, index, payload), token, attempt, waited_s))
            except CodecError as error:
                await self._score_unreadable(group_id, index, token, str(error))
        return jobs

    async def _score_unreadable(self, group_id: str, index: int, token: str, problem: str) -> None:
        """Score bytes that are not a trajectory of this group as UNSENDABLE (law 7): the group fails with the reason."""
        (error,) = await self._score_batch([(group_id, index, token, Score("UNSENDABLE", message=problem))])
        if error is not None and not isinstance(error, LeaseLost):
            raise error

    async def release_scoring(self) -> None:
        """Return the trajectories of an earlier scorer to the queue at once, without costing an attempt. Called when a scorer starts."""
        while await self._connection.call("release_scoring", **self._number()):
            pass

    async def wait_scoring(self, timeout_s: float) -> None:
        await self._wakeups.wait("scoring", timeout_s)

    async def score(self, job: ScoringJob, score: Score) -> None:
        """Write a score back. `SCORED` counts towards the group's completeness, with the others of its build. A score of a build that
        another has replaced is refused with `LeaseLost`, and the trajectory waits again (law 3). Law 7: a failed scoring is retried, after
        a pause, up to `max_scoring_attempts` times, and then fails the group with the message; `INVALID` fails it at once. If the
        environment was at fault, its breaker opens instead. `NOT_STARTED`, and `INTERRUPTED` if the trajectory was not alone, cost no
        attempt."""
        (error,) = await self.score_many([(job, score)])
        if error is not None:
            raise error

    async def score_many(self, items: Sequence[tuple[ScoringJob, Score]]) -> list[ReplayError | None]:
        """Write many scores at once. Returns, for each, None or the error that `score` would raise."""
        errors: list[ReplayError | None] = []
        for batch in chunks(items, BATCH):
            errors += await self._score_batch(
                [(job.group.id, job.trajectory.index, job.token, score) for job, score in batch]
            )
        return errors

    async def _score_batch(self, items: Sequence[tuple[str, int, str, Score]]) -> list[ReplayError | None]:
        scores = [
            {"group": group_id, "index": index, "token": token, **select_fields(score)}
            for group_id, index, token, score in items
        ]
        replies = await self._connection.call("score", *(score.encode() for *_, score in items), scores=scores)
        return [refusal(text.decode()) if text else None for text in replies]


def _decode_trajectory(group_id: str, index: int, payload: bytes) -> AnyTrajectory:
    trajectory = decode_trajectory(payload)
    if (trajectory.group_id, trajectory.index) != (group_id, index):
        raise CodecError(
            f"the payload of trajectory {index} of group {group_id!r} belongs to {trajectory.index} of {trajectory.group_id!r}"
        )
    return trajectory
