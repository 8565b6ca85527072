"""A fleet of a thousand replicas on one real buffer, under each age policy.

    python -m benchmarks.fleet [--replicas 1000] [--slots 10] [--steps 8] [--policy ordered|drop|mask] [--out FOLDER]
    python -m benchmarks.fleet --balance

Time is simulated, calls are real. Generating a group takes log-normal time (mean 3 trainer steps, sigma 0.6 of the logarithm), a step
takes 1, a refit nothing; replicas x slots groups are in flight at most, and `P` is such that this is 1.15 times what the trainer can use.
Every lease, push, score, heartbeat, acknowledgement, verification, reservation, read and commit is a call to one server by the client
that the services use, each replica with a client of its own. Whatever falls into the same twentieth of a step is called as fast as one
process can, 32 calls at a time: a call's time includes its wait for the other 31 and for the process.

Length is proportional to time, refits reach groups in flight: a token is of the version that was newest when it was sampled. Figures
leave out the first steps, while the fleet fills up. `bias` is how much shorter (-) what was trained is than what was generated.

With `--balance`, small fleets of several kinds run, and how busy their trainer is stands beside what `headrace plan balance` computes for
them (`headrace/run/balance.py`), from the same lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import dataclasses
import gc
import heapq
import itertools
import json
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.buffer import describe_calls, group, limits, server, trajectory, usage
from headrace.records.score import Score
from headrace.records.trajectory import Span, Trajectory
from headrace.replay import Lease, ReplayClient, Reservation, ScoringJob
from headrace.replay.connection import open_redis
from headrace.run import balance
from headrace_services.refit.probe import PROBE_TOKENS

# log-probabilities of a probe
PROBE = [-1.0] * (PROBE_TOKENS - 1)
POLICIES = ("ordered", "drop", "mask")
MEAN_STEPS, SIGMA, LOAD = 3.0, 0.6, 1.15
# Lengths that are drawn in turn, so that a fleet of any size has its share of long ones.
LENGTHS = 4096
GENERATIONS = 2
TOKENS_A_STEP = 64
WINDOW = 1 / 20
HEARTBEATS = 50
AT_A_TIME = 32
ASKING = 128  # replicas that ask for work before it is seen whether there is more
SCORED = 256
T = TypeVar("T")


@dataclasses.dataclass
class Figures:
    """What is measured once the fleet is full. Ages in steps, lengths in tokens."""

    busy: float = 0.0
    began: float = 0.0
    dropped_before: int = 0
    generated: list[float] = dataclasses.field(default_factory=list)
    trained: list[float] = dataclasses.field(default_factory=list)
    ages: Counter[int] = dataclasses.field(default_factory=Counter)
    counted_ages: Counter[int] = dataclasses.field(default_factory=Counter)
    tokens: int = 0
    masked: int = 0
    calls: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))


class SimulatedReplica:
    """One simulated rollout client."""

    def __init__(self, client: ReplayClient, slots: int) -> None:
        self.id = f"rollout-{secrets.token_hex(6)}"
        self.client = client
        self.free = slots
        self.tokens: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A fleet and its load. `mean` and `sigma` are of how long a group takes, in steps and of its logarithm."""

    replicas: int
    slots: int
    prompts: int
    age: int
    ahead: int | None = None
    mean: float = MEAN_STEPS
    sigma: float = SIGMA
    policy: str = "ordered"
    steps: int = 8
    warm_up: int = 8
    seed: int = 0

    @property
    def workload(self) -> balance.Workload:
        """The same for the model. Its trajectories are those of a group, which all take the same time here."""
        return balance.Workload(
            prompts=self.prompts,
            lengths=balance.spread(self.mean, self.sigma, count=LENGTHS),
            token_s=1.0,
            training_s=1.0,
            replicas=self.replicas,
            places=self.slots,
            age=self.age,
            policy=self.policy,
            ahead=self.ahead,
        )


