"""The divergence from the reference policy that rewards pay for."""

from __future__ import annotations

from typing import Literal

import numpy as np

from services.trainer.learning.tokens import Float64

# NeMo RL's, in rewards whatever the loss's clamps are
INPUT_CLAMP, OUTPUT_CLAMP = 20.0, 10.0


def kl_of_tokens(policy: Float64, ref: Float64, kind: Literal["k1", "k2", "k3"]) -> Float64:
    """Estimates of KL(policy || reference) from log-probabilities [N] of sampled tokens (Schulman, "Approximating KL Divergence").

    With `d = clamp(ref - policy, ±20)`: k1 `-d`, k2 `d²/2`, k3 `exp(d) - 1 - d`; then clamped to ±10.
    """
    d = np.clip(ref - policy, -INPUT_CLAMP, INPUT_CLAMP)
    match kind:
        case "k1":
            kl = -d
        case "k2":
            kl = d**2 / 2
        case "k3":
            kl = np.expm1(d) - d
    return np.clip(kl, -OUTPUT_CLAMP, OUTPUT_CLAMP)
