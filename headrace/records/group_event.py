"""One thing that happened to a group: as the buffer tells it, as the trainer writes it to a run's folder, and as readers find it there."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Cursor = tuple[int, int]

GroupState = Literal[
    "queued", "open", "scoring", "ready", "reserved", "trained", "filtered", "failed", "evaluated", "unused"
]
What = Literal[
    "enqueued", "leased", "pushed", "dropped", "began_anew", "scoring", "scored", "ready", "reserved", "rejected", "requeued", "passed_on",
    "trained", "filtered", "failed", "evaluated", "unused", "retried", "rewound", "restored", "lost",
]  # fmt: skip


class GroupEvent(NamedTuple):
    """One thing that happened to one group, or with group None to the whole run (`rewound`, `restored`, `lost`).

    `id` is the id of the entry in the buffer's stream `history`, which has the server's time in milliseconds, and `part` counts the events
    of one entry. `index` is of a trajectory; one that was pushed has `tokens`, and their `oldest` and `newest` versions. `lost` is how many
    entries were ever cut off unread. The fields from `lane` on are of a group that was enqueued; those from `epoch` on are not in the
    buffer: the trainer adds them. What an event doesn't have is None.
    """

    id: str
    part: int
    what: What
    group: str | None = None
    index: int | None = None  # type: ignore[assignment]  # a tuple has a method of this name
    replica: str | None = None
    attempt: int | None = None
    step: int | None = None
    version: int | None = None
    timeline: str | None = None
    reward: float | None = None
    build: str | None = None
    cause: str | None = None
    reason: str | None = None
    tokens: int | None = None
    oldest: int | None = None
    newest: int | None = None
    lost: int | None = None
    lane: str | None = None
    order: int | None = None
    n: int | None = None
    environment: str | None = None
    epoch: int | None = None
    task: str | None = None
    prompt: str | None = None
    messages: str | None = None  # JSON
    expected: str | None = None
    file: str | None = None
    line: int | None = None

    @property
    def cursor(self) -> Cursor:
        return parse_cursor(self.id)

    @property
    def time(self) -> float:
        """When it happened, in Unix seconds by the server's clock."""
        return self.cursor[0] / 1000

    def describe(self) -> dict[str, Any]:
        """Return what is told of it in the story of its group."""
        return {"time": self.time, **{name: getattr(self, name) for name in _TOLD}}


_TOLD = (
    "what", "index", "replica", "attempt", "step", "version", "timeline", "reward", "build", "cause", "reason", "tokens", "oldest",
    "newest",
)  # fmt: skip


def parse_cursor(text: str) -> Cursor:
    """Return the milliseconds and number of an event's id."""
    milliseconds, _, number = text.partition("-")
    return int(milliseconds), int(number)
