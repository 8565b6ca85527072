"""What the trainer shows over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headrace.config import Config
from headrace_services.trainer.progress import Progress
from headrace_services.trainer.telemetry import http
from headrace_services.trainer.telemetry.http import build_app
from headrace_services.trainer.telemetry.journal import Journal


async def ready() -> str | None:
    return "loading the model"


def test_the_curves_are_those_of_the_surviving_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    client = TestClient(build_app(config, ready, Progress()))
    assert "No step has been trained yet" in client.get("/").text
    journal = Journal(config.run_folder / "metrics.jsonl")
    for step in range(3):
        journal.append("train", step, "a", {"reward": 0.125})
    journal.append("rewind", 1, "b", {})
    journal.append("train", 1, "b", {"reward": 0.875})
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "Headrace, run adder" in page.text
    assert "2 steps, the last one 1, reward 0.875" in page.text
    with monkeypatch.context() as fault:
        fault.setattr(http, "render_page", None)
        assert client.get("/").text == page.text  # of an unchanged journal it is not drawn again
    assert (client.get("/healthz").status_code, client.get("/readyz").status_code) == (200, 503)


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
        assert "no progress for 701 s; trainer.collective_timeout_s is 700" in answer.json()["reason"]
        progress.mark()
        assert client.get("/healthz").status_code == 200
