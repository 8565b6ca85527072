"""A sample: a trajectory with what an environment and the trainer say of it, as a line of a sample file holds it and people read it.

Per-token lists cover the completion (for an episode of several `calls`, their completions one after the other) and have equal lengths.
null means that the policy did not write the token, or that nothing was computed. docs/metrics.md defines them (`COLUMNS`).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.base.deferred import np
from headrace.base.printable import printable
from headrace.records.score import Score, Status
from headrace.records.trajectory import AnyTrajectory, EpisodeTrajectory, FinishReason, Float32, Group, Message
from headrace.run import group_rewards
from headrace.run.token_texts import TokenTexts

Ranking = Literal["best", "worst"]

_DECIMALS = 6
_DIGITS = 7
# Characters of the artifacts of one sample that are shown.
_SHOWN = 10_000
# The lists with a number for each token of the completion, in the order in which they are written and shown.
COLUMNS = (
    "generation_logprobs",
    "token_loss_mask",
    "mask_reasons",
    "advantages",
    "prev_logprobs",
    "policy_logprobs",
    "reference_policy_logprobs",
    "teacher_logprobs",
    "ratios",
    "clipped",
    "importance_weights",
    "raw_importance_weights",
    "entropies",
    "token_losses",
    "token_loss_gradients",
    "token_value_losses",
    "values",
    "returns",
)
_CALL_FIELDS = ("parent", "trained", "finish_reason", "replica", "messages", "answer", "timings")


class MaskReason(enum.IntEnum):
    """Why a token doesn't count in the policy's loss; of several reasons, the lowest. Up to `LOGPROB_ERROR` it has no term in the loss;
    from `SAMPLING_FILTER` on only the policy term is left out."""

    COUNTED = 0
    ENVIRONMENT = 1  # the environment wrote it
    UNTRAINED_CALL = 2
    OVER_AGE = 3
    ZERO_MULTIPLIER = 4  # of the data set
    OVERLONG = 5  # cut off, with overlong_filtering
    LOGPROB_ERROR = 6  # seq_logprob_error_threshold
    SAMPLING_FILTER = 7  # top-k or top-p leaves it out now
    SEQUENCE_MASK = 8  # seq-mask-tis
    IMPORTANCE_WEIGHT = 9  # icepop, or a weight that is not finite
    PROBABILITY_DIFFERENCE = 10  # probability_difference_mask


class Clipped(enum.IntEnum):
    """Which bound of the ratio cut a token's policy term."""

    NONE = 0
    LOW = -1
    HIGH = 1
    DUAL = 2


class StoredCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an episode in a line of a sample file. `tokens` is its range `[start, end)` in the tokens of the completion."""

    parent: int
    tokens: tuple[int, int]
    trained: bool
    finish_reason: FinishReason
    replica: str
    messages: tuple[Message, ...]
    answer: Message


class StoredSample(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that readers use of a line of a sample file; all files but `failed_data.jsonl` have more.

    `reward` and `components` are the environment's. A completion that failed has none, but the `status` and `message` of its last scoring,
    the environment's `traceback`, the `reason` of its group and the `time` in Unix seconds. `step` is that of a trained sample, or the
    version that a validation evaluated. `token_ids` and `generation_logprobs` are of the completion, [T]; `spans` are (version, start,
    end). For an episode of several `calls` the completion is that of its calls, one after the other. `artifacts` is what its program left,
    `metadata` what the environment added to its score. The lists from `token_texts` on are missing in files of older builds, and where the
    step didn't compute them.
    """

    group: str
    task: str
    index: int
    attempt: int
    environment: str
    build: str = ""  # of the environment; for a failed completion, the build that failed
    messages: tuple[Message, ...]
    content: str
    finish_reason: FinishReason
    spans: tuple[tuple[int, int, int], ...]
    token_ids: tuple[int, ...]
    generation_logprobs: tuple[float | None, ...]
    reward: float | None = msgspec.field(name="rewards", default=None)
    components: dict[str, float] = {}
    extra_env_info: dict[str, Any] = {}  # missing in files of older builds
    step: int | None = None
    status: Status = "SCORED"
    message: str = ""
    traceback: str = ""
    reason: str = ""
    time: float | None = None
    calls: tuple[StoredCall, ...] = ()
    artifacts: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    token_texts: tuple[str, ...] | None = None
    ratios: tuple[float | None, ...] | None = None
    clipped: tuple[float | None, ...] | None = None
    token_losses: tuple[float | None, ...] | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def expected(self) -> str | None:
        return find_expected(self.extra_env_info)

    @property
    def prompt(self) -> str:
        return write_prompt(self.messages)

    @property
    def conversation(self) -> list[tuple[str, list[str]]]:
        """The head and the messages of each call, for an episode of several; otherwise empty."""
        return [self._call(*pair) for pair in enumerate(self.calls)]

    @property
    def left(self) -> str:
        """The artifacts as people read them: JSON on one line, cut off where it is too long; empty if there are none."""
        text = json.dumps(self.artifacts, ensure_ascii=False) if self.artifacts else ""
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"

    @property
    def text(self) -> str:
        """The completion as text for people: its content, or its conversation, then its artifacts. Messages are indented, and their
        further lines more, so that nothing in them looks like another message, the head of a call, or artifacts."""
        calls = (
            "\n".join([head, *("  " + part.replace("\n", "\n    ") for part in parts)])
            for head, parts in self.conversation
        )
        left = [f"artifacts: {self.left}"] if self.left else []
        return "\n\n".join([*(calls if self.calls else [self.content]), *left])

    def weights(self, start: int = 0, end: int | None = None) -> str:
        """Return the versions that sampled the tokens `[start, end)`, by default all, as `weights 3 to 5`."""
        end = len(self.token_ids) if end is None else end
        versions = sorted({version for version, first, last in self.spans if first < end and last > start})
        return f"weights {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else "")

    def _call(self, number: int, call: StoredCall) -> tuple[str, list[str]]:
        start, end = call.tokens
        notes = [f"tokens {start}-{end}", self.weights(start, end), printable(call.replica)]
        notes += [] if call.finish_reason == "stop" else ["cut off"]
        notes += [] if call.trained else ["not trained"]
        continues = "" if call.parent < 0 else f" continues call {call.parent}"
        # the prompt of the group is shown above all of its samples
        asked = () if call.messages == self.messages else call.messages
        parts = [part for message in (*asked, call.answer) for part in _write_message(message)]
        return f"call {number}{continues} ({', '.join(notes)})", parts


def write_prompt(messages: Iterable[Message]) -> str:
    """Return the messages as text, each after its role."""
    return "\n".join(f"{message.get('role')}: {_text(message.get('content'))}" for message in messages)


def _write_message(message: Message) -> Iterator[str]:
    """Yield a message's reasoning, content and tool calls, each after its role."""
    calls = message.get("tool_calls")
    parts = [
        (" thinks", message.get("reasoning")),
        ("", message.get("content")),
        *((" calls", _tool_call(call)) for call in (calls if isinstance(calls, list) else [calls] if calls else [])),
    ]
    for verb, part in [(verb, part) for verb, part in parts if part] or [("", "")]:
        yield f"{message.get('role')}{verb}: {_text(part)}"


def _tool_call(call: Any) -> Any:
    """Return a tool call as a function call, if it has the form of OpenAI's API. A program can send anything."""
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            return f"{name}({arguments})"
    return call


def find_expected(extra_env_info: Mapping[str, Any]) -> str | None:
    """Return the data set's `answer`, or else all that the environment gets; None if that is empty."""
    answer = extra_env_info.get("answer", extra_env_info)
    return None if answer in ({}, None) else _text(answer)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=repr)


@dataclasses.dataclass(frozen=True)
class SampleGroup:
    """A prompt with its completions that were kept. `reason` is why the group failed, if it did."""

    id: str
    task: str
    prompt: str
    expected: str | None
    samples: tuple[StoredSample, ...]
    reason: str = ""

    @property
    def mean_reward(self) -> float | None:
        return group_rewards.mean(self._rewards)

    @property
    def spread(self) -> float | None:
        return group_rewards.spread(self._rewards)

    @property
    def builds(self) -> list[str]:
        """The builds that scored its completions: only one, unless some wait to be scored again."""
        return list(dict.fromkeys(sample.build for sample in self.samples if sample.build))

    @property
    def _rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]


