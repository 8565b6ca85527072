"""`headrace deploy helm`: the values of the chart, from a run's configuration. (Helm takes them: tests/integration/deploy.)"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from typer.testing import CliRunner

from headrace.base.errors import ConfigError, MissingPackage
from headrace.cli.app import app
from headrace.config import Config, load
from headrace.config.loading import variable_name
from headrace.launch import chart_values as module
from headrace.launch.chart_values import Cluster, chart_values
from headrace.launch.entry_points import load_entry_point
from tests.support.helm import merged

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
CHART = ROOT / "deploy" / "helm" / "headrace"


@pytest.fixture(autouse=True)
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch is not installed: to plan the memory makes each model, which takes seconds."""

    def missing(*arguments: object, **options: object) -> None:
        raise MissingPackage("torch is not installed")

    monkeypatch.setattr(module, "load_entry_point", missing)


def config(**sections: Any) -> Config:
    given = {"env": {"math": {"type": "math"}}, "data": {"train": {"dataset_name": "arithmetic", "env_name": "math"}}}
    return Config.model_validate(given | sections)


def violations(values: Mapping[str, Any]) -> list[str]:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    return [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(merged(defaults, values))]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_becomes_values_of_the_schema(example: Path) -> None:
    values, _ = chart_values(load(example), Cluster(8 if example.stem.startswith("gpu") else 0))
    assert violations(values) == []


def test_the_schema_says_what_is_no_value() -> None:
    assert violations({"config": "a", "rollout": {"gpu": 1}})
    assert violations({"config": ""})


def test_the_configuration_of_the_values_is_that_of_the_run(tmp_path: Path) -> None:
    example = load(EXAMPLES / "gpu_8b_8gpus.yaml")
    file = tmp_path / "run.yaml"
    file.write_text(chart_values(example, Cluster(8))[0]["config"])
    assert load(file) == example


@pytest.mark.parametrize(
    ("ranks", "per_node", "nodes", "on_node"), [(4, 8, 1, 4), (12, 8, 2, 6), (16, 8, 2, 8), (9, 4, 3, 3), (7, 4, 7, 1)]
)
def test_nodes_with_ranks_have_equally_many(ranks: int, per_node: int, nodes: int, on_node: int) -> None:
    trainer = chart_values(config(trainer={"num_processes": ranks}), Cluster(per_node))[0]["trainer"]
    assert (trainer["nodes"], trainer["ranksPerNode"], trainer["gpus"]) == (nodes, on_node, on_node)


def test_a_side_that_is_on_cpus_gets_no_gpu() -> None:
    values, _ = chart_values(config(trainer={"device": "cpu"}), Cluster(8))
    assert "gpus" not in values["trainer"]
    assert values["rollout"]["gpus"] == 1
    values, _ = chart_values(config(), Cluster(0))
    assert "gpus" not in values["rollout"]


def test_a_pod_gets_the_memory_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_entry_point", load_entry_point)
    example = load(EXAMPLES / "gpu_1_5b_1gpu.yaml")
    (on_gpus, remarks), (on_cpus, _) = chart_values(example, Cluster(8)), chart_values(example, Cluster())
    assert remarks == []
    assert violations(on_gpus) + violations(on_cpus) == []

    def requested(values: Mapping[str, Any], component: str) -> int:
        return int(values[component]["resources"]["requests"]["memory"].removesuffix("Gi"))

    # 1.5 billion parameters: a checkpoint's 12 bytes of each, beside 16 on CPUs; and a replica's two
    assert 1.4 * 12 < requested(on_gpus, "trainer") < 2 * 1.4 * 12
    assert requested(on_cpus, "trainer") > 1.4 * (12 + 16)
    assert 1.4 * 2 < requested(on_gpus, "rollout") < 16


def test_without_the_plan_the_charts_own_memory_is_named() -> None:
    values, remarks = chart_values(config(), Cluster())
    assert "resources" not in values["trainer"]
    assert any("torch" in remark for remark in remarks)


COMMAND = {"mine": {"command": ["./serve", "--fast"], "timeout_s": 7}}


