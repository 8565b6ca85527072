"""Writes `now.json`, the state of the run, once a second beside the trainer's loop.

It reads the buffer, and every few seconds the replicas' pages and the reward hubs, as far as they can be reached. What it can't learn is
absent. No failure here ends the run: it is a view.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec

from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.http_client import open_session
from headrace.base.tls import client_context
from headrace.config import Config
from headrace.net import rpc
from headrace.net.credentials import make_token_source
from headrace.replay import ReplayClient
from headrace.replay.records import trouble_of
from headrace.run import now
from headrace.run.now import EnvironmentNow, Now, ReplicaNow, RunnerNow
from headrace.v1 import reward_pb2, reward_pb2_grpc

log = logging.getLogger(__name__)

PERIOD_S = 1.0
# How often replicas and hubs are asked, how long they may take, and how many replicas are asked: a page costs each a millisecond.
ASK_PERIOD_S, ASK_S, MOST_ASKED = 5.0, 2.0, 64
_PAGE_BYTES = 1 << 20
# What is read of a replica's page: sums since its start, and what is so now. Labels, which these don't have, would be a part of the name.
_PREFIX = "headrace_rollout_"
_SUMS = ("engine_generated_tokens", "preemptions", "prefix_cache_queries", "prefix_cache_hits")
_GAUGES = ("requests_running", "kv_cache_use", "engine_running", "engine_waiting")


@dataclasses.dataclass(frozen=True)
class Load:
    """What a replica's page says, by the names above, and when it said it."""

    at: float
    values: Mapping[str, float]


def read_load(page: str, at: float) -> Load | None:
    """Return the load on a replica's page of metrics, read `at` this time; None for a page without it."""
    wanted = {f"{_PREFIX}{name}_total": name for name in _SUMS} | {f"{_PREFIX}{name}": name for name in _GAUGES}
    values: dict[str, float] = {}
    for line in page.splitlines():
        name, _, value = line.partition(" ")
        if name in wanted:
            try:
                values[wanted[name]] = float(value)
            except ValueError:
                return None
    return Load(at, values) if values.keys() == set(wanted.values()) else None


def _describe(before: Load | None, load: Load | None) -> dict[str, Any]:
    """Return the fields of a replica that its page tells. Rates need two readings of the same process."""
    if load is None:
        return {}
    now = load.values
    told: dict[str, Any] = {
        "queue": int(now["requests_running"]),
        "kv_use": now["kv_cache_use"],
        "running": int(now["engine_running"]),
        "waiting": int(now["engine_waiting"]),
    }
    if before is None or load.at <= before.at or any(now[name] < before.values[name] for name in _SUMS):
        return told
    more = {name: now[name] - before.values[name] for name in _SUMS}
    seconds = load.at - before.at
    told |= {
        "tokens_per_s": more["engine_generated_tokens"] / seconds,
        "preemptions_per_s": more["preemptions"] / seconds,
    }
    if more["prefix_cache_queries"]:
        told["prefix_hits"] = more["prefix_cache_hits"] / more["prefix_cache_queries"]
    return told


def assemble(
    stats: Mapping[str, Any],
    loads: Mapping[str, tuple[Load | None, Load]],
    reports: Mapping[str, EnvironmentNow],
    waits: Sequence[str],
    at: float,
) -> Now:
    """Return the state of the run from the buffer's statistics. `loads` are the last two of each replica, by its address, and `reports`
    what the hubs say of their environments."""
    replicas = []
    for each in stats["replicas"]:
        address = _text(each["info"].get("url"))
        replicas.append(
            ReplicaNow(
                id=each["id"],
                state=each["state"],
                version=each["version"],
                holding=each["leases"],
                seen_s_ago=each["seen_s_ago"],
                address=address,
                device=_text(each["info"].get("device")),
                reason="validates beside training" if each["validates"] else each["reason"] or None,
                logprob_error=each["logprob_error"],
                **_describe(*loads.get(address or "", (None, None))),
            )
        )
    runners = [
        RunnerNow(each["id"], each["alive"], each["leases"], each["seen_s_ago"], _text(each["info"].get("url")))
        for each in stats["runners"]
    ]
    known = {each["name"]: each for each in stats["environments"]}
    environments = []
    for name in dict.fromkeys([*known, *reports]):
        state = known.get(name, {"waiting": 0, "taken": 0, "broken": False, "message": ""})
        report = reports.get(name, EnvironmentNow(name, 0, 0, broken=False))
        environments.append(
            msgspec.structs.replace(
                report,
                waiting=state["waiting"],
                in_hand=max(state["taken"], report.in_hand),
                broken=state["broken"],
                message=(state["message"] if state["broken"] else "") or report.message,
                trouble=trouble_of(state["kind"]) if state["broken"] else None,
            )
        )
    return Now(
        time=at,
        next_step=stats["next_step"],
        committed=stats["committed"],
        closed=stats["closed"],
        counts=stats["counts"]["train"],
        validation=stats["counts"]["validation"],
        replicas=replicas,
        runners=runners,
        environments=environments,
        waits=[
            *waits,
            *(
                f"environment {each.name}, which is {each.trouble}: {each.message or ''}"
                for each in environments
                if each.broken
            ),
            *_memory(stats["bytes"], stats["max_bytes"], stats["full"]),
        ],
    )


