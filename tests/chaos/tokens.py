"""What the policy of a chaos run of episodes writes: each token but the first of a completion follows from the path before it and from the
version of the weights, so that an auditor can tell a token that was sampled in another context, or from other weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

# of the tiny model: the end of a turn, and digits
END, DIGITS = 1, tuple(range(5, 15))


def first(seed: int) -> int:
    return DIGITS[seed % len(DIGITS)]


def following(path: Sequence[int], version: int) -> int:
    """The token behind `path`, whose last one was written before it."""
    digest = hashlib.blake2b(f"{version} {list(path)}".encode(), digest_size=8).digest()
    return (END, *DIGITS)[int.from_bytes(digest) % (1 + len(DIGITS))]
