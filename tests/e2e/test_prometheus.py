"""A real Prometheus with the containers' configuration reads a running demo: every service answers it, it evaluates every alert, and every
chart of the dashboard has values."""

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

from tests.support.metrics import OBSERVABILITY, alerts, pages, panels, reader_token
from tests.support.ports import free_ports
from tests.support.up import DEMO, Up, demo_arguments
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

# Charts that are empty here, and why.
EMPTY = {
    **dict.fromkeys(
        ("Episodes, by outcome", "Running episodes", "Time of a call, by phase, p99"), "the demo has no agents"
    ),
    "Groups generated again, by cause": "no group was requeued: the rate of a counter without values",
    "Refused calls, by code": "no call was refused: the rate of a counter without values",
    "KL to the reference policy": "the demo trains without a reference policy",
}


class Prometheus:
    def __init__(self, folder: Path, targets: dict[str, str], token: str) -> None:
        (folder / "token").write_text(token)
        config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(OBSERVABILITY / name) for name in config["rule_files"]]
        # the same jobs, but found by their addresses, and read without TLS
        config["scrape_configs"] = [
            {
                "job_name": job["job_name"],
                "authorization": {"credentials_file": str(folder / "token")},
                "static_configs": [{"targets": found}],
            }
            for job in config["scrape_configs"]
            if (found := [_place(url) for name, url in targets.items() if _job(name) == job["job_name"]])
        ]
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
        found: list[dict[str, Any]] = self._read("query", query=expression).get("result", [])
        return found

    def rules(self) -> dict[str, dict[str, Any]]:
        """What became of the last evaluation of each alert."""
        return {rule["name"]: rule for group in self._read("rules").get("groups", []) for rule in group["rules"]}

    def _read(self, path: str, **question: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(
                f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(question)}", timeout=30
            ) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.URLError:  # it starts
            return {}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def _place(address: str) -> str:
    return urllib.parse.urlsplit(address).netloc


def _job(service: str) -> str:
    """The job that reads a service: replicas have a number."""
    return service.rstrip("-0123456789")


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
    services = {"page", "replay", "reward", "rollout", "trainer"}
    wait_until(lambda: {one["metric"]["job"] for one in prometheus.ask("up == 1")} == services)
    assert EMPTY.keys() <= {panel["title"] for panel in panels()}
    missing = {panel["title"]: panel["targets"] for panel in panels() if panel["title"] not in EMPTY}

    def all_had_values() -> bool:
        """Each chart at some moment: on a busy machine no ten seconds need have a step, a refit and a validation."""
        for title, targets in list(missing.items()):
            recent = [target["expr"].replace("[1m]", "[10s]").replace("[5m]", "[10s]") for target in targets]
            if any(map(prometheus.ask, recent)):
                del missing[title]
        return not missing

    wait_until(all_had_values)
    assert not prometheus.ask('ALERTS{alertname="ServiceDown"}')
    known = {rule["alert"] for rule in alerts()}
    wait_until(lambda: {name for name, rule in prometheus.rules().items() if rule["health"] == "ok"} == known)
