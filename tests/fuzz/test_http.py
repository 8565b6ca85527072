"""Malformed and generated requests to every service's pages: a documented status, errors with a type, nothing changed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.config import Config
from headrace.config.environments import TargetConfig
from headrace.net.credentials import Credentials, complete
from headrace.net.http_access import SESSION, Guard, HttpAccess, new_code
from headrace.net.service import create_app
from headrace.records.score import Score
from headrace.replay import ReplayClient
from headrace.replay.connection import open_redis
from headrace.run.lineage import LineageFiles
from headrace_services.replay.http import build_app as replay_app
from headrace_services.reward.http import build_app as reward_app
from headrace_services.reward.hub import Hub
from headrace_services.reward.served import ServedBackend
from headrace_services.trainer.distributed.liveness import Progress
from headrace_services.trainer.telemetry.http import build_app as trainer_app
from tests.fuzz.asgi import Request
from tests.support.buffer import begin, contents, push_all
from tests.support.mutation import Mutator
from tests.support.recorded_run import LIMITS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
TEXTS = [
    "",
    "$",
    "0",
    "-1",
    "1-1",
    "٣",
    "9" * 19,
    "9" * 20,
    f"{2**64}",
    "nan",
    "%00",
    "%ff",
    "%ed%a0%80",
    "..",
    "a/b",
    "é",
    "x" * 5000,
    "{}",
]


@dataclasses.dataclass(frozen=True)
class Service:
    app: FastAPI
    replay: ReplayClient | None = None

    @property
    def routes(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Operations by method and path."""
        return {
            (method.upper(), path): operation
            for path, item in self.app.openapi()["paths"].items()
            for method, operation in item.items()
        }


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def _ready() -> None:
    return None


async def _filled(url: str, limits: Any) -> ReplayClient:
    """A run whose groups are queued, open, waiting for scores; with records that others wrote strangely."""
    replay = ReplayClient(open_redis(url), "pages")
    await replay.open_run(limits)
    first, second, _ = await replay.lease(await begin(replay, 6), 3)
    await push_all(replay, first)
    strange = {"nan": float("nan"), "deep": [[[]]], "big": 2**63}
    for job in await replay.take_scoring({"math": 2}):
        await replay.score(job, Score("SCORED", 1.0, {"part": 0.5}, metadata=strange))
    await replay.release(second, "\x1b[2J", failed=True)
    timeline = (await replay.state()).timeline
    await replay.publish_metrics("train", 0, {"loss": float("nan"), "grad": float("inf")}, timeline)
    return replay


