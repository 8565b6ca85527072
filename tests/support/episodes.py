"""Episodes that tests train, store and show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from headrace.trajectory import Call, EpisodeTrajectory, Message, Span


def call(
    parent: int,
    context: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    version: int = 0,
    spans: tuple[Span, ...] = (),
    replica: str = "r0",
    trained: bool = True,
    messages: tuple[Message, ...] = (),
    answer: Message | None = None,
) -> Call:
    """A call whose tokens were sampled from `version`, or as `spans` say."""
    return Call(
        parent=parent,
        context_token_ids=np.array(context, np.int32),
        completion_token_ids=np.array(completion, np.int32),
        logprobs=np.array([-0.5] * len(completion) if logprobs is None else logprobs, np.float32),
        spans=spans or (Span(version, 0, len(completion)),),
        finish_reason="stop",
        replica=replica,
        trained=trained,
        messages=messages,
        answer=answer or {},
    )


def episode(
    calls: Sequence[Call], *, group_id: str = "g", index: int = 0, truncated: bool = False
) -> EpisodeTrajectory:
    return EpisodeTrajectory(group_id, 1, index, tuple(calls), truncated, "runner")


@st.composite
def episodes(draw: st.DrawFn) -> EpisodeTrajectory:
    """Trees of up to eight calls, at least one of them trained."""
    count = draw(st.integers(1, 8))
    trained = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    tokens = st.integers(0, 50)
    calls = []
    for number in range(count):
        parent = draw(st.integers(-1, number - 1))
        length = draw(st.integers(1, 4))
        cut = draw(st.integers(0, length - 1))
        versions = draw(st.lists(st.integers(0, 3), min_size=2, max_size=2))
        content: Any = draw(st.none() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=2))
        calls.append(
            call(
                parent,
                draw(st.lists(tokens, min_size=int(parent < 0), max_size=3)),
                draw(st.lists(tokens, min_size=length, max_size=length)),
                draw(st.lists(st.floats(-9, 0, width=32), min_size=length, max_size=length)),
                spans=(Span(versions[0], 0, cut), Span(versions[1], cut, length))
                if cut
                else (Span(versions[0], 0, length),),
                replica=draw(st.sampled_from(["a", "b"])),
                trained=trained[number],
                answer={"content": content},
            )
        )
    return episode(calls, truncated=draw(st.booleans()))
