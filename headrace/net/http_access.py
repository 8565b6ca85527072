"""Access control of a service's HTTP API: by a bearer token, or by a browser's session.

`/healthz` is open. Reading (GET, HEAD) requires the token of a reader or the operator, everything else the operator's; `HttpAccess.posts`
lists what a service opens to further roles. Without credentials in the configuration (a service started by hand on the loopback interface)
no token is required, but other sites still can't misuse a browser. Host must be a name of this service (DNS rebinding), and a write must
come from the service's own pages, as JSON (cross-site requests).

A browser signs in with a code that works once. `headrace up` and `headrace page` write it to a file and print it in the fragment of an
address, which browsers don't send. The page posts it to `/session` and gets a cookie in return. The cookie is signed with the operator's
token: it ends after a week, or when that token is revoked.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.tls import CertificateFiles
from headrace.net.credentials import Credentials, load_credentials, write

if TYPE_CHECKING:
    from fastapi.responses import Response

    from headrace.config import Config

CODE = "code"  # the file in the run's folder
SESSION = "/session"
_SESSION_S = 7 * 24 * 3600
_LONGEST_SIGN_IN = 1024
_READS = ("GET", "HEAD")
_SIGN_IN_SCRIPT = """
const code = new URLSearchParams(location.hash.slice(1)).get("code");
const say = (text) => { document.querySelector("p").textContent = text; };
if (code) {
  history.replaceState(null, "", location.pathname + location.search);
  fetch("/session", {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({code})})
    .then((answer) => answer.ok ? location.reload() : say("This address has been used. `headrace page RUN` prints another."));
}
"""
_SIGN_IN_PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Headrace</title></head><body>'
    "<p>Sign in with the address that <code>headrace up</code> printed; <code>headrace page RUN</code> prints another.</p>"
    f"<script>{_SIGN_IN_SCRIPT}</script></body></html>\n"
)
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SIGN_IN_SCRIPT.encode()).digest()).decode()
_NOTHING_ELSE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_SIGN_IN_POLICY = f"default-src 'none'; script-src 'sha256-{_SCRIPT_HASH}'; connect-src 'self'; {_NOTHING_ELSE}"
_HEADERS = {
    "content-security-policy": f"default-src 'none'; {_NOTHING_ELSE}",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@dataclasses.dataclass(frozen=True)
class Denial:
    status: int
    reason: str


@dataclasses.dataclass(frozen=True)
class HttpAccess:
    """The access rules of a service."""

    credentials: Credentials | None
    hosts: frozenset[str]  # names, without ports; addresses and `localhost` are always allowed
    certificate: CertificateFiles | None = None
    code: Path | None = None  # the file with the one-time code
    cookie: str = "headrace"  # name of the session's cookie, the same for all services of a run
    # paths that other roles than the operator may POST to; those roles read nothing
    posts: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, host: str, posts: Mapping[str, frozenset[str]] | None = None) -> HttpAccess:
        """Return the access rules of a service that listens on `host`. Raises `ConfigError` for credentials that can't be used."""
        security = config.security
        names = {host, socket.gethostname(), *security.hosts}
        if config.rollout.advertise_host is not None:
            names.add(config.rollout.advertise_host)
        certificate = None
        if security.tls_cert is not None and security.tls_key is not None:
            certificate = CertificateFiles(Path(security.tls_cert), Path(security.tls_key))
            names |= names_in(certificate.chain)
        return cls(
            credentials=load_credentials(config),
            hosts=frozenset(name.lower() for name in names),
            certificate=certificate,
            code=None if config.run.id is None else code_file(config.run_folder),
            cookie=f"headrace-{config.run.id}",
            posts=posts or {},
        )

    def refusal(self, method: str, path: str, headers: Mapping[str, str], now: float) -> Denial | None:
        """Return why the request is refused, or None. `headers` are by lower-case name; `now` is the Unix time in seconds."""
        reads = method in _READS
        if path == "/healthz" and reads:
            return None
        if not self._is_here(headers.get("host", "")):
            return Denial(
                403,
                f"Host {headers.get('host', '')!r:.100} is not a name of this service; add it to security.hosts, or call the service by "
                "its address",
            )
        if path == SESSION and method == "POST":
            return self._cross_site(headers)
        by_token = self._role(headers)
        role = by_token or ("operator" if self._has_session(headers, now) else None)
        if self.credentials is not None:
            if role is None:
                return Denial(401, "give the token of a reader or the operator as `Authorization: Bearer TOKEN`")
            posts = method == "POST" and path in self.posts.get(role, ())
            if role != "operator" and not posts and not (role == "reader" and reads):
                return Denial(403, f"the token of {role!r} doesn't allow {method} here")
        if reads:
            return None
        if self.credentials is not None and by_token is None and "origin" not in headers:
            return Denial(403, "Origin is missing: a browser's session may write only from this service's pages")
        return self._cross_site(headers)

    def exchange(self, body: bytes, now: float, *, secure: bool) -> str | None:
        """Return the `Set-Cookie` header for a request with the one-time code; None for any other."""
        if self.credentials is None or self.code is None:
            return None
        try:
            presented = json.loads(body)["code"].encode()
            code = self.code.read_bytes()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
            return None
        if not hmac.compare_digest(presented, code):
            return None
        try:
            self.code.unlink()  # of two requests with the code, one succeeds
        except OSError:  # used meanwhile, or the folder is read-only
            return None
        expires = f"{now + _SESSION_S:.0f}"
        value = f"{expires}.{self._sign(expires, self.credentials.token('operator'))}"
        flags = f"Path=/; Max-Age={_SESSION_S}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"
        return f"{self.cookie}={value}; {flags}"

    def _is_here(self, host: str) -> bool:
        name = host.lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] if ":" in name else name
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name == "localhost" or name in self.hosts
        return True  # unlike a name, an address can't be redirected

    def _cross_site(self, headers: Mapping[str, str]) -> Denial | None:
        """Return why a write may come from another site, or None."""
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
            return Denial(403, f"Origin {origin!r:.100} is another site")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return Denial(415, "send `Content-Type: application/json`")
        return None

    def _role(self, headers: Mapping[str, str]) -> str | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if self.credentials is None or scheme.lower() != "bearer":
            return None
        return self.credentials.role(token.strip())

    def _has_session(self, headers: Mapping[str, str], now: float) -> bool:
        if self.credentials is None:
            return False
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        expires, _, signature = (morsel.value if morsel else "").partition(".")
        if not (expires.isascii() and expires.isdecimal() and len(expires) < 20) or int(expires) < now:
            return False
        return any(
            hmac.compare_digest(self._sign(expires, token).encode(), signature.encode())
            for token in self.credentials.tokens("operator")
        )

    def _sign(self, expires: str, operator: str) -> str:
        return hmac.new(operator.encode(), f"{self.cookie} {expires}".encode(), hashlib.sha256).hexdigest()


