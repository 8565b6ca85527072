"""The script for the first hour on a GPU: a part that fails leaves the others alone, what is done is kept, and the page shows what was said
as text."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import __main__, channel, drift, machine, runner, runs, shard_alone, step
from benchmarks.gpu.parts import PARTS, Part, choose, table
from benchmarks.gpu.report import page, write
from benchmarks.gpu.rows import Row, Rows
from benchmarks.gpu.runner import Outcome, Runner, run_part
from benchmarks.gpu.sizes import SIZES, find_model
from benchmarks.gpu.stage import Stage
from headrace.config import load
from headrace_services.trainer.distributed import sharding
from headrace_services.trainer.network import backbone
from headrace_services.trainer.network.packing import Packing
from headrace_services.trainer.network.policy_model import PolicyModel
from tests.support.processes import gone

ROOT = Path(__file__).parents[2]
TINY = dataclasses.replace(SIZES["tiny"], deadline_s=5.0)
ABOUT: dict[str, Any] = {
    "date": "2026-11-26",
    "device": "cpu",
    "size": "tiny",
    "machine": "a laptop",
    "versions": {"torch": "2.13"},
    "driver": "none",
    "devices": [],
    "topology": [],
    "model": "model",
    "weights": "RANDOM",
}

# What the process of a part does, by its name, once it has added a row.
SAYS = (
    "import os, sys, time\n"
    "from pathlib import Path\n"
    "from benchmarks.gpu.rows import Rows\n"
    "rows = Rows(Path({rows!r}))\n"
    "rows.add('given', os.environ.get('GIVEN', ''))\n"
)
SCRIPTS = {
    "ends": "",
    "raises": "raise MemoryError('out of memory')",
    "dies": "os.abort()",
    "hangs": "time.sleep(600)",
    "lacks a package": "import no_such_package",
    "is out of bounds": "rows.add('apart', 3.0, 'nats', 'below 1', False)",
    "ends, too": "",
}
SHORT = 0.005  # minutes: a limit of 2 s on a CPU


def part(name: str, minutes: float = 1.0, **fields: Any) -> Part:
    return Part("1", name, f"does it {name}?", minutes, "none:none", **fields)


FAKES = [part(name, SHORT if name == "hangs" else 1.0, environ={"GIVEN": "7"}) for name in SCRIPTS]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path / "rows.jsonl")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that were started, each of which is its script."""
    names: list[str] = []

    def command_of(one: Part, about: object, folder: Path) -> list[str]:
        names.append(one.name)
        return [sys.executable, "-c", SAYS.format(rows=str(folder / runner.ROWS)) + SCRIPTS.get(one.name, "")]

    monkeypatch.setattr(runner, "command_of", command_of)
    return names


def outcomes(
    out: Path, parts: list[Part], *, again: list[Part] | None = None, minutes: float = 60.0, **about: Any
) -> dict[str, Outcome]:
    one = Runner(out, ABOUT | about, time.monotonic() + 60 * minutes)
    return {each.name: one.outcome(each, parts, again or []) for each in parts}


def test_a_part_that_fails_or_hangs_leaves_the_others_alone(tmp_path: Path, started: list[str]) -> None:
    found = outcomes(tmp_path, FAKES)
    assert started == list(SCRIPTS)
    assert {name: outcome.verdict for name, outcome in found.items()} == {
        "ends": "passed",
        "raises": "failed",
        "dies": "failed",
        "hangs": "failed",
        "lacks a package": "not run",
        "is out of bounds": "failed",
        "ends, too": "passed",
    }
    problems = {name: outcome.problem or "" for name, outcome in found.items()}
    assert problems["raises"].endswith("MemoryError: out of memory")
    assert "SIGABRT" in problems["dies"]
    assert "not over after 2 s" in problems["hangs"]
    assert "no_such_package" in problems["lacks a package"]
    del found["hangs"]  # a busy machine may not have started it in time
    assert all(outcome.rows[0] == Row("given", "7") for outcome in found.values()), "what was found before stays"
    assert "MemoryError" in found["raises"].said
    assert found["ends"].said == ""


