"""Prometheus metrics of the agents service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_COUNTS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 100, 200, 500)
_TOKENS = tuple(64 * 4**power for power in range(8))

OPEN = Gauge("headrace_agents_episodes_open", "Episodes that are running")
EPISODES = Counter("headrace_agents_episodes", "Episodes by outcome", ["environment", "outcome"])
CALLS = Histogram("headrace_agents_episode_calls", "Trained calls of an episode", ["environment"], buckets=_COUNTS)
TOKENS = Histogram(
    "headrace_agents_episode_tokens", "Tokens that the policy wrote in an episode", ["environment"], buckets=_TOKENS
)
ROOTS = Histogram(
    "headrace_agents_episode_roots",
    "Roots of an episode: calls that continue no other call",
    ["environment"],
    buckets=_COUNTS,
)
RENDERED_AGAIN = Counter(
    "headrace_agents_context_tokens_rendered_again",
    "Context tokens of an episode's roots after its first",
    ["environment"],
)
DROPPED = Counter("headrace_agents_calls_dropped", "Calls that were dropped, by reason", ["environment", "reason"])
JOINED = Counter("headrace_agents_retries_joined", "Requests that an earlier call answered", ["environment"])
ASKED_ELSEWHERE = Counter(
    "headrace_agents_calls_elsewhere",
    "Calls that a replica did not answer, by reason; another replica is tried, or the same one later",
    ["reason"],
)
REFUSED = Counter("headrace_agents_requests_refused", "Requests that got an error", ["status", "code"])
IMPOSED = Counter(
    "headrace_agents_options_imposed", "Requests with an option that the run's value replaced", ["option"]
)
PHASES = Histogram(
    "headrace_agents_phase_seconds",
    "Time of a call by phase: render; sample (with parsing and the wait for a replica); keep",
    ["environment", "phase"],
)
