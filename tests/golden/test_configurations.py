"""The complete configuration that `headrace config show` makes of each example, of files that set the least that they can, and of files of
NeMo RL with what is said of their keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import comparison
from tests.support.command import headrace, said

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))
LEAST = sorted(path.stem for path in Path(__file__).with_name("least").glob("*.yaml"))
THEIRS = sorted(path.stem for path in Path(__file__).with_name("nemo_rl").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    comparison.check_text(f"configurations/{name}.yaml", said("config", "show", f"examples/{name}.yaml"))


@pytest.mark.parametrize("name", LEAST)
def test_defaults(name: str) -> None:
    comparison.check_text(
        f"configurations/least/{name}.yaml", said("config", "show", f"tests/golden/least/{name}.yaml")
    )


@pytest.mark.parametrize("name", THEIRS)
def test_files_of_nemo_rl(name: str) -> None:
    """Their models are not here, so `check` ends with that; before, it says what became of the keys."""
    file = f"tests/golden/nemo_rl/{name}.yaml"
    translated = headrace("config", "check", file).stdout
    assert translated.startswith("read as a NeMo RL file")
    shown = said("config", "show", file)
    comparison.check_text(
        f"configurations/nemo_rl/{name}.yaml", "".join(f"# {x}\n" for x in translated.splitlines()) + shown
    )


def test_every_kept_configuration_has_its_file() -> None:
    files = [*EXAMPLES, *(f"least/{name}" for name in LEAST), *(f"nemo_rl/{name}" for name in THEIRS)]
    folder = comparison.FOLDER / "configurations"
    assert sorted(files) == sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
