"""The file of an environment that a run serves, edited while it works."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import signature
from headrace.cli.display import LineDisplay
from headrace.config import Config
from headrace.launch import environment_processes
from headrace.launch.pipeline import Pipeline
from headrace.net import credentials
from headrace.replay import EnvironmentState

MINE = """
import headrace

class Mine(headrace.Environment):
    def score(self, sample: headrace.Sample) -> float:
        return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def config(tmp_path: Path, file: Path) -> Config:
    tokens = tmp_path / credentials.FILE
    config = Config.model_validate(
        {
            "run": {"id": "r", "dir": str(tmp_path)},
            "data": {"train": {"dataset_name": "arithmetic", "env_name": "mine"}},
            "env": {"mine": {"target": f"{file}:Mine", "port": 1}},
            "security": {"credentials": str(tokens)},
        }
    )
    credentials.complete(tokens, credentials.list_roles(config, redis=True))
    return config


def edit(file: Path, text: str) -> None:
    file.write_text(text)
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize(
    ("state", "text", "signum"),
    [
        ("ready", MINE.replace("1.0", "0.5"), signal.SIGTERM),
        ("ready", "import headrace\nimport no_such_package\n" + MINE, None),
        ("ready", MINE + "    def", None),
        # there is nothing to lose
        ("not ready", MINE + "    def", signal.SIGKILL),
    ],
)
async def test_a_change_is_loaded_and_one_that_can_not_be_is_told(
    config: Config,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    text: str,
    signum: int | None,
) -> None:
    console = Console(file=io.StringIO(), width=300)
    pipeline = Pipeline(config, tmp_path / "config.yaml", None, {}, LineDisplay(console))
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(
        pipeline.supervisor, "replace", lambda child, reason, by=signal.SIGKILL: sent.append((child.name, by))
    )

    async def answer(*_: object) -> tuple[int, str]:
        return 200, '[{"name": "mine", "ready": %s}]' % ("true" if state == "ready" else "false")

    monkeypatch.setattr(pipeline, "_ask", answer)
    child = pipeline.children.environments["mine"]
    child.pid, child.was_ready, child.source_signature = 1, True, signature(file)
    try:
        await pipeline._look_at_environments(0.0)
        assert sent == []
        edit(file, text)
        for _ in range(2):  # once for each change
            await pipeline._look_at_environments(0.0)
        assert sent == ([] if signum is None else [("environment-mine", signum)])
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert (said.count("can't be loaded") == 1) == (signum is None)
    finally:
        pipeline.supervisor.close()


async def test_one_that_restarts_with_an_edit_is_not_broken(
    config: Config, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(config, tmp_path / "config.yaml", None, {}, LineDisplay(Console(file=io.StringIO())))
    monkeypatch.setattr(pipeline.supervisor, "replace", lambda *_: None)
    ready = True

    async def answer(*_: object) -> tuple[int, str]:
        return 200, json.dumps([{"name": "mine", "ready": ready, "message": "can't be reached"}])

    async def waits(*, is_up: bool, breaker: str = "") -> list[str]:
        nonlocal ready
        ready = is_up
        await pipeline._look_at_environments(0.0)
        opened = EnvironmentState("mine", 1, 0, 0, 0, broken=True, kind=breaker, message="no answer")
        pipeline._broken = {"mine": opened} if breaker else {}
        pipeline._forget_edits()
        return [wait.why for wait in pipeline._waits()]

    monkeypatch.setattr(pipeline, "_ask", answer)
    child = pipeline.children.environments["mine"]
    child.pid, child.was_ready, child.source_signature = 1, True, signature(file)
    restarts = f"it restarts with the changed {file}"
    broken, unavailable = (
        f"it is {what}: no answer; fix {file}, and the run continues" for what in ("broken", "unavailable")
    )
    try:
        assert await waits(is_up=True) == []
        edit(file, MINE.replace("1.0", "0.5"))
        assert await waits(is_up=True) == []  # it has not ended yet
        assert await waits(is_up=False) == [restarts]
        child.restarts = 1
        assert await waits(is_up=False, breaker="NOT_STARTED") == [restarts]
        assert await waits(is_up=True, breaker="NOT_STARTED") == [restarts]  # until the breaker's probe
        assert await waits(is_up=True, breaker="FAILING") == [broken]  # the edit is to blame
        child.restarts = 2
        assert await waits(is_up=True, breaker="NOT_STARTED") == [unavailable]
        child.restarts = 1
        assert await waits(is_up=True) == []
        assert await waits(is_up=False) == ["can't be reached"]
    finally:
        pipeline.supervisor.close()


async def test_one_that_the_hub_never_names_ends_the_run(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(config, tmp_path / "config.yaml", None, {}, LineDisplay(Console(file=io.StringIO())))
    answers = iter([(0, "refused"), (200, "[]")])

    async def answer(*_: object) -> tuple[int, str]:
        return next(answers)

    monkeypatch.setattr(pipeline, "_ask", answer)
    try:
        await pipeline._look_at_environments(0.0)
        with pytest.raises(ServiceError, match="no environment mine"):
            await pipeline._look_at_environments(0.0)
    finally:
        pipeline.supervisor.close()


def test_what_an_environment_lacks_is_found_before_a_run(config: Config, file: Path) -> None:
    environment_processes.check_loading(config)
    file.write_text("import no_such_package\n" + MINE)
    environment_processes.check(config)  # its text is right
    with pytest.raises(ConfigError, match=r"env\.mine\.target (.|\n)*no_such_package"):
        environment_processes.check_loading(config)
