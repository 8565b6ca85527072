"""TLS: certificate files, read again when they change, and the contexts for HTTP servers and clients."""

from __future__ import annotations

import dataclasses
import logging
import ssl
from pathlib import Path

from headrace.base.errors import ConfigError

_log = logging.getLogger("headrace.security")


@dataclasses.dataclass(frozen=True)
class CertificateFiles:
    """A certificate chain and its private key, in PEM."""

    chain: Path
    key: Path

    def signature(self) -> tuple[int, ...]:
        """Return values that change whenever one of the files does."""
        states = [path.stat() for path in (self.chain, self.key)]
        return tuple(value for state in states for value in (state.st_mtime_ns, state.st_size, state.st_ino))

    def context(self) -> ssl.SSLContext:
        """Return a server's context. Raises `ConfigError` naming a file that can't be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.chain, self.key)
        except OSError as error:  # SSLError is one
            raise ConfigError(
                f"security.tls_cert {self.chain} with security.tls_key {self.key} can't be used ({error.strerror or error}); "
                "`headrace certs` makes both"
            ) from error
        return context


class Reloading:
    """A certificate that is read again when its files change, for the next handshake.

    While new files can't be used (half of them written), the last good ones stay in use.
    """

    def __init__(self, files: CertificateFiles) -> None:
        """Load the files. Raises `ConfigError`."""
        self.files = files
        self._context = files.context()
        self._signature = files.signature()

    def reload(self) -> bool:
        """Whether the files changed since the last call, and can be used."""
        try:
            signature = self.files.signature()
            if signature == self._signature:
                return False
            self._context = self.files.context()
        except (OSError, ConfigError) as error:
            _log.warning("the last certificate stays in use: %s", error)
            return False
        self._signature = signature
        _log.info("security.tls_cert %s was read again", self.files.chain)
        return True

    def context(self) -> ssl.SSLContext:
        """Return a server's context whose handshakes use the current certificate."""
        outer = self._context

        def before_handshake(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            self.reload()
            connection.context = self._context

        outer.sni_callback = before_handshake  # called without a name (SNI) too
        return outer


def client_context(authorities: str | None, key: str = "security.tls_ca") -> ssl.SSLContext:
    """Return a client's context that trusts `authorities` (a PEM file, the value of `key`), or the system's if None. Raises
    `ConfigError`."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise ConfigError(
            f"{key} {authorities} can't be used ({error.strerror or error}); give the certificates (PEM) of the authority, for a run's own "
            "services the ca.pem that `headrace certs` made"
        ) from error


def trusting(authorities: str | None, file: Path) -> dict[str, str]:
    """Return environment variables by which a user's program trusts `authorities` (`security.tls_ca`) in addition to those that it trusts
    already, because a gateway that it calls may present a certificate of theirs. OpenSSL and httpx read the first variable, requests the
    second; `file` is written with all authorities. Empty without `authorities`. Raises `ConfigError`."""
    if authorities is None:
        return {}
    import certifi

    client_context(authorities)
    # SSL_CERT_FILE, if that is set and exists, or the machine's own
    known = ssl.get_default_verify_paths().cafile or certifi.where()
    file.write_bytes(b"\n".join(Path(source).read_bytes() for source in (known, authorities)))
    return dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(file))
