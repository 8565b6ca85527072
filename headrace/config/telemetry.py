"""`telemetry`: traces of a run, in OpenTelemetry. `enabled` and `service_name` are keys of NeMo RL."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from headrace.config.section import Section

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class TelemetryConfig(Section):
    """Where traces go, and how, is in OpenTelemetry's own variables: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_PROTOCOL`,
    `OTEL_EXPORTER_OTLP_HEADERS`, …"""

    enabled: bool | None = Field(
        None,
        description="export traces over OTLP, to OTEL_EXPORTER_OTLP_ENDPOINT or else to this machine; null: if that variable is set. Needs "
        "`pip install 'headrace[tracing]'`",
    )
    service_name: str = Field(
        "headrace", min_length=1, description="service.name of a service's spans is this, followed by - and the service"
    )
    sampled_groups: float = Field(
        1.0, ge=0, le=1, description="share of the groups, and of the trainer's steps, that are traced"
    )

    def endpoint(self, variables: Mapping[str, str]) -> str | None:
        """Return where a process with these environment variables exports traces to; None if it doesn't."""
        given = next((value for name in _ENDPOINTS if (value := variables.get(name))), None)
        if self.enabled is None:
            return None if variables.get("OTEL_SDK_DISABLED") == "true" else given
        return (given or "this machine") if self.enabled else None
