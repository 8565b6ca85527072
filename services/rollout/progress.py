"""How far the replica has come with each lease, as its heartbeats report it (law 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.replay import Lease

# Returns how many tokens the engine has sampled so far for a trajectory of a lease: 0 before it begins and once it has ended.
CountTokens = Callable[[Lease, int], int]


class Progress:
    """Counts tokens for each lease: those sampled under it, and those sampled meanwhile under the leases before it.

    The engine serves its requests in the order in which they came. What is behind waits for what is before it, for a slot or for room in
    the KV cache, and progresses with it. So a lease is silent only if nothing that it waits for moves, and the first one only if it does
    not move itself. Tokens of later leases don't count: a request that is stuck would never be noticed while others come and go.
    """

    def __init__(self) -> None:
        # by the lease's token and the trajectory's index, as they were counted last
        self._sampled: dict[str, dict[int, int]] = {}
        self._counts: dict[str, int] = {}

    def count(self, leases: Iterable[Lease], sampled: CountTokens) -> dict[str, int]:
        """Return the count of each lease by its token. `leases` are those that are held, in the order in which they were given."""
        before, counts, self._sampled, self._counts = self._sampled, self._counts, {}, {}
        new = 0
        for lease in leases:
            known = before.get(lease.token, {})
            now = {index: sampled(lease, index) for index in lease.missing}
            new += sum(max(0, tokens - known.get(index, 0)) for index, tokens in now.items())
            self._sampled[lease.token] = now
            self._counts[lease.token] = counts.get(lease.token, 0) + new
        return self._counts
