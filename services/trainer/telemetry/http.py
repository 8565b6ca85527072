"""The trainer over HTTP: health, Prometheus, and the curves of the run at `/`."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from headrace.config import Config
from headrace.service import Ready, create_app
from services.trainer.telemetry import page
from services.trainer.telemetry.journal import JOURNAL, read_journal, surviving

REFRESH_S = 10


def build_app(config: Config, ready: Ready) -> FastAPI:
    app = create_app("Headrace trainer", ready)

    def curves() -> str:
        lines = surviving(read_journal(config.run_folder / JOURNAL))
        return page.render(lines, f"Headrace, run {config.run.id}", page.standing(lines), REFRESH_S)

    @app.get("/", summary="The curves of the run", response_class=HTMLResponse)
    async def main_page() -> HTMLResponse:
        return HTMLResponse(await asyncio.to_thread(curves))

    return app
