"""The pods of the chart, as Helm renders them, train the demo on a CPU: Podman runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from headrace.config import load
from headrace.launch.chart_values import Cluster, chart_values
from headrace.run.group_history import GroupHistory
from headrace.run.journal import surviving
from tests.support.finished_run import audit, journal
from tests.support.helm import CHART, Helm
from tests.support.manifests import COMPONENT, Manifest, kinds
from tests.support.pods import Pods, lacking, podman, pods
from tests.support.up import DEMO

IMAGE = "headrace:0.1.0"
REDIS = yaml.safe_load((CHART / "values.yaml").read_text())["redis"]["image"]
GET = {
    IMAGE: f"podman build -f deploy/Dockerfile --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t {IMAGE} .",
    REDIS: f"podman pull docker.io/library/{REDIS}",
}
RELEASE = "chart-pods"
LIMIT_S = 3600.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,  # it needs an image of 4 GB, and takes minutes; `tests/integration/deploy` has the objects
    pytest.mark.timeout(2 * LIMIT_S),
]


class Run:
    """The chart's pods, of a trainer on so many nodes; `folder` is where their files are brought."""

    def __init__(self, pods: Pods, objects: list[Manifest], nodes: int, folder: Path) -> None:
        self.pods, self._folder = pods, folder
        jobs = {each["metadata"]["labels"][COMPONENT]: each for each in kinds(objects, "Job")}
        for _ in ("install", "upgrade"):
            assert pods.run(jobs["secrets"]) == 0
        services = [
            *kinds(objects, "StatefulSet"),
            *kinds(objects, "Deployment"),
        ]  # the server first: a pod's start waits for its model
        self.services = {each["metadata"]["labels"][COMPONENT]: each for each in services}
        self.names = {component: pods.start(each) for component, each in self.services.items()}
        self.ranks = [pods.start(jobs["trainer"], index) for index in range(nodes)]

    def bring(self, *file: str) -> Path:
        """Copy the run's folder, or a file of it, as it is now. Return where the folder is."""
        self._folder.mkdir(exist_ok=True)
        inside = Path("/data/runs", RELEASE, *file)
        podman("cp", f"{self.pods.container(self.names['page'])}:{inside}", self._folder, check=not file)
        return self._folder

    def keep_until_step(self, step: int) -> None:
        def reached() -> bool:
            return any(line.step >= step for line in journal(self.bring("metrics.jsonl")))

        self.pods.keep_until(reached, LIMIT_S)

    def keep_until_the_end(self) -> Path:
        self.pods.keep_until(lambda: all(self.pods.state(rank) == ("exited", 0) for rank in self.ranks), LIMIT_S)
        files = self.bring() / RELEASE
        for name in reversed(self.pods.started):  # the server last: the others say to it that they leave
            podman("stop", "--time", 30, self.pods.container(name))
            assert self.pods.state(name) == ("exited", 0), name
        return files


@contextlib.contextmanager
def running(folder: Path, nodes: int, *settings: str) -> Iterator[Run]:
    if missing := lacking(GET):
        pytest.skip(missing)
    values, _ = chart_values(load(DEMO, settings), Cluster())
    values["trainer"]["nodes"] = nodes
    objects = Helm(folder / "helm").render(values, RELEASE)
    with pods(objects, RELEASE, folder / "pods") as started:
        yield Run(started, objects, nodes, folder / "runs")


def test_the_rendered_pods_train_the_demo_though_two_are_killed(tmp_path: Path) -> None:
    """A replica, while another is added, and then the trainer."""
    with running(tmp_path, 1) as run:
        run.keep_until_step(3)
        podman("kill", run.pods.container(run.names["rollout"]))
        run.pods.start(run.services["rollout"], name=f"{run.names['rollout']}-more")
        run.keep_until_step(12)
        podman("kill", run.pods.container(run.ranks[0]))
        files = run.keep_until_the_end()
        assert run.pods.ready >= run.pods.started.keys()

    config = load(DEMO, [f"run.dir={files.parent}", f"run.id={RELEASE}"])
    audit(config, 30)
    lines = journal(files)
    assert len({line.timeline for line in lines if line.kind == "train"}) == 2, "the trainer's second pod trained too"
    # (a validation that runs as the only replica dies is abandoned, and has none)
    accuracy = {line.step: line.metrics.get("accuracy") for line in surviving(lines) if line.kind == "validation"}
    assert (accuracy[30] or 0) >= 0.95, accuracy
    states = GroupHistory(files / "groups").states()
    assert states["trained"] == 30 * config.algorithm.num_prompts_per_step
    assert "failed" not in states
    events = pyarrow.parquet.read_table(files / "groups", columns=["what", "cause", "reason", "replica"]).to_pylist()
    assert len({each["replica"] for each in events if each["what"] == "leased"}) == 3
    assert {each["cause"] for each in events if each["what"] == "requeued"} <= {"rewind"}
    # a death is charged to a group that was alone with it
    assert not [each for each in events if "alone" in (each["reason"] or "")]


def test_a_trainer_of_two_pods(tmp_path: Path) -> None:
    steps = ["grpo.max_num_steps=3", "grpo.val_period=3", "grpo.max_val_samples=50", "weight_channel.timeout_s=180"]
    with running(tmp_path, 2, *steps) as run:
        files = run.keep_until_the_end()
        # a replica is ready while there is a trainer, for the seconds that three steps take
        assert run.pods.ready >= {name for component, name in run.names.items() if component != "rollout"}
    assert [line.step for line in journal(files) if line.kind == "train"] == [0, 1, 2]
