"""A program that owns its loop, in the process that serves it: what it returns, raises and leaves undone, and how it calls the policy."""

from __future__ import annotations

import asyncio
import functools
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace
from headrace import Episode, Score
from headrace.base.errors import ChatError, CodecError
from headrace.cli.app import app as cli
from headrace.env.chat import _authorities, chat
from headrace.env.episode import EpisodeOutcome
from headrace.env.kit.scripted_policy import ScriptedPolicy
from headrace.env.programs import Programs
from headrace.env.wire import episode_from_wire, episode_to_wire, outcome_from_wire, outcome_to_wire
from headrace.testing import Served, served
from headrace.v1 import episode_pb2

WAIT_S = 60.0


def program(episode: Callable[[Episode], Any], **attributes: Any) -> headrace.Environment:
    """An environment whose program is this function."""
    members = {"episode": staticmethod(episode), "name": "mine", "build": "1", **attributes}
    made = type("Mine", (headrace.Environment,), members)
    return made()  # type: ignore[no-any-return]


def given(within_s: float = WAIT_S, **fields: Any) -> Episode:
    return Episode("http://127.0.0.1:1/s/k/v1", "k" * 32, deadline=time.monotonic() + within_s, **fields)


def scored(outcome: EpisodeOutcome) -> Score:
    assert outcome.score is not None
    return outcome.score


class Repair(headrace.Environment):
    """Answer, be told that it is wrong, answer again."""

    build = "1"

    async def episode(self, e: Episode) -> float:
        messages = list(e.messages)
        for earned in (1.0, 0.5):
            answer = await e.chat(messages, max_tokens=16)
            if answer["content"] == e.public["answer"]:
                e.artifacts["turns"] = len(messages)
                return earned
            messages += [answer, {"role": "user", "content": "Wrong. Try again."}]
        return 0.0


def test_a_program_calls_the_policy_and_says_what_it_earned(serve_environment: Callable[..., Served]) -> None:
    repair = serve_environment(Repair())
    played = repair.episode(["5", "4"], prompt="2 + 2?", public={"answer": "4"})
    assert played.reward == 0.5
    assert played.outcome.artifacts == {"turns": 3}
    assert scored(played.outcome).build == "1"
    assert scored(played.outcome).timings["environment"] > 0
    first, second = played.calls
    assert first.messages == ({"role": "user", "content": "2 + 2?"},)
    assert (first.options["max_tokens"], first.options["model"]) == (16, "policy")
    assert [message["content"] for message in second.messages] == ["2 + 2?", "5", "Wrong. Try again."]
    assert repair.episode(["4"], public={"answer": "4"}).reward == 1
    assert repair.episode(["1", "2"], public={"answer": "4"}).reward == 0


def test_a_plain_function_plays_in_a_thread(serve_environment: Callable[..., Served]) -> None:
    def play(e: Episode) -> Score:
        said = e.chat_sync(e.messages)["content"]
        return Score("SCORED", float(said), components={"thread": float(threading.current_thread().name != "main")})

    played = serve_environment(program(play)).episode(["7"])
    assert (played.reward, scored(played.outcome).components) == (7, {"thread": 1})


def test_tools_and_messages_pass_as_they_are(serve_environment: Callable[..., Served]) -> None:
    calls = [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]

    async def play(e: Episode) -> float:
        answer = await e.chat(e.messages, tools=[{"type": "function", "function": {"name": "add"}}])
        return float(answer == {"role": "assistant", "content": None, "tool_calls": calls})

    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "1"}]}]
    played = serve_environment(program(play)).episode([{"content": None, "tool_calls": calls}], prompt=prompt)
    assert played.reward == 1
    assert list(played.calls[0].messages) == prompt
    assert played.calls[0].options["tools"][0]["function"] == {"name": "add"}


@pytest.mark.parametrize(
    ("returned", "said"), [(float("nan"), "reward is nan"), ("much", "'much' (str)"), (7.0, "reward 7 is not between")]
)
async def test_what_is_no_reward_is_failed(returned: Any, said: str) -> None:
    outcome = await Programs(program(lambda _: returned, reward_max=1.0)).run(given())
    assert scored(outcome).status == "FAILED"
    assert said in scored(outcome).message


async def test_none_leaves_the_reward_to_a_grader_and_invalid_is_invalid() -> None:
    assert (await Programs(program(lambda _: None)).run(given())).score is None
    outcome = await Programs(program(lambda _: Score("INVALID", message="no board"))).run(given())
    assert (scored(outcome).status, scored(outcome).message) == ("INVALID", "no board")


async def raises(e: Episode) -> float:
    raise LookupError(f"404 for {e.base_url}")


async def leaves(_: Episode) -> float:
    raise SystemExit(3)


async def cancels_itself(_: Episode) -> float:
    raise asyncio.CancelledError


