"""Clients that programs bring with them, as they are, against the gateway: their streams, their tools, their retries.

Behind each of them: what is trained is what the client gave its program, in that order and nothing else (acceptance 6).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import openai
import pytest

from headrace.records.trajectory import Message
from headrace_services.agents.session import SessionSummary
from tests.support.faulty_way import FAULTS, Fault, faulty_way
from tests.support.gateways import Open, open_episode, plain
from tests.support.own_python import own_python
from tests.support.toy_policy import ToyPolicy
from tests.support.toy_sessions import user

QUESTIONS = [f"question {number}" for number in range(10)]
# How long clients wait. A late answer is later than that; one that a busy machine holds up is late, too, and no test minds.
PATIENCE_S = 1.0
PATIENT: dict[str, Any] = {"timeout": PATIENCE_S, "max_retries": 8}
SEEN = '{"seen": "nothing"}'
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "looks",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "integer"}, "in": {"type": "array", "items": {"type": "integer"}}},
        "required": ["at", "in"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOLS: list[Any] = [{"type": "function", "function": LOOK}]
GIVEN: dict[str, Any] = {"model": "policy", "tools": TOOLS}
LITELLM_PROGRAM = Path(__file__).parents[2] / "support" / "litellm_program.py"

# Asks QUESTIONS at an address with a key, streaming or not; calls the tool `look`; returns the answers that it got.
Program = Callable[[str, str, bool], Awaitable[list[Message]]]


def spoken(answers: Iterable[Message]) -> list[Any]:
    """What is said and called in messages, in the forms that clients have of them."""
    return [
        [
            answer.get("content") or "",
            [
                [call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])]
                for call in answer.get("tool_calls") or ()
            ],
        ]
        for answer in answers
    ]


class ProgramFailed(Exception):
    """In a process of its own."""


# -- programs ----------------------------------------------------------------------------------------------------------------


async def converse(ask: Callable[[list[Any]], Awaitable[Any]]) -> list[Message]:
    """Ask each question, with calls of the tool until an answer has none. `ask` returns the client's message for a conversation."""
    used: list[Message] = []
    for question in QUESTIONS:
        messages: list[Any] = [user(question)]
        while messages[-1]["role"] != "assistant":
            answer = await ask(messages)
            messages.append(answer.model_dump(exclude={"parsed"}))
            used.append(messages[-1])
            messages += [{"role": "tool", "tool_call_id": call.id, "content": SEEN} for call in answer.tool_calls or ()]
    return used


async def with_openai(base_url: str, api_key: str, stream: bool) -> list[Message]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **PATIENT, **plain()) as client:

        async def ask(messages: list[Any]) -> Any:
            if not stream:
                return (await client.chat.completions.create(messages=messages, **GIVEN)).choices[0].message
            async with client.chat.completions.stream(messages=messages, **GIVEN) as answering:
                return (await answering.get_final_completion()).choices[0].message

        return await converse(ask)


