"""Episodes that tests train, store and show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from headrace.records.trajectory import Call, EpisodeTrajectory, Message, Span


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


def random_episodes(count: int, seed: int = 0, vocabulary: int = 20) -> tuple[list[EpisodeTrajectory], list[float]]:
    """Episodes `'g'[0]`, `'g'[1]`, … of one to six calls, and their rewards: chains, branches, several roots, calls that are not trained.
    Episodes of equal index modulo 2 begin with the same prompt."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocabulary, int(rng.integers(1, 9))).tolist() for _ in range(2)]
    found = []
    for place in range(count):
        calls: list[Call] = []
        for number in range(int(rng.integers(1, 8))):
            parent = number - 1 if rng.random() < 0.3 else int(rng.integers(-1, number))
            length = int(rng.integers(1, 7))
            context = rng.integers(0, vocabulary, int(rng.integers(0, 4)) + (parent < 0)).tolist()
            made = call(
                parent,
                context if number else prompts[place % 2],
                rng.integers(0, vocabulary, length).tolist(),
                (-rng.uniform(0.5, 4, length)).tolist(),
                version=int(rng.integers(0, 2)),
                replica=f"r{rng.integers(0, 2)}",
                trained=number == 0 or rng.random() < 0.8,
            )
            calls.append(made)
        found.append(episode(calls, index=place, truncated=bool(rng.random() < 0.2)))
    return found, rng.normal(size=count).tolist()


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
