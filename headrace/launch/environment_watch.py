"""What a run knows of its environments: which the hub can't reach, which are broken, and which restart with an edited file."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.config.environments import TargetConfig
from headrace.launch import environment_processes
from headrace.launch.children import Children
from headrace.launch.summary import Wait
from headrace.launch.supervisor import Child, Supervisor
from headrace.replay import EnvironmentState


class EnvironmentWatch:
    """The environments of a run, and the processes of those that are started here, which it restarts when their file changes."""

    def __init__(self, config: Config, children: Children, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        self.broken: dict[str, EnvironmentState] = {}  # those with an open breaker, from the buffer
        self._config, self._children, self._supervisor, self._say = config, children, supervisor, say
        self._found: dict[str, dict[str, Any]] = {}  # the hub's last report
        self._waiting_since: dict[str, float] = {}  # by environment: when the run began to wait for it
        self._edited: dict[str, int] = {}  # by environment whose file was edited: the restarts of its process before

    async def note(self, found: Sequence[dict[str, Any]], after_s: float) -> None:
        """Note the hub's report, `after_s` after the last one. Raises `ServiceError` if the hub doesn't know an environment that is started
        here: it never will."""
        now, started = time.monotonic(), self._children.environments
        self._found = {each["name"]: each for each in found}
        if unknown := started.keys() - self._found.keys():
            raise ServiceError(
                f"the reward service has no environment {', '.join(sorted(unknown))}, so the run would wait for it for ever; see "
                f"{self._children.reward.log}"
            )
        away = [each["name"] for each in found if not each["ready"]]
        self._waiting_since = {name: self._waiting_since.get(name, now) for name in away}
        for name, child in started.items():
            if child.state not in ("restarting", "failed"):
                child.set_ready(name not in away, "not ready" if child.was_ready else "starting")
                child.note_probe(name not in away, after_s)
            if child.source_changed():
                await self._load_again(name, child)

    async def _load_again(self, name: str, child: Child) -> None:
        """Restart an environment whose file has changed. One that works goes on with its former build if the new one can't be loaded."""
        changed, by = f"{child.source} has changed", signal.SIGKILL
        if name not in self.broken and child.state == "ready":
            environment, by = self._config.env[name], signal.SIGTERM
            assert isinstance(environment, TargetConfig)  # no other has a file that is watched
            problem = await asyncio.to_thread(environment_processes.loading_problem, environment.target)
            if problem is not None:
                correct = "its former build goes on. Correct the file"
                self._say(f"{child.name}: {changed}, and can't be loaded; {correct}:\n{problem}")
                return
        self._edited[name] = child.restarts
        self._supervisor.replace(child, changed, by)

    def note_breakers(self, states: Iterable[EnvironmentState]) -> None:
        """Note whose breaker is open. Forget the edits that are in use: the process is a new one, and the breaker, which may have opened
        meanwhile, is closed."""
        self.broken = {each.name: each for each in states if each.broken}
        for name, restarts in [*self._edited.items()]:
            child = self._children.environments[name]
            if child.state == "ready" and child.restarts > restarts and name not in self.broken:
                del self._edited[name]

    def waits(self) -> list[Wait]:
        """Return which environments the run waits for: those that can't be reached, and those whose breaker is open."""
        now = time.monotonic()
        waits = [
            Wait(self._describe(name), now - since, self._reload(name) or self._found[name]["message"])
            for name, since in self._waiting_since.items()
        ]
        for name, state in self.broken.items():
            if name not in self._waiting_since:
                child = self._children.environments.get(name)
                repair = f"; fix {child.source}, and the run continues" if child and child.source is not None else ""
                reload = self._reload(name) if state.kind == "NOT_STARTED" else ""
                why = reload or f"it is {state.trouble}: {state.message}{repair}"
                waits.append(Wait(self._describe(name), state.broken_s, why))
        return waits

    def _describe(self, name: str) -> str:
        address = self._found.get(name, {}).get("address")
        return f"environment {name} at {address}" if address else f"environment {name}"

    def _reload(self, name: str) -> str:
        """Return that an environment restarts because its file was edited; empty unless it does, and for one that has ended again since."""
        child = self._children.environments.get(name)
        if child is None or name not in self._edited or child.restarts > self._edited[name] + 1:
            return ""
        return f"it restarts with the changed {child.source}"
