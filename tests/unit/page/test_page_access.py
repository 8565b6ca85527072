"""Who may ask the page what, and with which headers it answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headrace.net.credentials import Credentials
from headrace.net.http_access import Guard, HttpAccess, new_code
from headrace.page.follow import Followers, NoRoom, NoView
from headrace.page.server import build_app
from tests.support.page_runs import recorded_run

HERE = {"origin": "http://127.0.0.1"}


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    recorded_run(tmp_path)
    tokens = tmp_path / "credentials"
    tokens.write_text("operator boss\nreader eye\n")
    access = HttpAccess(Credentials(tokens), frozenset(), code=tmp_path / "code")
    return TestClient(Guard(build_app(tmp_path), access), base_url="http://127.0.0.1")


def addresses(client: TestClient) -> list[str]:
    app = build_app(Path())
    return [getattr(route, "path", "").replace("{run}", "adder") for route in app.routes]


def test_strangers_get_nothing_but_the_sign_in(client: TestClient) -> None:
    paths = addresses(client)
    assert {"/api/runs", "/api/follow", "/", "/static", "/api/openapi.json", "/metrics"} <= set(paths)
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == (200 if path == "/healthz" else 401), path
        assert "adder" not in answer.text
    assert client.post("/api/view", json={"path": "/"}).status_code == 401
    page = client.get("/runs/adder/metrics", headers={"accept": "text/html"})
    assert (page.status_code, "sha256-" in page.headers["content-security-policy"]) == (401, True)


def test_a_browser_signs_in_once_with_the_code(client: TestClient, tmp_path: Path) -> None:
    code = new_code(tmp_path)
    assert client.post("/session", json={"code": "wrong"}).status_code == 401
    assert client.post("/session", json={"code": code}).status_code == 204
    assert client.get("/api/runs").json()["runs"][0]["id"] == "adder"
    assert client.post("/session", json={"code": code}).status_code == 401, "it works once"


def test_only_the_operator_and_own_pages_open_views(client: TestClient, tmp_path: Path) -> None:
    view = {"path": "/runs/adder"}
    assert client.post("/api/view", json=view, headers={"authorization": "Bearer eye"}).status_code == 403
    assert client.post("/api/view", json=view, headers={"authorization": "Bearer boss"}).json() == {"pages": 0}
    client.post("/session", json={"code": new_code(tmp_path)})
    assert client.post("/api/view", json=view).status_code == 403, "a session says where it is"
    assert client.post("/api/view", json=view, headers={"origin": "http://elsewhere"}).status_code == 403
    assert client.post("/api/view", json=view, headers=HERE).status_code == 200
    assert client.post("/api/view", content="path=/", headers=HERE).status_code == 415
    assert client.post("/api/view", json={"path": "//elsewhere"}, headers=HERE).status_code == 400
    assert client.get("/api/runs", headers={"host": "rebound.example"}).status_code == 403


def test_nothing_is_written_by_reading(client: TestClient, tmp_path: Path) -> None:
    for method in ("PUT", "DELETE", "PATCH", "POST"):
        answer = client.request(method, "/api/runs/adder", headers={"authorization": "Bearer boss"}, json={})
        assert answer.status_code == 405, method


def test_every_answer_has_the_strict_headers(client: TestClient) -> None:
    for path in ("/api/runs", "/runs/adder", "/static/index.html", "/api/runs/none"):
        headers = client.get(path, headers={"authorization": "Bearer eye"}).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'"), path
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] in ("no-store", "no-cache")


async def test_a_view_is_opened_in_each_page_that_follows() -> None:
    followers = Followers(most=2, silent_s=0.01)
    one, two = followers.follow(), followers.follow()
    assert await anext(one) == await anext(two) == ": following\n\n"
    with pytest.raises(NoRoom):
        followers.check_room()
    assert followers.show("/runs/adder?x=1") == 2
    told = [await anext(page) for page in (one, two)]
    assert told == ['event: view\ndata: {"path": "/runs/adder?x=1"}\n\n'] * 2
    assert await asyncio.wait_for(anext(one), 10) == ": nothing new\n\n"
    await one.aclose()
    assert followers.show("/") == 1


@pytest.mark.parametrize("path", ["", "runs", "//x", "/\\x", "/a\nb", "/" + "x" * 3000, "https://x", "/\u202e"])
def test_only_addresses_of_views_are_opened(path: str) -> None:
    with pytest.raises(NoView):
        Followers().show(path)
