"""What the page's API answers, from the files of runs alone."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi.testclient import TestClient

from headrace.base.errors import ConfigError
from headrace.config.loading import examine
from headrace.page import answers, indexing, overview, server, timeline
from headrace.page.memory import release_memory
from headrace.page.run_files import RunFiles, RunFolder
from headrace.page.server import build_app
from headrace.records.group_event import GroupEvent
from headrace.run import group_files, group_index, start
from headrace.run.group_history import GroupHistory
from headrace.run.history import RUN_LOCK
from headrace.run.journal import JOURNAL, Journal
from headrace.run.sample_files import SampleFiles
from tests.support.page_runs import START, STEPS, recorded_run, with_steps
from tests.support.past_run import past_run
from tests.support.stored_samples import sample
from tests.support.waiting import wait_until

WAITED = "timing/train/wait_for_generation"
HOSTILE = "</script><img src=x>\x1b[2J\u202e\"'&"
# by the path of the description: the addresses to ask
ASKED = {
    "/api/runs": ["/api/runs"],
    "/api/compare": ["/api/compare?run=adder&run=empty"],
    "/api/runs/{run}": ["/api/runs/adder", "/api/runs/adder?window=all", "/api/runs/empty?window=last"],
    "/api/runs/{run}/metrics": ["/api/runs/adder/metrics"],
    "/api/runs/{run}/series": ["/api/runs/adder/series?metric=train:reward&metric=validation:accuracy&metric=train:no"],
    "/api/runs/{run}/timeline": ["/api/runs/adder/timeline", "/api/runs/empty/timeline?first=1764000020&last=1764000030"],
    "/api/runs/{run}/system": ["/api/runs/adder/system"],
    "/api/runs/{run}/logs": ["/api/runs/adder/logs"],
    "/api/runs/{run}/groups": ["/api/runs/adder/groups?sort=-reward", "/api/runs/empty/groups", "/api/runs/adder/groups?row=sums.jsonl:3"],
    "/api/runs/{run}/groups/{group}": [
        *(f"/api/runs/adder/groups/{group}" for group in ("0-0", "0-10", "0-90", "0-91", "validation-0")),
    ],
    "/api/runs/{run}/groups/{group}/trajectories/{index}": [
        "/api/runs/adder/groups/0-10/trajectories/1",
        "/api/runs/adder/groups/validation-0/trajectories/0",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    recorded_run(folder, text=HOSTILE)
    recorded_run(folder, "empty", groups=False)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(build_app(folder)) as client:
        yield client


def ask(client: TestClient, path: str, status: int = 200) -> Any:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


@pytest.fixture(scope="module")
def description(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = ask(client, "/api/openapi.json")
    return found


def test_every_answer_is_as_it_is_described(client: TestClient, description: dict[str, Any]) -> None:
    own = {path for path in description["paths"] if path.startswith("/api/")}
    assert own - ASKED.keys() == {"/api/view", "/api/follow"}
    for path, addresses in ASKED.items():
        schema = description["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        # the description is made of this model
        model = getattr(answers, schema["$ref"].rpartition("/")[2])
        for address in addresses:
            ask(client, address)
            model.model_validate_json(client.get(address).text, strict=True)


def test_every_field_and_parameter_is_described(description: dict[str, Any]) -> None:
    for name, schema in description["components"]["schemas"].items():
        if name not in ("Health", "Problem", "HTTPValidationError", "ValidationError"):
            lacking = [field for field, about in schema["properties"].items() if not about.get("description")]
            assert lacking == [], name
    for path, methods in description["paths"].items():
        for method in methods.values():
            assert method["summary"], path
            lacking = [
                about["name"]
                for about in method.get("parameters", ())
                if about["in"] == "query" and "description" not in about
            ]
            assert lacking == [], path


def test_what_is_long_is_compressed_for_those_who_take_it(client: TestClient) -> None:
    for path, encoded in {"/static/vendor/uPlot.js": "gzip", "/api/openapi.json": "gzip", "/readyz": None}.items():
        whole = client.get(path, headers={"accept-encoding": "identity"})
        answer = client.get(path, headers={"accept-encoding": "gzip"})
        assert (whole.headers.get("content-encoding"), answer.headers.get("content-encoding")) == (None, encoded), path
        assert answer.content == whole.content
        if encoded:
            assert int(answer.headers.get("content-length", 0)) < len(whole.content) / 2


def test_a_run_is_described_by_its_files(client: TestClient) -> None:
    run = {each["id"]: each for each in ask(client, "/api/runs")["runs"]}["adder"]
    assert (run["state"], run["step"], run["max_steps"], run["started"]) == ("finished", STEPS, 10, START)
    assert run["best"] == {"metric": "val:accuracy", "step": STEPS, "value": 0.5}
    assert run["environments"] == ["math"]
    overview = ask(client, "/api/runs/adder?window=all")
    parts = {part["name"]: part["share"] for part in overview["time"]["parts"]}
    assert parts["waiting for generation"] == pytest.approx(0.6)
    assert sum(parts.values()) == pytest.approx(1)
    counts = overview["flow"]["counts"]
    assert {state: count for state, count in counts.items() if count} == {
        "trained": 12,
        "filtered": 1,
        "failed": 1,
        "evaluated": 1,
    }
    assert counts["unused"] == 0, "that there is none is known"
    assert any("generation" in finding["title"] for finding in overview["findings"])
    assert ask(client, "/api/runs/empty")["flow"]["counts"] == {}


def test_curves_have_means_and_extremes_of_their_buckets(client: TestClient) -> None:
    curve = ask(client, "/api/runs/adder/series?metric=train:reward&points=3")["series"][0]
    assert curve["steps"] == [1, 3, 5]
    assert curve["values"] == pytest.approx([0.05, 0.25, 0.45])
    assert (curve["low"], curve["high"]) == ([0.0, 0.2, 0.4], [0.1, 0.3, 0.5])
    odd = ask(client, "/api/runs/adder/series?metric=train:not/a known one&first=2&last=3")["series"][0]
    assert (odd["steps"], odd["values"], odd["missing"]) == ([2, 3], [None, 1.0], 1)
    named = ask(client, "/api/runs/adder/metrics")
    assert {mark["kind"] for mark in named["marks"]} == {"build", "rewind"}
    assert named["steps"] == [0, STEPS]
    assert ask(client, "/api/runs/adder/series?metric=reward", 404)["detail"]
    assert "points" in ask(client, "/api/runs/adder/series?metric=train:reward&points=0", 400)["detail"]


def test_groups_are_found_in_each_state(client: TestClient) -> None:
    found = ask(client, "/api/runs/adder/groups?state=filtered&state=failed")
    assert [group["id"] for group in found["groups"]] == ["0-90", "0-91"]
    assert found["states"] == {"trained": 12, "filtered": 1, "failed": 1, "evaluated": 1}
    assert ask(client, "/api/runs/adder/groups?row=sums.jsonl:3")["groups"][0]["source"] == {
        "file": "data/sums.jsonl",
        "line": 3,
    }
    assert "row" in ask(client, "/api/runs/adder/groups?row=sums", 400)["detail"]
    assert "sort" in ask(client, "/api/runs/adder/groups?sort=colour", 400)["detail"]
    assert ask(client, "/api/runs/empty/groups")["total"] == 0


def test_a_group_tells_its_whole_story(client: TestClient) -> None:
    group = ask(client, "/api/runs/adder/groups/0-10")
    happened = [event["what"] for event in group["story"]]
    assert happened == [
        "enqueued",
        "leased",
        *["pushed"] * 3,
        "scoring",
        *["scored"] * 3,
        "ready",
        "reserved",
        "trained",
    ]
    assert (group["previous"], group["next"], group["expected"]) == ("0-9", "0-11", "2")
    first = group["trajectories"][0]
    assert (first["kept"], first["content"], first["advantage"], first["versions"]) == (
        True,
        HOSTILE,
        -1.0,
        [[5, 0, 2]],
    )
    older = ask(client, "/api/runs/adder/groups/0-0")["trajectories"][0]
    assert (older["kept"], older["content"], older["reward"]) == (False, None, 0.0)
    assert ask(client, "/api/runs/adder/groups/0-91")["reason"].startswith("the environment says")
    assert "0-999" in ask(client, "/api/runs/adder/groups/0-999", 404)["detail"]


def test_a_failed_group_shows_what_its_environment_raised(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path)
    failed = sample(
        "0-91", 2, None, status="FAILED", message="it raised", traceback="Traceback: line 7", reason="it raised"
    )
    SampleFiles(folder / "logs", None).append_failed([msgspec.to_builtins(failed)])
    found = ask(TestClient(build_app(tmp_path)), "/api/runs/adder/groups/0-91")["trajectories"]
    assert [(each["index"], each["status"], each["traceback"]) for each in found if each["kept"]] == [
        (2, "FAILED", "Traceback: line 7")
    ]


def test_the_best_checkpoint_is_that_of_the_best_version(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path)
    for version, accuracy in ((3, 0.9), (STEPS, 0.5)):
        checkpoint = folder / "checkpoints" / f"step_{version}"
        checkpoint.mkdir()
        (checkpoint / "state.json").write_text(json.dumps({"timeline": "a", "metrics": {"val:accuracy": accuracy}}))
    client = TestClient(build_app(tmp_path))
    assert [each["best"] for each in ask(client, "/api/runs/adder")["checkpoints"]] == [False, True], (
        "only 6 was validated"
    )
    Journal(folder / JOURNAL).append("validation", 0, "a", {"accuracy": 0.95})
    assert [each["best"] for each in ask(client, "/api/runs/adder")["checkpoints"]] == [False, False], (
        "the initial model"
    )


@pytest.mark.parametrize("name", ["val:accuracy", "null"])
def test_checkpoints_have_the_metric_that_chooses_the_best(tmp_path: Path, name: str) -> None:
    folder = recorded_run(tmp_path)
    with (folder / "config.yaml").open("a") as file:
        file.write(f"checkpointing: {{metric_name: {name}}}\n")
    (folder / "checkpoints" / f"step_{STEPS}").mkdir()
    state = {"timeline": "a", "metrics": {"val:accuracy": 0.5}}
    (folder / "checkpoints" / f"step_{STEPS}" / "state.json").write_text(json.dumps(state))
    (checkpoint,) = ask(TestClient(build_app(tmp_path)), "/api/runs/adder")["checkpoints"]
    assert (checkpoint["best"], checkpoint["metric"]) == (True, 0.5)


def test_a_trajectory_is_read_token_by_token(client: TestClient) -> None:
    found = ask(client, "/api/runs/adder/groups/0-10/trajectories/1?first=1&count=1")
    assert (found["total"], found["first"], [token["id"] for token in found["tokens"]]) == (2, 1, [6])
    assert found["columns"]["advantages"] == [None]
    gone = ask(client, "/api/runs/adder/groups/0-0")["unkept"]
    assert "moved, not copied" in gone
    assert gone in ask(client, "/api/runs/adder/groups/0-0/trajectories/1", 404)["detail"]
    assert ask(client, "/api/runs/adder/groups/0-10")["unkept"] is None


def test_lanes_are_those_of_who_worked(client: TestClient) -> None:
    found = ask(client, "/api/runs/adder/timeline")
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    assert found["running"] is False
    assert {name: lane["kind"] for name, lane in lanes.items()} == {
        "trainer": "trainer",
        "rollout-1": "replica",
        "math": "environment",
    }
    generation = lanes["rollout-1"]["bars"][0]
    assert (generation["start"] - START, generation["end"] - START, generation["group"]) == (1.0, 2.0, "0-0")
    scoring = lanes["math"]["bars"][0]
    assert (scoring["start"] - START, scoring["end"] - START, scoring["index"]) == (2.0, 3.0, 0)
    assert sum(bar["end"] - bar["start"] for bar in lanes["trainer"]["bars"] if bar["step"] == 1) == pytest.approx(10)
    cut = ask(client, f"/api/runs/adder/timeline?first={START + 20}&last={START + 29}")["lanes"]
    assert {bar["step"] for lane in cut if lane["kind"] == "trainer" for bar in lane["bars"]} == {1, 2}


@pytest.mark.parametrize("twice", [(0, 30), (10, 30), (50, None)])
def test_events_that_stand_in_two_files_are_drawn_once(tmp_path: Path, twice: tuple[int, int | None]) -> None:
    """A trainer that is killed between writing a file and clearing the stream writes its events again, and more."""
    groups = recorded_run(tmp_path) / group_files.FOLDER
    with TestClient(build_app(tmp_path)) as client:
        once = ask(client, "/api/runs/adder/timeline")["lanes"]
        (file,) = group_files.list_files(groups)
        whole = group_files.read_file(file.path)
        group_files.write_file(groups, whole.slice(*twice).to_pydict())
        if twice[1] is None:
            file.path.unlink()
            group_files.write_file(groups, whole.slice(0, 80).to_pydict())
        assert len(group_files.list_files(groups)) == 2
        assert ask(client, "/api/runs/adder/timeline")["lanes"] == once


def test_a_timeline_is_made_anew_when_something_has_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = recorded_run(tmp_path) / group_files.FOLDER
    made: list[int] = []
    show = timeline.show
    monkeypatch.setattr(timeline, "show", lambda *given: made.append(1) or show(*given))  # type: ignore[func-returns-value]
    with TestClient(build_app(tmp_path)) as client:
        first = ask(client, "/api/runs/adder/timeline")
        lanes = len(made)
        assert ask(client, "/api/runs/adder/timeline") == first
        assert len(made) == lanes, "it was kept"
        (file,) = group_files.list_files(groups)
        late = group_files.read_file(file.path).slice(0, 3).to_pydict()
        moments = [time + timedelta(hours=1) for time in late["time"]]
        ids = [f"{int(moment.timestamp() * 1000)}-{number}" for number, moment in enumerate(moments)]
        group_files.write_file(groups, late | {"id": ids, "time": moments})
        assert ask(client, "/api/runs/adder/timeline")["last"] > first["last"]


def test_memory_of_a_long_answer_is_given_back(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []

    def release() -> None:
        release_memory()
        given_back.append(True)

    monkeypatch.setattr(server, "release_memory", release)
    monkeypatch.setattr(server, "_LONG_S", 60.0)
    ask(client, "/api/runs/adder/timeline")
    assert not given_back
    monkeypatch.setattr(server, "_LONG_S", -1.0)
    ask(client, "/api/runs/adder/timeline")
    ask(client, "/api/runs/adder/groups/nowhere", 404)
    assert given_back == [True, True]


def test_tables_are_kept_in_memory_that_can_be_given_back() -> None:
    code = """
