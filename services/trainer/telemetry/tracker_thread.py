"""Feeds a tracker from `metrics.jsonl`, on its own thread.

The file is the source of truth. Only the trainer writes it, and first; each tracker's position in the file is kept beside the run.
So a tracker that fails does not disturb the run: the failure is logged, counted in the metrics
`trackers/failures` and `trackers/lines_behind`, and the tracker is reopened every half minute and once more at the end. When it is
back, even after a restart, it gets every line that it missed. One that is switched on late gets the run from its beginning.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.errors import ServiceError
from headrace.files import atomic_write, fsync
from headrace.journal import Line, parse_lines, read_bytes, size, surviving
from headrace.samples import SampleFiles
from headrace_services.trainer.telemetry import alarm
from headrace_services.trainer.telemetry.metric_names import tracked_name
from headrace_services.trainer.telemetry.samples import as_markdown, choose
from headrace_services.trainer.telemetry.trackers import Opener, Tracker, TrackerEntry

log = logging.getLogger(__name__)

RETRY_S = 30.0


class Position(msgspec.Struct, frozen=True):
    """A tracker's position: bytes of the file read, entries sent in total, and its id of the run (None: there is none yet)."""

    run_id: str | None = None
    offset: int = 0
    entries: int = 0


class TrackerThread:
    """Sends tracker `name` the lines of `journal` that it lacks, `samples_shown` trajectories of each validation, and alarm pictures."""

    def __init__(self, name: str, opener: Opener, journal: Path, samples: SampleFiles, samples_shown: int = 0) -> None:
        self.name = name
        self.failures = 0
        self._open = opener
        self._journal = journal
        self._samples = samples
        self._samples_shown = samples_shown
        self._file = samples.folder / f"{name}.json"
        self._position = self._load()
        self._tracker: Tracker | None = None
        self._failing = False
        self._wake = threading.Event()
        self._finishing = threading.Event()
        self._deadline = 0.0
        # a tracker that hangs must not keep a finished trainer from leaving
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    def start(self) -> None:
        self._wake.set()  # a tracker that can't be opened is reported at once
        self._thread.start()

    def notify(self) -> None:
        """Wake the thread, because the file has grown."""
        self._wake.set()

    def finish(self, deadline: float) -> None:
        """Catch up once more and close. Returns at once; `join` waits until `deadline` (`time.monotonic`)."""
        self._deadline = deadline
        self._finishing.set()
        self._wake.set()

    def join(self) -> None:
        """Wait for the end, at most until the deadline of `finish`. Logs what the tracker still lacks."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive() or self.behind():
            log.error(
                "%s lacks %d lines of %s; the next start with this run.id sends them",
                self.name, self.behind(), self._journal,
            )  # fmt: skip

    def behind(self) -> int:
        """Lines of the file that the tracker lacks."""
        return self._unread().count(b"\n")

    def _run(self) -> None:
        ending = False
        while not ending:
            if self._failing:
                self._finishing.wait(RETRY_S)
            else:
                self._wake.wait()
            self._wake.clear()
            ending = self._finishing.is_set()
            try:
                self._catch_up()
                if ending and self._tracker is not None:
                    self._tracker.close()
            except Exception as error:  # noqa: BLE001 - a tracker's library raises what it likes, and none of it may stop the run
                self._failed(error)
            else:
                if self._failing:
                    log.warning("%s is back; it has every line of %s", self.name, self._journal)
                self._failing = False

    def _catch_up(self) -> None:
        if self._tracker is None:
            self._tracker = self._open(self._position.run_id)
            self._save(Position(self._tracker.run_id, self._position.offset, self._position.entries))
        data = self._unread()
        if not data:
            return
        position, end = self._position, self._position.offset + len(data)
        lines = [line for line in parse_lines(data.decode(), str(self._journal)) if line.kind != "retry"]
        rewound_to = min((line.step for line in lines if line.kind == "rewind"), default=None)
        if rewound_to is not None:
            # the lines of those steps are void, except for one that survives: the validation of the version that was rewound to
            whole = parse_lines(read_bytes(self._journal)[:end].decode(), str(self._journal))
            lines = [line for line in surviving(whole) if line.step >= rewound_to]
        entries = [self._entry(number, line) for number, line in enumerate(lines, start=position.entries)]
        self._tracker.write(entries, rewound_to)
        self._save(Position(position.run_id, end, position.entries + len(entries)))

    def _entry(self, number: int, line: Line) -> TrackerEntry:
        """The entry for a line, with the trajectories of a validation and the picture of an alarm if their files still exist."""
        texts, pictures = {}, {}
        samples = self._samples.samples("val", line.step) if line.kind == "validation" and self._samples_shown else []
        if samples:
            texts["validation/samples"] = as_markdown(choose(samples, self._samples_shown))
        picture = alarm.picture_path(self._samples.folder, line.step)
        if line.metrics.get("train_inference_alarm") and picture.exists():
            pictures["train/disagreement"] = picture
        metrics = {tracked_name(line.kind, name): value for name, value in line.metrics.items()}
        return TrackerEntry(number, line.step, line.time, metrics, texts, pictures)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if not self._failing:
            log.error(
                "%s can't be written to (%s: %s). Training goes on; every metric is in %s, and %s gets the lines it misses when it is back",
                self.name, type(error).__name__, " ".join(str(error).split())[:300], self._journal, self.name,
            )  # fmt: skip
        self._failing = True
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception):  # it has failed already, and will be reopened
                tracker.close()

    def _unread(self) -> bytes:
        """The complete lines after the position."""
        return read_bytes(self._journal, self._position.offset)

    def _load(self) -> Position:
        """The saved position, limited to the journal's size, because a power cut may have removed lines. Raises `ServiceError`
        for a file that `_save` did not write."""
        if not self._file.exists():
            return Position()
        try:
            position = msgspec.json.decode(self._file.read_bytes(), type=Position)
        except msgspec.DecodeError as error:
            raise ServiceError(
                f"{self._file} can't be read ({error}); remove it: {self.name} then gets the whole run again, as a new one"
            ) from error
        return Position(position.run_id, min(position.offset, size(self._journal)), position.entries)

    def _save(self, position: Position) -> None:
        self._position = position
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._file) as unfinished:
            unfinished.write_bytes(msgspec.json.encode(position))
            fsync(unfinished)


def tracker_metrics(threads: Sequence[TrackerThread]) -> dict[str, float]:
    """`trackers/failures` and `trackers/lines_behind`; nothing without a tracker."""
    if not threads:
        return {}
    return {
        "trackers/failures": float(sum(thread.failures for thread in threads)),
        "trackers/lines_behind": float(max(thread.behind() for thread in threads)),
    }
