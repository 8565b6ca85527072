"""The replay buffer's client and the records of its calls."""

from headrace.replay.client import ReplayClient
from headrace.replay.inspection import frequent
from headrace.replay.records import (
    End,
    Ended,
    EnvironmentLimits,
    EnvironmentState,
    Epoch,
    Evaluated,
    HeartbeatReply,
    HeldGroup,
    Lease,
    Limits,
    RefitVerdict,
    Replica,
    ReplicaState,
    Reservation,
    ReservedTrajectory,
    Runner,
    RunnerReply,
    RunState,
    ScoringJob,
    Waiting,
)
from headrace.replay.retry import BufferRetry
from headrace.replay.trainer import worst_case_bytes

__all__ = [
    "BufferRetry",
    "End",
    "Ended",
    "EnvironmentLimits",
    "EnvironmentState",
    "Epoch",
    "Evaluated",
    "HeartbeatReply",
    "HeldGroup",
    "Lease",
    "Limits",
    "RefitVerdict",
    "ReplayClient",
    "Replica",
    "ReplicaState",
    "Reservation",
    "ReservedTrajectory",
    "RunState",
    "Runner",
    "RunnerReply",
    "ScoringJob",
    "Waiting",
    "frequent",
    "worst_case_bytes",
]
