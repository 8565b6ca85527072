"""Messages to tokens and back as vLLM does it for chats, against the tokenizer's own template. No engine runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import AutoTokenizer

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.net.replica_client import RenderRefused, RenderRequest
from headrace_services.rollout.chat_format import ChatFormat, Written, register_parsers
from headrace_services.rollout.engine import engine_arguments
from headrace_services.trainer.demo_models import tiny_calculator
from tests.support.mutation import Mutator

pytestmark = pytest.mark.slow

CONTEXT = 1024
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Works out a sum",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
CALL = {"id": "call-0-0", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "2+2"}'}}
CHAT = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is 2+2, in Zürich? 🦊"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-0-0", "content": "4"},
]


def config_of(model: Path, template: dict[str, Any] | None = None, text: str | None = None, **parsers: str) -> Config:
    policy = {
        "model_name": str(model),
        "precision": "float32",
        "max_total_sequence_length": CONTEXT,
        "tokenizer": {"chat_template": text, "chat_template_kwargs": template or {}},
        "generation": {"vllm_cfg": parsers},
    }
    return Config.model_validate({"policy": policy})


@pytest.fixture(scope="module")
def format_of(model: Path) -> Callable[..., ChatFormat]:
    """The chat format under a configuration of the model."""
    return format_with(model)


def format_with(model: Path) -> Callable[..., ChatFormat]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers.registry import renderer_from_config
    from vllm.usage.usage_lib import UsageContext

    arguments = AsyncEngineArgs(**engine_arguments(config_of(model), on_cpu=True))
    engine_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    renderer = renderer_from_config(engine_config)
    return lambda **settings: ChatFormat(config_of(model, **settings), engine_config.model_config, renderer)


@pytest.fixture(scope="module")
def hermes(format_of: Callable[..., ChatFormat]) -> ChatFormat:
    return format_of(tool_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def plain(format_of: Callable[..., ChatFormat]) -> ChatFormat:
    return format_of()


def as_transformers_does(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **options: Any
) -> list[int]:
    """Templates take arguments as values, as vLLM gives them."""
    parsed = json.loads(json.dumps(messages))
    for message in parsed:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    options = {"add_generation_prompt": True, **options}
    ids: list[int] = tokenizer.apply_chat_template(parsed, tools=tools, return_dict=False, **options)
    return ids


@pytest.mark.parametrize("tools", [None, [TOOL], []])
@pytest.mark.parametrize("length", range(1, len(CHAT) + 1))
async def test_a_conversation_becomes_the_tokens_of_its_own_template(
    hermes: ChatFormat, plain: ChatFormat, tokenizer: Any, length: int, tools: Any
) -> None:
    messages = CHAT[:length]
    expected = as_transformers_does(tokenizer, messages, tools or None)
    assert await hermes.render(RenderRequest(messages, tools)) == expected
    assert await plain.render(RenderRequest(messages, tools)) == expected
    without = as_transformers_does(tokenizer, messages, tools or None, add_generation_prompt=False)
    assert await hermes.render(RenderRequest(messages, tools, add_generation_prompt=False)) == without
    assert expected[: len(without)] == without


async def test_the_runs_template_arguments_are_used(format_of: Callable[..., ChatFormat], tokenizer: Any) -> None:
    quiet = format_of(template={"no_thinking": True}, tool_parser="hermes")
    ids = await quiet.render(RenderRequest(CHAT))
    assert ids == as_transformers_does(tokenizer, CHAT, no_thinking=True)
    assert ids != as_transformers_does(tokenizer, CHAT)


async def test_the_runs_own_template_takes_the_place_of_the_tokenizers(
    format_of: Callable[..., ChatFormat], tokenizer: Any
) -> None:
    text = "{% for message in messages %}{{ message.content }}{{ after }}{% endfor %}"
    own = format_of(text=text, template={"after": "!"})
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    assert await own.render(RenderRequest(messages)) == tokenizer.encode("2+2!4!", add_special_tokens=False)


async def test_mistrals_own_files_beside_a_model_are_not_read(model: Path, tokenizer: Any, tmp_path: Path) -> None:
    """vLLM would take its configuration, weights and tokenizer from them, and the trainer's chat template from nowhere."""
    folder = shutil.copytree(model, tmp_path / "model")
    for name in ("params.json", "tekken.json"):
        (folder / name).write_text("{}")
    save_file({}, folder / "consolidated.safetensors")
    format = format_with(folder)()
    ids = await format.render(RenderRequest(CHAT))
    assert ids == as_transformers_does(tokenizer, CHAT)
    completion = tokenizer.encode("4", add_special_tokens=False)
    assert await format.derender(Written(completion, "length")) == {"role": "assistant", "content": "4"}


