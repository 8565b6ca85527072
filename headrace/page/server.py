"""The page's web server: its API, and the files that browsers load. It reads the runs' files, and changes none."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from headrace.base.errors import HeadraceError
from headrace.net.http_access import HttpAccess, with_headers
from headrace.net.service import bind, create_app, problems, serve_http, stop_on_signals
from headrace.page import answers, groups, metric_series, overview, run_list, system, timeline, trajectories
from headrace.page.follow import Followers, NoRoom, NoView
from headrace.page.memory import keep_little_memory, release_memory
from headrace.page.run_files import NotHere, RunFiles, RunFolder
from headrace.records.trajectory import Lane
from headrace.run.group_query import SORTS, GroupQuery, parse_row

STATIC = Path(__file__).parent / "static"
# Answers that are computed at a time: a page must not take the machine from the run that it shows.
_AT_A_TIME = 2
# An answer that took longer, in seconds, has used memory that the next ones don't need.
_LONG_S = 0.1
# From this size on an answer is compressed, for browsers at the far end of a tunnel: the timeline of a long run to a ninth. Streams are
# not. No answer holds a secret that its length could tell (BREACH): tokens and cookies are in headers, which stay as they are, and the
# cookie comes with no request of another site.
_COMPRESSED_BYTES = 16 << 10
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_VIEWS = (
    "/",
    "/runs/{run}",
    "/runs/{run}/metrics",
    "/runs/{run}/prompts",
    "/runs/{run}/groups/{group}",
    "/runs/{run}/groups/{group}/{index}",
    "/runs/{run}/timeline",
    "/runs/{run}/system",
    "/compare",
)

_log = logging.getLogger("headrace.page")


def build_app(folder: Path) -> FastAPI:
    """Make the application that serves the runs in `folder`."""
    runs, followers = RunFolder(folder), Followers()
    answering = _Answering(runs)

    async def ready() -> str | None:
        return None if runs.folder.is_dir() else f"{runs.folder} is not a folder"

    app = create_app("Headrace page", ready)
    app.openapi_url = None  # it is below /api
    app.router.responses |= problems(400, 404, 500)
    app.add_middleware(_Headers)
    app.add_middleware(GZipMiddleware, minimum_size=_COMPRESSED_BYTES, compresslevel=1)
    _answer_errors(app)
    # the list looks at every run, and may wait for one
    _add_list(app, _Answering(runs))
    _add_run(app, answering)
    _add_groups(app, answering)
    _add_follow(app, followers)
    _add_files(app)
    return app


async def serve(folder: Path, access: HttpAccess, host: str, port: int, started: Callable[[int], None]) -> None:
    """Serve the runs in `folder` until SIGTERM or SIGINT. `started` is called with the port. Raises `ServiceError` for a busy port."""
    keep_little_memory()
    stop = stop_on_signals()
    sock = bind(host, port, "page.port")
    async with serve_http(build_app(folder), sock, access):
        started(sock.getsockname()[1])
        await stop.wait()


# -- answering


class _Answering:
    """Computes answers in threads, a few at a time, and of each run one: while the index of a long run is built, the others are shown."""

    def __init__(self, runs: RunFolder) -> None:
        self._runs = runs
        self._room = asyncio.Semaphore(_AT_A_TIME)
        self._turns = weakref.WeakValueDictionary[str, asyncio.Lock]()

    async def of_folder(self, work: Callable[[RunFolder], Any]) -> Response:
        def compute() -> bytes:
            began = time.monotonic()
            try:
                return answers.encode(work(self._runs))
            finally:
                if time.monotonic() - began > _LONG_S:
                    release_memory()

        async with self._room:
            body = await asyncio.to_thread(compute)
        return Response(body, media_type="application/json")

    async def of_run(self, name: str, work: Callable[[RunFiles], Any]) -> Response:
        def locked(runs: RunFolder) -> Any:
            run = runs.find(name)
            try:
                with run.lock:
                    return work(run)
            except (OSError, HeadraceError) as error:
                if not run.folder.exists():
                    raise NotHere(f"run {name} was deleted or moved meanwhile") from error
                raise
            finally:
                runs.bound_memory()

        turn = self._turns.setdefault(name, asyncio.Lock())
        # before there is room: who waits for a run must not take it from others
        async with turn:
            return await self.of_folder(locked)


class _Headers:
    """ASGI middleware that adds the page's headers to every answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, with_headers(send, _HEADERS))


