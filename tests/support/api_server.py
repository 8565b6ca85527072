"""A stand-in for a cluster's API server, which keeps Secrets."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme

from tests.support.http_server import Quiet, serving

NAMESPACE, TOKEN = "training", "the-token"


class ApiServer:
    """It answers who presents the token of its service account. `refused` are the paths of other requests."""

    def __init__(self, host: str) -> None:
        self.secrets: dict[str, Any] = {}
        self.refused: list[str] = []
        self.authority = trustme.CA()
        secrets, refused = self.secrets, self.refused

        class Handler(Quiet):
            def answer(self, status: int, body: object) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def name(self) -> str:
                *before, name = self.path.partition("?")[0].split("/")
                known = self.headers["Authorization"] == f"Bearer {TOKEN}"
                if before != ["", "api", "v1", "namespaces", NAMESPACE, "secrets"] or not known:
                    refused.append(self.path)
                return name

            def do_GET(self) -> None:
                name = self.name()
                self.answer(200, secrets[name]) if name in secrets else self.answer(404, {})

            def do_PATCH(self) -> None:
                name = self.name()
                assert self.headers["Content-Type"] == "application/apply-patch+yaml"
                assert "fieldManager=" in self.path
                secrets[name] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(200, secrets[name])

        self.handler = Handler
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(host).configure_cert(self.context)
        self.variables: dict[str, str] = {}  # what Kubernetes sets in every pod

    def write_account(self, folder: Path) -> None:
        """Write what a pod with the service account finds in its volume."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ca.crt").write_bytes(self.authority.cert_pem.bytes())
        (folder / "token").write_text(f"{TOKEN}\n")
        (folder / "namespace").write_text(NAMESPACE)

    def files(self, name: str) -> dict[str, bytes]:
        return {key: base64.b64decode(value) for key, value in self.secrets[name]["data"].items()}


@contextmanager
def api_server(host: str = "127.0.0.1") -> Iterator[ApiServer]:
    server = ApiServer(host)
    with serving(server.handler, host, server.context) as address:
        port = address.removeprefix(f"{host}:")
        server.variables |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        yield server