async def test_what_it_raises_is_failed_with_the_place_and_without_the_key() -> None:
    key = "0123456789abcdef"
    episode = Episode(f"http://127.0.0.1:1/s/{key}/v1", key, deadline=time.monotonic() + WAIT_S)
    score = scored(await Programs(program(raises, __module__=__name__)).run(episode))
    assert score.status == "FAILED"
    assert score.message.startswith("LookupError: 404 for http://127.0.0.1:1/s/<key>/v1")
    assert f"{Path(__file__).name}:" in score.message
    assert "in raises" in score.message
    assert key not in str(score)
    assert "raises" in score.traceback
    assert "slots.py" not in score.traceback
    assert key not in repr(episode)


@pytest.mark.parametrize(("play", "said"), [(leaves, "SystemExit: 3"), (cancels_itself, "CancelledError")])
async def test_one_program_that_ends_all_or_itself_touches_no_other(play: Any, said: str) -> None:
    programs = Programs(program(play))
    outcomes = await asyncio.gather(*(programs.run(given()) for _ in range(3)))
    assert {scored(outcome).status for outcome in outcomes} == {"FAILED"}
    assert said in scored(outcomes[0]).message
    assert programs.busy == 0


async def test_past_the_deadline_it_is_cancelled_and_timed_out() -> None:
    cancelled = asyncio.Event()

    async def play(e: Episode) -> float:
        e.artifacts["begun"] = True
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    programs = Programs(program(play))
    outcome = await programs.run(given(0.05))
    assert scored(outcome).status == "TIMED_OUT"
    assert scored(outcome).message.startswith("the program of mine did not end within 0.")
    assert outcome.artifacts == {"begun": True}
    await asyncio.wait_for(cancelled.wait(), WAIT_S)
    assert programs.busy == 0


async def test_a_caller_that_goes_cancels_the_program_and_its_call() -> None:
    asked, hung_up = threading.Event(), threading.Event()

    def never(_: Any) -> str:
        asked.set()
        hung_up.wait(WAIT_S)
        return "late"

    with ScriptedPolicy() as policy:
        session = policy.session(never)
        episode = Episode(session.base_url, session.api_key, deadline=time.monotonic() + WAIT_S)
        programs = Programs(program(lambda e: e.chat(e.messages)))
        running = asyncio.create_task(programs.run(episode))
        await asyncio.to_thread(asked.wait, WAIT_S)
        assert programs.busy == 1
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        hung_up.set()


async def test_what_has_no_room_is_not_started_and_a_thread_keeps_its_own() -> None:
    go = threading.Event()
    freed = asyncio.Event()

    def play(_: Episode) -> float:
        go.wait(WAIT_S)
        return 1.0

    programs = Programs(program(play, episodes=1), on_free=freed.set)
    first = asyncio.create_task(programs.run(given(0.05)))
    await asyncio.sleep(0)
    refused = scored(await programs.run(given()))
    assert refused.status == "NOT_STARTED"
    assert "1 of at most 1 episodes" in refused.message
    assert scored(await first).status == "TIMED_OUT"
    assert scored(await programs.run(given())).status == "NOT_STARTED"  # its thread goes on
    go.set()
    await asyncio.wait_for(freed.wait(), WAIT_S)
    assert scored(await programs.run(given())).reward == 1


async def test_a_program_that_shuts_down_gives_up_what_is_left() -> None:
    programs = Programs(program(lambda e: asyncio.sleep(3600)))
    running = asyncio.create_task(programs.run(given()))
    await asyncio.sleep(0)
    await programs.drain(0.01)
    assert scored(await running).status == "NOT_STARTED"
    assert scored(await programs.run(given())).message == "mine is shutting down"


def test_no_room_for_any_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mine\.episodes is 0"):
        Programs(program(lambda _: 1.0, episodes=0))


def test_an_environment_without_a_program_says_that_it_runs_none(serve_environment: Callable[..., Served]) -> None:
    class Exact(headrace.Environment):
        build = "1"

        def score(self, sample: headrace.Sample) -> float:
            return 1.0

    with pytest.raises(Exception, match=r"Exact.*`async def episode"):
        serve_environment(Exact()).episode([])


# -- calling the policy


async def test_past_its_limits_the_policy_refuses_with_openais_code() -> None:
    with ScriptedPolicy() as policy:
        session = policy.session([])
        with pytest.raises(ChatError, match=r"refused the call \(400\): all 0 answers") as refused:
            await chat(session.base_url, session.api_key, {"messages": []}, WAIT_S)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


async def test_a_wrong_key_is_refused_and_noted() -> None:
    with ScriptedPolicy() as policy:
        session = policy.session(["yes"])
        with pytest.raises(ChatError, match="401"):
            await chat(session.base_url, "another", {"messages": []}, WAIT_S)
        assert (len(session.calls), len(policy.strays)) == (0, 1)


