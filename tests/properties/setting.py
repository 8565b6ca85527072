"""What a run is configured with."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st

from headrace.replay import EnvironmentLimits, Limits
from headrace.replay.trainer import worst_case_bytes

LEASE_S, SCORING_S, DEADLINE_S = 10.0, 15.0, 25.0
PROMPT_TOKENS, NEW_TOKENS = 4, 16  # of `make_group`
EPISODE_BYTES = 40_000


@dataclasses.dataclass(frozen=True)
class Setting:
    """`room`: groups whose worst case fits into memory; 0 is no bound that matters."""

    policy: str = "ordered"
    prompts: int = 2
    n: int = 2
    age: int = 1
    ahead: int = 1
    attempts: int = 2
    scoring_attempts: int = 2
    room: int = 0
    retain: int = 0
    filter: bool = False
    max_scored: int = 0
    redundant: int = 0
    environments: int = 1
    share: float = 0.5
    give_up: float | None = None
    dead_s: float = 20.0  # shorter or longer than a lease
    episodes: tuple[str, ...] = ()  # environments that have them

    def limits(self) -> Limits:
        worst = worst_case_bytes(self.n + self.redundant, PROMPT_TOKENS, NEW_TOKENS)
        if self.episodes:
            worst = 2 * (self.n + self.redundant) * EPISODE_BYTES
        return Limits(
            prompts_per_step=self.prompts,
            generations_per_prompt=self.n,
            max_age=self.age,
            staleness_policy=self.policy,
            max_attempts=self.attempts,
            max_scoring_attempts=self.scoring_attempts,
            lease_s=LEASE_S,
            group_deadline_s=DEADLINE_S,
            scoring_deadline_s=SCORING_S,
            replica_dead_s=self.dead_s,
            max_bytes=worst * self.room if self.room else 2**40,
            ahead_steps=self.age + self.ahead,
            redundant=self.redundant,
            filter_equal=self.filter,
            reward_min=0.0,
            reward_max=1.0,
            max_scored_per_step=self.max_scored,
            retain_steps=self.retain,
            max_episode_bytes=EPISODE_BYTES,
            environments={
                "math": EnvironmentLimits(self.share, self.give_up, "math" in self.episodes),
                "code": EnvironmentLimits(episodes="code" in self.episodes),
            },
        )


def _lawful(setting: Setting) -> bool:
    return setting.policy != "drop" or not setting.episodes


settings_of_runs = st.builds(
    Setting,
    policy=st.sampled_from(["ordered", "drop", "mask"]),
    prompts=st.integers(1, 3),
    n=st.integers(1, 3),
    age=st.integers(0, 2),
    ahead=st.integers(0, 2),
    attempts=st.integers(1, 3),
    scoring_attempts=st.integers(1, 3),
    room=st.sampled_from([0, 0, 0, 1, 2, 4]),
    retain=st.integers(0, 2),
    filter=st.booleans(),
    max_scored=st.sampled_from([0, 0, 2, 4]),
    redundant=st.sampled_from([0, 0, 1, 2]),
    environments=st.sampled_from([1, 2]),
    share=st.sampled_from([0.5, 0.5, 0.2]),
    give_up=st.sampled_from([None, 30.0]),
    dead_s=st.sampled_from([8.0, 8.0, 20.0]),
    episodes=st.sampled_from([(), ("math",), ("math",), ("code",), ("math", "code")]),
).filter(_lawful)