def _answer_errors(app: FastAPI) -> None:
    def answer(status: int, say: Callable[[Any], str] = str) -> Any:
        async def handler(_: Request, error: Exception) -> Response:
            return Response(answers.encode({"detail": say(error)}), status, media_type="application/json")

        return handler

    def of_argument(error: RequestValidationError) -> str:
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'][1:])}: {first['msg']}, not {first.get('input')!r:.100}"

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        _log.exception("a request failed", exc_info=error)
        return JSONResponse({"detail": f"the page's log tells more: {type(error).__name__}"}, 500)

    app.add_exception_handler(RequestValidationError, answer(400, of_argument))
    app.add_exception_handler(NotHere, answer(404))
    app.add_exception_handler(NoView, answer(400))
    app.add_exception_handler(NoRoom, answer(503))
    app.add_exception_handler(HeadraceError, answer(500))
    app.add_exception_handler(OSError, answer(500, _say_file))
    app.add_exception_handler(Exception, unexpected)


def _say_file(error: OSError) -> str:
    return f"{error.filename or 'a file'} can't be read ({error.strerror or error})"


def _document(model: type[answers.Answer]) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route. Answers are not validated as they are sent: a test does that."""
    return {200: {"model": model, "description": "The answer"}}


# -- routes


def _add_list(app: FastAPI, answering: _Answering) -> None:
    @app.get("/api/runs", summary="The runs of the folder", responses=_document(answers.Runs))
    async def list_all() -> Response:
        return await answering.of_folder(run_list.list_runs)

    @app.get("/api/compare", summary="Runs side by side", responses=_document(answers.Comparison))
    async def compare(
        run: Annotated[list[str], Query(description="the runs; repeat the parameter", min_length=2, max_length=20)],
    ) -> Response:
        return await answering.of_folder(lambda folder: run_list.compare_runs(folder, run))


def _add_run(app: FastAPI, answering: _Answering) -> None:
    @app.get("/api/runs/{run}", summary="How a run stands", responses=_document(answers.Overview))
    async def describe(
        run: str,
        window: Annotated[
            Literal["last", "10", "all"], Query(description="the steps of which shares are taken")
        ] = "10",
    ) -> Response:
        return await answering.of_run(run, lambda files: overview.describe(files, window))

    @app.get("/api/runs/{run}/metrics", summary="The metrics of a run", responses=_document(answers.Metrics))
    async def metrics(run: str) -> Response:
        return await answering.of_run(run, metric_series.list_metrics)

    @app.get("/api/runs/{run}/series", summary="Curves of metrics", responses=_document(answers.Series))
    async def series(
        run: str,
        metric: Annotated[list[str], Query(description="KIND:NAME; repeat the parameter", max_length=200)],
        points: Annotated[int, Query(ge=1, le=20_000, description="buckets of a curve at most")] = 1000,
        first: Annotated[int | None, Query(description="the first step")] = None,
        last: Annotated[int | None, Query(description="the last step")] = None,
    ) -> Response:
        return await answering.of_run(run, lambda files: metric_series.read_series(files, metric, points, first, last))

    @app.get("/api/runs/{run}/timeline", summary="Who did what when", responses=_document(answers.Timeline))
    async def lanes(
        run: str,
        first: Annotated[
            float | None, Query(allow_inf_nan=False, description="where to begin, in Unix seconds")
        ] = None,
        last: Annotated[float | None, Query(allow_inf_nan=False, description="where to end")] = None,
    ) -> Response:
        return await answering.of_run(run, lambda files: timeline.describe(files, first, last))

    @app.get("/api/runs/{run}/system", summary="Configuration and logs of a run", responses=_document(answers.System))
    async def describe_system(run: str) -> Response:
        return await answering.of_run(run, system.describe_system)

    @app.get("/api/runs/{run}/logs", summary="What the services logged", responses=_document(answers.Logs))
    async def logs(
        run: str,
        service: Annotated[str | None, Query(max_length=300, description="of this service alone")] = None,
        level: Annotated[str | None, Query(max_length=20, description="of this level alone, as WARNING")] = None,
        text: Annotated[str, Query(max_length=1000, description="with this text, ignoring case")] = "",
        before: Annotated[
            float | None, Query(allow_inf_nan=False, description="older than this, in Unix seconds")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=5000, description="how many at most")] = 200,
    ) -> Response:
        return await answering.of_run(run, lambda files: system.read_logs(files, service, level, text, before, limit))


def _add_groups(app: FastAPI, answering: _Answering) -> None:
    @app.get("/api/runs/{run}/groups", summary="The groups of a run", responses=_document(answers.Groups))
    async def list_groups(
        run: str,
        text: Annotated[str, Query(max_length=1000, description="in the prompt or the expected answer, or a whole id")] = "",
        state: Annotated[list[str] | None, Query(description="in these states; repeat the parameter")] = None,
        lane: Annotated[Lane | None, Query(description="trained ones, or those of validations")] = None,
        environment: Annotated[str | None, Query(max_length=300, description="scored by this environment")] = None,
        task: Annotated[str | None, Query(max_length=300, description="of this task")] = None,
        step: Annotated[int | None, Query(description="trained in this step, or evaluating this version")] = None,
        reason: Annotated[str, Query(max_length=1000, description="with this text in their reason")] = "",
        replica: Annotated[str | None, Query(max_length=300, description="generated by this replica")] = None,
        build: Annotated[str | None, Query(max_length=300, description="scored by this build")] = None,
        row: Annotated[str | None, Query(max_length=5000, description="FILE:LINE of the data set")] = None,
        sort: Annotated[str, Query(description=f"one of {', '.join(SORTS)}; - before it: descending")] = "order",
        offset: Annotated[int, Query(ge=0, description="how many to leave out")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="how many at most")] = 100,
    ) -> Response:  # fmt: skip
        if sort.removeprefix("-") not in SORTS:
            raise HTTPException(400, f"sort: {sort!r:.100} is none of {', '.join(SORTS)}")
        if row is not None and parse_row(row) is None:
            raise HTTPException(400, f"row: {row!r:.100} is not FILE:LINE")
        query = GroupQuery(
            text=text, states=state or (), lane=lane, environment=environment, task=task, step=step, reason=reason, replica=replica,
            build=build, row=parse_row(row) if row else None, sort=sort, offset=offset, limit=limit,
        )  # fmt: skip
        return await answering.of_run(run, lambda files: groups.list_groups(files, query))

    @app.get("/api/runs/{run}/groups/{group}", summary="One group", responses=_document(answers.GroupStory))
    async def describe_group(run: str, group: str) -> Response:
        return await answering.of_run(run, lambda files: groups.describe_story(files, group))

    @app.get(
        "/api/runs/{run}/groups/{group}/trajectories/{index}",
        summary="One trajectory, token by token",
        responses=_document(answers.Tokens),
    )
    async def describe_trajectory(
        run: str,
        group: str,
        index: int,
        first: Annotated[int, Query(ge=0, description="the first token of the part")] = 0,
        count: Annotated[
            int, Query(ge=1, le=trajectories.MOST_TOKENS, description="tokens of the part at most")
        ] = 5000,
    ) -> Response:
        return await answering.of_run(
            run, lambda files: trajectories.describe_trajectory(files, group, index, first, count)
        )


def _add_follow(app: FastAPI, followers: Followers) -> None:
    @app.post(
        "/api/view",
        summary="Open a view in the pages that are open",
        responses=problems(415),
        response_model=answers.Shown,
    )
    async def show(view: answers.View) -> answers.Shown:
        return answers.Shown(pages=followers.show(view.path))

    @app.get(
        "/api/follow",
        summary="The views to open, as server-sent events",
        response_class=StreamingResponse,
        responses=problems(503),
    )
    async def follow() -> StreamingResponse:
        followers.check_room()
        return StreamingResponse(followers.follow(), media_type="text/event-stream")


def _add_files(app: FastAPI) -> None:
    @app.get("/api/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(app.openapi())

    async def view(_: Request) -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    for path in _VIEWS:
        app.add_route(path, view, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", _Static(directory=STATIC))


class _Static(StaticFiles):
    """Files that browsers ask for again, and load only if they have changed."""

    def file_response(self, *given: Any, **named: Any) -> Response:
        response = super().file_response(*given, **named)
        response.headers["cache-control"] = "no-cache"
        return response
