"""Services that need no buffer, for `light_services`: they import next to nothing, because each is a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from headrace.config import Config
from headrace.net.service import admitting, stop_on_signals
from headrace.run.history import CURVES


def ample_memory(config: Config, site: object) -> SimpleNamespace:
    """In place of the plan of the devices' memory, for which torch is imported."""
    verdict = SimpleNamespace(problem=None, shares=None, warnings=[])
    return SimpleNamespace(judge=lambda: verdict)


def idle_reward(config: Config) -> None:
    """Says that it is ready and can't score yet with the environments that are started beside it, and scores nothing."""
    found = [{"name": name, "ready": False, "message": "nothing is scored here"} for name in config.started]
    _answer(config, itertools.repeat(json.dumps(found).encode()))


def hanging_reward(config: Config) -> None:
    """Says that it is ready, and answers nothing after that."""
    _answer(config, iter([b""]))


def _answer(config: Config, answers: Iterator[bytes]) -> None:
    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            for answer in answers:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)
                return
            threading.Event().wait()

    with admitting(config.reward.http_port):
        server = ThreadingHTTPServer((config.reward.host, config.reward.http_port), Pages)
    with server:
        server.serve_forever()


def idle_rollout(config: Config) -> None:
    """Waits, and leaves behind a child of its own, an engine that hangs: to end it is left to what runs the service."""

    async def wait() -> None:
        stop = stop_on_signals()
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])  # noqa: ASYNC220
        await stop.wait()

    asyncio.run(wait())


def recording_trainer(config: Config) -> None:
    """Leaves behind what six steps record, an empty page of curves among it, and trains nothing."""
    import shutil
    import tempfile

    from tests.support.page_runs import recorded_run

    with tempfile.TemporaryDirectory() as folder:
        recorded = recorded_run(Path(folder))
        for name in ("metrics.jsonl", "logs", "groups", "checkpoints"):
            place = config.run_folder / name
            if (recorded / name).is_dir():
                shutil.copytree(recorded / name, place, dirs_exist_ok=True)
            else:
                shutil.copy(recorded / name, place)
    (config.run_folder / CURVES).touch()  # else the supervisor imports what draws them, and draws
