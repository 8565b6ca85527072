"""What is said about a Redis server that is there but refuses calls: its own words, and the remedy."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from headrace.base.errors import ReplayUnavailable
from headrace.replay.connection import BufferConnection, open_redis, unavailable

REFUSALS = {
    "LOADING Redis is loading the dataset in memory": "goes on by itself",
    "LOADING Valkey is loading the dataset in memory": "goes on by itself",
    "MISCONF Errors writing to the AOF file: No space left on device": "free space on the server's disk",
    "NOREPLICAS Not enough good replicas to write.": "min-replicas-to-write",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": "lead to the primary",
    "ERR max number of clients reached": "maxclients",
    "BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.": "SCRIPT KILL",
    "CLUSTERDOWN The cluster is down": "outside a cluster",
    "CLUSTERDOWN Hash slot not served": "outside a cluster",
    "MOVED 3999 127.0.0.1:6381": "outside a cluster",
    "ASK 3999 127.0.0.1:6381": "outside a cluster",
    "TRYAGAIN Multiple keys request during rehashing of slot": "outside a cluster",
    "CROSSSLOT Keys in request don't hash to the same slot": "outside a cluster",
    "NOSCRIPT No matching script. Please use EVAL.": "functions only",
}


@pytest.mark.parametrize("reply", REFUSALS)
def test_a_server_that_is_there_is_not_said_to_be_down(reply: str) -> None:
    error = BaseParser.parse_error(reply)
    connection = BufferConnection(open_redis("redis://localhost:1/0"), "run")
    said = connection.make_refusal(error, ("FCALL", "x")) if isinstance(error, ResponseError) else unavailable(error)
    assert type(said) is ReplayUnavailable
    assert str(error) in str(said)
    assert REFUSALS[reply] in str(said)
    assert "start it" not in str(said)
