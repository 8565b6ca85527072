"""Learning rate schedules, in torch's schedulers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headrace.config.migrate.draft import Draft
from headrace.config.policy import NAMESPACE

_DECAYS = ("linear", "cosine", "cosine_with_min_lr")
_FLAT = ("constant", "constant_with_warmup")


def put_schedule(
    draft: Draft,
    kind: str,
    warm: float,
    total: int | None,
    in_batch: int,
    rates: tuple[float, float],
    names: Sequence[str],
) -> None:
    """Put `policy.scheduler`, which the keys `names` give: a warm-up of `warm` optimizer steps, or of that share of the run if it is below
    1, and the schedule after it. `total` are the trainer steps of the run, if they are known, of `in_batch` optimizer steps each; `rates`
    are the first rate, and the last one's share of it."""
    if kind not in (*_DECAYS, *_FLAT):
        draft.note(names, f"{kind}: policy.scheduler takes torch's schedulers; written is a constant rate")
        return
    if (kind in _DECAYS or 0 < warm < 1) and total is None:
        draft.note(
            names,
            f"policy.scheduler: a schedule ({kind}, warm-up {warm:g}) needs the number of trainer steps, which the data decides; "
            "give it with --steps. Written is a constant rate",
            draft.to_add,
        )
        return
    of_run, (rate, least) = total or 0, rates
    warm_steps = round(warm * of_run) if 0 < warm < 1 else math.ceil(warm / in_batch)
    after = max(1, of_run - warm_steps)
    parts: list[dict[str, Any]] = []
    if warm_steps:
        # the first step is 0 in both frameworks; torch takes no factor of 0
        parts.append(_named("LinearLR", start_factor=1e-8, end_factor=1.0, total_iters=warm_steps))
    if kind == "linear":
        parts.append(_named("LinearLR", start_factor=1.0, end_factor=least, total_iters=after))
    elif kind in _DECAYS:
        parts.append(_named("CosineAnnealingLR", T_max=after, eta_min=least * rate))
    elif warm_steps:
        parts.append(_named("ConstantLR", factor=1.0, total_iters=1))
    if len(parts) == 2:
        parts.append({"milestones": [warm_steps]})
    if parts:
        draft.put(("policy", "scheduler"), parts, *names)
    elif given := draft.those_given(*names):
        draft.note(given, "the rate is constant", draft.same)


def _named(name: str, **kwargs: float) -> dict[str, Any]:
    return {"name": f"{NAMESPACE}{name}", "kwargs": kwargs}
