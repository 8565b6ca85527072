"""The index of a run's groups, built beside the answers: what it has so far is shown meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

from headrace.base.errors import HeadraceError
from headrace.page.memory import release_memory
from headrace.run import group_files
from headrace.run.group_history import GroupHistory

# An answer waits until the index has everything if it lacks no more bytes of the files: a second of work.
WAITED_FOR = 1 << 20


class Indexing:
    """The index of the run in `folder`. Callers hold the lock of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / group_files.FOLDER
        self._thread: threading.Thread | None = None
        self._error: HeadraceError | None = None

    def history(self) -> tuple[GroupHistory, list[str]]:
        """Return the groups that can be asked for now, and what they lack. Raises `ConfigError` without pyarrow, and for an index that
        can't be written."""
        whole = GroupHistory(self._folder)
        missing, share = whole.missing()
        if self._thread is None and missing > WAITED_FOR:
            self._thread = threading.Thread(target=self._build, args=(whole,), name="index of groups", daemon=True)
            self._thread.start()
        if self._thread is None:
            return whole, []
        if self._thread.is_alive():
            lacking = f"the groups of this run are being indexed: {100 * share:.0f} % so far, and only these are found"
            return GroupHistory(self._folder, is_partial=True), [lacking]
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
        return whole, []

    def _build(self, history: GroupHistory) -> None:
        try:
            history.refresh()
        except HeadraceError as error:
            self._error = error
        release_memory()
