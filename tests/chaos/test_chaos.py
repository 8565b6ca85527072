"""The real pipeline under ten faults: every process hit twice, and every phase. `make chaos` is the long version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import runs

FAULTS = 10
SEED = 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_law_holds_under_ten_faults(tmp_path: Path, tiny_model: Path) -> None:
    if lacks := runs.missing():
        pytest.skip(lacks)
    verdict = runs.run(SEED, FAULTS, "external", tiny_model, tmp_path)
    assert verdict.problem is None, f"{verdict.problem}; its logs are in {tmp_path}"
    assert not verdict.objections, f"{verdict.objections}; its evidence is in {tmp_path}"
