"""Which sequences share a row and a micro-batch, and the rows as tensors.

    plans = plan(sequences, layout)                  pure; a sequence is never divided
    rows = build(sequences, plans[0], layout)        tensors on the CPU; `.to(device)`
    values = policy.logprobs(rows)                   [N], flat over policy tokens
    tokens = join(plans[0], array_of_sequence)       whatever else a loss needs, [N] in the same order
    arrays = divide(plans[0], sequences, values)     back to one array a sequence

Nothing here knows of losses or advantages. The N values of a micro-batch are those of the tokens that the policy wrote, one
sequence after the other in the order of `MicroBatch.order`; `Rows.sequence` says which sequence (0, 1, … in that order) a
token belongs to.
"""

from services.trainer.network.rows.build import Rows, build
from services.trainer.network.rows.layout import Layout, MicroBatch, TokenSequence, divide, join, plan

__all__ = ["Layout", "MicroBatch", "Rows", "TokenSequence", "build", "divide", "join", "plan"]
