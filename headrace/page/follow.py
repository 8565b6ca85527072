"""Opens views in the pages that are open: whoever may write calls `show`, and each page that follows goes there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator

from headrace.base.errors import HeadraceError

# Pages that may follow at a time.
MOST = 100
_SILENT_S = 15.0
_LONGEST = 2000
# An address on this server: one slash, then nothing that a browser or a person could take for something else.
_PATH = re.compile(r"/(?![/\\])[!-~]*")


class NoRoom(HeadraceError):
    """Raised when as many pages follow as may."""


class NoView(HeadraceError):
    """Raised for an address that is none of this page."""


class Followers:
    """The pages that are open, on this server. Not thread-safe: for one event loop."""

    def __init__(self, most: int = MOST, silent_s: float = _SILENT_S) -> None:
        self._most = most
        self._silent_s = silent_s
        self._queues: set[asyncio.Queue[str]] = set()

    def check_room(self) -> None:
        """Raise `NoRoom` if no further page may follow."""
        if len(self._queues) >= self._most:
            raise NoRoom(f"{self._most} pages follow already; close one")

    def show(self, path: str) -> int:
        """Send the address of a view to every page. Returns how many there are. Raises `NoView`."""
        if len(path) > _LONGEST or not _PATH.fullmatch(path):
            raise NoView(f"{path!r:.100} is no address of a view; give one that begins with /, as /runs/NAME")
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()  # its page hasn't read it, and the newest counts
            queue.put_nowait(path)
        return len(self._queues)

    async def follow(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events: `view` with the address to go to, and a comment where nothing happens for a while."""
        queue: asyncio.Queue[str] = asyncio.Queue(maxsize=10)
        self._queues.add(queue)
        try:
            yield ": following\n\n"
            while True:
                try:
                    path = await asyncio.wait_for(queue.get(), self._silent_s)
                    yield f"event: view\ndata: {json.dumps({'path': path})}\n\n"
                except TimeoutError:
                    yield ": nothing new\n\n"
        finally:
            self._queues.discard(queue)