class Guard:
    """An ASGI application that answers for `app` when `access` refuses, and adds the headers of every answer."""

    def __init__(self, app: Any, access: HttpAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no service has websockets; without an answer one is closed
            return
        # a repeated header has both values
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        denial = self._access.refusal(scope["method"], scope["path"], headers, time.time())
        if denial is not None:
            page = denial.status == 401 and scope["method"] == "GET" and "text/html" in headers.get("accept", "")
            await _refusing(denial, page=page)(scope, receive, with_headers(send))
            return
        if scope["path"] == SESSION and scope["method"] == "POST":
            await self._sign_in(scope, receive, send)
            return
        await self._app(scope, receive, with_headers(send))

    async def _sign_in(self, scope: Any, receive: Any, send: Any) -> None:
        from fastapi.responses import Response

        body, more = b"", True
        while more and len(body) <= _LONGEST_SIGN_IN:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        cookie = self._access.exchange(body, time.time(), secure=scope.get("scheme") == "https")
        if cookie is None:
            reason = "the code is wrong, or was already used; `headrace page RUN` prints another"
            response = _refusing(Denial(401, reason))
        else:
            response = Response(status_code=204, headers={"set-cookie": cookie})
        await response(scope, receive, with_headers(send))


def new_code(run_folder: Path) -> str:
    """Write a one-time code for the run's services, replacing an older one, and return it. Raises `ConfigError`."""
    code = secrets.token_urlsafe(24)
    write(code_file(run_folder), code)
    return code


def code_file(run_folder: Path) -> Path:
    """Return the path of the one-time code of a run's services: in its folder, or, for a service that may only read that, in the cache
    folder of its user."""
    there = run_folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if os.access(there, os.W_OK):
        return run_folder / CODE
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "headrace" / CODE / hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:32]


def _refusing(denial: Denial, *, page: bool = False) -> Response:
    from fastapi.responses import HTMLResponse, JSONResponse

    headers = {"www-authenticate": "Bearer"} if denial.status == 401 else {}
    if page:
        return HTMLResponse(_SIGN_IN_PAGE, denial.status, headers | {"content-security-policy": _SIGN_IN_POLICY})
    return JSONResponse({"detail": denial.reason}, denial.status, headers)


def with_headers(send: Any, headers: Mapping[str, str] = _HEADERS) -> Any:
    """Return the `send` of ASGI that adds those of `headers` which an answer does not have."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name.lower() for name, _ in given}
            added = [(n.encode(), v.encode()) for n, v in headers.items() if n.encode() not in names]
            message = {**message, "headers": given + added}
        await send(message)

    return sending


def names_in(certificate: Path) -> set[str]:
    """Return the DNS names in a certificate; none if it can't be read, which is reported when a service uses it."""
    from cryptography import x509

    try:
        names = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except (OSError, ValueError, x509.ExtensionNotFound):
        return set()
    return set(names.value.get_values_for_type(x509.DNSName))
