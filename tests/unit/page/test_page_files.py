"""What the page makes of folders that hold anything: a run that can't be read says so, and the others are shown."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headrace.page import system
from headrace.page.run_files import RunFolder, RunJournal
from headrace.page.server import build_app
from headrace.page.system import read_logs
from headrace.run.checkpoints import DAMAGE
from headrace.run.history import RECORD
from headrace.run.journal import JOURNAL, Journal, read_journal, surviving
from tests.support.page_runs import recorded_run
from tests.support.past_run import past_run


def link_out(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00{" * 10 + b"\n")


def deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "\n")


HARM = [(name, harm) for name in ("config.yaml", RECORD, JOURNAL) for harm in (link_out, pipe, folder_instead, garbage)]


# to find YAML too deep takes a second of a core: its reader has tests of its own
@pytest.mark.parametrize(("name", "harm"), [*HARM, (RECORD, deep), (JOURNAL, deep)])
def test_a_damaged_run_hides_no_other(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    recorded_run(tmp_path, "whole")
    harm(recorded_run(tmp_path, "damaged") / name)
    client = TestClient(build_app(tmp_path), raise_server_exceptions=False)
    rows = {row["id"]: row for row in client.get("/api/runs").json()["runs"]}
    assert rows["whole"]["error"] is None
    assert name in rows["damaged"]["error"]
    answer = client.get("/api/runs/damaged")
    assert answer.status_code == 500
    assert name in answer.json()["detail"]
    assert client.get("/api/runs/whole").status_code == 200


@pytest.mark.parametrize("name", ["config.yaml", RECORD])
def test_files_of_absurd_size_are_not_read(tmp_path: Path, name: str) -> None:
    huge(recorded_run(tmp_path) / name)
    detail = TestClient(build_app(tmp_path)).get("/api/runs/adder").json()["detail"]
    assert name in detail
    assert "bytes" in detail


@pytest.mark.parametrize("part", ["logs/train_data_step5.jsonl.gz", "checkpoints/lineage/step_5-a.jsonl.gz"])
def test_a_damaged_part_leaves_the_rest_of_a_group(tmp_path: Path, part: str) -> None:
    path = recorded_run(tmp_path) / part
    path.write_bytes(path.read_bytes()[:60])
    found = TestClient(build_app(tmp_path)).get("/api/runs/adder/groups/0-10").json()
    assert part.rpartition("/")[2] in found["problems"][0]
    assert len(found["trajectories"]) == 3


def test_a_damaged_checkpoint_is_told_with_its_reason(tmp_path: Path) -> None:
    aside = recorded_run(tmp_path) / "checkpoints" / "damaged-step_4-a"
    aside.mkdir()
    (aside / DAMAGE).write_text("model.safetensors is cut off")
    client = TestClient(build_app(tmp_path))
    (line,) = client.get("/api/runs/adder").json()["problems"]
    assert str(aside) in line
    assert "model.safetensors is cut off" in line
    link_out(aside / DAMAGE)
    (line,) = client.get("/api/runs/adder").json()["problems"]
    assert "is a link" in line


@pytest.mark.parametrize(
    "key", ["replay: {redis_url: '${oc.env:NOT_HERE}'}", "run: {id: a, max_failed_share: '${oc.env:NOT_HERE}'}"]
)
def test_a_copied_run_is_read_without_its_variables(tmp_path: Path, key: str) -> None:
    folder = past_run(tmp_path, "a", 3)
    saved = folder / "config.yaml"
    kept = [line for line in saved.read_text().splitlines() if not line.startswith(key.partition(":")[0])]
    saved.write_text("\n".join([*kept, key, ""]))
    client = TestClient(build_app(tmp_path))
    assert client.get("/api/runs").json()["runs"][0]["error"] is None
    shown = {each["key"]: each["value"] for each in client.get("/api/runs/a/system").json()["config"]}
    assert shown["replay.redis_url"] in (None, "${oc.env:NOT_HERE}")


def test_no_path_leads_out_of_the_folder(tmp_path: Path) -> None:
    recorded_run(tmp_path / "else", "where")
    runs = tmp_path / "runs"
    recorded_run(runs)
    (runs / "link").symlink_to(tmp_path / "else" / "where")
    client = TestClient(build_app(runs))
    for name in ("..", "..%2Felse%2Fwhere", "%2Fetc", ".", ".hidden", "a%00b", "link", "%5C..", "x" * 300):
        assert client.get(f"/api/runs/{name}/system").status_code == 404, name
    rows = {row["id"]: row["error"] for row in client.get("/api/runs").json()["runs"]}
    assert rows["adder"] is None
    assert "leads out" in rows["link"]
    (runs / "adder" / "logs" / "stolen.log").symlink_to("/etc/passwd")
    assert "stolen.log" in client.get("/api/runs/adder/logs").json()["detail"]


def test_a_run_that_is_deleted_meanwhile_is_gone(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path)
    client = TestClient(build_app(tmp_path))
    assert client.get("/api/runs/adder").status_code == 200
    shutil.rmtree(folder)
    assert client.get("/api/runs/adder").status_code == 404
    assert client.get("/api/runs").json()["runs"] == []
    tmp_path.rmdir()
    assert client.get("/api/runs").json()["runs"] == []
    assert client.get("/readyz").status_code == 503


def test_a_run_replaced_by_another_is_read_anew(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path)
    client = TestClient(build_app(tmp_path))
    assert client.get("/api/runs/adder").json()["run"]["step"] == 6
    (folder / JOURNAL).unlink()
    journal = Journal(folder / JOURNAL)
    for step in range(30):  # more bytes than were read of the other one
        journal.append("train", step, "b", {"reward": 1.0})
    assert client.get("/api/runs/adder").json()["newest"]["train"]["metrics"] == {"reward": 1.0}


def test_a_journal_read_as_it_grows_is_the_one_read_whole(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    journal = Journal(path, segment_bytes=300)
    read = RunJournal(path)
    steps = [0, 1, 2, 3, (2, "rewind"), 2, 3, 4, (1, "rewind"), 1]
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            journal.append("rewind", step[0], f"after {number}", {})
            timeline = f"after {number}"
        else:
            timeline = "first" if number < 4 else timeline
            journal.append("train", step, timeline, {"reward": number / 10, **({"odd": 1.0} if step % 2 else {})})
        read.refresh()
        whole = surviving(read_journal(path))
        assert [(line.step, dict(line.metrics.items())) for line in read.lines] == [
            (line.step, line.metrics) for line in whole
        ]
        values, present = read.columns["train"].values("odd")
        assert [value for value, there in zip(values, present, strict=True) if there] == [1.0] * sum(
            line.step % 2 for line in whole
        )
    assert len(list(tmp_path.glob("metrics.0*.jsonl"))) > 1, "over several files"


def test_a_log_is_read_from_its_end_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded_run(tmp_path)
    monkeypatch.setattr(system, "_BLOCK", 7)
    (folder / "logs" / "trainer.log").write_text(
        "".join(f"2026-11-26 12:00:{second:02},000 INFO x: line {second} \u20ac\n" for second in range(20))
    )
    run = RunFolder(tmp_path).find("adder")
    found = read_logs(run, service="trainer", limit=50)
    assert [line["text"] for line in found["lines"]] == [f"x: line {second} \u20ac" for second in range(20)]
    monkeypatch.setattr(system, "MOST_BYTES", 100)
    assert 0 < len(read_logs(run, service="trainer", limit=50)["lines"]) < 5