from headrace.page.memory import keep_little_memory, release_memory
keep_little_memory()
import pyarrow
release_memory()
print(pyarrow.default_memory_pool().backend_name)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "system\n"


async def test_a_run_that_is_read_for_long_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the index of a million groups is, which takes minutes once."""
    for name in ("slow", "quick"):
        recorded_run(tmp_path, name)
    reading, done = threading.Event(), threading.Event()

    def read_for_long(run: RunFiles, window: str) -> dict[str, str]:
        if run.name == "slow":
            reading.set()
            assert done.wait(60)
        return {"name": run.name}

    monkeypatch.setattr(overview, "describe", read_for_long)

    transport = httpx.ASGITransport(build_app(tmp_path))
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
        waiting = [asyncio.create_task(client.get("/api/runs/slow")) for _ in range(5)]
        assert await asyncio.to_thread(reading.wait, 60)
        try:
            async with asyncio.timeout(30):
                assert (await client.get("/api/runs/quick")).json() == {"name": "quick"}
            assert not any(task.done() for task in waiting)
        finally:
            done.set()
        assert [(await task).json() for task in waiting] == [{"name": "slow"}] * 5


def test_a_run_is_shown_while_its_groups_are_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_run(tmp_path)
    monkeypatch.setattr(indexing, "WAITED_FOR", 0)
    monkeypatch.setattr(group_index, "_AT_ONCE", 2)
    known, has_begun, may_end = group_index.iterate_events, threading.Event(), threading.Event()

    def slow(path: Path, fields: list[str], first_ms: int) -> Iterator[GroupEvent]:
        for number, event in enumerate(known(path, fields, first_ms)):
            if number == 60:
                has_begun.set()
                assert may_end.wait(60)
            yield event

    monkeypatch.setattr(group_index, "iterate_events", slow)
    with TestClient(build_app(tmp_path)) as client:
        try:
            ask(client, "/api/runs/adder/groups")
            assert has_begun.wait(60)
            found = ask(client, "/api/runs/adder/groups?text=1%2B1")
            assert 0 < found["total"] < 15
            assert [problem for problem in found["problems"] if "indexed" in problem and "%" in problem]
            assert [problem for problem in ask(client, "/api/runs/adder")["problems"] if "indexed" in problem]
            assert "indexed" in ask(client, "/api/runs/adder/groups/validation-0", 404)["detail"]
            assert ask(client, "/api/runs/adder/groups/0-0")["state"] == "trained"
        finally:
            may_end.set()
        wait_until(lambda: not ask(client, "/api/runs/adder/groups")["problems"])
        assert ask(client, "/api/runs/adder/groups")["total"] == 15


def test_an_index_that_cant_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_run(tmp_path)
    monkeypatch.setattr(indexing, "WAITED_FOR", 0)

    def fail(history: GroupHistory) -> None:
        raise ConfigError("the disk is full")

    monkeypatch.setattr(GroupHistory, "refresh", fail)
    with TestClient(build_app(tmp_path)) as client:
        wait_until(lambda: client.get("/api/runs/adder/groups").status_code == 500)
        said = []
        wait_until(lambda: said.append(client.get("/api/runs/adder/groups").json()) or "disk is full" in str(said[-1]))  # type: ignore[func-returns-value]


def test_logs_are_merged_by_time(client: TestClient) -> None:
    lines = ask(client, "/api/runs/adder/logs")["lines"]
    assert [(line["service"], line["level"]) for line in lines] == [
        ("trainer", "INFO"),
        ("replay", "WARNING"),
        ("trainer", "ERROR"),
    ]
    assert lines[-1]["text"].endswith("Traceback: of it"), "a traceback belongs to its record"
    assert HOSTILE in lines[-1]["text"]
    newest = ask(client, "/api/runs/adder/logs?limit=1")
    assert (len(newest["lines"]), newest["more"]) == (1, True)
    before = newest["lines"][0]["time"]
    assert [line["service"] for line in ask(client, f"/api/runs/adder/logs?limit=1&before={before}")["lines"]] == [
        "replay"
    ]
    assert len(ask(client, "/api/runs/adder/logs?service=trainer&level=ERROR")["lines"]) == 1
    assert ask(client, "/api/runs/adder/logs?text=BETWEEN")["lines"][0]["service"] == "replay"


def test_runs_are_compared_by_their_keys(tmp_path: Path) -> None:
    past_run(tmp_path, "one", 2, replay="{redis_url: 'redis://me:secret@10.0.0.1:6379/0'}")
    past_run(tmp_path, "two", 2, grpo="{seed: 7}")
    client = TestClient(build_app(tmp_path))
    found = {each["key"]: each["values"] for each in ask(client, "/api/compare?run=one&run=two")["differences"]}
    assert found["grpo.seed"] == [42, 7]
    assert found["replay.redis_url"] == ["redis://me:***@10.0.0.1:6379/0", None]
    assert "run.id" not in found
    assert "secret" not in client.get("/api/runs/one/system").text


def test_a_live_run_is_read_as_it_grows(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path, state="running")
    client = TestClient(build_app(tmp_path))
    assert ask(client, "/api/runs/adder")["run"]["state"] == "killed", "no process holds its lock"
    lock = os.open(folder / RUN_LOCK, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        Journal(folder / JOURNAL).append("train", STEPS, "a", {"reward": 9.0, "timing/train/total_step_time": 4.0})
        run = ask(client, "/api/runs/adder")["run"]
        assert (run["state"], run["step"]) == ("running", STEPS + 1)
        assert run["eta_s"] == pytest.approx(3 * 10.0)
        with (folder / JOURNAL).open("a") as file:
            file.write('{"kind": "train", "step": 7')
        assert ask(client, "/api/runs/adder")["run"]["step"] == STEPS + 1, "a line is being written"
    finally:
        os.close(lock)


def test_a_run_tells_how_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded_run(tmp_path)
    client = TestClient(build_app(tmp_path))
    assert ask(client, "/api/runs/adder/system")["versions"] == {}, "an older build started it"
    file = tmp_path / "run.yaml"
    file.write_text("run: {id: adder}\ngrpo: {seed: 7}\n")
    monkeypatch.setenv("HEADRACE_GRPO__NUM_PROMPTS_PER_STEP", "2")
    password = "replay.redis_url=redis://me:secret@10.0.0.1:6379/0"
    monkeypatch.setattr(sys, "argv", ["/bin/headrace", "up", "run.yaml", "grpo.max_num_steps=10", password])
    examined = examine(file, ["grpo.max_num_steps=10", password])
    start.record(folder, examined.config, examined.origin)
    answer = client.get("/api/runs/adder/system")
    found = answer.json()
    answers.System.model_validate_json(answer.text, strict=True)
    assert found["command"].startswith("headrace up run.yaml grpo.max_num_steps=10")
    assert "secret" not in (folder / start.START).read_text() + answer.text
    assert found["versions"]["python"] == platform.python_version()
    keys = {each["key"]: (each["origin"], each["file"]) for each in found["config"]}
    assert keys["grpo.max_num_steps"] == ("override", "command line")
    assert keys["grpo.num_prompts_per_step"] == ("environment", "environment")
    assert keys["grpo.num_generations_per_prompt"][0] == "default"
    assert keys["run.id"] == ("file", f"{file}:1")
    (folder / start.START).write_text("{")
    assert start.START in ask(client, "/api/runs/adder/system", 500)["detail"]


def test_a_checkout_is_named_by_its_commit(tmp_path: Path) -> None:
    assert start.find_checkout(tmp_path) is None
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    found = start.find_checkout(Path(__file__).parent)
    assert (found.commit if found else "") == done.stdout.strip()


def test_texts_stay_data(client: TestClient) -> None:
    answer = client.get("/api/runs/adder/groups/0-10/trajectories/1")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["metadata"] == {"judge": HOSTILE}
    assert answers.encode({"a": "\ud800", "b": float("nan")}) == b'{"a":"\\\\ud800","b":null}'


def test_the_first_page_is_at_every_view(client: TestClient) -> None:
    for view in ("/", "/runs/adder", "/runs/adder/groups/0-1/2", "/runs/adder/timeline", "/compare?run=a&run=b"):
        answer = client.get(view)
        assert answer.headers["content-type"].startswith("text/html"), view
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert client.get("/static/index.html").status_code == 200
    assert client.get("/static/..%2fserver.py").status_code == 404
    assert client.get("/static/../server.py").status_code == 404


def test_the_journals_that_are_kept_are_bounded(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        recorded_run(tmp_path, name)
    folder = RunFolder(tmp_path)
    for name in folder.names():
        assert folder.find(name).journal.lines
    cells = folder.find("one").cells
    folder.bound_memory(most=cells)
    assert [folder.find(name).cells > 0 for name in ("one", "three", "two")] == [True, False, False]


@pytest.mark.parametrize("window", ["last", "10", "all"])
def test_the_time_is_of_the_steps_of_which_findings_tell(tmp_path: Path, window: str) -> None:
    """Replicas load their models in the first step after a start."""
    start = {"efficiency/init/total_s": 90.0, "timing/train/total_step_time": 100.0, WAITED: 99.0}
    with_steps(recorded_run(tmp_path), [start, {WAITED: 4.0}, start, {WAITED: 4.0}])
    with TestClient(build_app(tmp_path)) as client:
        overview = ask(client, f"/api/runs/adder?window={window}")
    parts = {part["name"]: part["share"] for part in overview["time"]["parts"]}
    (found,) = [each["share"] for each in overview["findings"] if "generation" in each["title"]]
    assert parts["waiting for generation"] == pytest.approx(0.4) == found


def test_the_time_of_a_run_with_one_step_is_of_that_step(tmp_path: Path) -> None:
    with_steps(recorded_run(tmp_path), [{"efficiency/init/total_s": 9.0, WAITED: 5.0}])
    with TestClient(build_app(tmp_path)) as client:
        parts = {part["name"]: part["share"] for part in ask(client, "/api/runs/adder")["time"]["parts"]}
    assert parts["waiting for generation"] == pytest.approx(0.5)
