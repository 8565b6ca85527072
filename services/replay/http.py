"""The buffer's HTTP API for inspection: the run, its groups and trajectories, metrics, and live events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from typing import Annotated, Any, get_args

import msgspec
from fastapi import FastAPI, Header, HTTPException, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse

from headrace.base.errors import CodecError, InvalidCall, ReplayUnavailable
from headrace.net.service import Ready, WaitsFor, create_app, nothing, problems
from headrace.records.group_event import GroupState
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, EpisodeTrajectory, Group, Trajectory
from headrace.replay import ReplayClient
from headrace.replay.bias import QUANTITIES, Distribution, TrajectoryMeter, skews
from headrace.run import export
from headrace.run.lineage import LineageFiles

_EVENTS_BLOCK_S = 5.0
# ids of a Redis stream: two 64-bit numbers; `$` means "from now on"
_ID = "[0-9]{1,19}(-[0-9]{1,19})?"
_ID_OR_NOW = rf"^(\$|{_ID})$"
States = Annotated[
    list[GroupState] | None, Query(alias="state", description="groups in these states; all if not given")
]


def build_app(client: ReplayClient, ready: Ready, lineage: LineageFiles, waits_for: WaitsFor = nothing) -> FastAPI:
    """Build the replay service's application. `lineage` are the trainer's files, which may be missing if it runs on another machine."""
    app = create_app("Headrace replay", ready, waits_for=waits_for)
    app.router.responses |= problems(503)
    _answer_errors(app)
    _add_run(app, client)
    _add_groups(app, client, lineage)
    return app


def _add_run(app: FastAPI, client: ReplayClient) -> None:

    @app.get("/v1/run", summary="The state of the run")
    async def run() -> dict[str, Any]:
        return msgspec.structs.asdict(await client.state())

    @app.get(
        "/v1/stats",
        summary="Groups by state, refusals, requeues, bytes, ages, replicas, the scoring line, environments",
    )
    async def stats() -> dict[str, Any]:
        return await client.stats()

    @app.get("/v1/bias", summary="Statistics of trajectories at each moment that is metered, and the selection bias")
    async def bias() -> dict[str, Any]:
        meters = await client.bias()
        return {
            "meters": {moment: _meter(meter) for moment, meter in meters.items()},
            "skews": [dataclasses.asdict(skew) for skew in skews(meters)],
        }

    @app.get("/v1/metrics", summary="Metrics of each trainer step and validation")
    async def metrics(
        after: Annotated[str, Query(pattern=rf"^{_ID}$", description="entries after this id")] = "0",
        count: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> list[dict[str, Any]]:
        return [
            {"id": entry, "kind": kind, "step": step, "metrics": values}
            for entry, kind, step, values in await client.metrics(after, count)
        ]

    @app.get("/v1/events", summary="The events of the run, as server-sent events", response_class=StreamingResponse)
    async def events(
        request: Request,
        after: Annotated[str, Query(pattern=_ID_OR_NOW, description="events after this id; `$`: from now on")] = "$",
        last_event_id: Annotated[str | None, Header(pattern=_ID_OR_NOW)] = None,
    ) -> StreamingResponse:
        after = last_event_id or after
        if after == "$":
            after = await client.newest_event()
        return StreamingResponse(_events(client, request, after), media_type="text/event-stream")


def _add_groups(app: FastAPI, client: ReplayClient, files: LineageFiles) -> None:
    @app.get("/v1/groups", summary="The groups in the buffer, by state")
    async def groups(
        states: States = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []
        async for group_id, state in client.groups(states or get_args(GroupState)):
            if len(found) == limit:
                break
            found.append({"id": group_id, "state": state})
        return found

    @app.get(
        "/v1/groups/{group_id}", summary="One group, and its trajectories so far", responses=problems(400, 404, 500)
    )
    async def group(group_id: str) -> dict[str, Any]:
        found = await client.group(group_id)
        if found is None:
            raise HTTPException(404, f"the buffer does not hold group {group_id!r}")
        return {**found, "group": None if found["group"] is None else _plain(found["group"])}

    @app.get(
        "/v1/trajectories/{group_id}/{index}",
        summary="One trajectory with its tokens and score",
        responses=problems(400, 404, 500),
    )
    async def trajectory(group_id: str, index: int) -> dict[str, Any]:
        found = await client.trajectory(group_id, index)
        if found is None:
            raise HTTPException(404, f"the buffer does not hold trajectory {index} of group {group_id!r}")
        payload, score = found
        return {**_plain(payload), "score": None if score is None else _plain(score)}

    @app.get(
        "/v1/groups/{group_id}/lineage",
        summary="The lineage of a trained or waiting group: which replica wrote which tokens under which weights, and how it ended",
        responses=problems(400, 404, 500),
    )
    async def lineage(group_id: str) -> dict[str, Any]:
        found = await asyncio.to_thread(files.find, group_id) or await client.lineage(group_id)
        if found is None:
            raise HTTPException(
                404, f"the buffer does not hold group {group_id!r}, and no file in {files.folder} lists it as trained"
            )
        return dataclasses.asdict(found)

    @app.get("/v1/export", summary="The trajectories in the buffer, as JSON lines", response_class=StreamingResponse)
    async def exported(states: States = None) -> StreamingResponse:
        found = export.lines(client, states or get_args(GroupState))
        return StreamingResponse((line + "\n" async for line in found), media_type="application/x-ndjson")


async def _events(client: ReplayClient, request: Request, after: str) -> AsyncIterator[str]:
    while not await request.is_disconnected():
        entries = await client.events(after, _EVENTS_BLOCK_S)
        for after, fields in entries:
            yield f"id: {after}\nevent: {fields.pop('kind')}\ndata: {json.dumps(fields)}\n\n"
        if not entries:
            yield ": nothing new\n\n"


def _answer_errors(app: FastAPI) -> None:
    def answer(status: int) -> Any:
        async def handler(_: Request, error: Exception) -> JSONResponse:
            return JSONResponse({"detail": str(error)}, status_code=status)

        return handler

    app.add_exception_handler(InvalidCall, answer(400))
    app.add_exception_handler(CodecError, answer(500))
    app.add_exception_handler(ReplayUnavailable, answer(503))


def _meter(meter: TrajectoryMeter) -> dict[str, Any]:
    """Return a meter as JSON types. `mean` and `deviation` are null without values. A bucket is [upper bound, count], with null for an
    infinite bound."""
    plain: dict[str, Any] = {"trajectories": meter.trajectories, "tokens": meter.tokens}
    for quantity in QUANTITIES:
        distribution: Distribution = getattr(meter, quantity)
        plain[quantity] = {
            "count": distribution.count,
            "mean": distribution.mean if distribution.count else None,
            "deviation": distribution.deviation if distribution.count else None,
            "buckets": [[bound if math.isfinite(bound) else None, count] for bound, count in distribution.buckets],
        }
    return plain


def _plain(record: Group | AnyTrajectory | Score) -> dict[str, Any]:
    """Return a record as JSON types. Arrays become lists and spans objects. Values that JSON lacks are written as in an export."""
    fields = export.plain(record)
    del fields["schema"]
    if isinstance(record, Trajectory):
        fields["spans"] = [span._asdict() for span in record.spans]
    if isinstance(record, EpisodeTrajectory):
        for call, shown in zip(record.calls, fields["calls"], strict=True):
            del shown["schema"]
            shown["spans"] = [span._asdict() for span in call.spans]
    return fields
