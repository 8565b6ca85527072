"""Section `security`: credentials and TLS of everything that listens."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace.config.in_yaml import in_yaml
from headrace.config.marks import AnyPath
from headrace.config.section import Section


class SecurityConfig(Section):
    """Credentials and TLS. Every machine has its own files; docs/security.md lists what each token permits."""

    insecure: bool = Field(
        False, description="listen and connect beyond the loopback interface without TLS and credentials"
    )
    credentials: AnyPath[str | None] = Field(
        None,
        description="file with a line `ROLE TOKEN` for each token; null: `headrace up` makes one in the run's folder, and a service "
        "started by hand requires no token",
    )
    tls_cert: AnyPath[str | None] = Field(
        None, description="this machine's certificate chain (PEM); `headrace certs` makes one"
    )
    tls_key: AnyPath[str | None] = Field(None, description="private key (PEM) of tls_cert")
    tls_ca: AnyPath[str | None] = Field(
        None,
        description="certificates (PEM) of the authorities that signed the other machines' certificates; null: the system's",
    )
    hosts: list[str] = Field(
        [], description="further names under which browsers and clients may reach this machine's HTTP services"
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> SecurityConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                f"tls_cert {in_yaml(self.tls_cert)} with tls_key {in_yaml(self.tls_key)}: give both, or neither"
            )
        return self

    @property
    def tls(self) -> bool:
        """Whether the run's gRPC connections to the hub, and beyond the loopback interface, use TLS."""
        return self.tls_cert is not None or self.tls_ca is not None
