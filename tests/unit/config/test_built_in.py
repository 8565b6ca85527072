"""The options of built-in environments: what doesn't go together is refused with the value and the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import Config
from headrace.config.environments import CombineConfig
from headrace.config.explain import explain

JUDGE = {"base_url": "http://127.0.0.1:8000/v1", "model": "judge"}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"math": {"ngram": 3}}, r"env\.math\.ngram: 3 is an option of repetition, not of type math; leave it out"),
        (
            {"x": {"target": "a.py:A", "pattern": "y"}},
            r"env\.x\.pattern: 'y' is an option of regex, not of an environment with target",
        ),
        ({"math": {"extract": "choice", "tolerance": 0.1}}, r"env\.math: tolerance 0\.1 with extract choice"),
        ({"math": {"tolerance": 0}}, r"greater than 0"),
        ({"reasoning_gym": {"extract": "choice"}}, r"env\.reasoning_gym\.extract: 'choice' should be .*'answer_line'"),
        ({"regex": {}}, r"env\.regex\.pattern is missing; give a Python regular expression"),
        ({"regex": {"pattern": "("}}, r"env\.regex\.pattern: '\(' is not a regular expression \(missing \)"),
        (
            {"format": {"tags": ["<think>"]}},
            r"env\.format\.tags: '<think>' is not the name of a tag; give a name without <",
        ),
        ({"format": {"tags": ["a", "a"]}}, r"names a tag twice"),
        ({"length": {}}, r"env\.length: min_tokens 0 and max_tokens null limit nothing"),
        ({"length": {"min_tokens": 5, "max_tokens": 4}}, r"env\.length: max_tokens 4 is less than min_tokens 5"),
        (
            {"code": {"wall_s": 60}},
            r"env\.code: wall_s 60 is not less than timeout_s 60, the limit of all tests; lower",
        ),
        ({"code": {"extract": "choice"}}, r"env\.code\.extract: 'choice' should be "),
        ({"code": {"runs_with": []}}, r"at least 1 item"),
        ({"llm_judge": {"rubric": "x"}}, r"env\.llm_judge\.judges is missing; give the models that judge"),
        ({"llm_judge": {"rubric": "x", "judges": []}}, r"env\.llm_judge\.judges: \[\] .*at least 1 item"),
        ({"llm_judge": {"judges": [JUDGE]}}, r"env\.llm_judge: neither rubric nor template; give the criteria"),
        (
            {"llm_judge": {"judges": [JUDGE], "rubric": "x", "scale": [5, 1]}},
            r"env\.llm_judge\.scale: \[5, 1\]: the best score",
        ),
        (
            {"llm_judge": {"judges": [JUDGE], "rubric": "x", "scale": [0, 10**400]}},
            r"env\.llm_judge\.scale: .* between -1e\+09 and 1e\+09",
        ),
        ({"llm_judge": {"judges": [JUDGE], "rubric": "x", "vote": "majority"}}, r"vote majority without threshold"),
        (
            {"llm_judge": {"judges": [JUDGE | {"base_url": "https://me:secret@judge/v1"}], "rubric": "x"}},
            r"match pattern",
        ),
        (
            {"llm_judge": {"judges": [JUDGE | {"temperature": 2.5}], "rubric": "x"}},
            r"env\.llm_judge\.judges\.0\.temperature: 2\.5 should be less than or equal to 2",
        ),
        (
            {"llm_judge": {"judges": [JUDGE | {"seed": 2**63 - 1}], "rubric": "x"}},  # its second sample's has 65 bits
            r"env\.llm_judge\.judges\.0\.seed: 9223372036854775807 should be less",
        ),
        ({"reward_model": {}}, r"env\.reward_model\.model_name is missing; give directory, or name"),
        ({"reward_model": {"model_name": None}}, r"env\.reward_model\.model_name is missing"),
        ({"reward_model": {"model_name": "x", "device": "tpu"}}, r"match pattern"),
        ({"combine": {}}, r"env\.combine\.parts is missing; give the environments that score"),
        ({"combine": {"parts": {}}}, r"env\.combine\.parts: \{\} .*at least 1 item"),
        (
            {"both": {"type": "combine", "parts": {"math": 1}}},
            r"env\.both\.parts\.math is not under env, .* name one of none",
        ),
        (
            {"both": {"type": "combine", "parts": {"both": 1}}},
            r"env\.both\.parts\.both is not under env, or is a combination itself",
        ),
        (
            {"both": {"type": "combine", "combine": "product", "parts": {"math": 0.5}}, "math": {}},
            r"env\.both\.parts\.math 0\.5 with combine product",
        ),
        (
            {"both": {"type": "combine", "gate": "format", "parts": {"math": 1}}, "math": {}, "format": {}},
            r"env\.both\.gate 'format'",
        ),
        (
            {
                "both": {"type": "combine", "gate": "format", "parts": {"format": 0, "math": 1}},
                "math": {},
                "format": {},
            },
            r"env\.both\.timeout_s 60 is less than the 70 s",
        ),
        ({"both": {"type": "combine", "parts": {"math": float("nan")}}, "math": {}}, r"finite number"),
        (
            {"both": {"type": "combine", "parts": {"math": 1}, "require_stop": True}, "math": {}},
            r"env\.both\.require_stop: true is an option of math, .*, not of type combine",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(env: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Config.model_validate({"env": env})
    assert re.search(said, explain(refused.value, lambda _: ""))


def test_the_environments_of_one_reward_may_be_of_any_kind() -> None:
    env = {
        "both": {"type": "combine", "parts": {"math": 1, "brief": 0.2, "mine": 0.5}},
        "math": {},
        "brief": {"type": "length", "max_tokens": 9},
        "mine": {"attached": True},
    }
    both = Config.model_validate({"env": env}).env["both"]
    assert isinstance(both, CombineConfig)
    assert both.parts == {"math": 1, "brief": 0.2, "mine": 0.5}
