"""The conformance kit against programs with planted faults: it finds each, and blames nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import headrace
from headrace import Episode
from headrace.env.kit import conformance, conformance_episodes
from headrace.env.kit.conformance import examine
from headrace.env.kit.conformance_episodes import REMEDIES
from headrace.env.kit.example_samples import GoldenSample
from headrace.env.server import serving
from headrace.net import rpc
from tests.support.command import headrace as command

FILE = """
import headrace

class Mine(headrace.Environment):
    build = "1"

    async def episode(self, e):
        answer = await e.chat(e.messages)
        return float(answer["content"] == "4")
"""


async def right(e: Episode) -> float:
    """Until it is told four, or a limit is reached."""
    messages = list(e.messages)
    while (answer := await e.chat(messages))["content"] != "4":
        messages += [answer, {"role": "user", "content": "No."}]
    return 1.0


def plain(e: Episode) -> float:
    return float(e.chat_sync(e.messages)["content"] == "4")


@pytest.fixture(autouse=True)
def longer_than_any_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_episodes, "_SHORT_S", 5.0)


def environment(play: Callable[[Episode], Any], **attributes: Any) -> headrace.Environment:
    members = {"episode": staticmethod(play), "build": "1", **attributes}
    return type("Mine", (headrace.Environment,), members)()  # type: ignore[no-any-return]


async def wrong(made: headrace.Environment, samples: tuple[GoldenSample, ...] = (), timeout_s: float = 10.0) -> Any:
    async with serving(made) as port, rpc.channel(f"127.0.0.1:{port}") as channel:
        findings = await examine(channel, samples, timeout_s)
    looked_at = {each.check for each in findings if each.verdict != "skipped"}
    assert looked_at == {each.check for each in findings} >= {*REMEDIES}
    return {each.check: each.said for each in findings if each.verdict == "wrong"}


@pytest.mark.parametrize("play", [right, plain])
async def test_a_right_program_is_found_right(play: Callable[[Episode], Any]) -> None:
    assert await wrong(environment(play)) == {}


async def test_one_that_scores_as_well_is_held_to_both() -> None:
    made = environment(right, score=lambda self, sample: 1.0)
    async with serving(made) as port, rpc.channel(f"127.0.0.1:{port}") as channel:
        findings = await examine(channel, timeout_s=10.0)
    assert [each.check for each in findings] == [*conformance.REMEDIES, *REMEDIES]
    assert not [each for each in findings if each.verdict == "wrong"]


async def test_samples_say_what_is_answered_and_what_it_earns() -> None:
    samples = (GoldenSample(completion="4", reward=1.0), GoldenSample(completion="5", reward=1.0))
    assert await wrong(environment(plain), samples) == {"episodes": "'5' in answer to every call: reward 0, not 1"}


async def test_one_that_raises_is_found() -> None:
    async def raises(e: Episode) -> float:
        raise KeyError("board")

    assert "FAILED (KeyError: 'board'" in (await wrong(environment(raises)))["episodes"]


async def test_one_that_keeps_the_key_of_another_episode_is_found() -> None:
    kept: list[Episode] = []

    async def keeps(e: Episode) -> float:
        kept.append(e)
        await kept[0].chat(e.messages)
        return 1.0

    found = await wrong(environment(keeps))
    assert found.keys() == {"episode keys"}
    assert "key of an ended episode" in found["episode keys"]


async def test_one_that_makes_up_a_key_is_found() -> None:
    async def makes_up(e: Episode) -> float:
        made_up = Episode(e.base_url, "sk-mine", deadline=e.deadline)
        try:
            await made_up.chat(e.messages)
        except headrace.ChatError:
            return 0.0
        return 1.0

    found = await wrong(environment(makes_up))
    assert found.keys() == {"episode keys"}
    assert "no episode's key; the first was /s/" in found["episode keys"]


async def test_one_that_blocks_the_loop_is_found_late() -> None:
    async def blocks(e: Episode) -> float:
        await asyncio.to_thread(lambda: None)
        return plain_in_the_loop(e)

    def plain_in_the_loop(e: Episode) -> float:
        import http.client
        from urllib.parse import urlsplit

        parts = urlsplit(e.base_url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=15)
        headers = {"authorization": f"Bearer {e.api_key}", "content-type": "application/json"}
        try:
            connection.request("POST", f"{parts.path}/chat/completions", b'{"messages": []}', headers)
            return float(connection.getresponse().status == 200)
        except OSError:
            return 0.0

    found = await wrong(environment(blocks))
    assert found == {"episode deadline": "no answer within 5 s"}


def test_the_command_checks_a_file_with_a_program(tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    said = command("env", "check", str(path)).stdout
    assert "nothing is wrong" in said
    assert "episode keys" in said
    assert "odd completions" not in said
