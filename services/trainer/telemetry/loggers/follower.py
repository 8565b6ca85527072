"""A tracker follows `metrics.jsonl`, and never the other way round.

Law: the file is the truth. It is written first, by the trainer alone; what a tracker was sent is decided by how far in the file it has got,
and that place is kept beside the run. So a tracker that fails costs the run nothing: it is said aloud, counted in the metrics
`trackers/failures` and `trackers/lines_behind`, tried again, and where it comes back, be it after a restart, it gets every line that it
missed. One that is switched on late gets the run from its beginning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.errors import ServiceError
from services.trainer.files import atomic_write, fsync
from services.trainer.telemetry.journal import Line, parse_lines, surviving
from services.trainer.telemetry.loggers.tracker import Entry, Tracker, entry_of

log = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0

Make = Callable[[str | None], Tracker]
Adorn = Callable[[Line, Entry], Entry]


class Place(msgspec.Struct, frozen=True):
    """How far a tracker has got: bytes of the file, entries sent in all, and the run there (None: there is none yet)."""

    run_id: str | None = None
    offset: int = 0
    entries: int = 0


class Follower:
    """`make(run_id)` opens the tracker, on a run of its own or, with None, on a new one; `adorn` adds texts and pictures to an entry."""

    def __init__(self, name: str, make: Make, adorn: Adorn, journal: Path, folder: Path) -> None:
        self.name = name
        self.failures = 0
        self._make = make
        self._adorn = adorn
        self._journal = journal
        self._file = folder / f"{name}.json"
        self._place = self._remembered()
        self._tracker: Tracker | None = None
        self._retry_s = 0.0
        self._wake = threading.Event()
        self._deadline: float | None = None
        # a tracker that hangs must not keep a finished trainer from leaving
        self._thread = threading.Thread(target=self._follow, name=f"tracker-{name}", daemon=True)

    def start(self) -> None:
        self._wake.set()  # a tracker that can't be opened is said at once
        self._thread.start()

    def nudge(self) -> None:
        """The file has grown."""
        if not self._retry_s:
            self._wake.set()

    def ask_to_end(self, deadline: float) -> None:
        """Catch up, being tried again until `deadline` (`time.monotonic`), and close."""
        self._deadline = deadline
        self._wake.set()

    def join(self) -> None:
        """Wait until it has ended, to its deadline. Says what is left undone."""
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive() or self.behind():
            log.error(
                "%s lacks %d lines of %s; the next start with this run.id sends them",
                self.name,
                self.behind(),
                self._journal,
            )

    def behind(self) -> int:
        """Lines of the file that the tracker has not got."""
        return self._unread().count(b"\n")

    def _follow(self) -> None:
        while True:
            self._wake.wait(self._retry_s or None)
            self._wake.clear()
            try:
                self._catch_up()
                if self._deadline is not None and self._tracker is not None:
                    self._tracker.close()
            except Exception as error:  # noqa: BLE001 - a tracker's library raises what it likes, and none of it may stop the run
                self._failed(error)
            else:
                if self._retry_s:
                    log.warning("%s is back; it has every line of %s", self.name, self._journal)
                self._retry_s = 0.0
                if self._deadline is not None:
                    return
            if self._deadline is not None and time.monotonic() + self._retry_s > self._deadline:
                return

    def _catch_up(self) -> None:
        if self._tracker is None:
            self._tracker = self._make(self._place.run_id)
            self._remember(Place(self._tracker.run_id, self._place.offset, self._place.entries))
        data = self._unread()
        if not data:
            return
        place, end = self._place, self._place.offset + len(data)
        lines = self._lines(data)
        rewinds = [line.step for line in lines if line.kind == "rewind"]
        if rewinds:
            # what was sent of those steps is void, but for what survives: the validation of the version that was gone back to
            whole = self._lines(self._journal.read_bytes()[:end])
            lines = [line for line in surviving(whole) if line.step >= min(rewinds)]
            self._tracker.rewind(min(rewinds))
        for number, line in enumerate(lines, start=place.entries):
            self._tracker.write(self._adorn(line, entry_of(number, line)))
        self._tracker.flush()
        self._remember(Place(place.run_id, end, place.entries + len(lines)))

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if not self._retry_s:
            log.error(
                "%s can't be written to (%s: %s). Training goes on; every metric is in %s, and %s gets the lines it misses when it is back",
                self.name, type(error).__name__, " ".join(str(error).split())[:300], self._journal, self.name,
            )  # fmt: skip
        self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s or FIRST_RETRY_S)
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            try:
                tracker.close()
            except Exception as second:  # noqa: BLE001 - it has failed already; a new one takes its place
                log.debug("%s could not be closed either: %s", self.name, second)

    def _unread(self) -> bytes:
        """Whole lines past the place."""
        if not self._journal.exists():
            return b""
        with self._journal.open("rb") as file:
            file.seek(self._place.offset)
            data = file.read()
        return data[: data.rfind(b"\n") + 1]

    def _lines(self, data: bytes) -> list[Line]:
        return list(parse_lines(data.decode(), str(self._journal)))

    def _remembered(self) -> Place:
        """The place that was kept; no further than the file goes, which a power cut may have taken lines of. Raises `ServiceError` for a
        file that is not one that `_remember` wrote."""
        if not self._file.exists():
            return Place()
        try:
            place = msgspec.json.decode(self._file.read_bytes(), type=Place)
        except msgspec.DecodeError as error:
            raise ServiceError(
                f"{self._file} can't be read ({error}); remove it: {self.name} then gets the whole run again, as a new one"
            ) from error
        size = self._journal.stat().st_size if self._journal.exists() else 0
        return Place(place.run_id, min(place.offset, size), place.entries)

    def _remember(self, place: Place) -> None:
        self._place = place
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._file) as unfinished:
            unfinished.write_bytes(msgspec.json.encode(place))
            fsync(unfinished)


def counts(followers: Sequence[Follower]) -> dict[str, float]:
    """The metrics of the trackers; none without a tracker."""
    if not followers:
        return {}
    return {
        "trackers/failures": float(sum(follower.failures for follower in followers)),
        "trackers/lines_behind": float(max(follower.behind() for follower in followers)),
    }
