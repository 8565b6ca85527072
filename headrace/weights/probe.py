"""The probe: a fixed prompt on which a replica's log-probabilities must equal the trainer's before it may lease.

Names and checksums can agree while a packed copy of a weight is stale; only a computed result shows which weights a replica
uses.
"""

from __future__ import annotations

import numpy as np

from headrace.trajectory import Int32


def choose_token_ids(vocab_size: int, length: int = 64, seed: int = 0, exclude: tuple[int, ...] = ()) -> Int32:
    """[length] int32 ids drawn from [0, vocab_size) without `exclude`, the same for the same arguments.

    Random ids reach rows of the embedding and of the head that ordinary text seldom does.
    """
    ids = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), np.asarray(exclude, dtype=np.int32))
    if ids.size == 0 or length < 2:
        raise ValueError(
            f"a probe of {length} tokens from a vocabulary of {ids.size}; needs at least 2 tokens and 1 id"
        )
    return np.random.default_rng(seed).choice(ids, size=length).astype(np.int32)