def test_an_environment_runs_in_its_image_behind_a_service(tmp_path: Path) -> None:
    run = config(env=COMMAND, data={"train": {"dataset_name": "arithmetic", "env_name": "mine"}})
    values, _ = chart_values(run, Cluster(images={"mine": "registry.example/mine:1"}))
    (environment,) = values["environments"]
    assert environment["command"] == ["./serve", "--fast"]
    assert environment["image"] == "registry.example/mine:1"
    file = tmp_path / "run.yaml"
    file.write_text(values["config"])
    # the variable that the chart sets
    there = load(file, (), {variable_name(("env", "mine", "target")): f"demo-environment-mine:{environment['port']}"})
    assert there.env["mine"].address == "demo-environment-mine:50400"
    assert there.env["mine"].timeout_s == 7


def test_a_file_is_served_in_its_image_with_the_pods_certificate() -> None:
    run = config(
        env={"mine": {"target": "mine.py:Mine"}}, data={"train": {"dataset_name": "arithmetic", "env_name": "mine"}}
    )
    (environment,) = chart_values(run, Cluster(images={"mine": "mine:1"}))[0]["environments"]
    assert environment["command"][:4] == ["headrace", "env", "serve", "mine.py:Mine"]
    assert {"/run/headrace/tls.pem", "/run/headrace/tls.key"} <= set(environment["command"])
    _, remarks = chart_values(run, Cluster())
    assert any("env.mine.target" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("sections", "cluster", "tokens"),
    [
        ({"env": COMMAND, "data": {"train": {"env_name": "mine"}}}, Cluster(), ("env.mine.command", "--environment")),
        ({}, Cluster(images={"other": "x:1"}), ("--environment other",)),
        ({"trainer": {"device": "cuda"}}, Cluster(), ("trainer.device", "--gpus-per-node")),
        (
            {"policy": {"generation": {"vllm_cfg": {"tensor_parallel_size": 16}}}},
            Cluster(8),
            ("tensor_parallel_size 16", "nodes"),
        ),
        ({"replay": {"redis_url": "redis://redis:6379"}}, Cluster(), ("replay.redis_url", "rediss://")),
        ({"replay": {"redis_url": "rediss://me:secret@redis:6379"}}, Cluster(), ("password",)),
        ({"policy": {"model_name": "/home/me/model"}}, Cluster(), ("policy.model_name", "models/")),
        ({"checkpointing": {"checkpoint_dir": "/mnt/c"}}, Cluster(), ("checkpointing.checkpoint_dir", "runs/")),
        ({"checkpointing": {"store": "file:///mnt/c"}}, Cluster(), ("checkpointing.store", "s3://")),
        ({"checkpointing": {"snapshot_dir": "/dev/shm"}}, Cluster(), ("checkpointing.snapshot_dir", "null")),
        (
            {"env": {"programs": {"type": "code"}}, "data": {"train": {"env_name": "programs"}}},
            Cluster(),
            ("env.programs.type", "namespaces"),
        ),
    ],
)
def test_what_the_chart_can_not_run_is_refused(
    sections: dict[str, Any], cluster: Cluster, tokens: tuple[str, ...]
) -> None:
    train = {"dataset_name": "arithmetic", "env_name": "math", **sections.pop("data", {}).get("train", {})}
    with pytest.raises(ConfigError) as refused:
        chart_values(config(**sections, data={"train": train}), cluster)
    assert all(token in str(refused.value) for token in tokens)
    assert "secret" not in str(refused.value)


def test_what_calls_beyond_the_run_is_let_through() -> None:
    assert chart_values(load(EXAMPLES / "arithmetic_tiny.yaml"), Cluster())[0]["networkPolicies"]["outbound"] == {}
    values, _ = chart_values(
        config(
            policy={"model_name": "Qwen/Qwen3-8B"},
            env={"math": {"type": "math"}, "far": {"target": "far.example:50555"}},
        ),
        Cluster(),
    )
    assert values["networkPolicies"]["outbound"] == {"rollout": [443], "trainer": [443], "reward": [50555]}


def test_the_credentials_of_the_store_are_asked_for() -> None:
    run = config(policy={"model_name": "models/tiny"}, checkpointing={"store": "s3://bucket/runs"})
    values, remarks = chart_values(run, Cluster())
    assert values["networkPolicies"]["outbound"] == {"trainer": [443]}
    assert any("secrets.store" in remark for remark in remarks)
    assert not any("secrets.pull" in remark for remark in remarks)


