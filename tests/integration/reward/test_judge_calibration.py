"""Judges that are held against people before they judge a run: over a real HTTP server, in the hub, and by the command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import Sample
from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.config.environments import LLMJudgeConfig
from headrace.records.score import Score
from headrace_services.reward import llm_judge
from headrace_services.reward.judge.asking import VerdictStore
from headrace_services.reward.llm_judge import LLMJudge
from headrace_services.reward.main import make_hosted
from tests.support.command import headrace
from tests.support.judge_server import Answer, Answers, JudgeServer, judged, said
from tests.support.reward_hub import start_hub
from tests.support.waiting import eventually

# (completion, score of people, score of the judge) on a scale from 1 to 5
LABELS = [("one", 1, 2), ("two", 2, 2), ("three", 4, 3), ("four", 5, 5)]
GIVEN = {completion: given for completion, _, given in LABELS}


def by_table(request: dict[str, Any]) -> Answer:
    return said({"reason": "so so", "score": GIVEN.get(judged(request)["completion"], 4)})


def write(folder: Path, labels: list[tuple[str, int, int]]) -> str:
    lines = [json.dumps({"completion": text, "score": score, "prompt": "Count."}) for text, score, _ in labels]
    (folder / "labels.jsonl").write_text("\n".join(lines))
    return str(folder / "labels.jsonl")


def env_of(
    server: JudgeServer, folder: Path, labels: list[tuple[str, int, int]] = LABELS, **env: Any
) -> dict[str, Any]:
    judges = [{"base_url": server.base_url, "model": "small"}]
    common = {"type": "llm_judge", "judges": judges, "rubric": "Right?", "scale": [1, 5], "timeout_s": 20}
    return common | {"calibration": write(folder, labels)} | env


def hosted(env: dict[str, Any], folder: Path) -> LLMJudge:
    config = Config.model_validate({"env": {"counts": env}, "run": {"id": "run", "dir": str(folder)}})
    made = make_hosted("counts", config.env["counts"], config)  # type: ignore[arg-type]
    assert isinstance(made, LLMJudge)
    return made


async def test_the_agreement_is_kept_and_stands_beside_the_reasons(tmp_path: Path) -> None:
    with JudgeServer(by_table) as server:
        for _ in range(2):  # a second start asks nothing again
            judge = hosted(env_of(server, tmp_path, min_agreement=0.9), tmp_path)
            await judge.start()
            assert judge.problem() is None
            score = await judge.score(Sample("another"))
            await judge.aclose()
        assert len(server.requests) == len(LABELS) + 1
    assert isinstance(score, Score)
    assert score.reward == 0.75
    kept = json.loads((tmp_path / "run" / "calibration-counts.json").read_text())
    assert score.metadata == {"judge_0": "so so", "calibration": kept["measures"]["reward"]}
    assert kept["measures"]["reward"]["agreement"] == pytest.approx(0.9486833)  # ranks 1.5 1.5 3 4 and 1 2 3 4
    assert kept["measures"]["reward"]["bias"] == 0
    assert [(each["completion"], each["label"], each["reward"]) for each in kept["judged"]] == [
        (completion, (label - 1) / 4, (given - 1) / 4) for completion, label, given in LABELS
    ]


async def test_a_judge_that_does_not_agree_ends_the_start(tmp_path: Path) -> None:
    with JudgeServer(by_table) as server:
        with pytest.raises(ConfigError, match=r"env\.counts\.calibration .*is 0\.949, and min_agreement 0\.95"):
            async with start_hub({"counts": env_of(server, tmp_path, min_agreement=0.95)}):
                pass
        async with start_hub({"counts": env_of(server, tmp_path, min_agreement=0.94)}) as hub:
            (score,) = await hub.score([Sample("another", environment="counts")])
    assert (score.status, score.reward) == ("SCORED", 0.75)


async def test_law_7_failure_is_not_zero_a_label_without_verdict(tmp_path: Path) -> None:
    def fails_once(request: dict[str, Any]) -> Answer:
        return said("nonsense") if judged(request)["completion"] == "one" else by_table(request)

    with JudgeServer(fails_once) as server:
        judge = hosted(env_of(server, tmp_path), tmp_path)
        await judge.start()
        await judge.aclose()
        kept = json.loads((tmp_path / "run" / "calibration-counts.json").read_text())
        assert [each["status"] for each in kept["judged"]] == ["FAILED", "SCORED", "SCORED", "SCORED"]
        assert kept["judged"][0]["reward"] is None
        assert kept["measures"]["reward"]["bias"] == pytest.approx(-1 / 12)
        refused = hosted(env_of(server, tmp_path, min_agreement=0.1), tmp_path)
        with pytest.raises(ConfigError, match=r"1 of 4 completions got no reward.*invalid verdict"):
            await refused.start()
        await refused.aclose()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start waits no time, and the judges are asked again at once."""
    monkeypatch.setattr(LLMJudge, "patience_s", 0.0)
    monkeypatch.setattr(llm_judge, "_PAUSE_S", 0.01)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("bound", "scored"), [(0.9, True), (0.99, False)])
