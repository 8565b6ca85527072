"""How far judges agree with people: the numbers, the fit, and which judges are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.cli.env_calibrate import differing
from headrace.config.environments import LLMJudgeConfig
from headrace.env.kit.example_samples import read_labels
from headrace_services.reward.judge.calibration import (
    Calibration,
    Judged,
    find_refusal,
    fit_monotone,
    measure,
    measure_order,
)
from headrace_services.reward.judge.verdicts import Verdict


def judged(*pairs: tuple[float, float | None], prompts: str = "") -> list[Judged]:
    """(label, reward) of each completion."""
    return [
        Judged(
            prompt=ord(prompts[place]) if prompts else place,
            completion="x",
            label=label,
            status="FAILED" if reward is None else "SCORED",
            reward=reward,
            components={} if reward is None else {"judge_0": reward, "judge_1": 1 - reward, "spread": 0.5},
            reasons={},
            message="no verdict" if reward is None else "",
        )
        for place, (label, reward) in enumerate(pairs)
    ]


def agreement(pairs: list[tuple[float, float | None]], compare: str | None = None, prompts: str = "") -> float | None:
    return measure(judged(*pairs, prompts=prompts), compare)["reward"]["agreement"]


def test_the_measures_of_a_judge_that_is_half_a_scale_too_kind() -> None:
    measures = measure(judged((0, 0.5), (0.25, 0.5), (0.5, 1), (1, None)), None)
    assert set(measures) == {"reward", "judge_0", "judge_1"}  # a completion without a reward is left out, not 0
    assert measures["reward"] == measures["judge_0"]
    assert measures["reward"]["bias"] == measures["reward"]["error"] == pytest.approx(1.25 / 3)
    assert measures["reward"]["agreement"] == pytest.approx(0.8660254)  # ranks 1.5 1.5 3 and 1 2 3
    assert measures["judge_1"]["agreement"] == pytest.approx(-0.8660254)
    assert measures["judge_1"]["bias"] == pytest.approx(0.25 / 3)
    assert measures["judge_1"]["error"] == pytest.approx(1.25 / 3)


def test_kappa_of_yes_and_no_is_cohens() -> None:
    yes_no: list[tuple[float, float | None]] = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    assert measure(judged(*yes_no), None)["reward"]["kappa"] == pytest.approx(0.4)  # (0.7 - 0.5) / (1 - 0.5)


def test_the_agreement_is_spearmans_with_ties() -> None:
    drawn = random.Random(7)
    for _ in range(50):
        pairs = [(drawn.randrange(4) / 3, drawn.randrange(6) / 5) for _ in range(12)]
        labels, rewards = zip(*pairs, strict=True)
        ranks = [[sum(v < x for v in of) + sum(v == x for v in of) / 2 for x in of] for of in (labels, rewards)]
        assert agreement(list(pairs)) == pytest.approx(np.corrcoef(np.array(ranks))[0, 1])


def test_rounding_is_no_order() -> None:
    assert agreement([(0, 0.1 + 0.2), (1, 0.3), (0.5, 0.3)]) is None


def test_comparisons_are_held_against_people_prompt_by_prompt() -> None:
    """The second prompt is hard, and people gave all its completions little: wins among them are still right."""
    pairs: list[tuple[float, float | None]] = [(0.9, 0.0), (1.0, 1.0), (0.0, 0.0), (0.1, 1.0), (0.9, 0.5)]
    assert agreement(pairs, "pairs", "aabbc") == pytest.approx(1)  # the fifth had none to be compared with
    assert agreement(pairs, "reference", "aabbc") == pytest.approx(0.4055536)
    assert set(measure(judged(*pairs, prompts="aabbc"), "group")["reward"]) == {"agreement"}


def test_without_a_reward_nothing_is_measured() -> None:
    assert measure(judged((0, None), (1, None)), None) == {}
    assert measure(judged((0, 1.0), (1, 1.0)), "pairs") == {}


def test_how_far_the_order_moves_a_judge() -> None:
    def verdicts(*firsts: tuple[float, float]) -> list[tuple[Verdict, Verdict]]:
        return [(Verdict("", (one,)), Verdict("", (other,))) for one, other in firsts]

    assert measure_order([]) == {}
    assert measure_order(verdicts((1, 0), (0, 1), (0.5, 0.5))) == {"first_wins": 0.5, "turned": 0}
    assert measure_order(verdicts((1, 1), (1, 1), (1, 0), (0.5, 1))) == {"first_wins": 0.8125, "turned": 0.75}


def test_the_fit_is_monotone_and_right_on_average() -> None:
    drawn = random.Random(3)
    pairs = [(drawn.random(), round(drawn.random(), 1)) for _ in range(60)]
    rewards, labels = fit_monotone(judged(*pairs, (0.9, None)))
    assert rewards == sorted(set(rewards))
    assert labels == sorted(set(labels))
    assert fit_monotone(judged((0.2, 0.1), (0.4, 0.1), (0.6, 0.5), (0.5, 0.9), (1, 1))) == (
        pytest.approx([0.1, 0.7, 1]),
        pytest.approx([0.3, 0.55, 1]),
    )


def test_a_judge_that_is_wrong_way_round_can_t_be_mapped() -> None:
    assert fit_monotone(judged((1, 0), (0, 1))) == ([0.5], [0.5])


JUDGES = {"judges": [{"base_url": "http://127.0.0.1:1/v1", "model": "small"}], "rubric": "Is it polite?"}


@pytest.mark.parametrize(
    ("options", "pairs", "words"),
    [
        ({}, [(0, 1), (1, 0), (1, None)], None),
        ({"min_agreement": 0.9}, [(0, 0), (1, 1)], None),
        ({"min_agreement": 1.0}, [(0, 0), (1, 1)], None),
        ({"min_agreement": 0.9}, [(0, 0), (1, 1), (1, None)], "1 of 3 completions got no reward.*no verdict"),
        ({"min_agreement": 0.9}, [(0, 0), (0.5, 1), (1, 0.5)], r"is 0\.500, and min_agreement 0\.9"),
        ({"min_agreement": 0.0}, [(0, 1), (1, 1)], "no two rewards differ"),
        ({"map_to_people": True}, [(0, 0), (1, 1)], None),
        ({"map_to_people": True}, [(0, 1), (1, 0)], "map_to_people"),
        ({"map_to_people": True}, [(0, None), (1, None)], "map_to_people"),
    ],
)
def test_which_judges_are_refused(options: dict[str, Any], pairs: list[Any], words: str | None) -> None:
    env = LLMJudgeConfig.model_validate(JUDGES | {"calibration": "labels.jsonl"} | options)
    found = judged(*pairs)
    refusal = find_refusal(Calibration(found, measure(found, None), {}), "polite", env)
    if words is None:
        assert refusal is None
    else:
        assert refusal is not None
        with pytest.raises(ConfigError, match=words):
            raise ConfigError(refusal)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], r"labels\.jsonl has no samples"),
        (['{"completion": "a"}'], r"labels\.jsonl:1: .*`score`"),
        (
            ['{"completion": "a", "score": 1}', "", '{"completion": "a", "score": 6}'],
            r":3: score 6 is not on the scale",
        ),
        (['{"completion": "a", "score": 0}'], r":1: score 0 is not on the scale from 1 to 5"),
        (['{"completion": "a", "score": 3}', '{"completion": "b", "score": 3.0}'], "all scores are 3"),
        (['{"completion": "a", "score": 1, "reward": 0}'], "unknown field `reward`"),
    ],
)
def test_a_file_of_labels_that_can_t_be_used_is_named(tmp_path: Path, lines: list[str], words: str) -> None:
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=words):
        read_labels(tmp_path / "labels.jsonl", (1, 5))


def test_labels_are_read(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = [{"completion": "a", "score": 1, "prompt": "p"}, {"completion": "b", "score": 4.5, "prompt": messages}]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, lines)))
    one, other = read_labels(tmp_path / "labels.jsonl", (1, 5))
    assert (one.messages, one.score) == (({"role": "user", "content": "p"},), 1)
    assert (list(other.messages), other.score) == (messages, 4.5)


def test_the_reasons_of_several_verdicts_are_told_once_each() -> None:
    reasons = {"judge_0": ["too long", "rude", "too long"], "judge_1": "right"}
    made = differing([{"label": 0.5, "reward": 1.0, "completion": "42", "reasons": reasons}], 1)
    (told,) = made.columns[3].cells
    assert str(told) == "judge_0: too long / rude; judge_1: right"