def test_reasoning_goes_by_its_older_name_too(hermes: ChatFormat) -> None:
    """As some clients hand it back; docs/agents.md says so. What is shown of it, the template decides."""
    answer = {"role": "assistant", "content": "4", "reasoning_content": "I wonder"}
    (read,) = hermes._chat([answer], None).messages
    assert read["reasoning"] == "I wonder"
    assert "reasoning_content" not in read


async def test_special_tokens_spelt_in_a_text_are_what_chats_make_of_them(hermes: ChatFormat, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n<think>\x00\u2028"}]
    assert await hermes.render(RenderRequest(messages)) == as_transformers_does(tokenizer, messages)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty conversation"),
        ([{"role": 5, "content": "x"}], "messages.0"),
        ([{"content": "x"}], "messages.0"),
        ([{"role": "user", "content": {"a": 1}}], "messages"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "x"}}]}], "id: Field required"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}], "not text"),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "not text"),
    ],
)
async def test_messages_that_are_none_are_refused(hermes: ChatFormat, messages: Any, said: str) -> None:
    with pytest.raises(RenderRefused, match=said) as refused:
        await hermes.render(RenderRequest(messages))
    assert refused.value.reason == "invalid"


async def test_a_conversation_longer_than_the_context_is_told_apart(hermes: ChatFormat) -> None:
    with pytest.raises(RenderRefused, match="maximum context length is 1024 tokens") as refused:
        await hermes.render(RenderRequest([{"role": "user", "content": "x" * CONTEXT}]))
    assert refused.value.reason == "context"


def completion(tokenizer: Any, text: str, **changes: Any) -> Written:
    fields: dict[str, Any] = {"finish_reason": "stop", "stop_reason": tokenizer.eos_token_id, "tools": [TOOL]}
    return Written(token_ids=tokenizer.encode(text), **{**fields, **changes})


WRITTEN = (
    'I wonder</think>Let me see.<tool_call>\n{"name": "calculate", "arguments": {"expression": "2+2"}}\n</tool_call>'
)


async def test_a_completion_becomes_reasoning_content_and_tool_calls(hermes: ChatFormat, tokenizer: Any) -> None:
    """The same tokens always give the same message, so its calls have no ids."""
    request = completion(tokenizer, f"{WRITTEN}<|im_end|>")
    message = await hermes.derender(request)
    function = {"name": "calculate", "arguments": '{"expression": "2+2"}'}
    assert message == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": "I wonder",
        "tool_calls": [{"type": "function", "function": function}],
    }
    assert await hermes.derender(request) == message


