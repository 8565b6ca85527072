"""`combine`: several environments make one reward, whatever process each runs in, and none hides another's failure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import reasoning_gym

from headrace import Environment, Sample
from headrace.base.tagged_json import to_json
from headrace.config import Config
from headrace.env import server
from headrace.records.score import Score
from headrace_services.reward.main import sources_of_parts
from tests.support.hostile import DEADLY, hostile
from tests.support.reward_hub import start_hub

WRITTEN, UNWRITTEN = "<think>47+85</think>\n<answer>{}</answer>", "{}"
PARTS: dict[str, Any] = {
    "right": {"type": "math", "extract": "answer_tag", "timeout_s": 20.0},
    "written": {"type": "format", "timeout_s": 20.0},
    "brief": {"type": "length", "max_tokens": 4, "timeout_s": 20.0},
}


def both(**env: Any) -> dict[str, Any]:
    return PARTS | {"both": {"type": "combine", **env}}


def sample(text: str, tokens: int = 3) -> Sample:
    return Sample(text, {"answer": "132"}, completion_token_ids=tuple(range(tokens)), environment="both")


SAMPLES = [
    sample(WRITTEN.format("132")),
    sample(WRITTEN.format("131")),
    sample(UNWRITTEN.format("132")),
    sample(WRITTEN.format("132"), tokens=9),
]
RIGHT, WROTE, BRIEF = (1, 0, 0, 1), (1, 1, 0, 1), (1, 1, 1, 0)


async def test_a_sum_a_product_and_a_gate() -> None:
    ways: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
        "sum": ({"parts": {"right": 1.0, "written": 0.25, "brief": 0.5}}, (1.75, 0.75, 0.5, 1.25)),
        "product": ({"parts": {"right": 1, "written": 1, "brief": 1}, "combine": "product"}, (1, 0, 0, 0)),
        "gate": ({"parts": {"right": 1, "written": 0, "brief": 0.5}, "gate": "written"}, (1.5, 0.5, 0, 1)),
    }
    combined = {name: {"type": "combine", **env} for name, (env, _) in ways.items()}
    async with start_hub(PARTS | combined, workers=1) as hub:
        found = {
            name: await hub.score([dataclasses.replace(each, environment=name) for each in SAMPLES]) for name in ways
        }
    for name, (env, rewards) in ways.items():
        scores = found[name]
        assert [score.reward for score in scores] == pytest.approx(rewards), name
        assert [score.environment for score in scores] == [name] * 4
        gated = [env.get("gate") is None or bool(written) for written in WROTE]
        for place, passed in enumerate(gated):
            expected = {"right": RIGHT[place] * passed, "written": WROTE[place], "brief": BRIEF[place] * passed}
            assert scores[place].components == expected
        assert "math-verify" in scores[0].build


async def test_each_part_is_metered_and_a_closed_gate_asks_no_other() -> None:
    def counted(part: str) -> float:
        found = prometheus_client.REGISTRY.get_sample_value(
            "headrace_reward_results_total", {"environment": part, "status": "SCORED"}
        )
        return found or 0.0

    before = {part: counted(part) for part in (*PARTS, "both")}
    env = {"parts": {"right": 1, "written": 0, "brief": 1}, "gate": "written"}
    async with start_hub(both(**env), workers=1) as hub:
        await hub.score(SAMPLES)
        await hub.score(SAMPLES)
    since = {part: counted(part) - before[part] for part in before}
    assert since == {"written": 8, "right": 6, "brief": 6, "both": 8}


async def test_law_3_one_build_whatever_the_gate_and_whichever_the_hub() -> None:
    env = both(parts={"right": 1, "written": 0, "brief": 1}, gate="written")
    async with start_hub(env, workers=1) as hub, start_hub(env, workers=1) as other:
        listed = [(await each.environments())["both"].description.build for each in (hub, other)]
        scores = [*await hub.score(SAMPLES), *await other.score([sample(UNWRITTEN.format("132"))])]
    assert {*listed, *(score.build for score in scores)} == {listed[0]}
    async with start_hub(env | {"written": PARTS["written"] | {"tags": ["answer"]}}, workers=1) as hub:
        assert (await hub.environments())["both"].description.build != listed[0]


class Odd(Environment):
    def score(self, sample: Sample) -> float | Score:
        if sample.completion == "never":
            return Score("INVALID", message="it can't be scored")
        return 1.0 / float(sample.completion)


async def test_law_7_failure_is_not_zero_a_failed_part_fails_the_whole() -> None:
    async with server.serving(Odd()) as port:
        env = {
            "odd": {"target": f"127.0.0.1:{port}", "timeout_s": 20.0},
            "math": {"timeout_s": 20.0},
            "both": {"type": "combine", "parts": {"math": 1, "odd": 0.5}},
        }
        async with start_hub(env, workers=1) as hub:
            completions = ["2", "0", "never"]
            right, raised, never = await hub.score(
                [Sample(text, {"answer": text}, environment="both") for text in completions]
            )
            described = await hub.environments()
    assert (right.reward, right.components) == (1.25, {"math": 1.0, "odd": 0.5})
    assert (raised.status, raised.reward) == ("FAILED", None)
    assert raised.message.startswith("odd: ZeroDivisionError")
    assert raised.traceback.endswith("division by zero\n")
    assert (never.status, never.message) == ("INVALID", "odd: it can't be scored")
    assert described["both"].description.capacity == 16
    assert described["both"].ready


FUNCTIONS = """
def fits(completions, **kwargs):
    return [None if c[0]["content"] in ("neither", "math alone") else 2.0 for c in completions]