def test_what_is_done_is_kept_and_the_rest_is_run(tmp_path: Path, started: list[str]) -> None:
    done, *rest = part("ends"), part("raises"), part("is out of bounds"), part("lacks a package")
    before = outcomes(tmp_path, [done, *rest])
    started.clear()
    after = outcomes(tmp_path, [done, *rest, part("ends, too")])
    assert started == ["raises", "is out of bounds", "lacks a package", "ends, too"]
    assert after["ends"] == before["ends"]


@pytest.mark.parametrize(
    "changed",
    [{"again": [part("ends")]}, {"size": "full"}, {"devices": ["another GPU"]}, {"versions": {"torch": "2.14"}}],
    ids=["asked for", "size", "machine", "versions"],
)
def test_what_is_done_is_run_again_if_it_says_nothing(
    changed: dict[str, Any], tmp_path: Path, started: list[str]
) -> None:
    outcomes(tmp_path, [part("ends")])
    outcomes(tmp_path, [part("ends")], **changed)
    assert started == ["ends", "ends"]


def test_a_part_that_was_cut_off_is_run_again(tmp_path: Path, started: list[str]) -> None:
    outcomes(tmp_path, [part("ends")])
    (tmp_path / "ends" / runner.RESULT).unlink()  # it is written last
    assert outcomes(tmp_path, [part("ends")])["ends"].rows == (Row("given", ""),)
    assert started == ["ends", "ends"]


def test_the_first_parts_that_fit_the_minutes_are_run(tmp_path: Path, started: list[str]) -> None:
    long = part("is long", 20.0)
    found = outcomes(tmp_path, [part("ends"), long, part("ends, too")], minutes=15.0)
    assert started == ["ends", "ends, too"]
    assert found["is long"].verdict == "not run"
    assert "20 minutes" in (found["is long"].problem or "")


def test_a_part_for_two_gpus_is_not_run_on_one(tmp_path: Path, started: list[str]) -> None:
    two = part("ends", gpus=2)
    assert outcomes(tmp_path, [two], device="cuda", devices=["one"])["ends"].verdict == "not run"
    assert outcomes(tmp_path, [two], device="cuda", devices=["one", "two"])["ends"].verdict == "passed"
    assert outcomes(tmp_path, [two])["ends"].verdict == "passed", "on a CPU two processes share it"


def test_what_a_part_started_ends_with_it(tmp_path: Path, rows: Rows) -> None:
    child = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(c.pid)"
    assert run_part([sys.executable, "-c", child], tmp_path / "log", 60.0, {}, rows) is None
    assert gone(int((tmp_path / "log").read_text()))