@pytest.fixture(scope="module", params=["replay", "trainer", "reward"])
def service(
    request: pytest.FixtureRequest, runner: asyncio.Runner, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("runs")
    config = Config.model_validate({"run": {"id": "pages", "dir": str(folder)}})
    if request.param == "trainer":
        yield Service(trainer_app(config, _ready, Progress()))
    elif request.param == "reward":
        yield runner.run(_reward(config))
    else:
        replay = runner.run(_filled(redis_url, limits=LIMITS))
        yield Service(replay_app(replay, _ready, LineageFiles(config.run_folder / "lineage")), replay)
        runner.run(replay.aclose())


async def _reward(config: Config) -> Service:
    env = TargetConfig(target="127.0.0.1:1")
    backend = ServedBackend("mine", env, 2**20, config.security, None)
    return Service(reward_app(Hub({"mine": backend}, {"mine": env}, {})))


@pytest.fixture
def access(tmp_path: Path) -> HttpAccess:
    path = tmp_path / "credentials"
    complete(path, ["operator", "reader", "scorer"])
    new_code(tmp_path)
    return HttpAccess(Credentials(path), frozenset({"localhost"}), code=tmp_path / "code")


@pytest.mark.timeout(0)  # as long as so many requests take
def test_answers_are_as_documented(
    service: Service, access: HttpAccess, runner: asyncio.Runner, messages: int, session_seed: int
) -> None:
    """What schemathesis makes of the OpenAPI description, valid and not, with and without a token."""
    guarded, token = Guard(service.app, access), access.credentials.token("reader")
    random = Random(session_seed)

    def check(case: Case) -> None:
        sent = case.as_transport_kwargs(base_url="http://localhost")
        built = httpx.Request(
            **{name: sent[name] for name in ("method", "url", "params", "headers", "cookies") if sent.get(name)}
        )
        headers = [*built.headers.raw, *random.choice([[], [(b"authorization", f"Bearer {token}".encode())]])]
        request = Request(built.method, built.url.raw_path.partition(b"?")[0], built.url.query, headers, built.content)
        case.validate_response(runner.run(request.answer(guarded)), checks=CHECKS)

    schema = schemathesis.openapi.from_dict(service.app.openapi())
    for result in schema.get_all_operations():
        operation = result.ok()
        tried = settings(
            max_examples=min(messages // 4, 2_000),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        for mode in schemathesis.GenerationMode:
            strategy = operation.as_strategy(generation_mode=mode)
            with contextlib.suppress(Unsatisfiable):  # without parameters there are no wrong ones
                seed(session_seed)(tried(given(strategy)(check)))()


@pytest.mark.timeout(0)  # as long as so many requests take
def test_malformed_requests(
    service: Service, access: HttpAccess, runner: asyncio.Runner, messages: int, session_seed: int
) -> None:
    before = None if service.replay is None else runner.run(contents(service.replay))
    apps = [service.app, Guard(service.app, access), Guard(service.app, dataclasses.replace(access, credentials=None))]
    token = access.credentials.token("operator")
    everything = {status for operation in service.routes.values() for status in operation["responses"]} | {"415"}

    async def send(method: str, path: str, operation: dict[str, Any], random: Random) -> None:
        for _ in range(messages):
            request = _malformed(method, path, operation, token, Mutator(random))
            documented = set(operation["responses"]) if request.method == method else everything
            _check(request, await request.answer(random.choice(apps)), documented)

    for (method, path), operation in service.routes.items():
        runner.run(send(method, path, operation, Random(f"{session_seed} {path}")))
    if service.replay is not None:
        assert runner.run(contents(service.replay)) == before


@pytest.mark.timeout(0)
def test_malformed_sign_ins(access: HttpAccess, runner: asyncio.Runner, messages: int, session_seed: int) -> None:
    mutator = Mutator(Random(session_seed))
    guarded, code = Guard(create_app("test", _ready), access), (access.code or Path()).read_text()
    wrong = [
        "[" * 1024,
        "{}",
        '{"code": "\\ud800"}',
        '{"code": ["a"]}',
        '{"code": null}',
        json.dumps({"code": code + "x"}),
    ]

    async def send() -> None:
        for _ in range(messages):
            body = mutator.random.choice(
                [mutator.bytes(json.dumps({"code": "x" * 32}).encode()), *map(str.encode, wrong)]
            )
            request = Request("POST", SESSION.encode(), b"", _headers("", mutator), body)
            _check(request, await request.answer(guarded), {"401", "403", "415"})

    runner.run(send())
    assert access.code is not None
    assert access.code.exists(), "nobody has presented it"


def _malformed(method: str, path: str, operation: dict[str, Any], token: str, mutator: Mutator) -> Request:
    """A request that comes near to one of the route."""
    random, query, filled = mutator.random, [], path
    elsewhere = random.random() < 0.2  # perhaps no route at all
    for parameter in operation.get("parameters", ()):
        value = _text(mutator) if random.random() < 0.6 else random.choice(["0", "1", "ready"])
        if parameter["in"] == "path":
            filled = filled.replace(
                "{" + parameter["name"] + "}", random.choice(["e0-train-0", "0", quote(value, safe="%")])
            )
        elif parameter["in"] == "query":
            query += [(parameter["name"], value)] * random.choice([0, 1, 1, 2])
    raw = filled.encode("ascii", "replace")
    sent = urlencode(query).encode()
    return Request(
        random.choice(["HEAD", "POST", "X" * 300, "", method.lower()]) if elsewhere else method,
        _of_target(mutator.bytes(raw)) if elsewhere else raw,
        _of_target(mutator.bytes(sent)) if random.random() < 0.3 else sent,
        _headers(token, mutator),
        mutator.bytes(b"{}"),
    )


def _of_target(data: bytes) -> bytes:
    """What a request's first line can hold: uvicorn refuses other bytes."""
    return bytes(byte for byte in data if 0x21 <= byte <= 0x7E)


def _text(mutator: Mutator) -> str:
    return mutator.text(mutator.random.choice(TEXTS)) if mutator.random.random() < 0.5 else mutator.random.choice(TEXTS)


def _headers(token: str, mutator: Mutator) -> list[tuple[bytes, bytes]]:
    random, expires = mutator.random, mutator.random.choice(["9" * 5000, "1e9", "-1", "٣", "9" * 20])
    values: dict[str, list[str]] = {
        "host": ["localhost"] * 8
        + ["", "[", "[::1]:1", "127.0.0.1:99999999", "localhost:x", "other.example", _text(mutator)],
        "authorization": [f"Bearer {token}"] * 8
        + ["Bearer", "Bearer \x00", "Bearer é", f"Basic {token}", _text(mutator)],
        "content-type": ["application/json"] * 4 + ["application/json; charset=\x00", "text/plain", _text(mutator)],
        "origin": ["http://localhost", "null", "://", _text(mutator)],
        "cookie": [f"headrace={expires}.{'a' * 64}", "headrace=", "headrace", "a=\x00; headrace=1.é", _text(mutator)],
        "accept": ["text/html", "*/*", _text(mutator)],
        "last-event-id": ["0", *TEXTS],
    }
    chosen = [(name, random.choice(of)) for name, of in values.items() if random.random() < 0.7 or name in ("host",)]
    chosen = [(name, value) for name, value in chosen for _ in range(random.choice([1, 1, 1, 1, 2]))]
    return [(name.encode(), value.encode("utf-8")) for name, value in chosen]


def _check(request: Request, response: httpx.Response, documented: Any) -> None:
    said = f"{request!r:.2000}\nanswered {response.status_code} {response.content[:500]!r}"
    status = response.status_code
    assert str(status) in documented or status in (307, 404, 405), f"not documented: {said}"
    assert status < 500, said
    if status >= 400 and request.method != "HEAD" and not response.headers["content-type"].startswith("text/html"):
        assert isinstance(response.json()["detail"], str | list), said
