"""The scripts of the image (deploy/bin) that pods run."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

ROOT = Path(__file__).parents[3]
BIN = ROOT / "deploy" / "bin"
CONFIG = """
run: {id: demo}
data: {train: {dataset_name: arithmetic, env_name: mine}}
env: {mine: {target: "mine:50400"}}
"""
COMPONENTS = ("redis", "replay", "reward", "rollout", "trainer", "page", "environment-mine")

Secret = dict[str, Any]


class Cluster:
    """An API server that keeps Secrets, and a service account that may use it."""

    def __init__(self, folder: Path) -> None:
        self.secrets: dict[str, Secret] = {}
        self.refused: list[str] = []
        authority = trustme.CA()
        secrets, refused = self.secrets, self.refused

        class Handler(BaseHTTPRequestHandler):
            def answer(self, status: int, body: object) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def name(self) -> str:
                *before, name = self.path.partition("?")[0].split("/")
                if before != ["", "api", "v1", "namespaces", "training", "secrets"] or not self.known():
                    refused.append(self.path)
                return name

            def known(self) -> bool:
                return self.headers["Authorization"] == "Bearer the-token"

            def do_GET(self) -> None:
                name = self.name()
                self.answer(200, secrets[name]) if name in secrets else self.answer(404, {})

            def do_PATCH(self) -> None:
                name = self.name()
                assert self.headers["Content-Type"] == "application/apply-patch+yaml"
                assert "fieldManager=" in self.path
                secrets[name] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(200, secrets[name])

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        account = folder / "account"
        account.mkdir()
        authority.cert_pem.write_to_path(str(account / "ca.crt"))
        (account / "token").write_text("the-token\n")
        (account / "namespace").write_text("training")
        self.environ = {
            "SERVICE_ACCOUNT": str(account),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.server.server_port),
        }

    def files(self, name: str) -> dict[str, bytes]:
        return {key: base64.b64decode(value) for key, value in self.secrets[name]["data"].items()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    thread = threading.Thread(target=cluster.server.serve_forever)
    thread.start()
    yield cluster
    cluster.server.shutdown()
    thread.join()
    cluster.server.server_close()


def run(*argv: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, env=environ)


def make(cluster: Cluster, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    config = folder / "run.yaml"
    config.write_text(CONFIG)
    told = {"PREFIX": "demo", "NAME": "demo", "RELEASE": "demo", "COMPONENTS": " ".join(COMPONENTS)}
    told |= {"CERTIFICATES": "yes", "OWN_SERVER": "yes"}
    return run(sys.executable, BIN / "make-kubernetes-secrets", config, **(told | cluster.environ | more))


def test_secrets_are_made_kept_and_their_certificates_renewed(cluster: Cluster, tmp_path: Path) -> None:
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


def test_cert_manager_makes_the_certificates_alone(cluster: Cluster, tmp_path: Path) -> None:
    assert make(cluster, tmp_path, CERTIFICATES="no").returncode == 0
    assert not [name for name in cluster.secrets if name.endswith("-tls")]


def test_a_component_that_the_run_lacks_is_named(cluster: Cluster, tmp_path: Path) -> None:
    done = make(cluster, tmp_path, COMPONENTS="replay agents")
    assert done.returncode != 0
    assert "agents" in done.stderr.splitlines()[-1]


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
