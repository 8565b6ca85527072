"""The reward service over HTTP: health, Prometheus metrics, and the state of its environments."""

from __future__ import annotations

from fastapi import FastAPI

from headrace.net.service import create_app

from .hub import EnvironmentReport, Hub


def build_app(hub: Hub) -> FastAPI:
    app = create_app("Headrace reward", hub.problem, waits_for=hub.waits_for)

    @app.get("/v1/environments", summary="The environments, and whether each can score now")
    async def environments() -> list[EnvironmentReport]:
        return await hub.reports()

    return app