# Each side is the bottleneck of some: training, generation, the age bound (and alternating with A = 0), places that stragglers leave free.
BALANCED = {
    "training": Plan(8, 8, 16, 3, mean=1.5, sigma=0.3),
    "generation": Plan(3, 4, 16, 4, sigma=0.3),
    "generation, short of half": Plan(2, 4, 8, 2, mean=2.0),
    "age bound": Plan(8, 8, 16, 2),
    "age 0": Plan(4, 4, 16, 0, mean=1.5),
    "age 0, few replicas": Plan(1, 4, 12, 0, mean=1.5, sigma=0.3),
    "age 1, long tail": Plan(6, 4, 12, 1, mean=2.0, sigma=0.9),
    "drop": Plan(6, 10, 16, 4, policy="drop"),
    "mask": Plan(4, 8, 16, 2, policy="mask"),
}


class Fleet:
    """The run of one policy. `now` is in trainer steps."""

    def __init__(self, url: str, plan: Plan) -> None:
        policy = plan.policy
        self.prompts, self.age, self.ahead = plan.prompts, plan.age, plan.ahead
        self.steps, self.warm_up = plan.steps, plan.warm_up
        self.figures = Figures()
        self.now = 0.0
        self._run_id = f"fleet-{policy}-{secrets.token_hex(4)}"
        self._service = ReplayClient(open_redis(url), self._run_id)
        self._url, self._size, self._slots = url, plan.replicas, plan.slots
        self._replicas: list[SimulatedReplica] = []
        self._policy = policy
        self._under_way = asyncio.Semaphore(AT_A_TIME)
        self._random = random.Random(plan.seed)
        self._takes = balance.draw(plan.workload.lengths, plan.seed)
        self._ends: list[tuple[float, int, float, SimulatedReplica, Lease]] = []
        self._began_at = [0.0]  # when each version became the newest
        self._order = 0
        self._timeline = ""
        self._lengths: dict[str, float] = {}
        self._usage: dict[str, float] = {}

    async def run(self) -> dict[str, Any]:
        bounds = limits(self.prompts, GENERATIONS, self.age, self._policy, self.ahead)
        self._timeline = (await self._service.open_run(bounds)).timeline
        for _ in range(self._size):
            client = ReplayClient(open_redis(self._url), self._run_id)
            self._replicas.append(SimulatedReplica(client, self._slots))
        await self._together(self._timed("register", r.client.register(r.id, {})) for r in self._replicas)
        await self._refit(0)
        # a thousand clients stay as they are: the collector need not look at them again and again
        gc.collect()
        gc.freeze()
        trains_until: float | None = None
        wall = time.perf_counter()
        while self._step < self.warm_up + self.steps:
            await self._feed()
            await self._turn()
            # half a window less, because the sum of twenty windows is not exactly 1
            if trains_until is not None and self.now >= trains_until - WINDOW / 2:
                trains_until = None
                self._began_at.append(self.now)
                await self._refit(self._step)
                await self._lease()
            if trains_until is None and await self._reserve():
                trains_until = self.now + 1.0
            self.now += WINDOW
        return await self._report(time.perf_counter() - wall)

    async def aclose(self) -> None:
        await asyncio.gather(self._service.aclose(), *(replica.client.aclose() for replica in self._replicas))

    _step = 0

    # -- the parts of a window -------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Everything that replicas and scorer do within one window."""
        done: dict[SimulatedReplica, list[tuple[float, float, Lease]]] = defaultdict(list)
        while self._ends and self._ends[0][0] <= self.now:
            end, _, start, replica, lease = heapq.heappop(self._ends)
            done[replica].append((start, end, lease))
        await self._together(self._push(replica, ended) for replica, ended in done.items())
        await self._score()
        await self._lease()

    async def _push(self, replica: SimulatedReplica, ended: Sequence[tuple[float, float, Lease]]) -> None:
        items = [
            (lease, self._trajectory(lease, i, start, end)) for start, end, lease in ended for i in range(GENERATIONS)
        ]
        errors = await self._timed("push", replica.client.push_many(items))
        assert not any(errors), errors
        for start, end, lease in ended:
            replica.tokens.discard(lease.token)
            replica.free += 1
            length = (end - start) * TOKENS_A_STEP
            self._lengths[lease.group.id] = length
            if self._counts:
                self.figures.generated.append(length)

    async def _score(self) -> None:
        jobs: list[ScoringJob] | None = None
        while jobs is None or len(jobs) == SCORED:
            jobs = await self._timed("take_scoring", self._service.take_scoring({"math": SCORED}))
            scores = [(job, Score("SCORED", self._random.random())) for job in jobs]
            if scores:
                assert not any(await self._timed("score", self._service.score_many(scores)))

    async def _lease(self) -> None:
        """Those with free slots ask, a few at a time; admission is the same for all, so the first that gets nothing speaks for the rest."""
        idle = [replica for replica in self._replicas if replica.free]
        self._random.shuffle(idle)
        if not idle or not self._begin(await self._lease_one(idle[0])):
            return
        for first in range(1, len(idle), ASKING):
            granted = await self._together(self._lease_one(replica) for replica in idle[first : first + ASKING])
            self._begin(itertools.chain.from_iterable(granted))
            if not all(granted):
                return

    async def _lease_one(self, replica: SimulatedReplica) -> list[tuple[SimulatedReplica, Lease]]:
        leases = await self._timed("lease", replica.client.lease(replica.id, replica.free))
        return [(replica, lease) for lease in leases]

    def _begin(self, leases: Iterable[tuple[SimulatedReplica, Lease]]) -> bool:
        """Begin to generate in the order of tickets, so that how long each group takes does not depend on whose call was first. Returns
        whether there was any."""
        in_order = sorted(leases, key=lambda pair: pair[1].ticket)
        for replica, lease in in_order:
            (takes,) = next(self._takes)
            heapq.heappush(self._ends, (self.now + takes, self._random.getrandbits(60), self.now, replica, lease))
            replica.tokens.add(lease.token)
            replica.free -= 1
        return bool(in_order)

    async def _feed(self) -> None:
        counts = (await self._service.state()).counts
        if counts.get("queued", 0) < self.prompts:
            prompts = [group(self._order + i, GENERATIONS, 64 * TOKENS_A_STEP) for i in range(self.prompts)]
            await self._timed("enqueue", self._service.enqueue(prompts, self._timeline))
            self._order += self.prompts

    async def _reserve(self) -> bool:
        batch = await self._timed("reserve", self._service.reserve(self._step, self._timeline))
        if not isinstance(batch, Reservation):
            return False
        pairs = await self._timed("read", self._service.read([t.key for t in batch.trajectories]))
        if self._counts:
            self.figures.busy += 1.0
            self._note(batch, [trajectory.flat() for trajectory, _ in pairs])
        self._step += 1
        if self._step == self.warm_up:
            self.figures = Figures(began=self.now, dropped_before=await self._dropped())
            self._usage = await usage(self._service.redis)
        if self._step % 5 == 0:
            await self._timed("commit", self._service.commit(self._step - 1, self._timeline))
        return True

    async def _refit(self, version: int) -> None:
        """A whole membership epoch. Of the heartbeats, which come every few seconds whatever a step takes, a sample is sent."""
        epoch = secrets.token_hex(8)
        await self._service.open_epoch(epoch, version, self._timeline, {})
        await self._together(self._timed("acknowledge", r.client.acknowledge(r.id, epoch)) for r in self._replicas)
        await self._service.begin_epoch(epoch, {}, PROBE, 1e-3)
        await self._together(self._timed("verify", r.client.verify(r.id, epoch, PROBE)) for r in self._replicas)
        await self._timed("end_epoch", self._service.end_epoch(epoch, aborted=False))
        sample = self._random.sample(self._replicas, min(HEARTBEATS, len(self._replicas)))
        await self._together(self._timed("heartbeat", r.client.heartbeat(r.id, sorted(r.tokens))) for r in sample)

    # -- figures ---------------------------------------------------------------------------------------------------------

    @property
    def _counts(self) -> bool:
        return self._step >= self.warm_up

    def _trajectory(self, lease: Lease, index: int, start: float, end: float) -> Trajectory:
        length = max(1, round((end - start) * TOKENS_A_STEP))
        first = bisect.bisect_right(self._began_at, start) - 1
        last = bisect.bisect_left(self._began_at, end) - 1
        cuts = [round((self._began_at[v] - start) / (end - start) * length) for v in range(first + 1, last + 1)]
        edges = [0, *cuts, length]
        return trajectory(
            lease, index, [Span(first + i, a, b) for i, (a, b) in enumerate(itertools.pairwise(edges)) if b > a]
        )

    def _note(self, batch: Reservation, trajectories: Sequence[Trajectory]) -> None:
        for each in trajectories[::GENERATIONS]:
            self.figures.trained.append(self._lengths[each.group_id])
            self.figures.ages[batch.step - each.oldest_version] += 1
            for span in each.spans:
                age, tokens = batch.step - span.version, span.end - span.start
                self.figures.tokens += tokens
                if self._policy == "mask" and age > self.age:
                    self.figures.masked += tokens
                else:
                    self.figures.counted_ages[age] += tokens

    async def _timed(self, name: str, call: Awaitable[T]) -> T:
        async with self._under_way:
            start = time.perf_counter()
            result = await call
            self.figures.calls[name].append(time.perf_counter() - start)
        return result

    async def _together(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        return list(await asyncio.gather(*calls))

    async def _dropped(self) -> int:
        return int((await self._service.stats())["requeues"].get("over_age", 0))

    async def _report(self, wall_s: float) -> dict[str, Any]:
        figures, stats = self.figures, await self._service.stats()
        now = await usage(self._service.redis)
        used = {name: now[name] - self._usage[name] for name in now}
        elapsed = self.now - figures.began
        dropped = await self._dropped() - figures.dropped_before
        generated, trained = np.mean(figures.generated), np.mean(figures.trained)
        return {
            "policy": self._policy,
            "replicas": len(self._replicas),
            "generations": GENERATIONS,
            "prompts_per_step": self.prompts,
            "steps": self.steps,
            "utilisation": figures.busy / elapsed,
            "in_flight": stats["leases"],
            "dropped_share": dropped / (dropped + self.steps * self.prompts),
            "masked_share": figures.masked / figures.tokens,
            "mean_length_generated": float(generated),
            "mean_length_trained": float(trained),
            "length_bias": float(trained / generated - 1),
            "age_bound": self.age,
            "age_of_groups": dict(sorted(figures.ages.items())),
            "age_of_tokens_that_count": dict(sorted(figures.counted_ages.items())),
            "calls": {name: describe_calls(seconds) for name, seconds in figures.calls.items()},
            "server_cpu_s_per_step": used["cpu"] / self.steps,
            "server_cpu_share": used["cpu"] / used["wall"],
            "server_calls_per_step": used["calls"] / self.steps,
            "server_bytes_in_per_step": used["in"] / self.steps,
            "server_bytes_out_per_step": used["out"] / self.steps,
            "server_memory_bytes": int((await self._service.redis.info("memory"))["used_memory"]),
            "wall_s": wall_s,
        }


ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("trainer busy", lambda r: f"{r['utilisation']:.2f}"),
    ("groups dropped (over age)", lambda r: f"{r['dropped_share']:.1%}"),
    ("tokens masked", lambda r: f"{r['masked_share']:.1%}"),
    ("length bias of what is trained", lambda r: f"{r['length_bias']:+.1%}"),
    ("groups leased at the end", lambda r: f"{r['in_flight']:,}"),
    (
        "age of what counts: bound, largest",
        lambda r: f"{r['age_bound']}, {max(map(int, r['age_of_tokens_that_count']))}",
    ),
    ("age of groups: mean, largest", lambda r: "{:.1f}, {}".format(*_mean_and_most(r["age_of_groups"]))),
    ("server: CPU s a step", lambda r: f"{r['server_cpu_s_per_step']:.2f}"),
    ("server: share of a core while it ran", lambda r: f"{r['server_cpu_share']:.2f}"),
    ("server: commands a step", lambda r: f"{r['server_calls_per_step']:,.0f}"),
    (
        "server: MB in, out a step",
        lambda r: f"{r['server_bytes_in_per_step'] / 1e6:.1f}, {r['server_bytes_out_per_step'] / 1e6:.1f}",
    ),
    ("server: MB held at the end", lambda r: f"{r['server_memory_bytes'] / 1e6:.0f}"),
    ("seconds it ran", lambda r: f"{r['wall_s']:.0f}"),
)


