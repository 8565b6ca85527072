"""The file of an environment that a run serves, edited while it works."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import signature
from headrace.launch import environment_processes
from headrace.launch.pipeline import Pipeline
from headrace.replay import EnvironmentState
from tests.support.idle_pipeline import idle_pipeline

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
def printed() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def pipeline(tmp_path: Path, file: Path, printed: io.StringIO) -> Iterator[Pipeline]:
    data = {"train": {"dataset_name": "arithmetic", "env_name": "mine"}}
    env = {"mine": {"target": f"{file}:Mine", "port": 1}}
    with idle_pipeline(tmp_path, printed, data=data, env=env) as pipeline:
        yield pipeline


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
    pipeline: Pipeline,
    file: Path,
    printed: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    text: str,
    signum: int | None,
) -> None:
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(
        pipeline.supervisor, "replace", lambda child, reason, by=signal.SIGKILL: sent.append((child.name, by))
    )
    found = [{"name": "mine", "ready": state == "ready"}]
    child = pipeline.children.environments["mine"]
    child.pid, child.was_ready, child.source_signature = 1, True, signature(file)
    await pipeline.environments.note(found, 0.0)
    assert sent == []
    edit(file, text)
    for _ in range(2):  # once for each change
        await pipeline.environments.note(found, 0.0)
    assert sent == ([] if signum is None else [("environment-mine", signum)])
    assert (printed.getvalue().count("can't be loaded") == 1) == (signum is None)


async def test_one_that_restarts_with_an_edit_is_not_broken(
    pipeline: Pipeline, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.supervisor, "replace", lambda *_: None)

    async def waits(*, is_up: bool, breaker: str = "") -> list[str]:
        await pipeline.environments.note([{"name": "mine", "ready": is_up, "message": "can't be reached"}], 0.0)
        opened = EnvironmentState("mine", 1, 0, 0, 0, broken=True, kind=breaker, message="no answer")
        pipeline.environments.note_breakers([opened] if breaker else [])
        return [wait.why for wait in pipeline.environments.waits()]

    child = pipeline.children.environments["mine"]
    child.pid, child.was_ready, child.source_signature = 1, True, signature(file)
    restarts = f"it restarts with the changed {file}"
    broken, unavailable = (
        f"it is {what}: no answer; fix {file}, and the run continues" for what in ("broken", "unavailable")
    )
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


async def test_one_that_the_hub_never_names_ends_the_run(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(0, "refused"), (200, "[]")])

    async def answer(*_: object) -> tuple[int, str]:
        return next(answers)

    monkeypatch.setattr(pipeline, "_ask", answer)
    await pipeline._look_at_environments(0.0)
    with pytest.raises(ServiceError, match="no environment mine"):
        await pipeline._look_at_environments(0.0)


def test_what_an_environment_lacks_is_found_before_a_run(pipeline: Pipeline, file: Path) -> None:
    config = pipeline.config
    environment_processes.check_loading(config)
    file.write_text("import no_such_package\n" + MINE)
    environment_processes.check(config)  # its text is right
    with pytest.raises(ConfigError, match=r"env\.mine\.target (.|\n)*no_such_package"):
        environment_processes.check_loading(config)
