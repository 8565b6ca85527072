"""The losses of policy and value model, and their metrics: pure functions on the tokens of a micro-batch.

Names and formulae are NeMo RL's (`ClippedPGLossFn`, `MseValueLossFn`); docstrings name the differences. Everything is divided by counts
over the whole mini-batch, so losses, gradients and metrics of micro-batches and ranks add up to those of the whole.
"""

from .policy_loss import policy_loss
from .terms import LossParts
from .value_loss import explained_variance, value_loss

__all__ = ["LossParts", "explained_variance", "policy_loss", "value_loss"]
