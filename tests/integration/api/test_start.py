"""`headrace.Run.start`: the run that it starts, and what becomes of it when the process that started it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import headrace
from headrace.base.errors import ConfigError, ServiceError
from tests.support.light_services import instead_of
from tests.support.page_runs import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = [{"input": f"{number}+1", "output": str(number + 1)} for number in range(40)]


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose trainer leaves behind what six steps record, and ends."""
    use(monkeypatch, tmp_path / "services", trainer="recording_trainer", reward="idle_reward")
    file = tmp_path / "run.yaml"
    values = {
        "run": {"dir": str(tmp_path / "runs")},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 3, "max_num_steps": STEPS},
        "loss_fn": {"reference_policy_kl_penalty": 0},
        "policy": {"model_name": str(tiny_model), "precision": "float32", "max_total_sequence_length": 64},
        "data": {"train": {"dataset_name": "arithmetic", "env_name": "math"}},
        "env": {"math": {"type": "math"}},
        "page": {"port": None},
    }
    file.write_text(yaml.safe_dump(values))
    return file


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, **services: str) -> None:
    environ = instead_of(folder, **{"rollout": "idle_rollout", **services})
    monkeypatch.setenv("PYTHONPATH", environ["PYTHONPATH"])


def test_a_run_is_started_waited_for_and_read(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = headrace.train(config, {"grpo": {"max_num_steps": 8}}, data=ROWS)
    assert run.state == "finished"
    assert f"step {STEPS - 1}: reward 0.500" in capsys.readouterr().out
    assert run.config.algorithm.max_num_steps == 8
    (source,) = run.config.data.train
    assert source.data_path == str(run.folder / "inputs" / "train.jsonl")
    assert (source.dataset_name, source.env_name) == (None, "math")
    assert len(run.metrics()) == STEPS
    assert "finished" in (run.folder / "run.json").read_text()
    again = headrace.Run.start(config, {"run.id": run.id, "grpo.max_num_steps": 9}, data=ROWS)
    assert again.folder == run.folder
    assert again.wait(show=False).state == "finished"
    checkpoint = run.folder / "checkpoints" / f"step_{STEPS}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"timeline": "a"}')
    capsys.readouterr()
    assert headrace.train(config, {"run.id": run.id, "grpo.max_num_steps": STEPS}, data=ROWS).state == "finished"
    assert "nothing is left to train" in capsys.readouterr().out


def test_it_goes_on_when_its_starter_ends_and_stops_when_asked(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path / "endless", trainer="talking_trainer", reward="idle_reward")
    code = f"import headrace; print(headrace.Run.start({str(config)!r}, {{'grpo.max_num_steps': 100000}}).folder)"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    run = headrace.Run(started.stdout.strip())
    with run:
        assert run.state == "running"
        with pytest.raises(TimeoutError):
            run.wait(timeout=0)
        with pytest.raises(ServiceError, match="already up"):
            headrace.Run.start(config, {"run.id": run.id})
    assert run.state == "stopped"
    assert "SIGINT" in (run.folder / "up.log").read_text()


def test_what_can_not_start_says_why_and_leaves_nothing(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo\.max_num_stepz"):
        headrace.Run.start(config, {"grpo.max_num_stepz": 1}, data=ROWS)
    with pytest.raises(ServiceError, match="missing-model"):
        headrace.Run.start(config, {"policy.model_name": str(tmp_path / "missing-model")}, data=ROWS)
    with pytest.raises(ServiceError, match=r"^data\[1\]: field 'input' is 5, "):
        headrace.Run.start(config, data=[*ROWS[:1], {"input": 5, "output": "6"}])
    assert not [*(tmp_path / "runs").glob("*")]
