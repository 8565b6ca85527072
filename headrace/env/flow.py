"""Flow control of an `Attach` stream: how much work one of its environments may be sent. No I/O; both ends of the stream have an
instance."""

from __future__ import annotations

from headrace.base.errors import CodecError


class Flow:
    """The work that was sent and not answered, and the credit for more. Together they never exceed `capacity`.

    Each end calls its own instance for everything that it sends and receives, in order. What the other end may not do raises `CodecError`,
    and changes nothing.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.credit = 0
        self._pieces: dict[str, int] = {}  # sizes by work id

    @property
    def held(self) -> int:
        """The work that the process holds, withdrawn or not, until it has answered."""
        return sum(self._pieces.values())

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def room(self, busy: int) -> int:
        """Return the credit that the process may grant while `busy` are being scored. That may be more than it holds, if threads outlive
        the answer to their piece."""
        return max(0, self.capacity - self.credit - max(self.held, busy))

    def grant(self, amount: int) -> None:
        """Add `amount` to the credit: the process can take that much more."""
        if amount < 1 or self.credit + self.held + amount > self.capacity:
            raise CodecError(
                f"credit of {amount} is an overdraft: of the capacity {self.capacity}, {self.held} are not answered and {self.credit} are "
                "granted"
            )
        self.credit += amount

    def send(self, work_id: str, size: int) -> None:
        """Note a piece of work that the hub sends."""
        if not 1 <= size <= self.credit or work_id in self._pieces:
            raise CodecError(f"work {work_id!r} of {size} is an overdraft, or sent twice: the credit is {self.credit}")
        self.credit -= size
        self._pieces[work_id] = size

    def answer(self, work_id: str) -> bool:
        """Note an answer of the process to a piece of work. Returns False for a piece that it doesn't hold: the answer is then ignored."""
        return self._pieces.pop(work_id, None) is not None
