"""Errors that users and services act on. Each message names the offending value and the remedy, in one line."""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose; the command line prints its message and exits with 1."""


class ConfigError(HeadraceError):
    """The configuration can't be used: an unknown key, a wrong type, or an impossible combination. `key`: which one of its section is at
    fault, where that is known."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class MissingPackage(HeadraceError):
    """A command needs a package that is not installed."""


class CodecError(HeadraceError):
    """Bytes that are not a valid record of this schema."""


class ServiceError(HeadraceError):
    """A service can't start or go on (busy port, wrong model path, too little memory, …)."""


class ChatError(HeadraceError):
    """The policy refused a call of an episode (`Episode.chat`), or can't be reached. `status` is HTTP's, `code` OpenAI's."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Restartable(ServiceError):
    """This process of a service can't go on, but a new one in its place can: its inference engine died, or one of its parts hangs."""


class ReplayError(HeadraceError):
    """The replay buffer refused a call. `code` is the stable, machine-readable name of the refusal."""

    code = "HR_REFUSED"


class ReplayUnavailable(ReplayError):
    """The Redis server can't be reached, is too old, or does not hold this run."""

    code = "HR_UNAVAILABLE"


class ReplayFull(ReplayUnavailable):
    """The Redis server is at its `maxmemory` and refuses what would fill it further; time does not count until it takes it."""

    code = "HR_FULL"


class ReplayDenied(ReplayError):
    """The Redis server and this client don't accept each other (certificate, user, password, rights); retrying won't help."""

    code = "HR_DENIED"


class WrongBuild(ReplayError):
    """The run was opened by the functions of another build than the caller's; nothing was changed, and retrying won't help."""

    code = "HR_BUILD"


class InvalidCall(ReplayError):
    """The arguments are invalid (malformed record, unknown group, index out of range)."""

    code = "HR_INVALID"


class Unstaged(InvalidCall):
    """The payload that the call was to make visible is gone: its time ran out, or the server lost it."""

    code = "HR_UNSTAGED"


class EpisodeTooLarge(InvalidCall):
    """The record of an episode would have more bytes than `agents.max_episode_bytes`."""

    code = "HR_EPISODE_BYTES"


class Fenced(ReplayError):
    """Law 4: the caller's token, timeline or incarnation is no longer the valid one; nothing was changed."""

    code = "HR_FENCED"


class LeaseLost(Fenced):
    """The lease's token has expired, was voided by a rewind, or was taken back at its deadline."""

    code = "HR_LEASE_LOST"


class Surplus(Fenced):
    """The group has its n scored trajectories without this one; generation for it can stop."""

    code = "HR_SURPLUS"


class WrongTimeline(Fenced):
    """The call names a timeline that a rewind ended, or an incarnation that a restore ended."""

    code = "HR_TIMELINE"


class WrongStep(Fenced):
    """`reserve` or `commit` named a step other than the one that is due."""

    code = "HR_STEP"


class SamplingStarved(ReplayError):
    """Dynamic sampling scored as many groups as a batch may take, and too few of them had rewards that differ."""

    code = "HR_STARVED"


class EnvironmentBroken(ReplayError):
    """An environment has been broken for longer than the run was configured to wait for it (`env.<name>.give_up_after`)."""

    code = "HR_BROKEN"


class NotVerified(Fenced):
    """The replica is not HEALTHY: it holds no verified weights and may not lease."""

    code = "HR_NOT_VERIFIED"


class WeightChannelError(HeadraceError):
    """A transfer of weights failed: a peer failed, or the two sides disagree on what is sent."""


class WeightChannelTimeout(WeightChannelError):
    """A step of a transfer passed its deadline: a peer died or hangs."""


class WeightChannelAborted(WeightChannelError):
    """The trainer gave up this transfer (it will announce another), or has ended."""
