"""The examples of docs/environments.md: each configuration of a built-in environment gives the rewards that stand below it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import Sample
from headrace.config import Config
from headrace.config.environments import BUILT_IN, KINDS, ProgramConfig
from tests.support.judge_server import Answer, JudgeServer, said
from tests.support.reward_hub import start_hub
from tests.support.tiny_reward_model import make_reward_model

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
_EXAMPLE = re.compile(r"^```yaml\n((?:(?!^```).)*)^```\n\n^```json\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples() -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    text = PAGE.read_text()
    section = text[text.index("\n## Built-in environments") : text.index("\n## In another language")]
    for configuration, lines in _EXAMPLE.findall(section):
        yield yaml.safe_load(configuration), [json.loads(line) for line in lines.splitlines()]


EXAMPLES = list(examples())
LABELS = [line for line in PAGE.read_text().splitlines() if line.startswith('{"prompt": ') and '"score": ' in line]


def judge(request: dict[str, Any]) -> Answer:
    """Agrees with the labels, and gives 4 to all else."""
    labels = map(json.loads, LABELS)
    shown = request["messages"][1]["content"]
    return said(
        {"reason": "it is", "score": next((each["score"] for each in labels if f'"{each["completion"]}"' in shown), 4)}
    )


def examined() -> Iterator[Any]:
    for configuration, lines in EXAMPLES:
        # test_reward_model.py has a hub with such a model by day
        model = any("model_name" in env for env in configuration["env"].values())
        marks = pytest.mark.nightly if model else ()
        yield pytest.param((configuration, lines), id="-".join(configuration["env"]), marks=marks)


@pytest.mark.parametrize("example", list(examined()))
async def test_a_documented_environment_gives_the_documented_rewards(example: Any, tmp_path: Path) -> None:
    configuration, lines = example
    Config.model_validate(configuration)
    rewards = [line.pop("reward") for line in lines]  # null: of a model that is made here
    (tmp_path / "labels.jsonl").write_text("\n".join(LABELS))
    with JudgeServer(judge) as server:
        for env in configuration["env"].values():
            if "model_name" in env:
                env |= {"model_name": str(make_reward_model(tmp_path)), "device": "cpu"}
            if "calibration" in env:
                env["calibration"] = str(tmp_path / env["calibration"])
            for each in env.get("judges", []):  # those of the example are nowhere
                each |= {"base_url": server.base_url, "api_key_file": None, "tls_ca": None}
        async with start_hub(configuration["env"], workers=1) as hub:
            scores = await hub.score([Sample(**line) for line in lines])
    assert {score.status for score in scores} == {"SCORED"}, scores
    told = [score.reward for score, reward in zip(scores, rewards, strict=True) if reward is not None]
    assert told == pytest.approx([reward for reward in rewards if reward is not None]), scores


def test_every_built_in_environment_that_scores_has_an_example() -> None:
    shown = {type(env) for configuration, _ in EXAMPLES for env in Config.model_validate(configuration).env.values()}
    assert shown == {KINDS[key] for key in BUILT_IN if not issubclass(KINDS[key], ProgramConfig)}
