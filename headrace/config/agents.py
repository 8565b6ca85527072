"""`agents`: episodes, whose programs call the policy over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config.base import Section
from headrace.trajectory import Lane

# What becomes of an episode that a limit of the run ended: it is graded like any other, fails, or earns this.
OnLimit = Literal["grade", "fail"] | Annotated[float, Field(allow_inf_nan=False)]

# Leases that a runner renews at a time, at most (runner_heartbeat.lua); each has an episode at least.
MOST_SLOTS = 4096


class AgentsConfig(Section):
    """Runners, which give the programs of episodes (`env.<name>.episodes`) an endpoint of their own and keep what the policy wrote.
    docs/agents.md says what is trained of it."""

    host: str = Field("127.0.0.1", description="where the gateway listens, which programs call")
    port: int = Field(0, ge=0, le=65535, description="port of the gateway; 0 takes a free one")
    http_port: int = Field(0, ge=0, le=65535, description="health, readiness and metrics; 0 takes a free one")
    advertised_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s@?#]+[^\s@?#/]$",
        description="under which programs reach the gateways, as behind a load balancer; null takes the address of the runner itself",
    )
    runners: int = Field(1, ge=1, description="processes that `headrace up` starts, if an environment has episodes")
    slots: int = Field(64, ge=1, description="episodes of training that one runner has open at a time")
    validation_slots: int | None = Field(
        None,
        ge=1,
        description="those of validation, besides, so that neither waits for the other; null: as many as `slots`",
    )
    call_s: float = Field(120.0, gt=0, description="a call that has no answer by then fails")
    think_s: float = Field(120.0, gt=0, description="a program that makes no call for this long has hung")
    episode_s: float = Field(
        180.0, gt=0, description="an episode of more has hung. These clocks stand still while no replica can sample"
    )
    finish_s: float = Field(
        30.0, gt=0, description="what a program may take to end once a limit was reached, and every call is refused"
    )
    retry_grace_s: float = Field(
        30.0,
        ge=0,
        description="a call whose client has gone runs on for this long, so that a retry of it finds its answer",
    )
    max_rollout_turns: int = Field(64, ge=1, description="calls of an episode")
    max_episode_tokens: int | None = Field(
        None,
        ge=2,
        description="tokens of an episode, of contexts and of completions, each once; null: what its calls come to",
    )
    max_episode_bytes: int = Field(
        4 * 1024**2,
        ge=64 * 1024,
        description="of an episode's record: tokens, log-probabilities, messages and artifacts",
    )
    on_limit: OnLimit = Field(
        "grade",
        description="an episode that one of these limits ended: grade scores it as any other (one that a program gives no reward then "
        "fails), fail fails it, a number is its reward",
    )
    branches: Literal["allow", "refuse"] = Field(
        "allow",
        description="refuse fails an episode of more than one path, as losses and estimators need that take a trajectory for one sequence",
    )
    max_request_bytes: int = Field(16 * 1024**2, ge=1024, description="of the body of a request")
    max_parallel_calls: int = Field(
        64, ge=1, description="requests of one episode under way at a time; more are told to wait"
    )
    max_requests_per_s: float = Field(50.0, gt=0, description="of one episode, over ten seconds; more are told to wait")

    def slots_of(self, lane: Lane) -> int:
        """Episodes of this lane that one runner has open at a time."""
        return self.slots if lane == "train" or self.validation_slots is None else self.validation_slots