async def test_a_calculator_call_is_read_and_continued_as_taught(tmp_path: Path) -> None:
    tiny_calculator.make(tmp_path / "model", warmup=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    chats = format_with(tmp_path / "model")(tool_parser="hermes")
    tools = [{**TOOL, "function": {**TOOL["function"], "name": "calculator"}}]
    taught = (each for each in tiny_calculator.conversations(Random(0)) if len(each) == 2)
    for (asked, call), (told, right) in islice(taught, 5):
        problem = asked.removeprefix("<tools>calculator<user>").removesuffix("<asst>")
        messages: list[dict[str, Any]] = [{"role": "user", "content": problem}]
        assert await chats.render(RenderRequest(messages, tools)) == tokenizer.encode(asked)
        message = await chats.derender(completion(tokenizer, f"{call}<eos>", tools=tools))
        function = {"name": "calculator", "arguments": json.dumps({"expression": problem})}
        assert message["tool_calls"] == [{"type": "function", "function": function}]
        assert not message["content"]
        called = {**message, "tool_calls": [{"id": "call-0", **each} for each in message["tool_calls"]]}
        messages += [called, {"role": "tool", "tool_call_id": "call-0", "content": right}]
        assert await chats.render(RenderRequest(messages, tools)) == tokenizer.encode(f"{asked}{call}<eos>{told}")


async def test_without_tools_or_parsers_a_call_is_text(hermes: ChatFormat, plain: ChatFormat, tokenizer: Any) -> None:
    request = completion(tokenizer, f"{WRITTEN}<|im_end|>", tools=None)
    content = WRITTEN.removeprefix("I wonder</think>")
    assert await hermes.derender(request) == {"role": "assistant", "content": content, "reasoning": "I wonder"}
    # without a parser nobody looks for special tokens, and they are left out of the text
    assert await plain.derender(request) == {"role": "assistant", "content": f"I wonder</think>{content}"}
    spelt = completion(tokenizer, "one<|im_start|>two<|im_end|>")
    assert (await plain.derender(spelt))["content"] == "onetwo"


async def test_the_token_that_ended_it_is_not_in_the_text(
    hermes: ChatFormat, plain: ChatFormat, tokenizer: Any
) -> None:
    for ended, content in (
        (completion(tokenizer, "</think>fine!"), "fine"),
        (completion(tokenizer, "</think>fine!", stop_reason=None), "fine"),
        (completion(tokenizer, "</think>fine!", finish_reason="length", stop_reason=None), "fine!"),
        (completion(tokenizer, "</think>fine, so", stop_reason=", s"), "fine"),
        (completion(tokenizer, "</think>fi<|im_start|>ne,", stop_reason="<|im_start|>ne"), "fi"),
    ):
        assert (await hermes.derender(ended))["content"] == content
    assert (await plain.derender(completion(tokenizer, "<|im_end|>")))["content"] == ""
    with pytest.raises(RenderRefused, match="'absent'"):
        await hermes.derender(completion(tokenizer, "fine", stop_reason="absent"))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": "calculate"}</tool_call>',
        '<tool_call>{"name": "calculate", "arguments": {"expression": "2+',
        "<tool_call>" + "[" * 900,
        "<tool_call>1e999</tool_call>",
    ],
)
async def test_what_is_no_tool_call_stays_in_the_content(hermes: ChatFormat, tokenizer: Any, text: str) -> None:
    message = await hermes.derender(completion(tokenizer, f"</think>{text}", finish_reason="length", stop_reason=None))
    assert message["content"] == text
    assert "tool_calls" not in message


async def test_a_completion_that_the_parser_cant_read_is_text(
    format_of: Callable[..., ChatFormat], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hermes = format_of(tool_parser="hermes")

    def parse(*arguments: Any, **named: Any) -> Any:
        raise ValueError("what is this?")

    monkeypatch.setattr(hermes.online.parser, "parse", parse)
    text = '<tool_call>{"name": "calculate", "arguments": {}}</tool_call>'
    assert await hermes.derender(completion(tokenizer, f"{text}<|im_end|>")) == {"role": "assistant", "content": text}


async def test_half_a_surrogate_pair_in_a_call_stays_an_escape(hermes: ChatFormat, tokenizer: Any) -> None:
    text = r'</think><tool_call>{"name": "\ud83d", "arguments": {"expression": "\udd8a\ud83e\udd8a"}}</tool_call>'
    (call,) = (await hermes.derender(completion(tokenizer, f"{text}<|im_end|>")))["tool_calls"]
    assert call["function"] == {"name": r"\ud83d", "arguments": '{"expression": "\\udd8a🦊"}'}
    assert json.loads(call["function"]["arguments"]) == {"expression": "\udd8a🦊"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"tools": [{"type": "function"}]}, "tools.0.function: Field required"), ({"tools": [{}]}, "tools.0")],
)
async def test_what_is_no_completion_is_refused(
    hermes: ChatFormat, tokenizer: Any, changes: dict[str, Any], said: str
) -> None:
    fields: dict[str, Any] = {"token_ids": tokenizer.encode("x"), "finish_reason": "length"}
    with pytest.raises(RenderRefused, match=said):
        await hermes.derender(Written(**{**fields, **changes}))


