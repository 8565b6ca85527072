"""What is known about a run while it runs, and the interface by which a pipeline shows it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Protocol

# Of which a run's metrics are kept in memory; the journal has all steps.
KEPT_STEPS = 1000
# The state of a replica during a refit. It occurs every step, so a display prints no line for it.
UPDATING = "updating"
# The state of a service that is not to be started yet. A display prints no line for it either.
NOT_STARTED = "not started"


@dataclasses.dataclass(frozen=True)
class ServiceLine:
    name: str
    state: str
    restarts: int
    note: str
    page: str = ""  # its URL


@dataclasses.dataclass(frozen=True)
class Wait:
    """A wait of the run: for what, for how long so far, and why."""

    whom: str
    seconds: float
    why: str

    def __str__(self) -> str:
        return f"waits for {self.whom}, {self.seconds:.0f} s: {self.why}"


@dataclasses.dataclass
class RunSummary:
    """The known facts about a run. `train` and `validation` hold each step's metrics; a step that is trained again replaces the old one."""

    run_id: str
    max_steps: int
    folder: str = ""  # the run's, as the other commands find it
    evaluates: bool = False  # an evaluation trains nothing
    services: list[ServiceLine] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    train: dict[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    validation: dict[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    last_entry: str = "0"
    buffer: str = ""  # why the buffer can't be read now
    waits: list[Wait] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)  # the most frequent reasons of failed prompts

    @property
    def failed(self) -> int:
        """The number of training prompts that failed."""
        return self.counts.get("failed", 0)

    @property
    def evaluated(self) -> int:
        """The number of an evaluation's prompts that have ended."""
        return self.counts.get("evaluated", 0) + self.counts.get("failed", 0)

    def add(self, entry: str, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add an entry of the metric stream. A step before the last one means a rewind: the steps after it are dropped. Of a long run, the
        first entry and the newest `KEPT_STEPS` stay."""
        self.last_entry = entry
        series = self.train if kind == "train" else self.validation
        for later in [known for known in series if known > step]:
            del series[later]
        series[step] = metrics
        if len(series) > KEPT_STEPS + 1:
            del series[next(itertools.islice(series, 1, None))]


class Display(Protocol):
    """Shows a run to the user."""

    def print(self, line: str) -> None: ...

    def stop_when_unread(self, stop: Callable[[], object]) -> None:
        """Call `stop` once nobody reads any more what is shown."""

    def metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step or a validation that has just ended."""

    def update(self, run: RunSummary) -> None:
        """Show the present state of the run."""
