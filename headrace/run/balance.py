"""Which side of a run is its bottleneck: how fast a fleet trains, computed from what generation, scoring and training take.

Notation: a step trains on `P` groups of `n` trajectories, `A` is how many steps generation may run ahead (the age bound under `ordered`),
`T` the seconds in which the trainer turns a batch into new weights and sends them. `V(k)` is when the weights of version k are there, and
`S(k)` when the batch of step k is complete. Three rules of the buffer and the trainer make a run:

1. *The trainer takes steps one after the other*: `V(k+1) = max(V(k), S(k)) + T`.
2. *Admission*: the groups of step k may be leased from `V(k-A)` on (docs/architecture.md), each as soon as a replica has a place for it.
   Under `ordered`, `S(k)` is when the slowest group of that step has its scores; under `drop` and `mask`, when any `P` are ready.
3. *A replica shares itself among its sequences*: with b of them in flight, each gets a token every `token_s + per_sequence_s * b` seconds.
   A forward pass costs its weights, once, and something for each sequence. So b sequences make `b / (token_s + per_sequence_s * b)` tokens
   a second, at most `1 / per_sequence_s`.

Summed over many steps this gives bounds of the seconds per step, D, with w the replica-seconds and M the time of a batch's slowest group:

- the trainer:     `D >= T`
- generation:      `D >= P w / replicas`
- the age bound:   `D >= (M + T) / (A + 1)`: by rules 1 and 2, V(k+1) >= V(k-A) + M + T. With A = 0 generation and training alternate
- scoring:         `D >= P n scoring_s / scoring_places`

No closed form holds between them: M is the largest of P random lengths, it depends on b, and whoever waits for a straggler leaves places
free. So `simulate` follows the three rules event by event, with lengths drawn from those of the run. `python -m benchmarks.fleet --balance`
compares it with the real buffer. What it leaves out: a replica that fails or comes late, validations (they are in T as far as they hold up
the trainer), the time that a prompt's computation takes beside its tokens, and processes that share cores or a device.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from headrace.base.errors import ConfigError

Side = Literal["training", "generation", "age bound", "scoring", "episodes"]

# Trajectories that a simulation follows at least, if that is more than `_FEWEST_STEPS`, so that chance moves its result by a few percent.
_TRAJECTORIES = 8000
_FEWEST_STEPS, _MOST_STEPS = 8, 150
# A trainer that is busy for this share of its time is the bottleneck.
BUSY = 0.95
# Something more helps if it makes steps faster by more than this: less is chance, and not worth its price.
_HELPS = 0.05
# The largest fleet, and by how many steps a wider age bound, that are tried.
MOST_REPLICAS, WIDER = 1024, 8


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step takes and what works on it. `lengths` has groups to draw from: the tokens of each trajectory of a group.

    `places`: groups that one replica holds; `sequences`: those that its engine computes at a time, None for any number. `scoring_places`:
    trajectories that the environments score at a time, None for any number. `training_s`: from a complete batch to new weights; `refit_s`:
    until the replicas have them. `drains`: a refit waits for what is being generated. `episode_places`: groups of episodes that each of
    `runners` has; replicas then hold no groups. `aside_s`: what a trajectory takes besides its tokens.
    """

    prompts: int
    lengths: Sequence[tuple[float, ...]]
    token_s: float
    training_s: float
    replicas: int = 1
    per_sequence_s: float = 0.0
    places: int = 64
    sequences: int | None = None
    scoring_s: float = 0.0
    scoring_places: int | None = None
    refit_s: float = 0.0
    age: int = 0
    policy: str = "ordered"
    ahead: int | None = None
    drains: bool = False
    runners: int | None = None
    episode_places: int = 0
    aside_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.lengths or self.token_s <= 0 or self.training_s <= 0:
            raise ConfigError(
                f"{len(self.lengths)} groups, {self.token_s:g} s a token, {self.training_s:g} s of training: each must be more than 0"
            )
        if self.runners is not None and not self.episode_places:
            raise ConfigError(f"a runner has no place for a group of {len(self.lengths[0])}; raise agents.slots")

    @property
    def steps_ahead(self) -> int:
        return self.age if self.policy == "ordered" or self.ahead is None else self.ahead

    @property
    def tokens_a_step(self) -> float:
        return self.prompts * statistics.fmean(map(sum, self.lengths))


@dataclasses.dataclass(frozen=True)
class Balance:
    """How a workload runs. `busy`: the share of its time in which the trainer does not wait for a batch; `generating`: the share of the
    replicas' time in which they have something to generate; `repeated`: the share of groups that are generated again, being over age."""

    step_s: float
    busy: float
    generating: float
    repeated: float = 0.0