async def test_an_answer_that_is_late_is_a_timeout() -> None:
    go = threading.Event()
    with ScriptedPolicy() as policy:
        session = policy.session(lambda _: str(go.wait(WAIT_S)))
        with pytest.raises(TimeoutError):
            await chat(session.base_url, session.api_key, {"messages": []}, 0.05)
        go.set()


async def test_lost_connections_and_overload_are_tried_again_as_one_call() -> None:
    seen: list[dict[str, str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:] if line)}
        await reader.readexactly(int(headers["content-length"]))
        seen.append(headers)
        body = b'{"choices": [{"message": {"role": "assistant", "content": "yes"}}]}'
        answers = [
            b"",
            b"HTTP/1.1 200 OK\r\ncontent-length: 70\r\n\r\n{",
            b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nwait",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (body[:9], body[9:]))
            + b"0\r\n\r\n",
        ]
        writer.write(answers[len(seen) - 1])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await chat(f"http://127.0.0.1:{port}/v1", "key", {"messages": []}, WAIT_S))["content"] == "yes"
    assert len({headers["idempotency-key"] for headers in seen}) == 1
    assert [headers["x-stainless-retry-count"] for headers in seen] == ["0", "1", "2", "3"]
    assert seen[0]["authorization"] == "Bearer key"


async def test_all_calls_share_the_authorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(cli, ["certs", "--dir", str(tmp_path), "127.0.0.1"]).exit_code == 0
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(tmp_path / "127.0.0.1.pem", tmp_path / "127.0.0.1.key")
    loaded: list[ssl.SSLContext] = []

    def loads() -> ssl.SSLContext:
        loaded.append(create_default_context())
        return loaded[-1]

    create_default_context = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", loads)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setattr("headrace.env.chat._authorities", functools.cache(_authorities.__wrapped__))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"choices": [{"message": {"role": "assistant", "content": "yes"}}]}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_side) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        for _ in range(3):
            assert (await chat(url, "key", {"messages": []}, WAIT_S))["content"] == "yes"
    assert len(loaded) == 1


async def test_an_answer_that_is_too_large_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.env.chat.MOST_BYTES", 50)
    with ScriptedPolicy() as policy:
        session = policy.session(["x" * 50, "y"])
        with pytest.raises(ChatError, match="more than 50 bytes"):
            await chat(session.base_url, session.api_key, {"messages": []}, WAIT_S)
        assert len(session.calls) == 1


# -- on the wire


def test_an_episode_survives_the_wire() -> None:
    episode = given(
        messages=({"role": "user", "content": "2 + 2?", "name": "me"},),
        public={"board": [1, 2**60]},
        limits=headrace.env.episode.EpisodeLimits(5, 4096),
        attempt=2,
        environment="mine",
        task_name="sum",
        group_id="g",
        index=3,
        idempotency_key="run/g/2/3",
    )
    wire = episode_to_wire(episode)
    found = episode_from_wire(wire)
    assert 0 < found.remaining_s <= WAIT_S
    assert found == episode_from_wire(wire).__class__(**{**vars(episode), "deadline": found.deadline})
    assert episode_from_wire(wire, 1.0).remaining_s <= 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"deadline_ms": 0}, "deadline_ms is 0"),
        ({"base_url": "file:///etc"}, "base_url is not an http or https address"),
        ({"public_json": "[]"}, "public_json is a JSON list, not an object"),
    ],
)
def test_a_malformed_episode_is_refused(fields: dict[str, Any], said: str) -> None:
    wire = episode_to_wire(given(group_id="g"))
    wire.MergeFrom(episode_pb2.Episode(**fields))
    for name in fields:
        setattr(wire, name, fields[name])
    with pytest.raises(CodecError, match=rf"episode 'g'\[0\]: {said}"):
        episode_from_wire(wire)


def test_an_outcome_survives_the_wire_or_is_failed() -> None:
    for outcome in (EpisodeOutcome(Score("SCORED", 1.0, components={"a": 2.0}), {"end": [1]}), EpisodeOutcome(None)):
        assert outcome_from_wire(outcome_to_wire(outcome)) == outcome
    spoilt = outcome_from_wire(outcome_to_wire(EpisodeOutcome(Score("SCORED", 1.0), {"end": {1}})))
    assert scored(spoilt).status == "FAILED"
    assert "artifacts is not JSON" in scored(spoilt).message
    forged = episode_pb2.EpisodeOutcome(result=outcome_to_wire(EpisodeOutcome(Score("SCORED", 1.0))).result)
    forged.artifacts_json = "[1]"
    assert scored(outcome_from_wire(forged)).status == "FAILED"


def test_without_pytest(tmp_path: Path) -> None:
    with served(Repair()) as repair:
        assert repair.episode(lambda messages: str(len(messages)), public={"answer": "3"}).reward == 0.5