def _memory(held: int, most: int, refused: int) -> Iterator[str]:
    if refused:
        yield f"memory of the buffer's server, which refused {refused} bytes (its maxmemory)"
    elif held >= most:
        yield f"memory of the buffer: leases wait while {held} of {most} bytes are held (replay.max_bytes)"


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def merge_reports(answers: Sequence[reward_pb2.ListEnvironmentsResponse]) -> dict[str, EnvironmentNow]:
    """Return what the hubs say of each environment: work and capacity of all hubs together, times of the slowest."""
    found: dict[str, EnvironmentNow] = {}
    for each in (environment for answer in answers for environment in answer.environments):
        recent, before = each.recent, found.get(each.name)
        capacity = each.description.episodes or each.description.capacity
        report = EnvironmentNow(
            name=each.name,
            waiting=0,
            in_hand=each.in_hand,
            broken=False,
            message=None if each.ready else each.message or None,
            capacity=capacity or None,
            p50_s=recent.p50_ms / 1000 if recent.scored else None,
            p99_s=recent.p99_ms / 1000 if recent.scored else None,
            scored_per_s=1000 * recent.scored / recent.window_ms if recent.window_ms else None,
            build=each.description.build or None,
        )
        found[each.name] = report if before is None else _together(before, report)
    return found


def _together(first: EnvironmentNow, second: EnvironmentNow) -> EnvironmentNow:
    def both(name: str, combine: Callable[[list[Any]], Any]) -> Any:
        values = [value for each in (first, second) if (value := getattr(each, name)) is not None]
        return combine(values) if values else None

    return msgspec.structs.replace(
        first,
        in_hand=first.in_hand + second.in_hand,
        message=first.message or second.message,
        **{name: both(name, sum) for name in ("capacity", "scored_per_s")},
        **{name: both(name, max) for name in ("p50_s", "p99_s")},
    )


class NowWriter:
    """Writes the file of one run. `waits` is set by the trainer's loop: what it waits for, as a sentence, or empty."""

    def __init__(self, config: Config, replay: ReplayClient, clock: Callable[[], float] = time.time) -> None:
        self.waits = ""
        self._folder: Path = config.run_folder
        self._config = config
        self._replay = replay
        self._clock = clock
        self._token = make_token_source(config, "reader")
        self._authorities = config.security.tls_ca
        self._last: Now | None = None
        self._addresses: tuple[str, ...] = ()
        self._loads: dict[str, tuple[Load | None, Load]] = {}
        self._reports: dict[str, EnvironmentNow] = {}
        self._failed: set[str] = set()  # what has failed and was logged

    async def run(self) -> None:
        """Write until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ask())
                while True:
                    await asyncio.gather(asyncio.sleep(PERIOD_S), self.write())
        except Exception:  # a view must not stop the run
            log.exception("%s is no longer written: the pages show an old state", self._folder / now.NOW)

    async def write(self) -> None:
        """Write the file once."""
        waits = [self.waits] if self.waits else []
        try:
            stats = await self._replay.stats()
        except HeadraceError as error:
            if self._last is None:
                return
            # as it was then, with the time it was so
            state = msgspec.structs.replace(self._last, waits=[*waits, f"the buffer's server: {error}"])
        else:
            self._addresses = tuple(str(each["info"]["url"]) for each in stats["replicas"] if "url" in each["info"])
            state = self._last = assemble(stats, self._loads, self._reports, waits, self._clock())
        try:
            await asyncio.to_thread(now.write, self._folder, state)
            self._failed.discard(now.NOW)
        except OSError as error:
            self._note(
                logging.WARNING,
                now.NOW,
                f"{self._folder / now.NOW} can't be written ({error.strerror}): the pages show an old state",
            )

    async def _ask(self) -> None:
        """Ask replicas and hubs for what the buffer doesn't know."""
        verify = client_context(self._authorities) if self._config.security.tls else None
        async with open_session(verify, connect_s=ASK_S, total_s=ASK_S, connections=8) as session:
            while True:
                await asyncio.gather(asyncio.sleep(ASK_PERIOD_S), self._ask_replicas(session), self._ask_hubs())

    async def _ask_replicas(self, session: aiohttp.ClientSession) -> None:
        addresses = self._addresses[:MOST_ASKED]
        found = await asyncio.gather(*(self._load(session, address) for address in addresses))
        self._loads = {
            address: (self._loads[address][1] if address in self._loads else None, load)
            for address, load in zip(addresses, found, strict=True)
            if load is not None
        }

    async def _load(self, session: aiohttp.ClientSession, address: str) -> Load | None:
        try:
            headers = {} if self._token is None else {"authorization": f"Bearer {self._token()}"}
            async with session.get(f"{address}/metrics", headers=headers, allow_redirects=False) as answer:
                page = await answer.content.read(_PAGE_BYTES)
                return read_load(page.decode(errors="replace"), time.monotonic()) if answer.status == 200 else None
        except (OSError, aiohttp.ClientError, ValueError, ConfigError) as error:
            self._note(logging.INFO, "replicas", f"{address}/metrics can't be read ({error or type(error).__name__})")
            return None

    async def _ask_hubs(self) -> None:
        answers = await asyncio.gather(*map(self._hub, self._config.reward.addresses))
        self._reports = merge_reports([answer for answer in answers if answer is not None])

    async def _hub(self, address: str) -> reward_pb2.ListEnvironmentsResponse | None:
        async with rpc.channel(address, security=self._config.security, token=self._token) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            try:
                return await stub.ListEnvironments(reward_pb2.ListEnvironmentsRequest(), timeout=ASK_S)
            except (grpc.aio.AioRpcError, ConfigError) as error:
                why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                self._note(logging.INFO, "hubs", f"the reward hub at {address} does not list its environments ({why})")
                return None

    def _note(self, level: int, what: str, message: str) -> None:
        """Log a failure the first time."""
        if what not in self._failed:
            self._failed.add(what)
            log.log(level, "%s", message)
