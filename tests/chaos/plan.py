"""The plan of a run's faults: a pure function of its seed.

Every process is hit in every phase of the pipeline once in the faults of a whole run (`WHOLE`), the first five (or fewer) are in
different phases, and one of them hits the environment. What is done to a process goes round the kinds that apply to it.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

Target = Literal["server", "replay", "reward", "environment", "rollout", "trainer", "agents", "up", "store", "sentinel"]
Phase = Literal[
    "generation", "scoring", "reserve", "checkpoint", "refit", "validation", "committed", "refilled", "closed"
]
Kind = Literal[
    "kill", "kill_engine", "stop", "cut", "half_open", "full_disk", "torn_tail", "torn_step", "torn_refilled",
    "torn_validation", "torn_close", "failover", "no_memory", "clock", "slow", "overloaded", "bad_answers", "rival",
    "terminate", "noise", "raises", "proxy", "damaged", "thief", "node",
]  # fmt: skip
# Under `up`, `headrace up` runs all services but the user's environment and store, on one machine.
Topology = Literal["embedded", "external", "up"]
Policy = Literal["ordered", "drop", "mask"]

SERVICES: tuple[Target, ...] = ("server", "replay", "reward", "environment", "rollout", "trainer")
# Those that come again and again; the queue is closed once, near the end.
PHASES: tuple[Phase, ...] = ("generation", "scoring", "reserve", "checkpoint", "refit")
KINDS: dict[Target, tuple[Kind, ...]] = {
    "server": ("kill", "stop", "torn_tail", "full_disk", "failover", "cut", "no_memory", "clock", "node"),
    "replay": ("kill", "stop", "cut", "clock", "proxy", "node"),
    "reward": ("kill", "stop", "cut", "clock", "proxy", "thief", "node"),
    "environment": ("kill", "stop", "slow", "overloaded", "bad_answers", "raises", "cut", "node"),
    "rollout": ("kill", "stop", "cut", "kill_engine", "half_open", "clock", "noise", "proxy", "node"),
    "trainer": ("kill", "stop", "full_disk", "cut", "half_open", "rival", "clock", "proxy", "damaged", "node"),
    "agents": ("kill", "stop", "cut", "half_open", "clock", "proxy", "node"),
    "up": ("kill", "stop", "terminate", "clock", "proxy", "node"),
    "store": ("kill", "stop", "cut", "slow", "bad_answers"),
    "sentinel": ("kill", "stop", "cut"),
}
# What Headrace doesn't run.
YOURS: tuple[Target, ...] = ("environment", "store")
# What can be done to a service that somebody else runs, on a machine that it shares with the others.
_SUPERVISED: tuple[Kind, ...] = ("kill", "stop", "torn_tail", "damaged", "thief")
# Of the server's file in a long run, one each, the first two one after the other: `refilled` comes after a restore.
_TORN: tuple[tuple[tuple[Kind, Phase], ...], ...] = (
    (("torn_step", "committed"), ("torn_refilled", "refilled")),
    (("torn_validation", "validation"),),
)
_LAST: tuple[Kind, Phase] = ("torn_close", "closed")
# A run of at least so many faults has a prompt that kills its replicas, and its server forgets certain writes: the rest of the plan must
# not wait for them, and a run of `make test` has not the time.
LONG = 10


def topology_of(seed: int) -> Topology:
    """Runs go round."""
    rounds: tuple[Topology, ...] = ("embedded", "external", "up")
    return rounds[seed % len(rounds)]


def has_episodes(seed: int) -> bool:
    """Every other run that `headrace up` does not start."""
    return topology_of(seed) != "up" and seed % 2 == 1


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
    """How the run itself is made: small, and different from seed to seed. `prompts` end the run; with `deadly` one of them kills its
    replicas. With `duplicates` every call to the buffer's server is delivered again later. With `episodes` every prompt is a program's,
    and with `graded` its reward a grader's. With `store` checkpoints are copied to an object store; with `puller` the second replica pulls
    its weights from there. So many `validators` evaluate beside training, where there are two replicas. With `sentinels` three of Redis's
    Sentinels decide which server is the primary."""

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
    deadly: bool
    duplicates: bool
    episodes: bool = False
    graded: bool = False
    store: bool = False
    puller: bool = False
    validators: int = 0
    sentinels: bool = False

    @property
    def targets(self) -> tuple[Target, ...]:
        more = {"agents": self.episodes, "up": self.topology == "up", "store": self.store, "sentinel": self.sentinels}
        return (*SERVICES, *(target for target in KINDS if more.get(target)))

    @property
    def whole(self) -> int:
        """The faults of a run that hits every process in every phase."""
        return len(self.targets) * len(PHASES) + sum(map(len, _TORN)) + 1


def make_shape(seed: int, faults: int, topology: Topology, *, episodes: bool = False) -> Shape:
    rng = random.Random(f"shape {seed}")
    prompts_per_step = rng.choice((2, 3))
    # no episode is played again for its age alone
    policies: tuple[Policy, ...] = ("ordered", "ordered", "mask") if episodes else ("ordered", "drop", "mask")
    return Shape(
        topology=topology,
        prompts_per_step=prompts_per_step,
        generations=rng.choice((2, 3, 4)),
        max_age=rng.choice((1, 2)),
        policy=rng.choice(policies),
        redundant=rng.choice((0, 0, 1)),
        dynamic_sampling=rng.random() < 0.5,
        save_period=rng.choice((1, 2)),
        in_flight=rng.random() < 0.5,
        # one more than whole batches: what is left over at the end is an end of its own
        prompts=prompts_per_step * (10 + 6 * faults) + 1,
        deadly=faults >= LONG,
        duplicates=(duplicates := topology == "external" and rng.random() < 0.5),
        episodes=episodes,
        graded=episodes and rng.random() < 0.5,
        store=(store := rng.random() < 0.5),
        puller=store and topology != "up" and not episodes and rng.random() < 0.5,
        validators=int(not episodes and rng.random() < 0.5),
        sentinels=topology == "external" and not duplicates and rng.random() < 0.7,
    )


def make_plan(seed: int, faults: int, shape: Shape, lease_s: float, *, clocks: bool) -> list[Fault]:
    """Stops and cuts outlast a lease, so that the others have gone on without the process when it comes back; what is wrong with an
    environment outlasts its time limit, and the pauses between a trajectory's attempts. `clocks`: they can be moved."""
    rng = random.Random(f"plan {seed}")
    special = _TORN if faults >= LONG else ()
    usual = faults - sum(map(len, special)) - (faults >= LONG)
    decks = {
        target: _Deck(rng, [k for k in KINDS[target] if _applies(k, target, shape, clocks)]) for target in shape.targets
    }
    pairs: list[tuple[Target, Phase]] = []
    while len(pairs) < usual:
        targets, phases = rng.sample(shape.targets, len(shape.targets)), rng.sample(PHASES, len(PHASES))
        if (place := targets.index("environment")) >= (first := min(usual, len(PHASES))):
            chosen = rng.randrange(first)
            targets[place], targets[chosen] = targets[chosen], targets[place]
        for turn in rng.sample(range(len(PHASES)), len(PHASES)):
            pairs += [(target, phases[(place + turn) % len(PHASES)]) for place, target in enumerate(targets)]
    drawn = [(decks[target].draw(), target, phase) for target, phase in pairs[:usual]]
    _rival_at_a_checkpoint(drawn)
    for torn in special:
        place = rng.randint(1, len(drawn))
        while drawn[place - 1][0] == "torn_step":  # what follows it stays with it
            place += 1
        drawn[place:place] = [(kind, "server", phase) for kind, phase in torn]
    if faults >= LONG:
        drawn.append((_LAST[0], "server", _LAST[1]))
    return [
        Fault(number, kind, target, phase, _seconds(rng, kind, target, lease_s))
        for number, (kind, target, phase) in enumerate(drawn)
    ]