async def test_until_the_judges_can_be_asked_nothing_is_scored(tmp_path: Path, bound: float, scored: bool) -> None:
    up = asyncio.Event()

    def overloaded(request: dict[str, Any]) -> Answer:
        return by_table(request) if up.is_set() or judged(request)["completion"] == "one" else (503, b"loading")

    with JudgeServer(overloaded) as server:
        async with start_hub({"counts": env_of(server, tmp_path, min_agreement=bound)}) as hub:

            async def said_why() -> bool:
                (score,) = await hub.score([Sample("x", environment="counts")])
                assert score.status == "NOT_STARTED"
                return "3 of 4 completions are not judged yet" in score.message and "loading" in score.message

            await eventually(said_why)
            assert not (await hub.environments())["counts"].ready
            up.set()

            async def has_decided() -> bool:
                (score,) = await hub.score([Sample("x", environment="counts")])
                return score.status == "SCORED" if scored else "min_agreement 0.99" in score.message

            await eventually(has_decided)
            assert (await hub.environments())["counts"].ready is scored
    completions = [judged(request)["completion"] for request in server.requests]
    assert completions.count("one") == 1  # what was judged is not asked again


def prefers(first: str) -> Answers:
    """The longer of two is better, but what stands first counts as `first` longer."""

    def answer(request: dict[str, Any]) -> Answer:
        one, other = judged(request)["completions"].values()
        return said({"reason": "long", "better": "1" if len(one + first) > len(other) else "2"})

    return answer


@pytest.mark.parametrize(("first", "order"), [("", (0.5, 0)), ("xx", (2 / 3, 1 / 3)), ("x" * 99, (1, 1))])
async def test_pairs_are_also_judged_in_the_other_order(tmp_path: Path, first: str, order: tuple[float, float]) -> None:
    labels = [("a", 1, 0), ("aaa", 2, 0), ("a" * 4, 5, 0)]
    with JudgeServer(prefers(first)) as server:
        judge = hosted(env_of(server, tmp_path, labels, compare="pairs"), tmp_path)
        await judge.start()
        await judge.aclose()
    kept = json.loads((tmp_path / "run" / "calibration-counts.json").read_text())
    assert len(server.requests) == 6
    assert (kept["order"]["first_wins"], kept["order"]["turned"]) == pytest.approx(order)
    if not first:
        assert kept["measures"]["reward"] == {"agreement": 1}


async def test_law_3_one_build_a_mapped_reward_has_the_build_of_its_map(tmp_path: Path) -> None:
    """Corners (0.25, 0.125), (0.5, 0.75), (1, 1): of judges' scores 2, 3 and 5."""
    builds = set()
    with JudgeServer(by_table) as server:
        for labels in (LABELS, LABELS, [("one", 2, 2), *LABELS[1:]]):
            env = env_of(server, tmp_path, labels, map_to_people=True)
            async with start_hub({"counts": env}) as hub:
                scores = await hub.score([Sample(text, environment="counts") for text in ("one", "three", "another")])
            builds |= {score.build for score in scores}
            if labels is LABELS:
                assert [score.reward for score in scores] == pytest.approx([0.125, 0.75, 0.875])
    assert len(builds) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_agreement": 0.5}, "without calibration"),
        ({"map_to_people": True}, "without calibration"),
        ({"map_to_people": True, "calibration": "x", "compare": "group"}, "map_to_people with compare group"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    judge = {"base_url": "http://127.0.0.1:1/v1", "model": "small"}
    with pytest.raises(ValueError, match=words):
        LLMJudgeConfig.model_validate({"judges": [judge], "rubric": "Right?"} | options)


def test_a_file_that_can_t_be_used_ends_the_start_with_its_name(tmp_path: Path) -> None:
    judge = {"base_url": "http://127.0.0.1:1/v1", "model": "small"}
    env = {"judges": [judge], "rubric": "Right?", "calibration": str(tmp_path / "lost.jsonl")}
    with pytest.raises(ConfigError, match=r"lost\.jsonl"):
        LLMJudge("counts", LLMJudgeConfig.model_validate(env), VerdictStore(None))


def test_the_command_shows_where_judges_and_people_differ(tmp_path: Path) -> None:
    with JudgeServer(by_table) as server:
        env = env_of(server, tmp_path, calibration="labels.jsonl", min_agreement=0.9)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"env": {"counts": env}}))
        done = headrace("env", "calibrate", tmp_path / "run.yaml", "-n", "1")
        assert done.returncode == 0, done.stderr
        assert "0.949" in done.stdout
        assert "4 of 4 completions got a reward" in done.stdout
        assert "so so" in done.stdout
        shown = [text for text in GIVEN if text in done.stdout.split("reasons")[1]]
        assert len(shown) == 1
        refused = headrace("env", "calibrate", tmp_path / "run.yaml", "env.counts.min_agreement=0.99")
        assert refused.returncode == 1
        assert "min_agreement 0.99" in refused.stdout