def simulate(work: Workload, seed: int = 0, steps: int | None = None) -> Balance:
    """Return how the workload runs once it has come into its rhythm, over so many `steps`. The same arguments give the same balance."""
    return _Run(work, seed).measure(steps)


def warm_up(steps_ahead: int) -> int:
    """Return the number of steps after which a run that began with nothing in flight has come into its rhythm."""
    return 2 * steps_ahead + 3


def draw(lengths: Sequence[tuple[float, ...]], seed: int) -> Iterator[tuple[float, ...]]:
    """Yield the lengths of group after group: all of `lengths` in a random order, then in another, so that a short run has them all."""
    chance = random.Random(seed)
    while True:
        yield from chance.sample(lengths, len(lengths))


def spread(mean: float, sigma: float, trajectories: int = 1, count: int = 2048) -> list[tuple[float, ...]]:
    """Return groups of log-normal lengths with this mean and this standard deviation of their logarithm: `count` quantiles, so that chance
    has no part in how they are spread. Trajectories of a group are independent."""
    normal = statistics.NormalDist()
    middle = [normal.inv_cdf((place + 0.5) / count) for place in range(count)]
    column = [mean * math.exp(sigma * each - sigma**2 / 2) for each in middle]
    columns = [random.Random(place).sample(column, count) for place in range(trajectories)]
    return list(zip(*columns, strict=True))


@dataclasses.dataclass(frozen=True)
class Advice:
    """What holds a workload up, and what would not: the workload `proposed`, with the same age bound, and `wider`, with a wider one, if
    that helps. Each comes with how it runs."""

    side: Side
    now: tuple[Workload, Balance]
    proposed: tuple[Workload, Balance]
    wider: tuple[Workload, Balance] | None

    def __str__(self) -> str:
        (work, before), (other, after) = self.now, self.proposed
        changes = [
            f"{'raise' if (new or 0) > (old or 0) else 'lower'} {name} from {old} to {new}"
            for name, old, new in (
                ("rollout.replicas", work.replicas, other.replicas),
                ("agents.runners", work.runners, other.runners),
            )
            if old != new
        ]
        if (work.scoring_places or 0) < (other.scoring_places or 0):
            changes.append(f"raise the places of the environments from {work.scoring_places} to {other.scoring_places}")
        found = f"{', '.join(changes) or 'keep the replicas'}: trainer busy {before.busy:.0%} -> {after.busy:.0%}"
        if self.wider is not None:
            widest, balance = self.wider
            found += f"; with an age bound of {widest.age} (rollout.replicas {widest.replicas}) {balance.busy:.0%}"
        return f"{self.side} is the bottleneck; {found}"


def advise(work: Workload) -> Advice:
    """Return what holds the workload up, and what would not."""
    now, proposed = simulate(work), propose_replicas(work)
    after = simulate(proposed)
    wider = propose_age(proposed) if after.busy < BUSY else None
    return Advice(
        find_bottleneck(work, now), (work, now), (proposed, after), None if wider is None else (wider, simulate(wider))
    )


def enough_replicas(replicas: int, step_s: float, waited_s: float) -> int:
    """Return how many replicas generate a batch in the time in which the trainer trains on one, if these many keep it waiting for so many
    seconds of a step: the bound of generation alone, for a reader who knows no lengths."""
    return math.ceil(replicas * step_s / max(step_s - waited_s, step_s / MOST_REPLICAS))


def find_bottleneck(work: Workload, now: Balance | None = None) -> Side:
    """Return the side that holds up the others: the one whose relief makes steps fastest, unless the trainer is busy."""
    now = now or simulate(work)
    if now.busy >= BUSY:
        return "training"
    reliefs: dict[Side, Workload] = {
        "generation": dataclasses.replace(work, replicas=2 * work.replicas),
        "age bound": dataclasses.replace(work, age=work.age + 1, ahead=work.steps_ahead + 1),
        "scoring": dataclasses.replace(work, scoring_s=0.0),
    }
    if work.runners is not None:
        reliefs["episodes"] = dataclasses.replace(work, runners=2 * work.runners)
    took = {side: simulate(relieved).step_s for side, relieved in reliefs.items()}
    best = min(took, key=lambda side: took[side])
    return best if took[best] < now.step_s * (1 - _HELPS) else "training"


def propose_replicas(work: Workload) -> Workload:
    """Return the workload with the fewest replicas (and runners, and places of environments) that keep the trainer as busy as any number
    would, within a few percent."""
    found = work
    for name, most in (
        ("replicas", min(MOST_REPLICAS, work.prompts * (work.steps_ahead + 1))),
        ("runners", MOST_REPLICAS),
        ("scoring_places", work.prompts * len(work.lengths[0])),
    ):
        if getattr(work, name) is not None:
            found = _with(found, name, most)
    enough_s = simulate(found).step_s * (1 + _HELPS)
    for name in ("scoring_places", "runners", "replicas"):
        if getattr(work, name) is not None:
            found = _fewest(found, name, enough_s)
    return found


