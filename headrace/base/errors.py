"""Errors that users and services act on. Each message names the wrong value and the remedy, in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class HeadraceError(Exception):
    """Base of all errors that Headrace raises on purpose; the command line prints the message and exits with 1."""


class ConfigError(HeadraceError):
    """Raised when the configuration can't be used: an unknown key, a wrong type, or an impossible combination. `key` is the key at fault in
    its section, if it is known."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class Problems:
    """Gathers what is wrong, so that a user is told all of it at once: each in its own line or lines, and none twice."""

    def __init__(self) -> None:
        self._messages: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._messages)

    def add(self, message: str) -> None:
        self._messages[message] = None

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the error that the context raises for a wrong configuration, or for what it names."""
        try:
            yield
        except (ConfigError, ServiceError) as error:
            self.add(str(error))

    def tell(self) -> None:
        """Raise `ConfigError` if there are any."""
        if self._messages:
            raise ConfigError("\n".join(self._messages))


class MissingPackage(HeadraceError):
    """A command needs a package that is not installed."""


class CodecError(HeadraceError):
    """Raised for bytes that are not a valid record of this schema."""


class ServiceError(HeadraceError):
    """Raised when a service can't start or continue (busy port, wrong model path, too little memory, …)."""


class Unavailable(ServiceError):
    """Raised when something around a service (a file, a disk, a port, a store) can't be used now. The same start may succeed later."""


class UnusableFile(ConfigError, Unavailable):
    """Raised when a file that the configuration names is missing, can't be read or is not what it should be: it may be half written."""


def is_outage(error: BaseException | None) -> bool:
    """Whether an error comes from what is around a service, not from its configuration: it is `Unavailable`, or its cause is an error of
    the operating system, about a file, a disk or a connection. A `Restartable` is about the process: what hangs in it ends in a
    `TimeoutError`, which Python counts among those."""
    while error is not None and not isinstance(error, OSError | Unavailable | Restartable):
        error = error.__cause__
    return isinstance(error, OSError | Unavailable)


class StoppedByAlarm(ServiceError):
    """Raised when an alarm that `run.stop_on` names has ended the run."""


class PortTaken(Unavailable):
    """Raised when another process has the port of a server that can't be given a socket, only a port's number."""


class ChatError(HeadraceError):
    """Raised when the policy refuses a call of an episode (`Episode.chat`), or can't be reached. `status` is HTTP's, `code` OpenAI's."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Restartable(ServiceError):
    """Raised when this process of a service can't continue, but a new one can: its inference engine died, or one of its parts hangs."""


class ReplayError(HeadraceError):
    """Raised when the replay buffer refuses a call. `code` is the stable, machine-readable name of the refusal."""

    code = "HR_REFUSED"


class ReplayUnavailable(ReplayError):
    """Raised when the Redis server can't be reached, is too old, or does not hold this run."""

    code = "HR_UNAVAILABLE"


class ReplayFull(ReplayUnavailable):
    """Raised when the Redis server is at its `maxmemory` and refuses calls that store more. Run time stops until it accepts them again."""

    code = "HR_FULL"


class ReplayDenied(ReplayError):
    """Raised when the Redis server and this client don't accept each other (certificate, user, password, rights), or the server can't hold
    a buffer (a replica, too little memory, …). Retrying won't help, until somebody changes that."""

    code = "HR_DENIED"


class WrongBuild(ReplayError):
    """Raised when another build's functions opened the run; nothing was changed, and retrying won't help."""

    code = "HR_BUILD"


class InvalidCall(ReplayError):
    """Raised for invalid arguments (malformed record, unknown group, index out of range)."""

    code = "HR_INVALID"


class Unstaged(InvalidCall):
    """Raised when the payload that the call was to make visible is gone: its time ran out, or the server lost it."""

    code = "HR_UNSTAGED"


class EpisodeTooLarge(InvalidCall):
    """Raised when the record of an episode would have more bytes than `agents.max_episode_bytes`."""

    code = "HR_EPISODE_BYTES"


class Fenced(ReplayError):
    """Raised by law 4: the caller's token, timeline or incarnation is no longer the valid one; nothing was changed."""

    code = "HR_FENCED"


class LeaseLost(Fenced):
    """Raised when the lease's token has expired, was voided by a rewind, or was taken back at its deadline."""

    code = "HR_LEASE_LOST"


class Surplus(Fenced):
    """Raised when the group has its n scored trajectories without this one; generation for it can stop."""

    code = "HR_SURPLUS"


class WrongTimeline(Fenced):
    """Raised for a call with a timeline that a rewind ended, or an incarnation that a restore ended."""

    code = "HR_TIMELINE"


class WrongStep(Fenced):
    """Raised when `reserve` or `commit` names a step other than the next one."""

    code = "HR_STEP"


class SamplingStarved(ReplayError):
    """Raised when dynamic sampling has scored as many groups as a batch allows, and too few of them had differing rewards."""

    code = "HR_STARVED"


class EnvironmentBroken(ReplayError):
    """Raised when an environment has been broken for longer than the run waits for it (`env.<name>.give_up_after`)."""

    code = "HR_BROKEN"


class NotVerified(Fenced):
    """Raised when the replica is not HEALTHY: it holds no verified weights and may not lease."""

    code = "HR_NOT_VERIFIED"


class WeightChannelError(HeadraceError):
    """Raised when a transfer of weights failed: a peer failed, or the two sides disagree about what is sent."""


class WeightChannelTimeout(WeightChannelError):
    """Raised when a step of a transfer passed its deadline: a peer died or hangs."""


class WeightChannelAborted(WeightChannelError):
    """Raised when the trainer gave up this transfer (it will announce another), or has ended."""
