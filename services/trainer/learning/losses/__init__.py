"""The losses of policy and value model, and their metrics: pure functions on the tokens of a micro-batch.

Names and formulae are NeMo RL's (`ClippedPGLossFn`, `MseValueLossFn`); where they differ, a docstring says so. Everything is
divided by counts over the whole global batch, so that losses, gradients and metrics of micro-batches and ranks add up to
those of the whole.
"""

from services.trainer.learning.losses.policy import policy_loss, policy_metric_names
from services.trainer.learning.losses.reduction import MetricNames, token_mean
from services.trainer.learning.losses.value import explained_variance, value_loss, value_metric_names

__all__ = [
    "MetricNames",
    "explained_variance",
    "policy_loss",
    "policy_metric_names",
    "token_mean",
    "value_loss",
    "value_metric_names",
]
