"""The models that `headrace model NAME DIR` makes, for machines that can't reach a model hub. A folder contains a complete model or none,
and a model is made only once."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.base.errors import ServiceError
from headrace.base.scratch import scratch_folder

log = logging.getLogger(__name__)

STAMP = "headrace_model.json"


def already_made(directory: Path, recipe: dict[str, Any]) -> bool:
    """Return whether `directory` holds a model of exactly this recipe. Raises `ServiceError` if it holds anything else."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    stamp = directory / STAMP
    if stamp.is_file():
        found = json.loads(stamp.read_text())
        if found == recipe:
            log.info("%s holds the model already", directory)
            return True
        raise ServiceError(f"{directory} holds a model made as {found}, not as {recipe}; remove it or name another")
    raise ServiceError(f"{directory} exists and holds something else; remove it or name another directory")


@contextlib.contextmanager
def publish(directory: Path, recipe: dict[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder. It becomes `directory`, stamped with `recipe`, when the context ends without an error."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(f".{directory.name}-", directory.parent) as outer:
        folder = outer / directory.name
        folder.mkdir()
        yield folder
        (folder / STAMP).write_text(json.dumps(recipe) + "\n")
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)
        if directory.exists():
            directory.rmdir()
        folder.rename(directory)
