"""Whatever a program sends: an answer, or an error with a type; and a good request is answered afterwards."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import httpx
import pytest

from headrace.records.trajectory import episode_record
from tests.support.gateways import open_episode
from tests.support.mutation import Mutator
from tests.support.toy_sessions import TOOLS

GOOD: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "000000000", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "000000000", "content": "found"},
    ],
    "tools": list(TOOLS),
    "tool_choice": "auto",
    "stream": False,
    "max_tokens": 5,
    "stop": ["z"],
    "temperature": 0.5,
    "logprobs": True,
    "return_token_ids": True,
    "n": 1,
}
MOST_BYTES = 100_000
HEADERS = {
    "content-type": "application/json",
    "x-stainless-retry-count": "0",
    "idempotency-key": "one",
    "x-headrace-train": "1",
}


def written(value: Any, mutator: Mutator) -> bytes:
    body = json.dumps(value, default=str, skipkeys=True).encode()
    return mutator.bytes(body) if mutator.random.random() < 0.3 else body


@pytest.mark.timeout(0)  # as long as so many requests take
async def test_malformed_requests(messages: int, session_seed: int) -> None:
    mutator = Mutator(Random(session_seed))
    statuses = set()
    async with open_episode(max_request_bytes=MOST_BYTES) as opened, opened.http() as client:
        for number in range(messages):
            headers = dict(HEADERS) | {"idempotency-key": f"{number}"}
            if mutator.random.random() < 0.2:
                name = mutator.random.choice(list(headers))
                headers[name] = "".join(each for each in mutator.text(headers[name]) if 32 < ord(each) < 127)
            request = httpx.Request(
                "POST",
                f"{opened.url}/chat/completions",
                content=written(mutator.structure(GOOD), mutator),
                headers=headers,
            )
            try:
                response = await client.send(request)
            except httpx.HTTPError:
                # who is told that a body is too large may still be sending it, and not get to read that
                assert len(request.content) > MOST_BYTES
                continue
            statuses.add(response.status_code)
            assert response.status_code in (200, 400, 413, 429), response.text
            if response.status_code != 200:
                error = response.json()["error"]
                assert error["type"]
                assert error["message"]
        assert statuses >= {200, 400}
        good = await client.post("/chat/completions", json=GOOD)
        # the episode may have come to its limits, which is an answer too
        assert good.status_code == 200 or good.json()["error"]["code"] == "context_length_exceeded"
        ending = await opened.episode.end()
    episode_record("g", 1, 0, ending.calls, truncated=False, runner="r", timings={}).encode()
