from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template has tools."""
    from tests.support import tool_model  # with transformers, which most tests here do without

    return tool_model.make(tmp_path_factory.mktemp("tool-model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