def test_a_part_ends_with_a_call_that_is_killed(tmp_path: Path) -> None:
    """However early: it has not come to its first line."""
    part = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    script = (
        "import pathlib\nfrom benchmarks.gpu import rows, runner\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "real = runner.subprocess.Popen\n"
        "def started(*words, **named):\n"
        "    process = real(*words, **named)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "runner.subprocess.Popen = started\n"
        f"runner.run_part({part!r}, folder / 'log', 600.0, {{}}, rows.Rows(folder / 'rows'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as call:
        assert call.stdout is not None
        pid = int(call.stdout.readline())
        call.kill()
    try:
        assert gone(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("left", ["{", "7", '{"problem": null}', '{"about": {}, "seconds": 1}'])
def test_a_result_that_cannot_be_read_is_measured_again(left: str, tmp_path: Path, started: list[str]) -> None:
    outcomes(tmp_path, [part("ends")])
    result = tmp_path / "ends" / runner.RESULT
    if left.startswith('{"about'):  # of a script that wrote other fields
        left = json.dumps({"about": json.loads(result.read_text())["about"], "colour": "blue"})
    result.write_text(left)
    assert outcomes(tmp_path, [part("ends")])["ends"].verdict == "passed"
    assert started == ["ends", "ends"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "nan"], "--minutes"),
        (["--minutes", "-5"], "--minutes"),
        (["--out", "/dev/null/report"], "--out"),
        (["--out", "/dev/null"], "--out"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(words: list[str], said: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        *(words if "--out" in words else [*words, "--out", str(tmp_path)]),
    ]
    done = subprocess.run([*command, "--device", "cpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert said in done.stderr.splitlines()[-1]


def test_a_line_that_was_cut_off_is_no_row(rows: Rows) -> None:
    rows.add("a", 1.0)
    rows.path.write_text(rows.path.read_text() + '{"what": "b", "mea')
    assert rows.read() == [Row("a", 1.0)]


class Page(HTMLParser):
    """Its elements, the text in them, and what they refer to. Fails for one that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = '</pre></style><script src="//evil.example/x.js">alert(1)</script><img onerror=alert(1)>\x1b[31m&quot;'


def test_the_page_shows_hostile_text_as_text() -> None:
    bad = dataclasses.replace(part(HOSTILE), asks=HOSTILE)
    row = Row(HOSTILE, HOSTILE, HOSTILE, HOSTILE, False)
    about = ABOUT | {name: HOSTILE for name in ("machine", "driver", "model", "weights")}
    about |= {"versions": {HOSTILE: HOSTILE}, "devices": [HOSTILE, "b"], "topology": [["", HOSTILE], [HOSTILE, ""]]}
    text = page(about, [Outcome(bad, (row,), f"failed: {HOSTILE}", 1.0, HOSTILE)])
    found = Page(text)
    assert not found.elements & {"script", "img", "link", "iframe"}
    assert not [name for name in found.attributes if name.startswith("on")]
    assert all(link.startswith("#") for link in found.links), "it needs no network"
    assert "default-src 'none'" in text
    assert found.text.count("alert(1)</script>") >= 10
    assert "\x1b" not in text


def test_the_report_has_what_was_measured_beside_what_was_expected(tmp_path: Path) -> None:
    first = Outcome(
        part("ends"), (Row("speed", 1234.5, "tokens/s", "below 9"), Row("off", 0.1234, "", "0", False)), None, 60.0
    )
    write(tmp_path, ABOUT, [first, Outcome(part("later"), problem="not run: it takes about 3 minutes")])
    found = Page((tmp_path / "report.html").read_text())
    for text in (
        "1,234 tokens/s",
        "below 9",
        "0.123",
        "failed",
        "it takes about 3 minutes",
        "says anything about a GPU",
    ):
        assert text in found.text, text
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert parts[0]["rows"][0]["measured"] == 1234.5
    assert [each["verdict"] for each in parts] == ["failed", "not run"]
    measured = ABOUT | {"device": "cuda", "size": "full"}
    assert "says anything about a GPU" not in page(measured, [first])


def test_every_part_is_there_and_together_they_fit_40_minutes() -> None:
    for each in PARTS:
        module, name = each.function.split(":")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name))
    assert sum(each.minutes for each in PARTS) <= 40
    assert table() in (ROOT / "docs" / "gpu.md").read_text(), (
        "python -c 'from benchmarks.gpu.parts import *; print(table())'"
    )


def test_parts_are_chosen_by_number_or_name() -> None:
    assert [each.name for each in choose(["3", "tiny-run"])] == ["tiny-run", "step"]
    assert [each.name for each in __main__._parts("1, 3")] == ["tiny-run", "step"]
    assert {each.gpus for each in choose(["0"])} == {2}
    with pytest.raises(argparse.ArgumentTypeError, match=r"9.*tiny-run"):
        __main__._parts("9")


def test_a_package_that_is_missing_is_named_in_one_line(tmp_path: Path) -> None:
    """Before anything is started."""
    (tmp_path / "pynvml.py").write_text("raise ModuleNotFoundError(\"No module named 'pynvml'\")")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "'pynvml'; pip install '.[cuda]'" in done.stderr


def test_what_is_between_devices_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = {frozenset("ab")}

    def status(one: str, other: str, what: int) -> int:
        return int(what != pynvml.NVML_P2P_CAPS_INDEX_NVLINK or frozenset((one, other)) not in joined)

    for name, function in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetP2PStatus": status,
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: pynvml.NVML_TOPOLOGY_SYSTEM,
    }.items():
        monkeypatch.setattr(pynvml, name, function)
    assert machine.topology([]) == []
    assert machine.topology("abc") == [
        ["", "NVLink", "SYS, no peer access"],
        ["NVLink", "", "SYS, no peer access"],
        ["SYS, no peer access", "SYS, no peer access", ""],
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    name, weights = find_model(TINY, tmp_path_factory.mktemp("models") / "model", "cpu", None)
    assert weights.startswith("RANDOM")
    return name


@pytest.fixture
def stage(tmp_path: Path, model: str, rows: Rows) -> Stage:
    return Stage("cpu", TINY, tmp_path, model, rows)


def test_a_model_that_is_asked_for_must_be_here(tmp_path: Path, model: str) -> None:
    assert find_model(TINY, tmp_path / "unused", "cpu", model)[0] == model
    with pytest.raises(machine.ServiceError, match="--model"):
        find_model(TINY, tmp_path / "unused", "cpu", "nobody/has-this")


def test_a_peer_that_is_killed_is_given_up(stage: Stage) -> None:
    channel.killed_peer(stage)
    checked = [row for row in stage.rows.read() if row.passed is not None]
    assert len(checked) == 2
    assert all(row.passed for row in checked), checked


@pytest.fixture(params=["0", "1"], ids=["on a CPU", "sharded as on a GPU"])
def sharded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether one rank's parameters are DTensors in bfloat16, as on a GPU."""
    for module in (sharding, backbone):
        monkeypatch.setattr(module, "shards_alone", module.shards_alone)  # put back afterwards
    monkeypatch.setenv(shard_alone.VARIABLE, request.param)
    shard_alone.switch_on_if_asked()
    yield
    if dist.is_initialized():  # over one rank
        dist.destroy_process_group()


@pytest.mark.usefixtures("sharded")
def test_a_step_is_measured_beside_float32_and_a_failure_is_a_row(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "STEPS", 1)
    modes = {"impossible": ("policy.logprob_chunk_size=-1",), step.COMPARED: step.MODES[step.COMPARED]}
    monkeypatch.setattr(step, "MODES", modes)
    step.step(stage)
    failed, *measured = stage.rows.read()
    assert (failed.what, failed.passed) == ("impossible", False)
    gradient = next(row for row in measured if "float32" in row.what)
    assert gradient.passed
    assert any("planned" in row.expected for row in measured if row.unit == "GiB")


@pytest.mark.usefixtures("sharded")
def test_a_head_in_float32_is_nearer_to_float32(stage: Stage) -> None:
    trajectories = TINY.trajectories(250)

    def logprobs(precision: str, change: Callable[[PolicyModel], None] = lambda policy: None) -> np.ndarray:
        config = stage.config(f"policy.precision={precision}")
        policy = PolicyModel(config)
        with torch.no_grad():  # logits of random weights are all small, and so is their error
            policy.model.get_input_embeddings().weight.mul_(20)
        change(policy)
        return drift.logprobs_of(policy, Packing.of(config.policy, training=False), trajectories)

    exact = logprobs("float32")
    usual, changed = (
        np.abs(found - exact).mean() for found in (logprobs("bfloat16"), logprobs("bfloat16", drift._use_float32_head))
    )
    assert 0 < changed < 0.8 * usual


def test_what_a_run_logs_of_its_refits_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `WeightReceiver` and `Fleet` log it; `test_every_part_runs_on_a_cpu` reads the real ones."""
    run = object.__new__(runs.Run)
    run.config = load(runs.EXAMPLE, [f"run.dir={tmp_path}", "run.id=run"], {})
    run.config.log_folder.mkdir(parents=True)
    when = "2026-11-26 11:27:10,953"
    line = f"{when} INFO r.receiver: version 3 is verified: {{'pausing': 0.5, 'receiving weights': 1.0, 'computing the probe': 9.0}}\n"
    (run.config.log_folder / "rollout-1.log").write_text(f"noise\n{line}more noise\n{line}")
    first, second = run.proofs
    assert first.pause == second.pause == 1.5
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.time)) == when[:-4]


@pytest.mark.nightly  # a dozen processes that import torch, five runs, and five engines
@pytest.mark.timeout(6000)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """With one rank's parameters sharded as on a GPU. A second call keeps all of it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--minutes", "90", "--out", str(tmp_path)]
    environ = os.environ | {shard_alone.VARIABLE: "1"}
    for call in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        assert [each["name"] for each in report["parts"]] == [each.name for each in PARTS]
        assert {each["verdict"] for each in report["parts"]} == {"passed"}, call
        assert done.stdout.count("kept") == (len(PARTS) if call else 0)
    Page((tmp_path / "report.html").read_text())
    not_run = [each["name"] for each in report["parts"] if str(each["rows"][0]["measured"]).startswith("not run")]
    assert not_run == ["refit-v2"]
