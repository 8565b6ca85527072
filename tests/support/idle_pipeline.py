"""A pipeline of `headrace up` that starts no process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.cli.display import LineDisplay
from headrace.config import Config
from headrace.launch.pipeline import Pipeline
from headrace.net import credentials


@contextlib.contextmanager
def idle_pipeline(folder: Path, printed: io.StringIO | None = None, **sections: Any) -> Iterator[Pipeline]:
    """Yield the pipeline of run `r`, in `folder`, with these sections of the configuration. It prints into `printed`."""
    file = folder / credentials.FILE
    run = {"run": {"id": "r", "dir": str(folder)}, "security": {"credentials": str(file)}}
    config = Config.model_validate(run | sections)
    credentials.complete(file, credentials.list_roles(config, redis=True))
    display = LineDisplay(Console(file=printed or io.StringIO(), width=300))
    pipeline = Pipeline(config, folder / "config.yaml", None, {}, display)
    try:
        yield pipeline
    finally:
        pipeline.supervisor.close()
