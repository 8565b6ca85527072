"""The pods of the chart, as Helm renders them, train the demo: as containers of a Docker engine, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from headrace.config import load
from headrace.launch.chart_values import Cluster, chart_values
from tests.support.helm import CHART, RELEASE, ROOT, Helm
from tests.support.manifests import COMPONENT, kinds
from tests.support.pods import docker, lacking, pods

IMAGE = "headrace:0.1.0"
REDIS = yaml.safe_load((CHART / "values.yaml").read_text())["redis"]["image"]
LIMIT_S = 3600.0


@pytest.mark.nightly  # it needs an image of 4 GB, and takes minutes
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_rendered_pods_train_the_demo(tmp_path: Path, nodes: int) -> None:
    if (missing := lacking(IMAGE, REDIS)) is not None:
        pytest.skip(missing)
    steps = ["grpo.max_num_steps=3", "grpo.val_period=3", "grpo.max_val_samples=50", "weight_channel.timeout_s=180"]
    values, _ = chart_values(load(ROOT / "examples" / "arithmetic_tiny.yaml", steps), Cluster())
    values["trainer"]["nodes"] = nodes
    objects = Helm(tmp_path / "helm").render(values)
    of_hooks, of_trainer = (
        next(each for each in kinds(objects, "Job") if each["metadata"]["labels"][COMPONENT] == component)
        for component in ("secrets", "trainer")
    )
    with pods(objects, IMAGE, tmp_path) as started:
        for _ in ("install", "upgrade"):
            assert started.run(of_hooks) == 0
        del started.containers[of_hooks["metadata"]["name"]]
        services = [started.start(each) for each in kinds(objects, "StatefulSet", "Deployment")]
        ranks = [started.start(of_trainer, index) for index in range(nodes)]
        ready = started.keep_until(ranks, LIMIT_S)
        # a replica is ready while there is a trainer, for the seconds that three steps take
        assert ready >= {name for name in services if "rollout" not in name}
        read = ["exec", f"{RELEASE}-page", "cat", f"/data/runs/{RELEASE}/metrics.jsonl"]
        lines = [json.loads(line) for line in docker(*read).splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "train"] == [0, 1, 2]
        for name in services:
            docker("stop", "--time", "30", name)
            assert started.state(name) == ("exited", 0), name
