"""The clocks of a chaos run's machines: what processes of a machine read as the time of day is moved, as when somebody sets its clock.

(libfaketime is not used: since Python 3.11 `time.sleep` fails under it.)
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


def missing() -> str | None:
    """What a machine lacks to move clocks, or None."""
    return None if shutil.which("cc") else "no C compiler is installed (apt-get install gcc)"


class Clocks:
    """A file for each machine says how many seconds its clock is off. Processes map it, so it is changed in place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "clock.so"
        folder.mkdir()

    def environ(self, machine: str) -> dict[str, str]:
        """What a process on `machine` is started with, so that its clock can be moved."""
        if not self._library.exists():
            argv = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(self._library), str(_SOURCE), "-ldl"]
            subprocess.run(argv, check=True)
        file = self._folder / machine
        if not file.exists():
            file.write_bytes(struct.pack("l", 0))
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(file)}

    def move(self, machine: str, off_s: int) -> None:
        with (self._folder / machine).open("r+b", buffering=0) as file:
            file.write(struct.pack("l", off_s))
