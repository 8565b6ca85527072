"""The scripts of the image (deploy/bin) that pods run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.api_server import ApiServer, api_server
from tests.support.fork_server import TESTS
from tests.support.light_services import instead_of

ROOT = Path(__file__).parents[3]
BIN = ROOT / "deploy" / "bin"
CONFIG = """
run: {id: demo}
data: {train: {dataset_name: arithmetic, env_name: mine}}
env: {mine: {target: "mine:50400"}}
"""
COMPONENTS = ("redis", "replay", "reward", "rollout", "trainer", "page", "environment-mine")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ApiServer]:
    with api_server() as cluster:
        cluster.write_account(tmp_path / "account")
        yield cluster


def run(*argv: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, env=environ)


def make(cluster: ApiServer, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    config = folder / "run.yaml"
    config.write_text(CONFIG)
    told = {"PREFIX": "demo", "NAME": "demo", "RELEASE": "demo", "COMPONENTS": " ".join(COMPONENTS)}
    told |= {"CERTIFICATES": "yes", "OWN_SERVER": "yes", "SERVICE_ACCOUNT": str(folder / "account")}
    forked = instead_of(Path(tempfile.mkdtemp(dir=folder)))  # are the commands that it runs
    told |= {name: forked[name] for name in ("PYTHONPATH", TESTS)}
    return run(sys.executable, BIN / "make-kubernetes-secrets", config, **(told | cluster.variables | more))


def test_secrets_are_made_kept_and_their_certificates_renewed(cluster: ApiServer, tmp_path: Path) -> None:
    done = make(cluster, tmp_path)
    assert done.returncode == 0, done.stderr
    assert cluster.refused == []
    both = {f"demo-{name}-{kind}" for name in COMPONENTS for kind in ("credentials", "tls")}
    assert cluster.secrets.keys() == both | {"demo-authority-credentials"}
    before = {name: cluster.files(name) for name in cluster.secrets}
    assert b"operator " in before["demo-replay-credentials"]["credentials"]
    assert before["demo-environment-mine-credentials"]["credentials"].startswith(b"environment mine ")
    assert before["demo-redis-credentials"].keys() == {"users.acl"}
    assert before["demo-replay-tls"].keys() == {"tls.crt", "tls.key", "ca.crt"}
    assert cluster.secrets["demo-replay-tls"]["type"] == "kubernetes.io/tls"

    assert make(cluster, tmp_path).returncode == 0
    after = {name: cluster.files(name) for name in cluster.secrets}
    assert {name: files for name, files in after.items() if name.endswith("credentials")} == {
        name: files for name, files in before.items() if name.endswith("credentials")
    }
    for name in (f"demo-{component}-tls" for component in COMPONENTS):
        assert after[name]["ca.crt"] == before[name]["ca.crt"]
        assert after[name]["tls.crt"] != before[name]["tls.crt"]


def test_cert_manager_makes_the_certificates_alone(cluster: ApiServer, tmp_path: Path) -> None:
    assert make(cluster, tmp_path, CERTIFICATES="no").returncode == 0
    assert not [name for name in cluster.secrets if name.endswith("-tls")]


def test_a_component_that_the_run_lacks_is_named(cluster: ApiServer, tmp_path: Path) -> None:
    done = make(cluster, tmp_path, COMPONENTS="replay agents")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("error: the values have agents")


def test_of_pods_that_start_together_one_makes_the_model(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    headrace = tmp_path / "bin" / "headrace"
    headrace.write_text('#!/bin/sh\necho "$@" >> made\nmkdir "$3"\n')
    headrace.chmod(0o755)
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    argv = [BIN / "make-model", "tiny", "models"]
    started = [subprocess.Popen(argv, cwd=tmp_path, env=environ) for _ in range(4)]
    assert [process.wait() for process in started] == [0] * 4
    assert (tmp_path / "made").read_text() == "model tiny models\n"
