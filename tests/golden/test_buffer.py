"""Recorded calls of the buffer, played to empty servers: what each call answers.

Three runs were recorded: one of single completions and one of episodes, both under faults (`tests/chaos`), and a small one that calls every
function. Only the calls and the server's clock come from them, so the functions here answer as they would have then (`record.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import comparison, recordings
from tests.golden.record import RECORDED
from tests.golden.recordings import SERVERS

# Redis by day: the run that calls every function. What else the two servers do apart, `properties/test_model.py` sees on both.
BY_DAY = [*((name, "valkey") for name in RECORDED), ("functions", "redis")]
AT_NIGHT = [(name, binary) for name in RECORDED for binary in SERVERS if (name, binary) not in BY_DAY]


@pytest.mark.parametrize(
    ("name", "binary"), [*BY_DAY, *(pytest.param(*each, marks=pytest.mark.nightly) for each in AT_NIGHT)]
)
def test_recorded_calls_are_answered_as_before(name: str, binary: str, tmp_path: Path) -> None:
    calls = recordings.read(recordings.file_of(name))
    with recordings.server(SERVERS[binary], tmp_path / "server") as (_, redis):
        recordings.load_functions(redis)
        answers = list(recordings.play(redis, calls))
    named = [{call.function: answer} for call, answer in zip(calls, answers, strict=True)]
    comparison.check_answers(f"buffer/{name}.answers.xz", named)


def test_every_function_is_called(tmp_path: Path) -> None:
    called = {call.function for name in RECORDED for call in recordings.read(recordings.file_of(name))}
    with recordings.server(SERVERS["valkey"], tmp_path / "server") as (_, redis):
        recordings.load_functions(redis)
        there = recordings.function_names(redis)
    assert called == there
