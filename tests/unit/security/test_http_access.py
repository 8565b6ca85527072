"""Who may call a service over HTTP: tokens, sessions of browsers, names of the service, and writes of other sites."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from typing import Any

import pytest

from headrace.net.credentials import Credentials
from headrace.net.http_access import Guard, HttpAccess, new_code

NOW = 1_800_000_000.0
HOST = {"host": "127.0.0.1:8390"}
JSON = {"content-type": "application/json; charset=utf-8"}
HERE = {"origin": "http://127.0.0.1:8390"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "credentials"
    path.write_text("operator boss\nreader eye\nscorer judge\nenvironment math mine\n")
    return path


@pytest.fixture
def access(file: Path, tmp_path: Path) -> HttpAccess:
    return HttpAccess(
        Credentials(file), frozenset({"replay.internal"}), code=tmp_path / "code", cookie="headrace-adder"
    )


@pytest.fixture
def open_to_all(tmp_path: Path) -> HttpAccess:
    return HttpAccess(None, frozenset({"replay.internal"}))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def status(access: HttpAccess, method: str, path: str, *headers: dict[str, str], now: float = NOW) -> int:
    given = {name: value for some in (HOST, *headers) for name, value in some.items()}
    refusal = access.refusal(method, path, given, now)
    return 200 if refusal is None else refusal.status


def signed_in(access: HttpAccess, folder: Path) -> dict[str, str]:
    code = new_code(folder)
    answer = access.exchange(f'{{"code": "{code}"}}'.encode(), NOW, secure=False)
    assert answer is not None
    return {"cookie": f"other=1; {answer.partition(';')[0]}"}


@pytest.mark.parametrize("path", ["/", "/readyz", "/metrics/", "/openapi.json", "/v1/run", "//healthz", "/healthz/"])
def test_reading_takes_the_token_of_a_reader_or_the_operator(access: HttpAccess, path: str) -> None:
    assert status(access, "GET", path) == 401
    assert status(access, "GET", path, bearer("wrong")) == 401
    assert status(access, "GET", path, {"authorization": "Basic Ym9zcw=="}) == 401
    assert status(access, "GET", path, bearer("eye")) == 200
    assert status(access, "HEAD", path, bearer("boss")) == 200
    assert [status(access, "GET", path, bearer(token)) for token in ("judge", "mine")] == [403, 403]


def test_health_is_open_to_all_and_nothing_but_reading_it(access: HttpAccess) -> None:
    assert status(access, "GET", "/healthz", {"host": "anything"}) == 200
    assert status(access, "POST", "/healthz", JSON) == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_everything_else_takes_the_operators(access: HttpAccess, method: str) -> None:
    assert status(access, method, "/v1/completions", JSON) == 401
    assert status(access, method, "/v1/completions", JSON, bearer("eye")) == 403
    assert status(access, method, "/v1/completions", JSON, bearer("boss")) == 200


def test_a_role_may_post_to_its_open_paths_and_nothing_else(access: HttpAccess, file: Path) -> None:
    file.write_text(file.read_text() + "agents runner\n")
    replica = dataclasses.replace(access, posts={"agents": frozenset({"/sample", "/render"})})
    runner = bearer("runner")
    assert [status(replica, "POST", path, JSON, runner) for path in ("/sample", "/render")] == [200, 200]
    for path in ("/sample/", "/sample/x", "//sample", "/renders", "/v1/completions", "/session/"):
        assert status(replica, "POST", path, JSON, runner) == 403, path
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert status(replica, method, "/sample", JSON, runner) == 403, method
    assert status(replica, "GET", "/metrics", runner) == 403
    assert status(access, "POST", "/sample", JSON, runner) == 403
    assert [status(replica, "POST", "/sample", JSON, bearer(token)) for token in ("boss", "eye", "judge")] == [
        *(200, 403, 403)
    ]
    assert status(replica, "POST", "/sample", JSON, runner, {"origin": "http://evil.example"}) == 403


def test_a_revoked_token_is_refused_at_the_next_request(access: HttpAccess, file: Path) -> None:
    assert status(access, "GET", "/", bearer("eye")) == 200
    file.write_text("operator boss\nreader other\n")
    assert status(access, "GET", "/", bearer("eye")) == 401
    assert status(access, "GET", "/", bearer("other")) == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8390", 200),
        ("[::1]:8390", 200),
        ("10.1.2.3", 200),
        ("localhost:8390", 200),
        ("Replay.Internal:1", 200),
        ("evil.example:8390", 403),
        ("replay.internal.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_foreign_host_name_is_refused_with_credentials_and_without(
    access: HttpAccess, open_to_all: HttpAccess, host: str, expected: int
) -> None:
    assert status(open_to_all, "GET", "/", {"host": host}) == expected
    assert status(access, "GET", "/", bearer("boss"), {"host": host}) == expected


def test_a_write_is_json_from_this_site_even_without_tokens(open_to_all: HttpAccess) -> None:
    assert status(open_to_all, "GET", "/") == 200
    assert status(open_to_all, "POST", "/v1/x", JSON) == 200
    assert status(open_to_all, "POST", "/v1/x", JSON, HERE) == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8390", ""):
        assert status(open_to_all, "POST", "/v1/x", JSON, {"origin": origin}) == 403
    for content in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert status(open_to_all, "POST", "/v1/x", {"content-type": content}) == 415
    assert status(open_to_all, "POST", "/v1/x") == 415


def test_a_code_signs_in_once(access: HttpAccess, tmp_path: Path) -> None:
    code = new_code(tmp_path)
    assert stat.S_IMODE((tmp_path / "code").stat().st_mode) == 0o600
    body = f'{{"code": "{code}"}}'.encode()
    for wrong in (
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"code": 1}',
        b'{"code": ""}',
        b'{"code": "x"}',
        b"\xff",
        b'{"code": "\xff"}',
    ):
        assert access.exchange(wrong, NOW, secure=False) is None
    cookie = access.exchange(body, NOW, secure=True)
    assert cookie is not None
    assert cookie.startswith("headrace-adder=")
    assert cookie.endswith("; HttpOnly; SameSite=Strict; Secure")
    assert access.exchange(body, NOW, secure=True) is None


def test_a_session_reads_and_writes_from_its_own_pages_until_it_ends(access: HttpAccess, tmp_path: Path) -> None:
    session = signed_in(access, tmp_path)
    assert status(access, "GET", "/", session) == 200
    assert status(access, "POST", "/v1/x", session, JSON, HERE) == 200
    assert status(access, "POST", "/v1/x", session, JSON) == 403
    assert status(access, "POST", "/v1/x", session, JSON, {"origin": "http://evil.example"}) == 403
    assert status(access, "POST", "/v1/x", session, HERE, {"content-type": "text/plain"}) == 415
    assert status(access, "GET", "/", session, now=NOW + 8 * 24 * 3600) == 401


def test_a_session_is_of_one_run_and_ends_with_its_token(access: HttpAccess, file: Path, tmp_path: Path) -> None:
    session = signed_in(access, tmp_path)
    name, _, value = session["cookie"].partition("; ")[2].partition("=")
    expires, _, signature = value.partition(".")
    for made_up in ("", ".", expires, f"{expires}.", f"{int(expires) + 1}.{signature}", f"x.{signature}", f"{value}0"):
        assert status(access, "GET", "/", {"cookie": f"{name}={made_up}"}) == 401
    other = HttpAccess(access.credentials, access.hosts, cookie="headrace-other")
    assert status(other, "GET", "/", {"cookie": f"headrace-other={value}"}) == 401
    file.write_text("operator another\n")
    assert status(access, "GET", "/", session) == 401


def test_the_exchange_itself_is_of_this_site(access: HttpAccess) -> None:
    assert status(access, "POST", "/session", JSON, HERE) == 200
    assert status(access, "POST", "/session", JSON, {"origin": "http://evil.example"}) == 403
    assert status(access, "POST", "/session", {"content-type": "text/plain"}) == 415
    assert status(access, "GET", "/session") == 401


async def test_an_answer_that_sets_no_policy_may_load_and_run_nothing(access: HttpAccess) -> None:
    async def answering(_scope: object, _receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<script>x</script>"})

    async def receive() -> dict[str, str]:
        return {"type": "http.request"}

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in (HOST | bearer("eye")).items()]
    await Guard(answering, access)({"type": "http", "method": "GET", "path": "/", "headers": given}, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert sent[0]["status"] == 200
    policy = dict(part.split(maxsplit=1) for part in headers["content-security-policy"].split("; "))
    assert set(policy.values()) == {"'none'"}
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} == policy.keys()
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
