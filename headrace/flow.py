"""Flow control of a stream of `Attach`: what one of its environments may be sent. No I/O; both ends of the stream have one."""

from __future__ import annotations

from headrace.errors import CodecError


class Flow:
    """What is sent and not answered, and the credit for more: together never above `capacity`.

    Each end tells its own of everything that it sends and receives, in order; what the other end may not do raises `CodecError`, and
    changes nothing.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.credit = 0
        self._pieces: dict[str, int] = {}  # their sizes, by work id

    @property
    def held(self) -> int:
        """What the process is at work on, withdrawn or not, until it has answered."""
        return sum(self._pieces.values())

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def room(self, busy: int) -> int:
        """What the process may grant while `busy` are being scored: more than it holds if threads outlive the answer to their piece."""
        return max(0, self.capacity - self.credit - max(self.held, busy))

    def grant(self, amount: int) -> None:
        """The process can take `amount` more."""
        if amount < 1 or self.credit + self.held + amount > self.capacity:
            raise CodecError(
                f"credit of {amount} is an overdraft: the capacity is {self.capacity}, of which {self.held} are not answered and "
                f"{self.credit} are granted"
            )
        self.credit += amount

    def send(self, work_id: str, size: int) -> None:
        """The hub sends a piece of work."""
        if not 1 <= size <= self.credit or work_id in self._pieces:
            raise CodecError(f"work {work_id!r} of {size} is an overdraft, or sent twice: the credit is {self.credit}")
        self.credit -= size
        self._pieces[work_id] = size

    def answer(self, work_id: str) -> bool:
        """The process answers a piece of work. False of one that it doesn't hold: the answer means nothing."""
        return self._pieces.pop(work_id, None) is not None