# -- choosing samples


def by_group(samples: Iterable[StoredSample]) -> list[SampleGroup]:
    """Return the groups of these samples, in the order of their first samples."""
    groups: dict[str, list[StoredSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return [
        SampleGroup(name, first.task, first.prompt, first.expected, (first, *others))
        for name, (first, *others) in groups.items()
    ]


def failed_groups(samples: Sequence[StoredSample]) -> list[SampleGroup]:
    """Return the groups that failed with these samples of `failed_data.jsonl`, newest first; of a group that failed again, its last
    failure."""
    newest = {sample.group: sample for sample in samples}
    last = [sample for sample in samples if sample.reason == newest[sample.group].reason]
    groups = [dataclasses.replace(group, reason=newest[group.id].reason) for group in by_group(last)]
    places = {name: place for place, name in enumerate(sample.group for sample in samples)}
    return sorted(groups, key=lambda group: -places[group.id])


def choose_groups(groups: Iterable[SampleGroup], ranking: Ranking | None, text: str, most: int) -> list[SampleGroup]:
    """Return up to `most` groups with `text` in their prompt, ignoring case: in their order, or those with the highest or lowest mean
    reward first, and their samples likewise."""
    found = [group for group in groups if text.casefold() in group.prompt.casefold()]
    if ranking is None:
        return found[:most]
    sign = -1 if ranking == "best" else 1

    def place(reward: float | None) -> tuple[bool, float]:
        return reward is None, sign * (reward or 0.0)

    ranked = sorted(found, key=lambda group: place(group.mean_reward))[:most]
    return [
        dataclasses.replace(group, samples=tuple(sorted(group.samples, key=lambda sample: place(sample.reward))))
        for group in ranked
    ]


# -- the files


def record(group: Group, trajectory: AnyTrajectory, score: Score, texts: TokenTexts | None = None) -> dict[str, Any]:
    """Return the fields that the lines of all sample files share, with NeMo RL's names where it has them; with `texts` also those of the
    tokens.

    The metadata is the whole of it: what was too large for the buffer has a note in its place (`Score.fit`).
    """
    flat = trajectory.flat()
    prompt, completion = flat.prompt_token_ids.tolist(), flat.completion_token_ids.tolist()
    return {
        "group": group.id,
        "task": group.task_name,
        "index": trajectory.index,
        "attempt": trajectory.attempt,
        "environment": score.environment or group.env_name,
        "build": score.build,
        "rewards": score.reward,
        "components": score.components,
        "metadata": score.metadata,
        "finish_reason": flat.finish_reason,
        "spans": [[span.version, span.start, span.end] for span in flat.spans],
        "turns": flat.turns,
        "replica": flat.replica,
        "messages": group.messages,
        "extra_env_info": group.extra_env_info,
        "content": trajectory.text,
        **(_of_episode(trajectory, texts) if isinstance(trajectory, EpisodeTrajectory) else {}),
        "input_lengths": sum(
            path.prompt_token_ids.size + path.completion_token_ids.size for path in trajectory.paths()
        ),
        # from here on lists by token: a reader of the rest stops here (`sample_files.read_heads`)
        "token_ids": completion,
        "prompt_token_ids": prompt,
        **({} if texts is None else {"prompt_token_texts": texts(prompt), "token_texts": texts(completion)}),
        "generation_logprobs": round_values(np.where(flat.loss_mask > 0, flat.logprobs, np.nan)),
    }


def _of_episode(episode: EpisodeTrajectory, texts: TokenTexts | None) -> dict[str, Any]:
    calls = {"calls": list(_calls(episode, texts))}
    return {**calls, "artifacts": episode.artifacts} if episode.artifacts else calls


def _calls(episode: EpisodeTrajectory, texts: TokenTexts | None) -> Iterator[dict[str, Any]]:
    start = 0
    for call in episode.calls:
        end = start + call.completion_token_ids.size
        context = call.context_token_ids.tolist()
        yield {
            "parent": call.parent,
            "context_token_ids": context,
            **({} if texts is None else {"context_token_texts": texts(context)}),
            "tokens": (start, end),
            "trained": call.trained,
            "finish_reason": call.finish_reason,
            "replica": call.replica,
            "messages": call.messages,
            "answer": call.answer,
            "timings": call.timings,
        }
        start = end


def failed_record(group: Group, trajectory: AnyTrajectory, score: Score, reason: str) -> dict[str, Any]:
    """Return a line of `failed_data.jsonl`: the group failed for `reason` when `trajectory` got this `score`, which is not a reward."""
    return {
        **record(group, trajectory, score),
        **_failure_fields(score),
        "reason": reason,
        "time": time.time(),
    }


def _failure_fields(score: Score) -> dict[str, Any]:
    return {"status": score.status, "message": score.message, "traceback": score.traceback}


def make_group(group: Group, samples: Sequence[StoredSample], reason: str = "") -> SampleGroup:
    """Return a group for display, even if none of its samples were kept."""
    expected = find_expected(group.extra_env_info)
    return SampleGroup(group.id, group.task_name, write_prompt(group.messages), expected, tuple(samples), reason)


def make_sample(group: Group, trajectory: AnyTrajectory, score: Score | None) -> StoredSample:
    """Return the sample that a line about this trajectory would contain. Without a score it has no reward."""
    scored = score or Score("NOT_STARTED")
    fields = {**record(group, trajectory, scored), **_failure_fields(scored)}
    return msgspec.json.decode(msgspec.json.encode(fields), type=StoredSample)


def round_values(values: Float32) -> list[float]:
    """Return the values with six decimals."""
    decimals: list[float] = np.round(values.astype(np.float64), _DECIMALS).tolist()
    return decimals


def round_digits(values: Float32) -> list[float]:
    """Return the values with seven significant digits: those of a float32, so that sums stay what they are."""
    size = np.abs(values.astype(np.float64))
    scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.where(size > 0, size, 1.0))))
    digits: list[float] = (np.round(values * scale) / scale).tolist()
    return digits


