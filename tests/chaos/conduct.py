"""How what a run depends on behaves, by a file that the driver writes and it reads: the environment, and the object store."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass
class Conduct:
    """Seconds that a score takes, and whether it is "well" or one of the kinds of faults (`plan.Kind`)."""

    file: Path
    pace: float = 0.5
    mood: str = "well"

    def tell(self, *, pace: float | None = None, mood: str | None = None) -> None:
        self.pace = self.pace if pace is None else pace
        self.mood = self.mood if mood is None else mood
        fresh = self.file.with_suffix(".new")
        fresh.write_text(f"{self.pace} {self.mood}")
        fresh.rename(self.file)

    def heard(self) -> tuple[float, str]:
        pace, mood = self.file.read_text().split()
        return float(pace), mood
