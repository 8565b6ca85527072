"""`headrace plan memory`: a table of what a run takes, without a GPU and without weights."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.cli.app import app

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = """
policy:
  model_name: meta-llama/Llama-3.1-8B
  max_total_sequence_length: 8192
  train_micro_batch_size: 1
  generation: {vllm_cfg: {kv_cache_memory_bytes: null, gpu_memory_utilization: 0.9}}
loss_fn: {reference_policy_kl_penalty: 0}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def rows(config: Path, *arguments: str) -> dict[str, list[str]]:
    """The lines of the output by their first column, which is followed by two blanks."""
    result = CliRunner().invoke(app, ["plan", "memory", str(config), *arguments], catch_exceptions=False)
    lines = (line.split("  ") for line in result.output.splitlines())
    return {line[0].strip(): [part.strip() for part in line[1:] if part.strip()] for line in lines}


def test_parts_of_a_known_model_are_shown_by_number_of_gpus(config: Path) -> None:
    found = rows(config)
    assert found["trainer, GiB on each GPU"] == ["1 GPU", "4 GPUs", "8 GPUs", "16 GPUs"]
    # 8.03 billion parameters at 4 and 8 bytes
    assert found["policy: parameters, float32"] == ["29.9", "7.5", "3.7", "1.9"]
    assert found["policy: optimizer's moments, float32"] == ["59.8", "15.0", "7.5", "3.7"]
    assert [total.endswith(" !") for total in found["together, of 80"]] == [True, False, False, False]
    # embedding and head, 128,256 x 4,096 in bfloat16, have a bucket each, and one of them is copied as it is loaded
    assert any(
        row.startswith("a replica") and "weights 15.0" in row and "a layer 3.3; together" in row for row in found
    )
    assert set(found["most in the phase"]) <= {"policy: loss", "policy: layers", "policy: root"}
    # one rank has no NCCL
    assert found["NCCL's channels"] == ["-", "0.5", "0.5", "0.5"]


@pytest.mark.parametrize("name", ["gpu_1_5b_1gpu", "gpu_8b_8gpus", "gpu_32b_16gpus"])
def test_the_examples_are_planned_without_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(rows(EXAMPLES / f"{name}.yaml")["policy: parameters, float32"]) == 4


def test_the_trainer_has_its_fraction_of_a_gpu(config: Path) -> None:
    found = rows(config, "trainer.gpu_memory_fraction=0.5", "--gpus", "4,8")
    assert [total.endswith(" !") for total in found["together, of 40"]] == [True, False]


def test_a_copy_on_each_host_takes_what_one_host_alone_takes(config: Path) -> None:
    over_all = rows(config, "--gpus", "8,16")["policy: parameters, float32"]
    copies = rows(config, "trainer.shard_within_host=true", "--gpus", "8,16")["policy: parameters, float32"]
    assert over_all == ["3.7", "1.9"]
    assert copies == ["3.7", "3.7"]


def test_half_a_host_more_is_refused_where_each_host_has_a_copy(config: Path) -> None:
    # 8.03 billion parameters at 4 bytes over 12 GPUs
    assert rows(config, "--gpus", "8,12")["policy: parameters, float32"] == ["3.7", "2.5"]
    with pytest.raises(ConfigError, match=r"--gpus 8,12:.*shard_within_host.*8 GPUs"):
        rows(config, "trainer.shard_within_host=true", "--gpus", "8,12")
    with pytest.raises(ConfigError, match=r"--gpus 0: give numbers of GPUs"):
        rows(config, "--gpus", "0")


@pytest.mark.parametrize("command", [["plan", "memory"], ["config", "check"]])
@pytest.mark.parametrize("size", ["inf", "1e300", "nan", "0", "81920"])
def test_memory_that_no_gpu_has_is_refused(config: Path, command: list[str], size: str) -> None:
    result = CliRunner().invoke(app, [*command, str(config), "--gpu-memory", size])
    assert result.exit_code == 2
    assert "--gpu-memory" in result.output


def test_more_gpus_than_there_can_be_are_refused_at_once(config: Path) -> None:
    result = CliRunner().invoke(app, ["config", "check", str(config), "--gpu-memory", "2", "--gpus", "1000000000"])
    assert result.exit_code == 2
    assert "--gpus" in result.output


def test_what_replicas_that_pull_cost_rank_0_is_said(config: Path) -> None:
    def said(*arguments: str) -> list[str]:
        return [row for row in rows(config, *arguments) if "pull" in row]

    assert said() == []
    (line,) = said("checkpointing.store=s3://bucket/runs", "run.id=adder")
    assert "29.9 GiB" in line  # 8.03 billion parameters in bfloat16, twice
