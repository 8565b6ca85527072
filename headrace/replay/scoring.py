"""The scorer's calls: trajectories that wait for a score, and their scores."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from headrace.errors import CodecError, LeaseLost, ReplayError
from headrace.replay.calls import BATCH, Calls, chunks
from headrace.replay.records import ScoringJob
from headrace.replay.replies import Taken
from headrace.replay.wire import refusal
from headrace.trajectory import Group, Score


class ScoringCalls(Calls):
    async def take_scoring(self, scorer: str, max_trajectories: int) -> list[ScoringJob]:
        """Pushed trajectories waiting for a score, oldest first, until `scoring_deadline_s` from now."""
        return await self._read_jobs(
            await self._wire.call("take_scoring", scorer, max_trajectories, secrets.token_hex(8))
        )

    async def _read_jobs(self, reply: Sequence[Any]) -> list[ScoringJob]:
        taken = [
            Taken(group_id.decode(), int(index), payload, record, token.decode(), attempt)
            for group_id, index, payload, record, token, attempt in zip(*[iter(reply)] * 6, strict=True)
        ]
        records = list(dict.fromkeys(entry.record for entry in taken))
        groups = {
            record: None if data is None else Group.decode(data)
            for record, data in zip(records, await self._fetch(records), strict=True)
        }
        payloads = await self._read_batches(self._fetch, [entry.payload for entry in taken])
        jobs = []
        for entry, payload in zip(taken, payloads, strict=True):
            group = groups[entry.record]
            if payload is None or group is None:  # discarded since: the token is void
                continue
            try:
                jobs.append(entry.job(group, payload))
            except CodecError as error:
                await self._score_unreadable(entry, str(error))
        return jobs

    async def _score_unreadable(self, entry: Taken, problem: str) -> None:
        """Bytes that are no trajectory of this group can't be scored by anyone: law 7, the group fails with the reason."""
        score = Score("INVALID", message=problem)
        errors = await self._score_batch([(entry.group, entry.index, entry.token, score)])
        if errors[0] is not None and not isinstance(errors[0], LeaseLost):
            raise errors[0]

    async def release_scoring(self) -> None:
        """A scorer starts: what an earlier one had taken waits again at once, without costing an attempt."""
        await self._until_done("release_scoring")

    async def wait_scoring(self, timeout_s: float) -> None:
        await self._wakeups.wait("scoring", timeout_s)

    async def score(self, job: ScoringJob, score: Score) -> None:
        """Write a score back. `SCORED` counts towards the group's completeness. Law 7: `FAILED` and `TIMED_OUT` are tried again up to
        `max_scoring_attempts` and then fail the group with the message; `INVALID` fails it at once."""
        (error,) = await self.score_many([(job, score)])
        if error is not None:
            raise error

    async def score_many(self, items: Sequence[tuple[ScoringJob, Score]]) -> list[ReplayError | None]:
        """`score` of many at once: for each None, or the error that `score` would raise."""
        errors: list[ReplayError | None] = []
        for batch in chunks(items, BATCH):
            errors += await self._score_batch(
                [(job.group.id, job.trajectory.index, job.token, score) for job, score in batch]
            )
        return errors

    async def _score_batch(self, items: Sequence[tuple[str, int, str, Score]]) -> list[ReplayError | None]:
        args: list[Any] = []
        for group_id, index, token, score in items:
            reward = "-" if score.reward is None else repr(float(score.reward))
            args += [f"{group_id} {index} {token} {score.status} {reward}", score.encode()]
        return [refusal(text.decode()) if text else None for text in await self._wire.call("score", *args)]
