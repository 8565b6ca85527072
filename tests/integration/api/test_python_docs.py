"""The snippets of docs/python.md, and the example notebook, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import headrace
from tests.support.light_services import ROOT, instead_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # all of the page, on a busy machine

SNIPPETS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
NOTEBOOK = ROOT / "examples" / "python_api.ipynb"


@pytest.fixture(params=["light", pytest.param("real", marks=pytest.mark.nightly)])
def workplace(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A checkout with the demo's model."""
    if request.param == "light":
        light = {"rollout": "idle_rollout", "trainer": "recording_trainer"}
        monkeypatch.setenv("PYTHONPATH", instead_of(tmp_path / "services", **light)["PYTHONPATH"])
        monkeypatch.setenv("HEADRACE_PAGE__PORT", "null")  # nobody looks at it
        monkeypatch.setenv("HEADRACE_REWARD__WORKERS", "1")  # nothing is scored
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_snippet_of_the_page_runs_as_it_stands(workplace: Path) -> None:
    assert len(SNIPPETS) == 6
    (workplace / "script.py").write_text("\n".join(SNIPPETS))
    done = subprocess.run([sys.executable, "script.py"], cwd=workplace, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # a script's reward and rows, in the folder of their run
    (reward,) = (workplace / "runs").glob("*/inputs/reward.py")
    run = headrace.Run(reward.parents[1])
    assert run.config.env["exact"].target == f"{reward}:exact"
    assert [(each.env_name, each.data_path) for each in run.config.data.train] == [
        ("exact", str(reward.with_name("train.jsonl")))
    ]


def outputs(notebook: Any) -> list[dict[str, Any]]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.nightly  # a run and a kernel; its calls are those of the page, above, and unit/api/test_run.py has what it shows
def test_the_notebook_runs_and_shows_the_run_with_its_curves(workplace: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert outputs(notebook) == [], "what a run showed is not kept"
    NotebookClient(notebook, kernel_name="python3", timeout=500).execute()
    shown = "".join(output["data"].get("text/html", "") for output in outputs(notebook) if "data" in output)
    assert "<polyline" in shown
    assert "finished" in shown
