"""The plan of a run's faults: a pure function of its seed.

Every process is hit in every phase of the pipeline once in 25 faults, and in any five in a row each process and each phase
comes up once. What is done to a process goes round the kinds that apply to it.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

Target = Literal["server", "replay", "reward", "rollout", "trainer"]
Phase = Literal["generation", "scoring", "reserve", "checkpoint", "refit"]
Kind = Literal["kill", "kill_engine", "stop", "cut", "half_open", "full_disk", "torn_tail", "failover"]
Topology = Literal["embedded", "external"]
Policy = Literal["ordered", "drop", "mask"]

TARGETS: tuple[Target, ...] = ("server", "replay", "reward", "rollout", "trainer")
PHASES: tuple[Phase, ...] = ("generation", "scoring", "reserve", "checkpoint", "refit")
KINDS: dict[Target, tuple[Kind, ...]] = {
    "server": ("kill", "stop", "torn_tail", "full_disk", "failover", "cut"),
    "replay": ("kill", "stop", "cut"),
    "reward": ("kill", "stop", "cut"),
    "rollout": ("kill", "stop", "cut", "kill_engine", "half_open"),
    "trainer": ("kill", "stop", "full_disk", "cut", "half_open"),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """`target` suffers `kind` in the middle of `phase`, for `seconds` (a killed process stays away that long)."""

    number: int
    kind: Kind
    target: Target
    phase: Phase
    seconds: float


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the run itself is made: small, and different from seed to seed. `prompts` end the run."""

    topology: Topology
    prompts_per_step: int
    generations: int
    max_age: int
    policy: Policy
    redundant: int
    dynamic_sampling: bool
    save_period: int
    in_flight: bool
    prompts: int


def make_shape(seed: int, faults: int, topology: Topology) -> Shape:
    rng = random.Random(f"shape {seed}")
    prompts_per_step = rng.choice((2, 3))
    return Shape(
        topology=topology,
        prompts_per_step=prompts_per_step,
        generations=rng.choice((2, 3, 4)),
        max_age=rng.choice((1, 2)),
        policy=rng.choice(("ordered", "drop", "mask")),
        redundant=rng.choice((0, 0, 1)),
        dynamic_sampling=rng.random() < 0.5,
        save_period=rng.choice((1, 2)),
        in_flight=rng.random() < 0.5,
        # one more than whole batches: what is left over at the end is an end of its own
        prompts=prompts_per_step * (8 + 4 * faults) + 1,
    )


def make_plan(seed: int, faults: int, topology: Topology, lease_s: float) -> list[Fault]:
    """Stops and cuts outlast a lease, so that the others have gone on without the process when it comes back."""
    rng = random.Random(f"plan {seed}")
    decks = {target: _Deck(rng, [k for k in KINDS[target] if _applies(k, topology)]) for target in TARGETS}
    pairs: list[tuple[Target, Phase]] = []
    while len(pairs) < faults:
        targets, phases = rng.sample(TARGETS, 5), rng.sample(PHASES, 5)
        for turn in rng.sample(range(5), 5):
            pairs += [(target, phases[(place + turn) % 5]) for place, target in enumerate(targets)]
    plan = []
    for number, (target, phase) in enumerate(pairs[:faults]):
        kind = decks[target].draw()
        away = (
            rng.uniform(0.0, 2.0)
            if kind in ("kill", "kill_engine", "torn_tail", "failover")
            else lease_s * rng.uniform(1.2, 2.0)
        )
        plan.append(Fault(number, kind, target, phase, round(away, 2)))
    return plan


def _applies(kind: Kind, topology: Topology) -> bool:
    return kind != "failover" or topology == "external"


class _Deck:
    """Draws from a shuffled pile; when it is empty, from a new one."""

    def __init__(self, rng: random.Random, kinds: list[Kind]) -> None:
        self._rng = rng
        self._kinds = kinds
        self._pile: list[Kind] = []

    def draw(self) -> Kind:
        if not self._pile:
            self._pile = self._rng.sample(self._kinds, len(self._kinds))
        return self._pile.pop()
