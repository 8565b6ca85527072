"""What the engine has sampled of one trajectory, after what another replica may have sampled before: pure, no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import HeadraceError
from headrace.replay import Lease
from headrace.trajectory import FinishReason, Span, Trajectory

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

# (version, first token) of each run of tokens of this request that were sampled from the same weights
Labels = Sequence[tuple[str, int]]
# The text of a completion's first tokens.
Text = Callable[[Sequence[int]], str]


class GenerationError(HeadraceError):
    """The engine gave something that is no trajectory; the attempt at it has failed."""


class Sampled:
    """Grows with the engine's outputs. `begun` tokens of another replica come first in every record made of it."""

    def __init__(self, lease: Lease, index: int, replica: str) -> None:
        self._lease = lease
        self._index = index
        self._replica = replica
        self._prefix = lease.prefixes.get(index)
        self._begun: list[int] = self._prefix.completion_token_ids.tolist() if self._prefix else []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self.text = ""

    @property
    def new(self) -> int:
        """Tokens sampled here."""
        return len(self._ids)

    @property
    def begun(self) -> int:
        return len(self._begun)

    @property
    def ids(self) -> list[int]:
        """The completion so far."""
        return [*self._begun, *self._ids]

    def add(self, output: CompletionOutput) -> None:
        """The tokens since the last output. Raises `GenerationError` if they come without their log-probabilities."""
        ids = list(output.token_ids)
        if not ids:
            return
        # one sampled token a position, so the flat lists are in step with the ids
        if output.logprobs is None or list(output.logprobs.token_ids) != ids:
            raise GenerationError(
                f"trajectory {self._index}: log-probabilities are not of the {len(ids)} sampled tokens"
            )
        self._ids += ids
        self._logprobs += output.logprobs.logprobs
        self.text += output.text

    def record(self, labels: Labels, finish: FinishReason, text: str, seconds: float, length: int) -> Trajectory:
        """The first `length` tokens as a trajectory."""
        ids = np.asarray(self.ids[:length], dtype=np.int32)
        prefix = self._prefix
        before = prefix.logprobs if prefix else np.empty(0, dtype=np.float32)
        spans = [*(prefix.spans if prefix else ()), *self._spans(labels)]
        writers = (*(prefix.written if prefix else ()), (self._replica, self.begun, length))
        timings = {"generate_s": seconds + (prefix.timings.get("generate_s", 0.0) if prefix else 0.0)}
        record = Trajectory(
            group_id=self._lease.group.id,
            attempt=self._lease.attempt,
            index=self._index,
            prompt_token_ids=self._lease.group.prompt_token_ids,
            completion_token_ids=ids,
            logprobs=np.concatenate([before, np.asarray(self._logprobs, dtype=np.float32)])[:length],
            loss_mask=np.ones(ids.size, dtype=np.uint8),
            spans=joined(spans, length),
            finish_reason=finish,
            text=text,
            replica=self._replica,
            turns=((0, ids.size),),
            timings=timings,
            writers=writers,
        )
        record.check()
        return record

    def _spans(self, labels: Labels) -> list[Span]:
        """Law 2 counts age by these, so a token whose weights have no version never leaves the replica."""
        if not labels or not all(version.isdecimal() for version, _ in labels):
            raise GenerationError(
                f"trajectory {self._index}: sampled from weights that no refit has named ({list(labels)})"
            )
        ends = [start for _, start in labels[1:]] + [len(self._ids)]
        return [
            Span(int(version), self.begun + start, self.begun + end)
            for (version, start), end in zip(labels, ends, strict=True)
        ]


def joined(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    """The spans of the first `length` tokens, neighbours of one version as one."""
    whole: list[Span] = []
    for span in spans:
        end = min(span.end, length)
        if end <= span.start:
            continue
        if whole and whole[-1].version == span.version:
            whole[-1] = Span(span.version, whole[-1].start, end)
        else:
            whole.append(Span(span.version, span.start, end))
    return tuple(whole)


def end_at_stop(text_of: Text, ids: Sequence[int], begun: int, stops: Sequence[str]) -> tuple[int, str]:
    """Length and text of a completion that was gone on from `begun` tokens, as its stop strings end it.

    The engine looks for them in what it has sampled itself; one that begins in the tokens before is found here. The text ends where
    the stop string begins.
    """
    longest = max(len(stop.encode()) for stop in stops)
    lengths = [*range(begun + 1, min(begun + longest, len(ids))), len(ids)]
    for length in lengths:
        text = text_of(ids[:length])
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return length, text[: min(found)]
    return len(ids), text
