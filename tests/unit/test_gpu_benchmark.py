"""The benchmark of a GPU: a part that fails leaves the others alone, and nothing that was not measured is a figure."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import channel, expected, step
from benchmarks.gpu.__main__ import NEEDED, PLANS, run_part
from benchmarks.gpu.drift import drift
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.report import PartReport, markdown
from benchmarks.gpu.rows import NEEDS_CUDA, Expected, Row, Rows
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.stage import Stage
from headrace_services.trainer.distributed import sharding
from headrace_services.trainer.network import backbone
from tests.support.processes import gone

ROOT = Path(__file__).parents[2]
TINY = dataclasses.replace(SIZES["tiny"], deadline_s=0.5, groups=1)


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path / "rows.jsonl")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def ended(tmp_path: Path, rows: Rows, script: str, limit_s: float = 60.0) -> str | None:
    return run_part([sys.executable, "-c", script], tmp_path / "log", limit_s, {"GIVEN": "7"}, rows)


# appends a row
SAYS = (
    "import os, sys\n"
    "from pathlib import Path\n"
    "from benchmarks.gpu.rows import Rows\n"
    "Rows(Path({path!r})).add('a', os.environ['GIVEN'])\n"
)


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("", None),
        ("import no_such_package", "not run: No module named 'no_such_package'"),
        ("raise MemoryError('out of memory')", "failed: exit code 1: MemoryError: out of memory"),
        ("os.abort()", "failed: signal SIGABRT: without a word"),
    ],
    ids=["ends", "lacks a package", "raises", "dies"],
)
def test_what_a_part_found_before_it_failed_stays(then: str, problem: str | None, tmp_path: Path, rows: Rows) -> None:
    assert ended(tmp_path, rows, SAYS.format(path=str(rows.path)) + then) == problem
    assert rows.read() == [Row("a", "7")]


def test_a_part_that_hangs_is_ended(tmp_path: Path, rows: Rows) -> None:
    rows.add("a", "7")
    problem = ended(tmp_path, rows, "import time; time.sleep(600)", limit_s=0.5)
    assert problem == f"failed: not over after 0.5 s; see {tmp_path / 'log'}"
    assert rows.read() == [Row("a", "7")]


def test_what_a_part_started_ends_with_it(tmp_path: Path, rows: Rows) -> None:
    child = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(c.pid)"
    assert ended(tmp_path, rows, child) is None
    assert gone(int((tmp_path / "log").read_text()))


def test_a_line_that_was_cut_off_is_no_row(rows: Rows) -> None:
    rows.add("a", "1")
    rows.path.write_text(rows.path.read_text() + '{"what": "b", "mea')
    assert rows.read() == [Row("a", "1")]


def test_what_was_expected_and_not_measured_says_why() -> None:
    report = PartReport(
        "p", (Expected("a", "9", "x"), Expected("b", "8", "y")), (Row("a", "1"), Row("c", "3")), "failed: it died"
    )
    text = markdown({"device": "cuda", "size": "full"}, [report])
    assert "| a | 1 |  | 9 | x |" in text
    assert "| c | 3 |  |  |  |" in text
    assert "| b | failed: it died |  | 8 | y |" in text
    assert "No figure here" not in text
    assert "No figure here" in markdown({"device": "cpu", "size": "tiny"}, [report])


def test_every_part_has_limits_and_figures_and_all_fit_their_time() -> None:
    assert PARTS.keys() == PLANS.keys() == expected.figures().keys()
    assert sum(plan.limit_s for plan in PLANS.values()) <= 45 * 60


def test_the_documented_table_is_the_expected_one() -> None:
    assert expected.table() in (ROOT / "docs" / "gpu.md").read_text(), "python -m benchmarks.gpu.expected"


def test_a_package_that_is_missing_is_named_in_one_line(tmp_path: Path) -> None:
    """Before anything is imported that would need it."""
    script = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "runpy.run_module('benchmarks.gpu', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install '.[trainer]' (docs/gpu.md)" in done.stderr
    assert "transformers" in NEEDED


def test_a_peer_that_never_comes_is_given_up(models: Path, rows: Rows) -> None:
    channel.missing_peer(Stage("cpu", TINY, models, rows))
    gloo, nccl = rows.read()
    assert "given up" in gloo.measured
    assert "HANGS" not in gloo.measured
    assert nccl.measured == NEEDS_CUDA


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_peer_of_nccl_has_a_device_of_its_own_if_there_is_one(
    gpus: int, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    stage = Stage("cuda", TINY, tmp_path, rows)
    _, (_, apart) = channel.pairs(stage)
    channel.say_where(stage, apart)
    (row,) = rows.read()
    assert row.measured == ("cuda:0 and cuda:0, the only device" if gpus == 1 else "cuda:0 and cuda:1")
    _, (_, together) = channel.pairs(stage, apart=False)  # which is what the part `nccl` asks about
    assert together.peer_device == together.place.device


@pytest.fixture(params=[False, True], ids=["on a CPU", "sharded as on a GPU"])
def sharded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether one rank's parameters are DTensors in bfloat16, as on a GPU."""
    if request.param:
        for module in (sharding, backbone):
            monkeypatch.setattr(module, "shards_alone", lambda device, *, bfloat16: bfloat16)
    yield
    if dist.is_initialized():  # over one rank
        dist.destroy_process_group()


@pytest.mark.usefixtures("sharded")
def test_packing_is_measured_against_float32_and_a_failure_is_a_row(
    models: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "STEPS", 1)
    monkeypatch.setattr(step, "MODES", {"impossible": {"logprob_chunk_size": -1}, "packed": step.MODES["packed"]})
    step.step(Stage("cpu", TINY, models, rows))
    exact, failed, packed = rows.read()
    assert exact.what == step.FLOAT32
    assert failed.measured.startswith("failed: ValidationError")
    assert float(packed.measured.rpartition("gradient off by ")[2]) < 0.05


@pytest.mark.usefixtures("sharded")
def test_drift_is_measured_in_each_layout(models: Path, rows: Rows) -> None:
    drift(Stage("cpu", TINY, models, rows))
    apart = {row.what: float(row.measured.split()[0]) for row in rows.read()}
    assert len(apart) == 5
    assert 0 < apart["bfloat16, padded"] < 0.01


@pytest.mark.nightly  # a dozen processes that import torch, and an engine
@pytest.mark.timeout(1800)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--size", "tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [part["name"] for part in report["parts"]] == list(PLANS)
    assert [part["problem"] for part in report["parts"]] == [None] * len(PLANS)
    measured = {row["what"]: row["measured"] for part in report["parts"] for row in part["rows"]}
    assert not [what for what, text in measured.items() if text.startswith(("failed", "refused"))], measured
    assert {what for what, text in measured.items() if text == NEEDS_CUDA} == {
        "two ranks of nccl on one device, NCCL_MULTI_RANK_GPU_ENABLE=0",
        "two ranks of nccl on one device, NCCL_MULTI_RANK_GPU_ENABLE=1",
        "a peer that never comes, nccl",
        "a peer that stands still in a broadcast, nccl",
        "all tensors in bfloat16 over nccl",
        "copy to the host's memory, pinned as gloo's bucket",
        "copy to the host's memory, pageable",
        "decoding with defaults, model runner V2",
        "a refit, with its proofs, model runner V2",
        "a refit during completions, model runner V2",
    }