def test_the_credentials_of_replicas_that_pull_are_asked_for() -> None:
    store = {"checkpointing": {"store": "s3://bucket/runs"}, "rollout": {"weights_from": "store"}}
    values, remarks = chart_values(config(policy={"model_name": "models/tiny"}, **store), Cluster())
    assert values["networkPolicies"]["outbound"] == {"rollout": [443], "trainer": [443]}
    assert any("secrets.pull" in remark for remark in remarks)


def test_files_of_this_machine_are_told(tmp_path: Path) -> None:
    """Each in a data set: its problems, its prompt, and its code."""
    for name in ("problems.jsonl", "prompt.txt", "rows.py"):
        (tmp_path / name).touch()
    files = {
        "data_path": str(tmp_path / "problems.jsonl"),
        "prompt_file": str(tmp_path / "prompt.txt"),
        "processor": f"{tmp_path}/rows.py:convert",
    }
    run = config(policy={"model_name": "models/own"}, data={"train": [{**files, "env_name": "math"}]})
    values, remarks = chart_values(run, Cluster())
    assert [sum(path.name in remark for remark in remarks) for path in tmp_path.iterdir()] == [1, 1, 1]
    assert "trainer" not in values["networkPolicies"]["outbound"]


def of_train(**train: Any) -> dict[str, Any]:
    return {"data": {"train": {"env_name": "math", **train}}}


@pytest.mark.parametrize(
    ("sections", "outbound"),
    [
        (of_train(dataset_name="DeepScaler"), {"trainer": [443]}),
        (of_train(data_path="trl-lib/DeepMath-103K"), {"trainer": [443]}),
        (of_train(data_path="models/rows.jsonl"), {}),
        (of_train(data_path="data/rows.parquet"), {}),
        ({"checkpointing": {"store": "s3://bucket/runs"}}, {"trainer": [443]}),
        (
            {"policy": {"model_name": "models/own", "tokenizer": {"name": "Qwen/Qwen3-8B"}}},
            {"rollout": [443], "trainer": [443]},
        ),
        ({"env": {"math": {"type": "reward_model", "model_name": "org/judge"}}}, {"reward": [443]}),
    ],
)
def test_what_the_trainer_and_rewards_fetch_is_let_through(sections: dict[str, Any], outbound: dict[str, Any]) -> None:
    values, _ = chart_values(config(**{"policy": {"model_name": "models/own"}, **sections}), Cluster())
    assert values["networkPolicies"]["outbound"] == outbound


def test_the_command_writes_what_it_would_print(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    call = ["deploy", "helm", str(EXAMPLES / "arithmetic_tiny.yaml"), "grpo.max_num_steps=3", "run.id=small"]
    printed = CliRunner().invoke(app, call)
    written = CliRunner().invoke(app, [*call, "-o", str(file)])
    assert (printed.exit_code, written.exit_code) == (0, 0), printed.output + written.output
    assert file.read_text() in printed.output
    values = yaml.safe_load(file.read_text())
    assert values["runId"] == "small"
    assert yaml.safe_load(values["config"])["grpo"]["max_num_steps"] == 3


def test_an_image_needs_a_name(tmp_path: Path) -> None:
    call = ["deploy", "helm", str(EXAMPLES / "arithmetic_tiny.yaml"), "--environment", "mine"]
    with pytest.raises(ConfigError, match="NAME=IMAGE"):
        CliRunner().invoke(app, call, catch_exceptions=False)


PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


@pytest.mark.parametrize("command", re.findall(r"^headrace (deploy helm .*)$", PAGE, re.MULTILINE))
def test_a_command_of_the_page_writes_values(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = yaml.safe_load((EXAMPLES / "arithmetic_tiny.yaml").read_text())
    example["env"]["exact"] = {"target": "exact.py:Exact"}
    Path("run.yaml").write_text(yaml.safe_dump(example))
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert violations(yaml.safe_load(Path("values.yaml").read_text())) == []


def test_every_value_that_the_page_names_is_one() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    named = set(re.findall(r"`([a-z]\w+)\.(\w+)[^`]*`", PAGE))
    values = {(section, key) for section, key in named if section in defaults}
    assert len(values) > 10
    configuration = Config().model_dump()
    assert {
        (section, key)
        for section, key in values
        if key not in defaults[section] and key not in configuration.get(section, {})
    } == set()
