"""The files with which Prometheus and Grafana watch a run (deploy/observability)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.metrics import OBSERVABILITY, alerts, expressions

ROOT = OBSERVABILITY.parents[1]


def promtool(*arguments: object) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_current(tmp_path: Path) -> None:
    fresh = tmp_path / "headrace.json"
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_dashboard.py", fresh], check=True)
    assert fresh.read_text() == (OBSERVABILITY / "grafana" / "headrace.json").read_text(), "run `make docs`"


def test_prometheus_takes_its_configuration_and_every_expression(tmp_path: Path) -> None:
    promtool("check", "config", "--syntax-only", OBSERVABILITY / "prometheus.yml")
    promtool("check", "rules", OBSERVABILITY / "alerts.yml")
    rules = [{"record": f"r{number}", "expr": expression} for number, expression in enumerate(expressions().values())]
    written = tmp_path / "rules.yml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", written)


def test_every_service_of_the_compose_file_is_read() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())["services"]
    ports = {
        name: int(re.findall(r"\d+", str(service["healthcheck"]["test"]))[0])
        for name, service in services.items()
        if service.get("healthcheck", {}).get("test", [""])[:2] == ["CMD", "ready"]
    }
    jobs = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"]
    read = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs}
    assert {name: discovered["port"] for name, discovered in read.items()} == ports
    assert all(discovered["names"] == [name] for name, discovered in read.items())
    assert all(job["tls_config"]["server_name"] == job["job_name"] and "authorization" in job for job in jobs)


def test_services_export_traces_to_the_tempo_that_grafana_reads() -> None:
    """Tempo itself is not here to take its configuration: what has to agree, agrees."""
    services = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())["services"]
    tempo = yaml.safe_load((OBSERVABILITY / "tempo.yml").read_text())
    taken = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]
    for name in ("replay", "reward", "rollout", "agents", "trainer"):
        environment = services[name]["environment"]
        scheme, host, port = re.fullmatch(r"(\w+)://(\w+):(\d+)", environment["OTEL_EXPORTER_OTLP_ENDPOINT"]).groups()  # type: ignore[union-attr]
        assert (scheme, host, port) == ("https", "tempo", taken["endpoint"].rpartition(":")[2])
        assert environment["OTEL_EXPORTER_OTLP_CERTIFICATE"] == environment["HEADRACE_SECURITY__TLS_CA"]
        assert environment["HEADRACE_TELEMETRY__ENABLED"] == "${TRACES:-false}", "off unless it is asked for"
    mounts = dict(volume.split(":")[:2] for volume in services["tempo"]["volumes"])
    assert set(taken["tls"].values()) == {f"{mounts['secrets-tempo']}/tls.{end}" for end in ("pem", "key")}
    assert all(tempo["storage"]["trace"][kind]["path"].startswith(f"{mounts['tempo']}/") for kind in ("local", "wal"))
    sources = yaml.safe_load((OBSERVABILITY / "grafana" / "datasources.yml").read_text())["datasources"]
    (source,) = (each for each in sources if each["type"] == "tempo")
    assert source["url"] == f"http://tempo:{tempo['server']['http_listen_port']}"


# What makes each alert fire, and what does not: series of values a minute apart.
FIRING: Mapping[str, tuple[str, str, str]] = {
    "ServiceDown": ('up{job="rollout", instance="a"}', "0x90", "1x90"),
    "NoVerifiedReplica": ('headrace_replay_replicas{state="HEALTHY"}', "0x90", "2x90"),
    "ReplicaQuarantined": ('headrace_replay_replicas{state="QUARANTINED"}', "1x90", "0x90"),
    "SlowWeightChannel": ("headrace_trainer_weight_channel_alarm", "2x90", "0x90"),
    "BufferFull": ("headrace_replay_full", "4096x90", "0x90"),
    "EnvironmentBroken": ('headrace_replay_environment_broken{environment="math"}', "1x90", "0x90"),
    "PromptsFail": ("headrace_trainer_failed_prompts_total", "0+1x90", "7x90"),
    "SelectionBias": ('headrace_replay_selection_bias{quantity="length"}', "-0.3x90", "0.1x90"),
    "NoProgress": ("headrace_trainer_step", "12x90", "0+1x90"),
    "Collapsed": ("headrace_trainer_collapse_alarm", "1x90", "0x90"),
    "TrainerAndInferenceDisagree": ("headrace_trainer_train_inference_alarm", "1x90", "0x90"),
    "NothingToLearn": ("headrace_trainer_equal_rewards_alarm", "1x90", "0x90"),
    "TrainerWaits": ("headrace_trainer_efficiency_idle_buffer_starvation_pct", "80x90", "3x90"),
}


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert FIRING.keys() == {rule["alert"] for rule in alerts()}
    rules = tmp_path / "without_words.yml"
    bare = [{key: rule[key] for key in ("alert", "expr", "for") if key in rule} for rule in alerts()]
    rules.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": bare}]}))

    def case(values: int, name: str) -> dict[str, Any]:
        series = FIRING[name][0]
        labels = dict(re.findall(r'(\w+)="(\w+)"', series))
        if name == "NoVerifiedReplica":  # a sum has no labels
            labels = {}
        expected = [{"exp_labels": labels}] if values == 1 else []
        return {
            "interval": "1m",
            "input_series": [{"series": series, "values": FIRING[name][values]}],
            "alert_rule_test": [{"eval_time": "80m", "alertname": name, "exp_alerts": expected}],
        }

    tests = tmp_path / "tests.yml"
    cases = [case(values, name) for name in FIRING for values in (1, 2)]
    tests.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", tests)


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["annotations"].keys() == {"summary", "description"}
    pages = re.findall(r"docs/([\w-]+\.md)(?:, ([^).]+))?", rule["annotations"]["description"])
    assert pages
    for page, heading in pages:
        text = (ROOT / "docs" / page).read_text()
        assert not heading or re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
