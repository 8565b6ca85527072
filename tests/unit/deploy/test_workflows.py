"""The jobs of continuous integration, in .github/workflows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

WORKFLOWS = Path(__file__).resolve().parents[3] / ".github" / "workflows"


def read(file: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((WORKFLOWS / file).read_text())
    return found


def jobs(file: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read(file)["jobs"]
    return found


def test_nothing_is_released_of_a_commit_that_has_not_passed_the_gate() -> None:
    of_tags = [each.name for each in WORKFLOWS.iterdir() if "tags" in ((read(each.name)[True] or {}).get("push") or {})]
    assert of_tags == ["release.yml"]  # YAML 1.1 reads `on` as True
    release = jobs("release.yml")
    gates = {name for name, job in release.items() if job.get("uses") == "./.github/workflows/gate.yml"}
    for name, job in release.items():
        writes = "environment" in job or "write" in job.get("permissions", {}).values()
        assert not writes or gates & {*job["needs"]}, name
    (gate,) = jobs("gate.yml").values()
    assert {"run": ".ci/run"}.items() <= gate["steps"][-1].items()


def test_an_action_is_pinned_by_its_digest() -> None:
    used = [
        step["uses"]
        for file in WORKFLOWS.iterdir()
        for job in jobs(file.name).values()
        for step in job.get("steps", ())
        if "uses" in step
    ]
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40}", each)] == []
