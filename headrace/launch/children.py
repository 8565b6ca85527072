"""The services of a run as processes of this machine: their commands, devices, threads and ports."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.base.devices import DevicePlan
from headrace.config import Config
from headrace.launch import device_plan, environment_processes
from headrace.launch.supervisor import Child, child_environ

# The sockets that reserve the ports that were chosen, by configuration key.
Reserved = Mapping[str, socket.socket]


@dataclasses.dataclass
class Children:
    """The services of a run, as processes."""

    replay: Child
    reward: Child
    environments: dict[str, Child]
    rollouts: list[Child]
    agents: list[Child]
    trainer: Child
    page: Child | None

    def __iter__(self) -> Iterator[Child]:
        others = (*self.environments.values(), *self.rollouts, *self.agents)
        page = () if self.page is None else (self.page,)
        return iter((self.replay, self.reward, *others, self.trainer, *page))

    @classmethod
    def of(cls, config: Config, saved: Path, plan: DevicePlan | None, reserved: Reserved) -> Children:
        """Return the services of a run whose resolved configuration was saved as `saved`. Each gets the devices that `plan` gives it, its
        number of threads, and its ports of those `reserved`."""

        def child(name: str, service: str, ends_run: bool = False) -> Child:
            launcher = [sys.executable, "-m"]
            if service == "trainer" and config.trainer.num_processes > 1:
                launcher += ["headrace_services.trainer.launch", str(config.trainer.num_processes), "-m"]
            argv = [*launcher, "headrace.cli", service, "--config", str(saved)]
            return Child(name, argv, saved.parent / "logs" / f"{name}.log", ends_run)

        children = cls(
            replay=child("replay", "replay"),
            reward=child("reward", "reward"),
            environments=environment_processes.children(config, saved.parent / "logs"),
            rollouts=[child(f"rollout-{number + 1}", "rollout") for number in range(config.rollout.replicas)],
            agents=[
                child(f"agents-{number + 1}", "agents")
                for number in range(config.agents.runners if config.has_episodes else 0)
            ],
            trainer=child("trainer", "trainer", ends_run=True),
            page=None if config.page.port is None else child("page", "page"),
        )
        threads = device_plan.plan_threads(config, plan)
        for each in children:
            variables = device_plan.thread_variables(threads, config, each.name)
            if plan is not None:
                variables |= device_plan.device_variables(plan, config, each.name)
            own = child_environ(os.environ, config.variables) if each.environ is None else each.environ
            each.environ = {**own, **variables}
        for key, sock in reserved.items():
            section, _, name = key.removesuffix(".port").partition(".")
            owner = children.environments[name] if section == "env" else getattr(children, section)
            owner.reserved = [*owner.reserved, sock]
        return children
