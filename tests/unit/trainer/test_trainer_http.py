"""What the trainer shows over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headrace.config import Config
from headrace.run.journal import Journal
from headrace.run.samples import SampleFiles
from headrace_services.trainer.distributed.liveness import Progress
from headrace_services.trainer.telemetry import http
from headrace_services.trainer.telemetry.http import build_app
from tests.support.stored_samples import hostile_episode, hostile_sample, sample, write


async def ready() -> str | None:
    return "loading the model"


def test_the_curves_are_those_of_the_surviving_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    failures = ""
    client = TestClient(build_app(config, ready, Progress(), lambda: failures))
    assert "No step" in client.get("/").text
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
    failures = "2 prompts failed"
    assert failures in client.get("/").text
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


HOSTILE = "\x1b[2J</pre><script>x</script>\u202e&amp;\"'"
SHOWN = "\\x1b[2J&lt;/pre&gt;&lt;script&gt;x&lt;/script&gt;\\u202e&amp;amp;&quot;&#x27;"


def test_samples_are_picked_by_step_order_and_prompt(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    client = TestClient(build_app(config, ready, Progress()))
    assert "step: none yet: 0 groups" in client.get("/samples").text
    logs = config.log_folder
    write(logs, "train", 3, [sample("older")])
    prompt = ({"role": "user", "content": "7+7"},)
    write(logs, "train", 4, [sample("low", 0, 0.0, messages=prompt), sample("high", 0), sample("high", 1, 0.5)])
    write(logs, "val", 2, [sample("held-out", finish_reason="length")])
    SampleFiles(logs, None).write("val_failed", 2, [{"group": "refused", "reason": "no such sum"}])
    newest = client.get("/samples")
    assert "step 4: 2 groups" in newest.text
    assert "high <" in newest.text
    assert "form-action 'self'" in newest.headers["content-security-policy"]
    assert "script" not in newest.headers["content-security-policy"]
    assert newest.text.index("low <") < newest.text.index("high <")
    best = client.get("/samples", params={"of": "train-4", "order": "best"}).text
    assert best.index("high <") < best.index("low <")
    assert "high <" not in client.get("/samples", params={"text": "7+7"}).text
    assert "older <" in client.get("/samples", params={"of": "train-3"}).text
    assert "2 tokens, truncated" in client.get("/samples", params={"of": "val"}).text
    gone = client.get("/samples", params={"of": "train-9"})
    assert gone.status_code == 404
    assert "keep_step_data" in gone.json()["detail"]
    SampleFiles(logs, None).path("train", 3).write_bytes(b"damaged")
    assert client.get("/samples", params={"of": "train-3"}).status_code == 500
    assert '<a href="/samples">' in client.get("/").text


def test_an_episode_is_a_conversation_on_the_page_of_samples(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    client = TestClient(build_app(config, ready, Progress()))
    write(config.log_folder, "train", 1, [hostile_episode(HOSTILE)])
    page = client.get("/samples").text
    heads = [f'<div class="note">call {number}' for number in ("0 (tokens 0-1", "1 continues call 0 (tokens 1-2")]
    assert [page.count(head) for head in heads] == [1, 1]
    said = [part.split("</pre>")[0] for part in page[page.index(heads[0]) :].split("<pre>")[1:]]
    assert said.pop().startswith("<b>artifacts:</b> {&quot;")
    # of each call: what the tool answered; what the program added, and what the policy answered, both with the call of a tool
    of_call = [part.split(": ")[0] for part in said[: len(said) // 2]]
    assert of_call == ["tool", SHOWN, f"{SHOWN} calls", SHOWN, f"{SHOWN} calls"]
    assert [part.split(": ")[0] for part in said] == of_call * 2
    assert not any(part in page for part in ("<script", "\x1b", "\u202e", '&"'))


def test_what_others_wrote_is_no_markup_on_the_page_of_samples(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    client = TestClient(build_app(config, ready, Progress()))
    hostile = hostile_sample(HOSTILE, reward=None, reason=HOSTILE)
    SampleFiles(config.log_folder, None).append_failed([hostile])  # type: ignore[list-item]
    page = client.get("/samples", params={"of": "failed", "text": HOSTILE}).text
    assert page.count(SHOWN) == 11
    assert not any(part in page for part in ("<script", "\x1b", "\u202e", '&"'))
