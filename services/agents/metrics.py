"""Prometheus metrics of the agents service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_COUNTS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 100, 200, 500)
_TOKENS = tuple(64 * 4**power for power in range(8))

OPEN = Gauge("headrace_agents_episodes_open", "Episodes that run now")
EPISODES = Counter("headrace_agents_episodes", "Episodes, by how they ended", ["environment", "outcome"])
CALLS = Histogram(
    "headrace_agents_episode_calls", "Calls of an episode that were trained", ["environment"], buckets=_COUNTS
)
TOKENS = Histogram(
    "headrace_agents_episode_tokens", "Tokens that the policy wrote in an episode", ["environment"], buckets=_TOKENS
)
ROOTS = Histogram(
    "headrace_agents_episode_roots",
    "Roots of an episode: conversations that continue no other",
    ["environment"],
    buckets=_COUNTS,
)
RENDERED_AGAIN = Counter(
    "headrace_agents_context_tokens_rendered_again",
    "Context tokens of roots behind an episode's first",
    ["environment"],
)
DROPPED = Counter("headrace_agents_calls_dropped", "Calls that no episode kept, by reason", ["environment", "reason"])
JOINED = Counter("headrace_agents_retries_joined", "Requests that an earlier call answered", ["environment"])
ASKED_ELSEWHERE = Counter(
    "headrace_agents_calls_elsewhere",
    "Times a replica did not do its part of a call, by reason; another is asked, or it again later",
    ["reason"],
)
REFUSED = Counter("headrace_agents_requests_refused", "Requests that were answered by an error", ["status", "code"])
IMPOSED = Counter("headrace_agents_options_imposed", "Requests whose option the run's value replaced", ["option"])
PHASES = Histogram(
    "headrace_agents_phase_seconds",
    "Time of a call: rendering, sampling and parsing (with waiting for a replica), and keeping its record",
    ["environment", "phase"],
)