def math(completions, **kwargs):
    return [None if c[0]["content"] in ("neither", "fits alone") else 1.0 for c in completions]
"""


def count(environment: str, status: str) -> float:
    labels = {"environment": environment, "status": status}
    return prometheus_client.REGISTRY.get_sample_value("headrace_reward_results_total", labels) or 0.0


@pytest.mark.parametrize(
    ("env", "rewards"),
    [
        ({}, [2.0, 1.0, 1.0, None]),
        ({"combine": "product"}, [2.0, 2.0, 1.0, None]),
        ({"gate": "fits"}, [2.0, 1.0, 1.0, None]),
    ],
)
async def test_a_function_that_does_not_apply_is_left_out(
    tmp_path: Path, env: dict[str, Any], rewards: list[float | None]
) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    weights = {"fits": 1.0 if "combine" in env else 0.5, "math": 1.0}
    before = {status: count("fits", status) for status in ("NOT_APPLICABLE", "INVALID")}
    parts = {name: {"target": f"{tmp_path}/rewards.py:{name}", "timeout_s": 20.0} for name in weights}
    async with start_hub(parts | {"both": {"type": "combine", "parts": weights, **env}}, workers=1) as hub:
        said = ("both", "fits alone", "math alone", "neither")
        scores = await hub.score([Sample(text, {}, environment="both") for text in said])
    assert [score.reward for score in scores] == rewards
    assert [sorted(score.components) for score in scores] == [["fits", "math"], ["fits"], ["math"], []]
    assert scores[-1].status == "INVALID"
    assert scores[-1].message.startswith(("fits: ", "math: "))
    assert count("fits", "NOT_APPLICABLE") == before["NOT_APPLICABLE"] + 2
    assert count("fits", "INVALID") == before["INVALID"]


async def test_a_part_that_cannot_be_reached_costs_nothing() -> None:
    env = {"away": {"attached": True}, "math": {}, "both": {"type": "combine", "parts": {"math": 1, "away": 1}}}
    async with start_hub(env, workers=1) as hub:
        (score,) = await hub.score([Sample("2", {"answer": "2"}, environment="both")])
    assert (score.status, score.reward) == ("NOT_STARTED", None)
    assert score.message.startswith("away: ")


def test_a_part_prepares_for_the_data_sets_of_the_whole() -> None:
    source = {"dataset_name": "reasoning_gym", "task": "chain_sum", "env_name": "both"}
    env = {"both": {"type": "combine", "parts": {"gym": 1}}, "gym": {"type": "reasoning_gym"}}
    config = Config.model_validate({"env": env, "data": {"train": source}})
    assert [(each.env_name, each.task) for each in sources_of_parts(config)] == [
        ("both", "chain_sum"),
        ("gym", "chain_sum"),
    ]


async def test_a_problem_of_reasoning_gym_is_scored_in_part() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    info = {"task": "chain_sum", "entry": to_json(entry)}
    env = {"both": {"type": "combine", "parts": {"gym": 2}}, "gym": {"type": "reasoning_gym"}}
    async with start_hub(env, workers=1) as hub:
        (score,) = await hub.score([Sample(str(entry["answer"]), info, environment="both")])
    assert score.reward == 2


async def test_hostile_completions_earn_nothing_from_rules_of_text(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    completions = [*DEADLY, *hostile(mark)]
    env = {
        "format": {},
        "digits": {"type": "regex", "pattern": r"^13\d$"},
        "letter": {"type": "math", "extract": "choice"},
        "box": {"type": "math", "extract": "boxed", "tolerance": 0.01, "timeout_s": 2.0},
    }
    answers = {"letter": "Z"}
    async with start_hub(env, workers=2) as hub:
        for name in env:
            info = {"answer": answers.get(name, "132")}
            samples = [Sample(completion, info, environment=name) for completion in completions]
            for completion, score in zip(completions, await hub.score(samples), strict=True):
                assert (score.status, score.reward) == ("SCORED", 0), (name, completion[:80], score)
        right = await hub.score(
            [
                Sample("<think></think><answer></answer>", environment="format"),
                Sample("131", environment="digits"),
                Sample("Answer: Z", {"answer": "Z"}, environment="letter"),
                Sample("\\boxed{131.5}", {"answer": "132"}, environment="box"),
            ]
        )
    assert [score.reward for score in right] == [1, 1, 1, 1]
    assert not mark.exists()


async def test_law_6_liveness_an_endless_pattern_costs_its_own_completion() -> None:
    env = {"regex": {"pattern": r"^(a+)+$", "timeout_s": 1.0}}
    async with start_hub(env, workers=1) as hub:
        endless, short = await hub.score(
            [Sample("a" * 99 + "b", environment="regex"), Sample("aa", environment="regex")]
        )
    assert (endless.status, short.reward) == ("TIMED_OUT", 1)
