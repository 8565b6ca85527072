"""The real pipeline under two faults, other ones each day, in two phases and on two processes, one of them the environment.
`make chaos` is the long version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import runs
from tests.chaos.plan import has_episodes, topology_of

FAULTS = 2


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_every_law_holds_under_two_faults(tmp_path: Path, tiny_model: Path, session_seed: int) -> None:
    if lacks := runs.missing():
        pytest.skip(lacks)
    episodes = has_episodes(session_seed)
    verdict = runs.run(session_seed, FAULTS, topology_of(session_seed), tiny_model, tmp_path, episodes=episodes)
    assert verdict.problem is None, f"{verdict.problem}; its logs are in {tmp_path}"
    assert not verdict.objections, f"{verdict.objections}; its evidence is in {tmp_path}"