def _fewest(work: Workload, name: str, enough_s: float) -> Workload:
    """Return the workload with the fewest of `name` with which a step takes no longer than `enough_s`."""
    least, most = 0, getattr(work, name)
    # by doubling first: a small fleet is simulated fast, and is what most runs need
    guess = 1
    while most - least > 1:
        tried = _with(work, name, min(guess, most))
        if simulate(tried).step_s <= enough_s:
            most = min(guess, most)
        else:
            least = guess
        guess = 2 * guess if 2 * guess < most and most == getattr(work, name) else (least + most) // 2
    return _with(work, name, most)


def _with(work: Workload, name: str, value: Any) -> Workload:
    return dataclasses.replace(work, **{name: value})


def propose_age(work: Workload) -> Workload | None:
    """Return the workload with the narrowest wider age bound that keeps the trainer busy, or else makes steps fastest, and with the
    replicas for it; None if a wider one does not help."""
    best: Workload | None = None
    fastest = simulate(work).step_s
    for more in range(1, WIDER + 1):
        wider = propose_replicas(dataclasses.replace(work, age=work.age + more, ahead=work.steps_ahead + more))
        found = simulate(wider)
        if found.step_s > fastest * (1 - _HELPS):
            break
        best, fastest = wider, found.step_s
        if found.busy >= BUSY:
            break
    return best


class _Engine:
    """A replica. `clock` is how many tokens each of its sequences would have by now, had it been there from the beginning."""

    def __init__(self, work: Workload, place: int) -> None:
        self.place = place  # among the replicas
        self.held = 0  # groups
        self.stamp = 0  # of the event that tells its next end
        self.running: list[tuple[float, int, _Group]] = []
        self.waiting: collections.deque[tuple[float, int, _Group]] = collections.deque()
        self.generated_s = 0.0
        self._work, self._clock, self._at = work, 0.0, 0.0

    @property
    def _token_s(self) -> float:
        return self._work.token_s + self._work.per_sequence_s * len(self.running)

    def advance(self, now: float) -> None:
        if self.running:
            self._clock += (now - self._at) / self._token_s
            self.generated_s += now - self._at
        self._at = now

    def add(self, tokens: float, order: int, group: _Group) -> None:
        self.waiting.append((tokens, order, group))
        self._fill()

    def _fill(self) -> None:
        most = self._work.sequences
        while self.waiting and (most is None or len(self.running) < most):
            tokens, order, group = self.waiting.popleft()
            heapq.heappush(self.running, (self._clock + tokens, order, group))

    def take_ended(self) -> list[_Group]:
        """Return the groups of the sequences that end now, of which there is one: rounding must not put its end off forever."""
        self._clock = max(self._clock, self.running[0][0])
        ended = []
        while self.running and self.running[0][0] <= self._clock * (1 + 1e-12):
            ended.append(heapq.heappop(self.running)[2])
        self._fill()
        return ended

    def next_end(self) -> float:
        return self._at + max(0.0, self.running[0][0] - self._clock) * self._token_s


@dataclasses.dataclass(slots=True)
class _Group:
    ticket: int
    version: int
    engine: _Engine
    left: int
    pushed_at: float = 0.0
    ready_at: float = 0.0


