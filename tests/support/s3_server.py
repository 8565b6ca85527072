"""A server of S3's protocol, as far as checkpoints use it, whose answers a test may spoil. Its objects are in memory, or where a test puts
them.

moto's server can't take its place: of two conditional puts that meet both may succeed (it looks, and then writes, without a lock), it keeps
objects in its memory alone (a chaos run kills its store), it takes 4 ms of a core for a request (this one 0.3), and it asks for
python-dateutil below 3, which would be in every lock. At nightly size, checkpoints go through it too (`moto_server`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import math
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import httpx
import pytest

from tests.support.own_python import own_python
from tests.support.ports import free_port, listens
from tests.support.waiting import wait_until

KEY = "test-key"
# In place of a status: the connection ends without an answer; the server does what it was asked, and says that it failed; or its answer
# breaks off in the middle.
CUT, DONE, HALF = -1, -2, -3
Spoil = Callable[[str, str], int | None]  # of the method and the object's name: the status of an error


@dataclasses.dataclass
class Stored:
    data: bytes
    meta: dict[str, str]


class S3Server:
    """Its bucket is `bucket`. `spoil` may give a request another answer; `requests` are those that it got, as `PUT name`; each takes
    `seconds` at least. It sends objects at most at `rate` bytes a second, all together; `sent_bytes` are those so far."""

    makes_twice = False  # it has no conditional put

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.objects: MutableMapping[str, Stored] = {}
        self.uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = {}
        self.requests: list[str] = []
        self.spoil: Spoil = lambda method, name: None
        self.seconds = 0.0
        self.rate = math.inf
        self.sent_bytes = 0
        self._free_at = 0.0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer((host, port), type("Of", (_Handler,), {"store": self}))
        self.server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.server.server_port}"

    def pace(self, size: int) -> None:
        """Wait for the turn of so many bytes."""
        with self.lock:
            self.sent_bytes += size
            self._free_at = max(self._free_at, time.monotonic()) + size / self.rate
            wait_s = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_s))

    def names(self, part: str = "") -> list[str]:
        return sorted(name for name in self.objects if part in name)

    def sent(self, part: str) -> list[str]:
        """The puts of objects and their parts whose names contain this, so far."""
        return [request for request in self.requests if request.startswith("PUT") and part in request]


def environ(endpoint: str) -> dict[str, str]:
    """What leads to the server there, and lets in."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server, to whose bucket the environment leads while the context is open."""
    store = S3Server()
    thread = threading.Thread(target=store.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    for name, value in environ(store.endpoint).items():
        monkeypatch.setenv(name, value)
    try:
        yield store
    finally:
        store.server.shutdown()
        store.server.server_close()
        thread.join()


@contextlib.contextmanager
def moto_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """moto's server, from a Python of its own in `folder`. The environment leads to its `bucket` while the context is open."""
    port = free_port()
    argv = [str(own_python(folder, "moto")), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: listens(port))
            for name, value in environ(f"http://127.0.0.1:{port}").items():
                monkeypatch.setenv(name, value)
            # whose region and service it reads from this
            said = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20261001/us-east-1/s3/aws4_request"}
            httpx.put(f"http://127.0.0.1:{port}/bucket", headers=said).raise_for_status()
            yield
        finally:
            server.kill()


class _Handler(BaseHTTPRequestHandler):
    store: S3Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body of an answer waits until its head is acknowledged, for 40 ms

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        bucket, _, name = unquote(url.path).removeprefix("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        store = self.store
        time.sleep(store.seconds)
        with store.lock:
            store.requests.append(f"{self.command} {name}{'?' + url.query if query else ''}")
        spoiled = store.spoil(self.command, name)
        if spoiled == CUT:
            self.close_connection = True
        elif spoiled in (DONE, HALF):
            way, said = self.wfile, io.BytesIO()
            self.wfile = said
            with store.lock:
                self._answer(name, query, body)
            self.wfile = way
            if spoiled == DONE:
                self._fail(500, "InternalError")
            else:
                way.write(said.getvalue()[: len(said.getvalue()) // 2])
                self.close_connection = True
        elif spoiled is not None:
            self._fail(spoiled, "SlowDown" if spoiled == 503 else "Spoiled")
        elif f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._fail(403, "InvalidAccessKeyId")
        elif bucket != "bucket":
            self._fail(404, "NoSuchBucket")
        else:
            if self.command == "GET" and (stored := store.objects.get(name)) is not None:
                store.pace(len(stored.data))
            with store.lock:
                self._answer(name, query, body)

    def _answer(self, name: str, query: dict[str, str], body: bytes) -> None:
        match self.command:
            case "GET" if not name:
                self._list(query)
            case "PUT" if "uploadId" in query:
                self.store.uploads[query["uploadId"]][2][int(query["partNumber"])] = body
                self._reply(200, etag=_etag(body))
            case "PUT":
                exists = name in self.store.objects and not self.store.makes_twice
                if exists and self.headers.get("If-None-Match") == "*":
                    self._fail(412, "PreconditionFailed")
                else:
                    self.store.objects[name] = Stored(body, self._meta())
                    self._reply(200, etag=_etag(body))
            case "POST" if "uploads" in query:
                upload = secrets.token_hex(8)
                self.store.uploads[upload] = name, self._meta(), {}
                self._reply(
                    200, f"<R><Bucket>bucket</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId></R>"
                )
            case "POST" if "uploadId" in query:
                target, meta, parts = self.store.uploads.pop(query["uploadId"])
                data = b"".join(parts[number] for number in sorted(parts))
                self.store.objects[target] = Stored(data, meta)
                self._reply(200, f"<R><ETag>{escape(_etag(data))}</ETag></R>")
            case "POST" if "delete" in query:
                keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
                for key in keys:
                    self.store.objects.pop(unescape(key), None)
                deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                self._reply(200, f"<DeleteResult>{deleted}</DeleteResult>")
            case "DELETE":
                self.store.uploads.pop(query.get("uploadId", ""), None)
                if "uploadId" not in query:
                    self.store.objects.pop(name, None)
                self._reply(204)
            case "GET" | "HEAD":
                self._get(name)

    def _get(self, name: str) -> None:
        stored = self.store.objects.get(name)
        if stored is None:
            self._fail(404, "NoSuchKey")
            return
        data, size, status, headers = stored.data, len(stored.data), 200, dict(stored.meta)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2]), size - 1)
            data, status = data[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        headers["Last-Modified"] = "Thu, 01 Oct 2026 00:00:00 GMT"
        self._reply(status, data, etag=_etag(stored.data), **headers)

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, prefixes = "", set[str]()
        for name in self.store.names():
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in name[len(prefix) :]:
                prefixes.add(prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            data = self.store.objects[name].data
            found += (
                f"<Contents><Key>{escape(name)}</Key><LastModified>2026-10-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(_etag(data))}</ETag><Size>{len(data)}</Size></Contents>"
            )
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(prefixes)
        )
        self._reply(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>")

    def _meta(self) -> dict[str, str]:
        return {key: value for key, value in self.headers.items() if key.lower().startswith("x-amz-meta-")}

    def _fail(self, status: int, code: str) -> None:
        self._reply(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def _reply(self, status: int, body: str | bytes = b"", etag: str = "", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for key, value in {**headers, **({"ETag": etag} if etag else {})}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
