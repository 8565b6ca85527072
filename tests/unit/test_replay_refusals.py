"""What is said about a Redis server that is there but refuses calls: its own words, and the remedy."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from headrace.errors import ReplayUnavailable
from headrace.replay.connection import refusal, unavailable

REFUSALS = {
    "LOADING Redis is loading the dataset in memory": "goes on by itself",
    "LOADING Valkey is loading the dataset in memory": "goes on by itself",
    "MISCONF Errors writing to the AOF file: No space left on device": "free space on the server's disk",
    "NOREPLICAS Not enough good replicas to write.": "min-replicas-to-write",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": "lead to the primary",
    "ERR max number of clients reached": "maxclients",
}


@pytest.mark.parametrize("reply", REFUSALS)
def test_a_server_that_is_there_is_not_said_to_be_down(reply: str) -> None:
    error = BaseParser.parse_error(reply)
    said = refusal(str(error)) if isinstance(error, ResponseError) else unavailable(error)
    assert type(said) is ReplayUnavailable
    assert str(error) in str(said)
    assert REFUSALS[reply] in str(said)
    assert "start it" not in str(said)
