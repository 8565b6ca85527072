"""Converts messages to tokens and back, with the renderer and parsers of vLLM's chat endpoint, and the run's tokenizer and template."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from pydantic import ValidationError

from headrace.base.errors import ServiceError
from headrace.base.repeats import Repeats
from headrace.config import Config
from headrace.net.replica_client import RenderRefused, RenderRequest, StopReason
from headrace.records.trajectory import FinishReason, Message

from .generate import detokenize

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import BaseRenderer

log = logging.getLogger(__name__)

_ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "properties": {}}}}
_SECTION = "policy.generation.vllm_cfg"
# errors that a template, or a renderer's code in its place, raises for messages that it can't render
_UNRENDERABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, TemplateError)


def register_parsers(config: Config) -> None:
    """Load the run's own parsers into vLLM. Raises `ServiceError` for a file that can't be loaded, and for a parser that vLLM does not have
    even so. vLLM must be imported by then."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    vllm_cfg = config.policy.generation.vllm_cfg
    for key, plugin in (
        ("tool_parser_plugin", vllm_cfg.tool_parser_plugin),
        ("reasoning_parser_plugin", vllm_cfg.reasoning_parser_plugin),
    ):
        if plugin is not None:
            _load_plugin(key, plugin)
    for key, name, known in (
        ("tool_parser", vllm_cfg.tool_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", vllm_cfg.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if problem := unknown_name(name, known):
            raise ServiceError(f"{_SECTION}.{key}: {problem}")


def _load_plugin(key: str, plugin: str) -> None:
    """Import a file, or an installed module. vLLM's own function for it only logs what is wrong."""
    from vllm.utils.import_utils import import_from_path

    try:
        if plugin.endswith(".py"):
            import_from_path(Path(plugin).stem, plugin)
        else:
            importlib.import_module(plugin)
    except (Exception, SystemExit) as error:  # whatever it raises
        raise ServiceError(
            f"{_SECTION}.{key} {plugin}: it can't be loaded ({error!r}); correct it, or leave it out and choose a parser of vLLM's"
        ) from error


def unknown_name(name: str | None, known: Iterable[str]) -> str | None:
    """Return why there is no parser `name`, or None if there is one (or `name` is None)."""
    names = sorted(known)
    if name is None or name in names:
        return None
    close = difflib.get_close_matches(name, names, 1, 0.6)
    return f"vLLM has no parser {name!r}; " + (f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}")


@dataclasses.dataclass(frozen=True)
class Written:
    """A completion to be parsed. The fields are those of `Sampled`.

    `prompt_token_ids` are the tokens before the completion. Some parsers look there for reasoning that the prompt has begun, and some
    tokenizers for whether the first token has a space before it.
    """

    token_ids: Sequence[int]
    finish_reason: FinishReason
    tools: list[dict[str, Any]] | None = None
    stop_reason: StopReason = None
    prompt_token_ids: Sequence[int] = ()


class ChatFormat:
    """The chat format of the run's model."""

    def __init__(self, config: Config, model: ModelConfig, renderer: BaseRenderer) -> None:
        """Raises `ServiceError` for a parser that can't read this tokenizer's output."""
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.utils.async_utils import make_async

        self._vllm_cfg = vllm_cfg = config.policy.generation.vllm_cfg
        # the same arguments as for vLLM's chat endpoint
        self.template: dict[str, Any] = {
            "chat_template": config.policy.tokenizer.chat_template,
            "chat_template_content_format": "auto",
            "default_chat_template_kwargs": config.policy.tokenizer.chat_template_kwargs,
        }
        self.parsers: dict[str, Any] = {
            "enable_auto_tools": vllm_cfg.tool_parser is not None,
            "tool_parser": vllm_cfg.tool_parser,
            "reasoning_parser": vllm_cfg.reasoning_parser or "",
        }
        try:
            self.online = OnlineRenderer(model, renderer, request_logger=None, **self.template, **self.parsers)
        except TypeError as error:
            raise ServiceError(
                f"{_SECTION}.tool_parser {vllm_cfg.tool_parser}, reasoning_parser {vllm_cfg.reasoning_parser}: {error}"
            ) from error
        # A tool call that can't be read stays in the content. That is the policy's fault, not an error of this process to log with a trace.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._unread = Repeats()
        self._model = model
        self._renderer = renderer
        # on the thread where the renderer tokenizes, since a tokenizer is not thread-safe
        self._parse = make_async(self._parsed, executor=renderer._executor)
        self._check_parser()

    @property
    def special_tokens(self) -> bool:
        """Whether the text of a completion keeps its special tokens, because a parser looks for some of them."""
        return self.online.parser is not None

    async def render(self, request: RenderRequest) -> list[int]:
        """Return the token ids of the messages. Raises `RenderRefused`."""
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse
        from vllm.exceptions import VLLMValidationError
        from vllm.renderers.chat_utils import has_non_text_content

        if has_non_text_content(request.messages):
            raise RenderRefused("invalid", "messages contain content that is not text; this service reads text only")
        chat = self._chat(request.messages, request.tools, add_generation_prompt=request.add_generation_prompt)
        try:
            rendered = await self.online.render_chat(chat)
        except VLLMValidationError as error:
            raise RenderRefused(
                "context" if error.parameter in ("input_text", "input_tokens") else "invalid", str(error)
            ) from error
        except ValidationError as error:  # pydantic validates some parts only now
            raise RenderRefused("invalid", f"messages: {_first(error)}") from error
        except _UNRENDERABLE as error:
            raise RenderRefused("invalid", f"the chat template can't render these messages: {error!r}") from error
        if isinstance(rendered, ErrorResponse):
            raise RenderRefused("invalid", rendered.error.message)
        _, (prompt,) = rendered
        ids: list[int] = prompt["prompt_token_ids"]
        return ids

    async def derender(self, written: Written) -> Message:
        """Return the message that a completion of the engine forms. It depends on `written` alone. Raises `RenderRefused`."""
        return await self._parse(written)

    def _parsed(self, written: Written) -> Message:
        chat = self._chat([], written.tools)
        tokenizer, ids, prompt = self._renderer.get_tokenizer(), written.token_ids, written.prompt_token_ids
        if written.finish_reason == "stop" and not isinstance(written.stop_reason, str):
            ids = ids[:-1]  # the end token is not part of the text
        text = detokenize(tokenizer, prompt, ids, special_tokens=self.special_tokens)
        if isinstance(written.stop_reason, str):
            text, found, _ = text.partition(written.stop_reason)
            if not found:
                raise RenderRefused("invalid", f"the stop string {written.stop_reason!r} is not in the completion")
        if self.online.parser is None:
            return {"role": "assistant", "content": text}
        try:
            reasoning, content, calls = self._read(chat, text, ids, prompt)
        except Exception as error:  # noqa: BLE001 - whatever the parser raises for a text that the policy wrote
            if (times := self._unread.due(type(error).__name__)) is not None:
                log.warning("vLLM's parser can't read a completion, which stays text: %r (%d so far)", error, times)
            return {"role": "assistant", "content": text}
        message: Message = {"role": "assistant", "content": _whole(content)}
        if reasoning is not None:
            message["reasoning"] = _whole(reasoning)
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": _whole(call.name), "arguments": _whole(call.arguments)}}
                for call in calls
            ]
        return message

    def _read(
        self, chat: ChatCompletionRequest, text: str, ids: Sequence[int], prompt: Sequence[int]
    ) -> tuple[str | None, str | None, Sequence[Any] | None]:
        """Reasoning, content and tool calls of a completion, by vLLM's parsers."""
        kwargs = self.online.effective_chat_template_kwargs(chat)
        tokenizer = self._renderer.get_tokenizer()
        parser: Any = self.online.parser(tokenizer, chat.tools, chat_template_kwargs=kwargs, model_config=self._model)
        parser.set_prompt_token_ids(prompt)
        parsed: tuple[str | None, str | None, Sequence[Any] | None] = parser.parse(
            text, chat, enable_auto_tools=self.online.enable_auto_tools, model_output_token_ids=ids
        )
        return parsed

    def _check_parser(self) -> None:
        """Raise `ServiceError` for a parser that reads no completion at all: some of vLLM's are for its server alone."""
        if self.online.parser is None:
            return
        vllm_cfg, ids = self._vllm_cfg, self._renderer.get_tokenizer().encode("a")
        try:
            self._read(self._chat([], [_ANY_TOOL]), "a", ids, ())
        except Exception as error:  # whatever it raises
            raise ServiceError(
                f"{_SECTION}.tool_parser {vllm_cfg.tool_parser}, reasoning_parser {vllm_cfg.reasoning_parser}: vLLM's parser "
                f"can't read a completion of this model ({error!r}); choose another"
            ) from error

    def _chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, **options: Any
    ) -> ChatCompletionRequest:
        """Return the request that vLLM's chat endpoint would have received. Raises `RenderRefused` if it is invalid."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.exceptions import VLLMClientError

        if tools:
            options["tool_choice"] = "auto" if self.online.enable_auto_tools else "none"
        try:
            return ChatCompletionRequest(messages=messages, tools=tools or None, **options)
        except ValidationError as error:
            raise RenderRefused("invalid", _first(error)) from error
        except VLLMClientError as error:
            raise RenderRefused("invalid", str(error)) from error


def _first(error: ValidationError) -> str:
    """Return the first problem and its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _whole(text: str | None) -> str | None:
    """Return the text with each half of a surrogate pair as an escape. A policy can write halves as escapes in JSON, and they stay
    escapes."""
    return None if text is None else text.encode(errors="backslashreplace").decode()
