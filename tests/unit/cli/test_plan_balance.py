"""`headrace plan balance`: the table, the sentence and the JSON, of a run that is over and of one that has not begun."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.cli.app import app
from headrace.run import now
from headrace.run.now import Now, ReplicaNow
from tests.support.page_runs import recorded_run, with_steps

CONFIG = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, async_grpo: {enabled: true, max_trajectory_age_steps: 4}}
rollout: {max_concurrent_groups: 4}
policy: {generation: {vllm_cfg: {tensor_parallel_size: 2}}}
"""
# A completion of 100 tokens takes ten seconds alone, and twenty in a full replica.
RATES = ("--tokens-per-second", "80", "--sequence-tokens-per-second", "10", "--mean-tokens", "100")
TRAINING = ("--training-seconds", "20")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def balance(*arguments: object) -> str:
    return CliRunner().invoke(app, ["plan", "balance", *map(str, arguments)], catch_exceptions=False).output


def as_json(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(balance(*arguments, "--json"))
    return found


def test_a_configuration_is_planned_with_given_rates(config: Path) -> None:
    """A step is 3,200 tokens: 40 seconds of a full replica."""
    found = as_json(config, *RATES, *TRAINING, "--length-spread", 0)
    assert found["bottleneck"] == "generation"
    assert found["computed"]["trainer_busy"] == pytest.approx(0.5, abs=0.05)
    assert found["proposed"]["replicas"] == 2
    assert "raise rollout.replicas from 1 to 2" in found["advice"]
    shown = balance(config, *RATES, *TRAINING, "--length-spread", 0)
    assert shown.splitlines()[0].split() == ["computed", "proposed"]
    assert ["replicas", "1", "2"] in [line.split() for line in shown.splitlines()]
    assert found["advice"] in shown


def test_overrides_and_scores_count(config: Path) -> None:
    scored = as_json(config, "rollout.replicas=4", *RATES, *TRAINING, "--scoring-seconds", 5, "--scoring-places", 2)
    assert scored["bottleneck"] == "scoring"
    assert scored["computed"]["seconds_a_step"] == pytest.approx(32 * 5 / 2)
    assert scored["proposed"]["scoring_places"] > 2


def test_prices_give_the_price_of_a_trained_token(config: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("{rollout_device: 2, trainer_device: 3, cpu: 0.5}")
    found = as_json(config, *RATES, *TRAINING, "--length-spread", 0, "--prices", prices)
    # two devices of a replica, one of the trainer, two reward workers
    assert found["computed"]["price_an_hour"] == 2 * 2 + 3 + 2 * 0.5
    assert found["proposed"]["price_an_hour"] == 4 * 2 + 3 + 2 * 0.5
    tokens_an_hour = found["computed"]["steps_an_hour"] * 3200
    price = found["computed"]["price_of_a_million_trained_tokens"]
    assert price == pytest.approx(8 / tokens_an_hour * 1e6, rel=0.01)


@pytest.mark.parametrize("text", ["{rollout_device: 2}", "{rollout_device: 2, trainer_device: 3, gpu: 1}", "[1]"])
def test_prices_that_say_something_else_are_refused_at_once(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.delattr("headrace.cli.plan.advise")
    prices = tmp_path / "prices.yaml"
    prices.write_text(text)
    with pytest.raises(ConfigError, match=r"prices\.yaml"):
        balance(config, *RATES, *TRAINING, "--prices", prices)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        balance(config, *RATES, *TRAINING, "--prices", tmp_path / "nowhere.yaml")


def test_rates_are_needed_where_there_is_no_run(config: Path) -> None:
    with pytest.raises(ConfigError, match="--training-seconds"):
        balance(config, *RATES)
    for rate in (800, 9, "inf"):
        with pytest.raises(ConfigError, match="--tokens-per-second"):
            balance(config, "--tokens-per-second", rate, *RATES[2:], *TRAINING)
    # an engine that gains nothing from several sequences
    assert as_json(config, "--tokens-per-second", 10, *RATES[2:], *TRAINING)["bottleneck"] == "generation"


def test_a_run_is_planned_with_what_it_measured(tmp_path: Path) -> None:
    run = with_steps(
        recorded_run(tmp_path), [{"timing/train/exposed_generation": 6.0, "mean_gen_tokens_per_sample": 4.0}] * 6
    )
    found = as_json(run, "--window", "all")
    assert found["measured"]["seconds_a_step"] == 10.0
    assert found["measured"]["trainer_busy"] == pytest.approx(0.4)
    assert found["computed"]["replicas"] == 1
    assert found == as_json("--run", run, "--window", "all")
    assert balance(run, "--window", "all").splitlines()[0].split()[:2] == ["measured", "computed"]
    for option in ("--mean-tokens", "--length-spread"):
        with pytest.raises(ConfigError, match=f"{option}: the rates of run"):
            balance(run, option, 1)


def test_another_fleet_is_planned_with_what_this_one_measured(tmp_path: Path) -> None:
    """Whatever fleet is up, and with the price of what would be trained."""
    run = with_steps(
        recorded_run(tmp_path), [{"timing/train/exposed_generation": 6.0, "mean_gen_tokens_per_sample": 4.0}] * 6
    )
    now.write(run, Now(0.0, 1, 0, False, {}, {}, [ReplicaNow("rollout-1", "HEALTHY", 1, 0, 0.0)], [], [], []))
    prices = tmp_path / "prices.yaml"
    prices.write_text("{rollout_device: 2, trainer_device: 3}")
    given = (run, "--window", "all", "--prices", prices)
    measured, four = as_json(*given), as_json(*given, "rollout.replicas=4")
    assert "measured" not in four
    assert four["computed"]["replicas"] == 4
    assert four["proposed"] == measured["proposed"]
    twice = as_json(*given, "grpo.num_prompts_per_step=4")["computed"]
    tokens = [
        each["price_an_hour"] / each["steps_an_hour"] / each["price_of_a_million_trained_tokens"]
        for each in (measured["computed"], twice)
    ]
    assert tokens[1] == pytest.approx(2 * tokens[0])


@pytest.mark.parametrize("key", ["trainer.num_processes=2", "grpo.num_generations_per_prompt=4"])
def test_what_was_not_measured_is_not_planned(tmp_path: Path, key: str) -> None:
    run = with_steps(
        recorded_run(tmp_path), [{"timing/train/exposed_generation": 6.0, "mean_gen_tokens_per_sample": 4.0}] * 6
    )
    with pytest.raises(ConfigError, match="groups of 3"):
        balance(run, "--window", "all", key)


def test_the_documented_example_is_what_is_printed(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs" / "scaling.md").read_text()
    (given,) = re.findall(r"headrace plan balance CONFIG (--.*)", text)
    shown = balance(root / "examples" / "gpu_8b_8gpus.yaml", *given.split())
    assert "\n".join(line.rstrip() for line in shown.splitlines()) in text
    (prices,) = re.findall(r"```yaml\n(rollout_device.*?)```", text, re.DOTALL)
    (tmp_path / "prices.yaml").write_text(prices)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)
    assert as_json(config, *RATES, *TRAINING, "--prices", tmp_path / "prices.yaml")["computed"]["price_an_hour"] > 0