def _seconds(rng: random.Random, kind: Kind, target: Target, lease_s: float) -> float:
    if kind in ("kill", "kill_engine", "failover", "terminate", "proxy", "damaged", "thief", "node") or kind.startswith(
        "torn"
    ):
        return round(rng.uniform(*((4.0, 15.0) if target == "store" else (0.0, 2.0))), 2)
    if target in YOURS:
        return round(lease_s * rng.uniform(2.0, 4.0), 2)
    return round(lease_s * rng.uniform(1.2, 2.0), 2)


def _rival_at_a_checkpoint(drawn: list[tuple[Kind, Target, Phase]]) -> None:
    """The trainer that is frozen while another takes its place is one that writes a checkpoint, if any fault hits a trainer there."""
    rivals = [place for place, (kind, _, _) in enumerate(drawn) if kind == "rival"]
    saving = [place for place, (_, target, phase) in enumerate(drawn) if (target, phase) == ("trainer", "checkpoint")]
    for one, other in zip(rivals, saving, strict=False):
        (first, *_), (second, *_) = drawn[one], drawn[other]
        drawn[one], drawn[other] = (second, *drawn[one][1:]), (first, *drawn[other][1:])


def _applies(kind: Kind, target: Target, shape: Shape, clocks: bool) -> bool:
    if kind == "kill_engine" and shape.episodes:  # its replicas have none
        return False
    if shape.topology == "up" and target not in ("up", *YOURS):
        return kind in _SUPERVISED
    if kind == "node" and target == "server":  # the embedded server has the machine of the replay service
        return shape.topology == "external"
    if kind == "node" and target in ("trainer", "up"):  # elsewhere its checkpoints are lost
        return shape.store
    if kind == "thief":  # elsewhere nobody chose its ports but the configuration
        return False
    return (kind != "failover" or shape.topology == "external") and (kind != "clock" or clocks)


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
