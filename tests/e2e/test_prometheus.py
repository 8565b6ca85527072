"""A real Prometheus reads a running demo: every service answers it, and every chart of the dashboard has values."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.metrics import OBSERVABILITY, pages, panels, reader_token
from tests.support.ports import free_ports
from tests.support.up import DEMO, Up, demo_arguments
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

# The demo has no episodes, and a chart of rates of what did not happen is empty.
EMPTY = ("Episodes, by outcome", "Running episodes", "Time of a call, by phase, p99", "Groups generated again, by cause",
         "Refused calls, by code", "KL to the reference policy")  # fmt: skip


class Prometheus:
    def __init__(self, folder: Path, targets: dict[str, str], token: str) -> None:
        (folder / "token").write_text(token)
        jobs = [
            {
                "job_name": name,
                "authorization": {"credentials_file": str(folder / "token")},
                "static_configs": [{"targets": [urllib.parse.urlsplit(address).netloc]}],
            }
            for name, address in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(OBSERVABILITY / "alerts.yml")],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )

    def ask(self, expression: str) -> list[dict[str, Any]]:
        question = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/query?{question}", timeout=30) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.URLError:  # it starts
            return []

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


@pytest.fixture
def prometheus(tmp_path: Path, warm_model: Path) -> Iterator[Prometheus]:
    arguments = demo_arguments(tmp_path, warm_model, "grpo.max_num_steps=1000", "grpo.max_num_epochs=100")
    up = Up(DEMO, *arguments, output=tmp_path / "up.out")
    try:
        up.wait_for("step 6:")
        prometheus = Prometheus(tmp_path, pages(up.said()), reader_token(tmp_path / "demo"))
        try:
            yield prometheus
        finally:
            prometheus.close()
    finally:
        up.stop(signal.SIGKILL)


def test_every_service_answers_and_every_chart_has_values(prometheus: Prometheus) -> None:
    services = {"replay", "reward", "rollout-1", "trainer"}
    wait_until(lambda: {one["metric"]["job"] for one in prometheus.ask("up == 1")} == services, within_s=60)
    wanted = {panel["title"]: panel["targets"] for panel in panels() if panel["title"] not in EMPTY}
    wait_until(
        lambda: (
            not [
                title
                for title, targets in wanted.items()
                if not any(
                    prometheus.ask(target["expr"].replace("[1m]", "[10s]").replace("[5m]", "[10s]"))
                    for target in targets
                )
            ]
        ),
        within_s=120,
    )
    assert not prometheus.ask('ALERTS{alertname="ServiceDown"}')