def whole_numbers(values: Float32) -> list[int | None]:
    """Return the values as whole numbers, None for NaN."""
    missing = np.isnan(values)
    numbers: list[int | None] = np.where(missing, 0, values).astype(int).tolist()
    for place in np.flatnonzero(missing):
        numbers[place] = None
    return numbers


def view_record(line: Mapping[str, msgspec.Raw], first: int = 0, count: int = 5000) -> dict[str, Any]:
    """Return a trajectory for a viewer, with up to `count` tokens of its completion from `first` on.

    `tokens`, `prompt_tokens` and each call's `context_tokens` have `id` and `text`, which is None where the file has no texts. `columns`
    are those of `COLUMNS` that the file has, for these tokens; `legend` has the names of their codes.
    """
    shown = slice(first, first + count)

    def read(name: str, default: Any = None) -> Any:
        return msgspec.json.decode(line[name]) if name in line else default

    ids = read("token_ids")
    return {
        "group": read("group"),
        "index": read("index"),
        "step": read("step"),
        "total": len(ids),
        "first": first,
        "tokens": _tokens(ids, read("token_texts"), shown),
        # one at a time: a column of a long trajectory takes megabytes
        "columns": {name: values[shown] for name in COLUMNS if (values := read(name)) is not None},
        "legend": {
            name: {int(code): code.name for code in codes}
            for name, codes in (("mask_reasons", MaskReason), ("clipped", Clipped))
        },
        "versions": read("spans"),
        "calls": [
            {
                "number": number,
                "start": call["tokens"][0],
                "end": call["tokens"][1],
                "context_tokens": _tokens(call["context_token_ids"], call.get("context_token_texts")),
                **{name: call[name] for name in _CALL_FIELDS},
            }
            for number, call in enumerate(read("calls", []))
        ],
        "prompt_tokens": _tokens(read("prompt_token_ids"), read("prompt_token_texts")),
        "reward": read("rewards"),
        **{name: read(name, {}) for name in ("components", "metadata", "artifacts")},
    }


def _tokens(ids: list[int], texts: list[str | None] | None, shown: slice = slice(None)) -> list[dict[str, Any]]:
    texts = [None] * len(ids) if texts is None else texts
    return [{"id": id_, "text": text} for id_, text in zip(ids[shown], texts[shown], strict=True)]