async def with_blocking_openai(base_url: str, api_key: str, stream: bool) -> list[Message]:
    """In threads: it closes a stream's connection itself, as soon as it has read the end."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, **PATIENT) as client:

        def ask(messages: list[Any]) -> Any:
            if not stream:
                return client.chat.completions.create(messages=messages, **GIVEN).choices[0].message
            with client.chat.completions.stream(messages=messages, **GIVEN) as answering:
                return answering.get_final_completion().choices[0].message

        return await converse(lambda messages: asyncio.to_thread(ask, messages))


async def with_openai_agents(base_url: str, api_key: str, stream: bool) -> list[Message]:
    import agents  # a second of imports, for this alone

    used: list[Message] = []

    async def look(context: Any, arguments: str) -> str:
        assert json.loads(arguments) == {"at": 1, "in": [2]}
        return SEEN

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **PATIENT, **plain()) as client:
        agent = agents.Agent(
            name="looker",
            instructions="Look around.",
            model=agents.OpenAIChatCompletionsModel("policy", client),
            tools=[agents.FunctionTool("look", "looks", LOOK["parameters"], look)],
        )
        options: dict[str, Any] = {"max_turns": 50, "run_config": agents.RunConfig(tracing_disabled=True)}
        for question in QUESTIONS:
            ran: Any
            if stream:
                ran = agents.Runner.run_streamed(agent, question, **options)
                async for _ in ran.stream_events():
                    pass
            else:
                ran = await agents.Runner.run(agent, question, **options)
            used += [_message(response.output) for response in ran.raw_responses]
    return used


def _message(output: Iterable[Any]) -> Message:
    """The items that the Agents SDK makes of one answer, as the message that it was."""
    items = list(output)
    text = [part.text for item in items if item.type == "message" for part in item.content]
    calls = [
        {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        for item in items
        if item.type == "function_call"
    ]
    return {"role": "assistant", "content": "".join(text), "tool_calls": calls}


@pytest.fixture(scope="session")
def litellm(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """LiteLLM has a Python of its own: it asks for an older huggingface_hub than vLLM gets."""
    python = own_python(tmp_path_factory.mktemp("litellm"), "litellm")

    async def play(base_url: str, api_key: str, stream: bool) -> list[Message]:
        options = {"base_url": base_url, "api_key": api_key, "tools": TOOLS, **PATIENT}
        told = json.dumps({"questions": QUESTIONS, "seen": SEEN, "stream": stream, "options": options})
        process = await asyncio.create_subprocess_exec(python, LITELLM_PROGRAM, told, stdout=PIPE, stderr=PIPE)
        said, complained = await process.communicate()
        if process.returncode:
            raise ProgramFailed(complained.decode())
        answers: list[Message] = json.loads(said.splitlines()[-1])
        return answers

    return play


@pytest.fixture(
    params=[
        "openai",
        "openai, blocking",
        "openai agents",
        # it is installed for this, and takes seconds to be imported: minutes in all
        pytest.param("litellm", marks=[pytest.mark.nightly, pytest.mark.timeout(1200)]),
    ]
)
def program(request: pytest.FixtureRequest) -> Program:
    if request.param == "litellm":
        installed: Program = request.getfixturevalue("litellm")
        return installed
    return {"openai": with_openai, "openai, blocking": with_blocking_openai, "openai agents": with_openai_agents}[
        request.param
    ]


# -- what is trained ---------------------------------------------------------------------------------------------------------


async def played(
    program: Program, faults: Iterable[Fault | None], *, stream: bool
) -> tuple[list[Message], SessionSummary, Open]:
    """What the program was given, what is trained of it, and the episode."""
    # reasoning is not shown again, so that programs that leave it out continue what they were told
    async with open_episode(ToyPolicy(reasoning="stripped")) as opened:
        async with faulty_way(opened.address, faults) as address:
            used = await program(f"{address}/s/{opened.key}/v1", opened.key, stream)
        return used, await opened.episode.end(), opened


def check(used: list[Message], ending: SessionSummary, opened: Open) -> None:
    assert spoken(call.answer for call in ending.calls) == spoken(used)
    assert all(call.trained for call in ending.calls)
    assert not ending.dropped
    # each was sampled once, as it is recorded, in the context that it is recorded in
    (toy,) = opened.replicas.values()
    paths: list[tuple[int, ...]] = []
    for call, (prompt, completion) in zip(ending.calls, toy.policy.asked, strict=True):
        before = () if call.parent < 0 else paths[call.parent]
        assert (*before, *call.context_token_ids.tolist()) == prompt
        assert tuple(call.completion_token_ids.tolist()) == completion
        paths.append((*prompt, *completion))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_a_client_was_given_is_what_is_trained(program: Program, stream: bool) -> None:
    used, ending, opened = await played(program, (), stream=stream)
    check(used, ending, opened)
    assert len(used) > len(QUESTIONS)  # of which some are calls of the tool
    assert sum(call.parent < 0 for call in ending.calls) == len(QUESTIONS)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_client_that_retries_gets_the_answer_that_is_trained(program: Program, fault: Fault) -> None:
    used, ending, opened = await played(program, [None, fault, None, None, fault], stream=False)
    check(used, ending, opened)
    assert opened.episode.session.joined >= (0 if fault in ("500", "503") else 2)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "cut"])
async def test_a_stream_that_did_not_begin_is_asked_for_again(program: Program, fault: Fault) -> None:
    used, ending, opened = await played(program, [fault, None, fault], stream=True)
    check(used, ending, opened)


async def test_one_fault_after_the_other(program: Program) -> None:
    used, ending, opened = await played(program, FAULTS, stream=False)
    check(used, ending, opened)
    assert opened.episode.session.joined >= 3


async def test_a_stream_that_breaks_on_its_way_was_given(program: Program) -> None:
    """Nobody asks again by himself behind the first bytes of a stream, and the gateway wrote all of them."""
    async with open_episode() as opened:
        async with faulty_way(opened.address, ["cut"]) as address:
            with pytest.raises((openai.APIConnectionError, ProgramFailed)):
                await program(f"{address}/s/{opened.key}/v1", opened.key, True)
        ending = await opened.episode.end()
    assert len(ending.calls) == 1
