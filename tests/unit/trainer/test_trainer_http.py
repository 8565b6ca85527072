"""The trainer's HTTP port: its health and its metrics."""

from __future__ import annotations

from pathlib import Path

from fastapi.testclient import TestClient

from headrace.config import Config
from headrace_services.trainer.distributed.liveness import Progress
from headrace_services.trainer.telemetry.http import build_app


async def ready() -> str | None:
    return "loading the model"


def test_a_trainer_whose_work_stands_still_is_not_healthy(tmp_path: Path) -> None:
    settings = {"run": {"id": "adder", "dir": str(tmp_path)}, "trainer": {"collective_timeout_s": 700}}
    now = 0.0
    progress = Progress(lambda: now)
    client = TestClient(build_app(Config.model_validate(settings), ready, progress))
    now = 10_000
    assert client.get("/healthz").status_code == 200, "it has nothing to do"
    with progress.working():
        now += 700
        assert client.get("/healthz").status_code == 200
        now += 1
        answer = client.get("/healthz")
        assert (answer.status_code, answer.json()["status"]) == (503, "stuck")
        assert "trainer.collective_timeout_s is 700" in answer.json()["reason"]
        progress.mark()
        assert client.get("/healthz").status_code == 200


def test_metrics_are_answered_where_they_are_asked_for(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    client = TestClient(build_app(config, ready, Progress()), follow_redirects=False)
    for path in ("/metrics", "/metrics/"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.text.startswith("# HELP")
    assert client.get("/metrics", headers={"accept": "application/openmetrics-text"}).text.endswith("# EOF\n")
