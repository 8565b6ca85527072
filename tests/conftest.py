from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-type model of 0.5 M random weights with a character tokenizer and a chat template."""
    from services.trainer.models import tiny

    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.make(directory, warmup=False)
    return directory
