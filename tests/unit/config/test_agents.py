"""What must hold of `agents` where an environment has episodes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.launch import ports

PROGRAM = {"attached": True, "episodes": True}
GROUPS = {"num_generations_per_prompt": 8}


def config(env: dict[str, Any] | None = None, **sections: Any) -> Config:
    given = {"grpo": GROUPS, "env": {"game": PROGRAM} if env is None else env}
    return Config.model_validate(given | sections)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"agents": {"slots": 7}}, r"agents\.slots 7 is less than 8"),
        ({"agents": {"slots": 8}, "replay": {"redundant_generations": 1}}, r"agents\.slots 8 is less than 9"),
        ({"grpo": {"val_num_generations_per_prompt": 99}}, r"agents\.validation_slots 64 .* is less than 99"),
        (
            {"agents": {"slots": 99, "validation_slots": 3}, "grpo": {"val_num_generations_per_prompt": 4}},
            r"agents\.validation_slots 3 .* is less than 4",
        ),
        ({"agents": {"slots": 2049}}, r"agents\.slots 2049 and agents\.validation_slots 2049"),
        ({"replay": {"max_bytes": 2**24}}, r"agents\.max_episode_bytes 4194304"),
        (
            {"replay": {"max_bytes": 2 * 8 * 2**22}},
            r"agents\.max_episode_bytes 4194304.* is more than replay\.max_bytes",
        ),
        (
            {
                "trainer": {"validation_deadline_s": 100},
                "data": {"validation": {"dataset_name": "arithmetic", "env_name": "game"}},
            },
            r"validation_deadline_s 100 is less than agents\.episode_s 180",
        ),
        (
            {"loss_fn": {"sequence_level_importance_ratios": True, "token_level_loss": False}},
            r"set agents\.branches to refuse",
        ),
        ({"agents": {"on_limit": "zero"}}, "on_limit"),
        ({"agents": {"on_limit": float("nan")}}, "on_limit"),
        ({"agents": {"advertised_url": "agents:8394"}}, "advertised_url"),
    ],
)
def test_what_would_never_work_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"agents": {"on_limit": -1.0}},
        {
            "agents": {"episode_s": 3600, "think_s": 3000}
        },  # longer than a group may be silent: a program that runs is progress
        {
            "agents": {"branches": "refuse"},
            "loss_fn": {"sequence_level_importance_ratios": True, "token_level_loss": False},
        },
        {"env": {"math": {}}, "agents": {"slots": 1}},
        {"env": {"math": {}}, "loss_fn": {"sequence_level_importance_ratios": True, "token_level_loss": False}},
        {"trainer": {"validation_deadline_s": 100}},
    ],
)
def test_what_works_is_accepted(sections: dict[str, Any]) -> None:
    assert config(**sections).has_episodes is ("env" not in sections)


@pytest.mark.parametrize(
    ("sections", "warned"),
    [
        ({"max_new_tokens": 16384}, True),
        ({"max_new_tokens": 16384, "agents": {"call_s": 1800, "episode_s": 3600}}, False),
        ({"max_new_tokens": 512}, False),
        ({"max_new_tokens": 16384, "env": {"math": {}}}, False),
    ],
)
def test_a_call_without_time_for_a_long_answer_is_warned_of(sections: dict[str, Any], warned: bool) -> None:
    generation = {"generation": {"max_new_tokens": sections.pop("max_new_tokens")}}
    warnings = config(policy={"max_total_sequence_length": 32768, **generation}, **sections).warnings
    assert any("agents.call_s" in warning for warning in warnings) is warned


def test_runners_do_not_share_a_port() -> None:
    with (
        pytest.raises(ConfigError, match=r"agents\.port 8394 with agents\.runners 2"),
        ports.settle(config(agents={"port": 8394, "runners": 2})),
    ):
        pass
