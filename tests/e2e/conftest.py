from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model: right some of the time."""
    from services.trainer.models import tiny

    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.make(directory)
    return directory
