"""What of a call is refused before the engine sees it, and what the engine may not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.net.replica_client import RenderRefused, SampleRequest
from headrace.records.trajectory import Span
from headrace_services.rollout.calls import Completion, _completion, check_request
from headrace_services.rollout.chat_format import unknown_name
from headrace_services.rollout.generate import GenerationError


def request(**changes: Any) -> SampleRequest:
    fields = {"token_ids": (3, 4), "max_new_tokens": 6, "timeline": "t", "min_version": 0}
    return msgspec.convert({**fields, **changes}, SampleRequest)


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"token_ids": ()}, "invalid", "token_ids is empty"),
        ({"token_ids": (3, 20)}, "invalid", r"token_ids\[1\] is 20; the model has tokens 0 to 19"),
        ({"token_ids": (-1,)}, "invalid", r"token_ids\[0\] is -1"),
        ({"token_ids": (2**80,)}, "invalid", r"token_ids\[0\] is 1208925819614629174706176"),
        ({"stop_token_ids": (3, 99)}, "invalid", r"stop_token_ids\[1\] is 99"),
        ({"token_ids": (3,) * 5}, "context", "5 tokens, which with max_new_tokens 6 exceed .* 10"),
        ({"max_new_tokens": 10**30}, "context", "max_new_tokens 1000000"),
    ],
)
def test_what_must_not_reach_the_engine_is_refused_by_value(changes: dict[str, Any], reason: str, said: str) -> None:
    with pytest.raises(RenderRefused, match=said) as refused:
        check_request(request(**changes), context=10, vocabulary=20)
    assert refused.value.reason == reason


def test_a_call_may_fill_the_context() -> None:
    check_request(request(token_ids=(0, 19, 3, 4)), context=10, vocabulary=20)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 0},
        {"seed": 2**63},
        {"top_k": 2**31},
        {"token_ids": "34"},
        {"token_ids": (3.5,)},
        {"priority": -9},
    ],
)
def test_a_request_of_another_shape_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        request(**changes)


def output(**changes: Any) -> Any:
    ids = changes.pop("token_ids", [5, 6, 7])
    given = {
        "token_ids": ids,
        "logprobs": SimpleNamespace(token_ids=ids, logprobs=[-0.5] * len(ids)),
        "weight_versions": [SimpleNamespace(version="4", start=0), SimpleNamespace(version="5", start=2)],
        "finish_reason": "length",
        "stop_reason": None,
    }
    return SimpleNamespace(**{**given, **changes})


def test_a_completion_says_what_ended_it() -> None:
    spans = (Span(4, 0, 2), Span(5, 2, 3))
    assert _completion(output(), 3, "call") == Completion([5, 6, 7], [-0.5] * 3, spans, "length", None, 3)
    assert _completion(output(finish_reason="stop"), 3, "call").stop_reason == 7  # the model's own end token
    assert _completion(output(finish_reason="stop", stop_reason="x"), 3, "call").stop_reason == "x"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finish_reason": "abort"}, "ended it with 'abort' after 3 tokens"),
        ({"token_ids": []}, "ended it with 'length' after 0 tokens"),
        ({"logprobs": None}, "not those of the 3 sampled tokens"),
        ({"logprobs": SimpleNamespace(token_ids=[5, 6, 7], logprobs=[-1.0, float("nan"), 0.0])}, "not finite"),
        ({"weight_versions": None}, "no refit has given a version"),
        ({"weight_versions": [SimpleNamespace(version="default", start=0)]}, "no refit has given a version"),
    ],
)
def test_what_the_engine_gave_that_is_no_whole_completion_is_an_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GenerationError, match=said):
        _completion(output(**changes), 3, "call")


def test_an_unknown_parser_is_refused_with_the_nearest() -> None:
    known = ["hermes", "qwen3_xml", "llama3_json"]
    assert unknown_name("hermes", known) is None
    assert unknown_name(None, known) is None
    assert str(unknown_name("hermse", known)).endswith("did you mean hermes?")
    assert str(unknown_name("zzz", known)).endswith("it has hermes, llama3_json, qwen3_xml")
