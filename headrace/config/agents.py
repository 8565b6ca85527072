"""`agents`: episodes, whose programs call the policy over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from headrace.config.marks import Fixed, MayChange
from headrace.config.section import Section

if TYPE_CHECKING:  # numpy comes with it
    from headrace.records.trajectory import Lane

# What happens to an episode that a limit of the run ended: it is graded like any other, fails, or earns this reward.
OnLimit = Literal["grade", "fail"] | float

# The most leases that a runner renews at a time (runner_heartbeat.lua); each has at least one episode.
MOST_SLOTS = 4096


class AgentsConfig(Section):
    """Runners give the program of each episode (`env.<name>.episodes`) its own endpoint, and keep what the policy wrote. docs/agents.md
    explains what is trained of it."""

    host: MayChange[str] = Field("127.0.0.1", description="host on which the gateway listens, which programs call")
    port: MayChange[int] = Field(0, ge=0, le=65535, description="port of the gateway; 0 chooses a free one")
    http_port: MayChange[int] = Field(
        0, ge=0, le=65535, description="port of health, readiness and metrics; 0 chooses a free one"
    )
    advertised_url: MayChange[str | None] = Field(
        None,
        pattern=r"^https?://[^\s@?#]+[^\s@?#/]$",
        description="URL at which programs reach the gateways, for example behind a load balancer; null: the runner's own address",
    )
    runners: MayChange[int] = Field(
        1, ge=1, description="processes that `headrace up` starts, if an environment has episodes"
    )
    slots: MayChange[int] = Field(64, ge=1, description="episodes of training that one runner has open at a time")
    validation_slots: MayChange[int | None] = Field(
        None,
        ge=1,
        description="the same for validation, counted separately, so that neither waits for the other; null: as many as `slots`",
    )
    call_s: MayChange[float] = Field(120.0, gt=0, description="seconds after which a call without an answer fails")
    think_s: MayChange[float] = Field(
        120.0, gt=0, description="seconds without a call after which a program counts as hung"
    )
    episode_s: MayChange[float] = Field(
        180.0,
        gt=0,
        description="seconds after which an episode counts as hung. These clocks stop while no replica can sample",
    )
    finish_s: MayChange[float] = Field(
        30.0,
        gt=0,
        description="seconds that a program has to end once a limit was reached and every call is refused",
    )
    retry_grace_s: MayChange[float] = Field(
        30.0,
        ge=0,
        description="seconds for which a call continues after its client has gone, so that a retry finds its answer",
    )
    max_rollout_turns: MayChange[int] = Field(64, ge=1, description="the most calls of an episode")
    max_episode_tokens: MayChange[int | None] = Field(
        None,
        ge=2,
        description="the most tokens of an episode, contexts and completions, each counted once; null: as many as its calls may have",
    )
    max_episode_bytes: MayChange[int] = Field(
        4 * 1024**2,
        ge=64 * 1024,
        description="the largest record of an episode: tokens, log-probabilities, messages and artifacts",
    )
    on_limit: Fixed[OnLimit] = Field(
        "grade",
        description="what happens to an episode that one of these limits ended. grade: it is scored like any other, and fails if its "
        "program gives no reward; fail: it fails; a number: this is its reward",
    )
    branches: Fixed[Literal["allow", "refuse"]] = Field(
        "allow",
        description="refuse: an episode of more than one path fails. Losses and estimators that treat a trajectory as one sequence need "
        "this",
    )
    max_request_bytes: MayChange[int] = Field(
        4 * 1024**2,
        ge=1024,
        description="the largest body of a request, which holds the whole conversation. A token of text takes 4 to 8 bytes of JSON, so the "
        "default suits a policy.max_total_sequence_length of up to 500,000. Whatever its size, a body has at most 100,000 JSON values",
    )
    max_parallel_calls: MayChange[int] = Field(
        64, ge=1, description="the most requests of one episode in progress; further ones get status 429"
    )
    max_requests_per_s: MayChange[float] = Field(
        50.0,
        gt=0,
        description="the most requests per second of one episode, over ten seconds; further ones get status 429",
    )

    def slots_of(self, lane: Lane) -> int:
        """Return the number of episodes of this lane that one runner has open at a time."""
        return self.slots if lane == "train" or self.validation_slots is None else self.validation_slots
