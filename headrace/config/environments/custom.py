"""Environments that are the user's own code, in its own process."""

from __future__ import annotations

import re
from typing import ClassVar, Self

from pydantic import Field, model_validator

from headrace.base.addresses import LOOPBACK, with_port
from headrace.config.environments.base import EpisodicConfig
from headrace.config.marks import AnyPath, MayChange

# A file in `env.<name>.target`, the alternative to a gRPC address.
_FILE = re.compile(r".+\.py:[A-Za-z_][A-Za-z0-9_]*")
# An address with a port, or a socket on this machine.
_ADDRESS = re.compile(r"unix(-abstract)?:.+|.*[^:]:\d{1,5}")


class CustomConfig(EpisodicConfig):
    """An environment of the user's, in its own process, which listens or dials. `key` is the key whose presence makes it one."""

    key: ClassVar[str]


class StartableConfig(CustomConfig):
    """An environment that `headrace up` may start."""

    port: MayChange[int] = Field(
        0,
        ge=0,
        le=65535,
        description="port on the loopback interface for an environment that `headrace up` starts; 0 chooses a free one",
    )

    @property
    def address(self) -> str | None:
        return with_port(LOOPBACK, self.port) if self.port else None


class TargetConfig(StartableConfig):
    """A class or reward function in a file, or a process that listens."""

    key = "target"
    target: MayChange[AnyPath[str]] = Field(
        description="FILE.py:CLASS or FILE.py:FUNCTION, which `headrace up` serves (without `up`, the reward service does), or the "
        "host:port of a process that serves the environment over gRPC"
    )

    @model_validator(mode="after")
    def _is_a_target(self) -> Self:
        if not self.is_started and not _ADDRESS.fullmatch(self.target):
            raise ValueError(
                f"target {self.target!r} is neither FILE.py:CLASS or FILE.py:FUNCTION, nor the host:port of a process that serves the "
                "environment"
            )
        if self.port and not self.is_started:
            raise ValueError(
                f"port {self.port} is for an environment that `headrace up` starts (target: FILE.py:CLASS, or command); leave it out"
            )
        return self

    @property
    def is_started(self) -> bool:
        return _FILE.fullmatch(self.target) is not None

    @property
    def address(self) -> str | None:
        return super().address if self.is_started else self.target


class CommandConfig(StartableConfig):
    """A program."""

    key = "command"
    command: MayChange[list[str]] = Field(
        min_length=1,
        description="a program and its arguments, which `headrace up` starts. It serves the environment over gRPC on $ENVIRONMENT_HOST and "
        "$ENVIRONMENT_PORT",
    )

    @property
    def is_started(self) -> bool:
        return True


class AttachedConfig(CustomConfig):
    """Processes that dial."""

    key = "attached"
    attached: MayChange[bool] = Field(
        True, description="processes dial the reward hub (`headrace.attach`) and share its load: true"
    )