async def test_malformed_requests_are_refused_or_answered(hermes: ChatFormat, session_seed: int) -> None:
    """Nothing else may come of them; what is not of the request's shape doesn't get here."""
    mutator = Mutator(Random(f"{session_seed} chat format"))
    answered = 0
    for _ in range(300):
        chat = mutator.structure({"messages": CHAT, "tools": [TOOL]})
        messages, tools = (chat.get(key) if isinstance(chat, dict) else None for key in ("messages", "tools"))
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            continue
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            continue
        try:
            ids = await hermes.render(RenderRequest(messages, tools))
            await hermes.derender(Written(ids, "length", tools))
            answered += 1
        except RenderRefused:
            pass
    assert answered


def test_a_parser_that_there_is_not_is_refused_with_the_nearest(model: Path) -> None:
    register_parsers(config_of(model, tool_parser="hermes", reasoning_parser="qwen3"))
    with pytest.raises(ServiceError, match=r"tool_parser.*'hermse'.*hermes\?"):
        register_parsers(config_of(model, tool_parser="hermse"))
    with pytest.raises(ServiceError, match=r"reasoning_parser.*'qwen33'.*qwen3"):
        register_parsers(config_of(model, reasoning_parser="qwen33"))


PLUGIN = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser


@ReasoningParserManager.register_module("of_this_test")
class OfThisTest(DeepSeekR1ReasoningParser):
    pass
"""


def test_a_parser_from_a_file_of_ones_own_is_registered(
    model: Path, format_of: Callable[..., ChatFormat], tmp_path: Path
) -> None:
    plugin = tmp_path / "of_this_test_parser.py"
    settings = {"reasoning_parser": "of_this_test", "reasoning_parser_plugin": str(plugin)}
    with pytest.raises(ServiceError, match=r"reasoning_parser_plugin .*FileNotFoundError"):
        register_parsers(config_of(model, **settings))
    plugin.write_text(PLUGIN)
    with pytest.raises(ServiceError, match=r"reasoning_parser: .*'of_this_test'"):
        register_parsers(config_of(model, reasoning_parser="of_this_test"))
    register_parsers(config_of(model, **settings))
    assert format_of(**settings).special_tokens
    plugin.write_text("1 / 0")
    with pytest.raises(ServiceError, match=r"tool_parser_plugin .*ZeroDivisionError"):
        register_parsers(config_of(model, tool_parser_plugin=str(plugin)))


@pytest.mark.parametrize("parsers", [{"tool_parser": "openai"}, {"reasoning_parser": "openai_gptoss"}])
def test_a_parser_that_reads_nothing_is_refused_at_the_start(
    format_of: Callable[..., ChatFormat], parsers: dict[str, str]
) -> None:
    with pytest.raises(ServiceError, match=r"read a completion.*choose another"):
        format_of(**parsers)


def test_parsers_that_do_not_go_together_are_refused(format_of: Callable[..., ChatFormat]) -> None:
    with pytest.raises(ServiceError, match=r"tool_parser hf, reasoning_parser qwen3.*combined"):
        format_of(tool_parser="hf", reasoning_parser="qwen3")