def _mean_and_most(ages: dict[Any, int]) -> tuple[float, int]:
    total = sum(ages.values())
    return sum(int(age) * count for age, count in ages.items()) / total, max(map(int, ages))


def show(results: Sequence[dict[str, Any]]) -> None:
    first = results[0]
    size = f"{first['replicas']:,} replicas, {first['prompts_per_step']:,} groups of {first['generations']} a step"
    table = Table(title=f"{size}, {first['steps']} steps")
    table.add_column("")
    for result in results:
        table.add_column(result["policy"], justify="right")
    for name, cell in ROWS:
        table.add_row(name, *(cell(result) for result in results))
    table.add_section()
    for name in sorted(set().union(*(result["calls"] for result in results))):
        calls = [result["calls"].get(name) for result in results]
        cells = (f"{c['p50_ms']:.1f}, {c['p99_ms']:.1f}" if c else "" for c in calls)
        table.add_row(f"{name}: p50, p99 in ms", *cells)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=10, help="groups that one replica holds at a time")
    parser.add_argument("--steps", type=int, default=8, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before these")
    parser.add_argument("--age", type=int, default=4, help="max_trajectory_age_steps")
    parser.add_argument("--ahead", type=int, help="ahead_steps of drop and mask; takes --age without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--policy", choices=POLICIES, action="append", help="may be given several times; all without it"
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="takes fleet.json; results there are kept")
    parser.add_argument("--balance", action="store_true", help="compare small fleets with what is computed for them")
    args = parser.parse_args()
    if args.balance:
        show_balance()
        return
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "fleet.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for policy in args.policy or POLICIES:
        with server() as buffer:
            results[policy] = asyncio.run(measure(buffer.url, plan_of(args, policy)))
        kept.write_text(json.dumps(results, indent=1))
    in_order = [results[policy] for policy in POLICIES if policy in results]
    show(in_order)


def plan_of(args: argparse.Namespace, policy: str) -> Plan:
    names = ("replicas", "slots", "age", "ahead", "steps", "warm_up", "seed")
    prompts = round(args.replicas * args.slots / (LOAD * MEAN_STEPS))
    return Plan(prompts=prompts, policy=policy, **{name: getattr(args, name) for name in names})


def compare(plan: Plan, steps: int = 40) -> tuple[float, float]:
    """Return how busy the trainer is: as computed, and on the real buffer."""
    plan = dataclasses.replace(plan, steps=steps, warm_up=balance.warm_up(plan.workload.steps_ahead))
    with server() as buffer:
        measured = asyncio.run(measure(buffer.url, plan))
    return balance.simulate(plan.workload, plan.seed, steps).busy, measured["utilisation"]


def show_balance() -> None:
    """Compare the fleets one after the other, a line each."""
    console = Console(width=100, highlight=False)
    names = ("replicas x groups", "a step", "age", "computed", "measured", "difference")
    console.print(f"{'fleet':26}", *(f"{name:>{len(name) + 2}}" for name in names), sep="")
    for name, plan in BALANCED.items():
        computed, measured = compare(plan)
        fleet = f"{plan.replicas} x {plan.slots}", plan.prompts, plan.age
        cells = (*fleet, f"{computed:.3f}", f"{measured:.3f}", f"{computed / measured - 1:+.1%}")
        shown = (f"{value:>{len(title) + 2}}" for title, value in zip(names, cells, strict=True))
        console.print(f"{name:26}", *shown, sep="")


async def measure(url: str, plan: Plan) -> dict[str, Any]:
    """Run the fleet, and return what `ROWS` show."""
    fleet = Fleet(url, plan)
    try:
        return await fleet.run()
    finally:
        await fleet.aclose()


if __name__ == "__main__":
    main()
