"""deploy/docker-compose.yml: what a container may do, what others reach, and where secrets go. (That it runs, an engine must show.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[3] / "deploy" / "docker-compose.yml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "redis"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_can_do_nothing_but_its_work(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("cap_add", []) == (["CHOWN", "DAC_OVERRIDE"] if name == "secrets" else [])


def test_one_image_is_built_once() -> None:
    assert [name for name, service in SERVICES.items() if "build" in service] == ["secrets"]
    assert {(service["image"], service["pull_policy"]) for service in OURS.values()} == {("headrace", "never")}


def test_nothing_is_reached_from_other_machines() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_each_service_has_its_own_secrets_alone() -> None:
    for name in ("redis", "replay", "reward", "rollout", "agents", "trainer"):
        mounted = [volume for volume in SERVICES[name]["volumes"] if volume.startswith("secrets")]
        assert mounted == [f"secrets-{name}:/run/headrace:ro"]
    assert not [volume for volume in SERVICES["model"]["volumes"] if "secrets" in volume]


def test_the_hubs_token_goes_where_models_are_loaded() -> None:
    with_token = {name for name, service in SERVICES.items() if "HF_TOKEN" in service.get("environment", {})}
    assert with_token == {"rollout", "trainer"}


def test_services_speak_tls_and_ask_for_tokens() -> None:
    for name in ("replay", "reward", "rollout", "agents", "trainer"):
        environment = SERVICES[name]["environment"]
        assert environment["HEADRACE_REPLAY__REDIS_URL"].startswith("rediss://")
        assert {key for key in environment if key.startswith("HEADRACE_SECURITY__")} == {
            f"HEADRACE_SECURITY__{key}" for key in ("TLS_CERT", "TLS_KEY", "TLS_CA", "CREDENTIALS")
        }
    assert "--port 0 --tls-port 6379" in " ".join(SERVICES["redis"]["command"])
