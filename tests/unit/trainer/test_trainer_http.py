"""What the trainer shows over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headrace.config import Config
from headrace_services.trainer.telemetry import http
from headrace_services.trainer.telemetry.http import build_app
from headrace_services.trainer.telemetry.journal import Journal


async def ready() -> str | None:
    return "loading the model"


def test_the_curves_are_those_of_the_surviving_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    client = TestClient(build_app(config, ready))
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