class _Run:
    """The events of a run."""

    def __init__(self, work: Workload, seed: int) -> None:
        self._work, self._lengths = work, draw(work.lengths, seed)
        self._engines = [_Engine(work, place) for place in range(work.replicas)]
        of_episodes = work.runners is not None
        self._most_held = math.inf if of_episodes else work.places
        self._places = work.episode_places * (work.runners or 0) if of_episodes else work.places * work.replicas
        # the engines by what they hold; an entry whose number is no longer true is passed over
        self._by_load = [(0, place) for place in range(work.replicas)]
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._environments = [0.0] * (work.scoring_places or 0)  # when each place is free again
        self._now = 0.0
        self._version = self._next_step = self._line = self._ticket = 0
        self._open = 0
        self._draining = False
        self._idle_since: float | None = 0.0
        self._ready: list[tuple[int, int, _Group]] = []  # by ticket
        self._ready_of: collections.Counter[int] = collections.Counter()  # by step
        self._waited = 0.0
        self._repeated = 0

    def measure(self, steps: int | None) -> Balance:
        work = self._work
        if steps is None:
            a_step = work.prompts * len(work.lengths[0])
            steps = min(max(_FEWEST_STEPS, math.ceil(_TRAJECTORIES / a_step)), _MOST_STEPS)
        self._train(warm_up(work.steps_ahead))
        began, waited, repeated, generated = self._now, self._waited, self._repeated, self._generated()
        self._train(steps)
        took, again = self._now - began, self._repeated - repeated
        return Balance(
            step_s=took / steps,
            busy=1 - (self._waited - waited) / took,
            generating=(self._generated() - generated) / (took * work.replicas),
            repeated=again / (again + steps * work.prompts),
        )

    def _generated(self) -> float:
        for engine in self._engines:
            engine.advance(self._now)
        return sum(engine.generated_s for engine in self._engines)

    def _train(self, steps: int) -> None:
        """Go on until so many more versions are there."""
        until = self._version + steps
        self._lease()
        while self._version < until:
            self._now, _, what, of = heapq.heappop(self._events)
            match what, of:
                case "generated", (_Engine() as engine, stamp) if engine.stamp == stamp:
                    self._end_sequences(engine)
                case "pushed", _Engine() as engine:
                    self._let_go(engine)
                case "ready", _Group() as group:
                    self._ready_of[group.ticket // self._work.prompts] += 1
                    heapq.heappush(self._ready, (group.ticket, next(self._order), group))
                    self._reserve()
                case "trained", _:
                    self._draining = self._work.drains
                    if not self._draining or not self._open:
                        self._at(self._now + self._work.refit_s, "refitted")
                case "refitted", _:
                    self._version += 1
                    self._draining, self._idle_since = False, self._now
                    self._lease()
                    self._reserve()

    def _at(self, time: float, what: str, of: object = None) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, of))

    # -- generation and scoring

    def _lease(self) -> None:
        work = self._work
        bound = (self._version + work.steps_ahead + 1 - self._next_step) * work.prompts
        changed = {}
        while not self._draining and self._line < bound and self._places > 0:
            held, place = heapq.heappop(self._by_load)
            engine = self._engines[place]
            if held != engine.held:
                continue
            if id(engine) not in changed:
                engine.advance(self._now)
                changed[id(engine)] = engine
            lengths = next(self._lengths)
            group = _Group(self._ticket, self._version, engine, len(lengths))
            self._ticket += 1
            self._line += 1
            self._open += 1
            self._places -= 1
            engine.held += 1
            if engine.held < self._most_held:
                heapq.heappush(self._by_load, (engine.held, place))
            for tokens in lengths:
                engine.add(tokens, next(self._order), group)
        for engine in changed.values():
            self._tell_next_end(engine)

    def _tell_next_end(self, engine: _Engine) -> None:
        engine.stamp += 1
        if engine.running:
            self._at(engine.next_end(), "generated", (engine, engine.stamp))

    def _end_sequences(self, engine: _Engine) -> None:
        engine.advance(self._now)
        for group in engine.take_ended():
            group.left -= 1
            pushed = self._now + self._work.aside_s
            group.pushed_at = max(group.pushed_at, pushed)
            group.ready_at = max(group.ready_at, self._score(pushed))
            if not group.left:
                self._at(group.pushed_at, "pushed", engine)
                self._at(group.ready_at, "ready", group)
        self._tell_next_end(engine)

    def _score(self, pushed: float) -> float:
        """Return when a trajectory that is pushed has its score."""
        if not self._environments:
            return pushed + self._work.scoring_s
        return_at = max(pushed, self._environments[0]) + self._work.scoring_s
        heapq.heapreplace(self._environments, return_at)
        return return_at

    def _let_go(self, engine: _Engine) -> None:
        engine.held -= 1
        heapq.heappush(self._by_load, (engine.held, engine.place))
        self._open -= 1
        self._places += 1
        if self._draining and not self._open:
            self._at(self._now + self._work.refit_s, "refitted")
        self._lease()

    # -- training

    def _reserve(self) -> None:
        work, idle_since = self._work, self._idle_since
        if idle_since is None:
            return
        if work.policy == "ordered":
            if self._ready_of[self._next_step] < work.prompts:
                return
            del self._ready_of[self._next_step]
        else:
            if work.policy == "drop":
                self._drop_old()
            if len(self._ready) < work.prompts:
                return
            for _ in range(work.prompts):
                heapq.heappop(self._ready)
        self._waited += self._now - idle_since
        self._idle_since = None
        self._line -= work.prompts
        self._next_step += 1
        self._at(self._now + work.training_s, "trained")

    def _drop_old(self) -> None:
        young = [entry for entry in self._ready if self._next_step - entry[2].version <= self._work.age]
        if dropped := len(self._ready) - len(young):
            heapq.heapify(young)
            self._ready = young
            self._line -= dropped
            self._repeated += dropped
            self._lease()
