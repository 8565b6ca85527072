"""What a host has for a run. `headrace deploy ssh` sends this text to the host's Python: another Headrace may be there, or none."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def digest() -> str | None:
    """Return a digest of the installed code; None without Headrace."""
    found = hashlib.sha256()
    for package in ("headrace", "headrace_services"):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(spec.submodule_search_locations[0])
        for path in sorted(path for suffix in ("py", "lua") for path in root.rglob(f"*.{suffix}")):
            found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()


def look(folder: str, run_folder: str, port: int | None) -> dict[str, Any]:
    """Return what is here, and under "problems" what isn't as a run needs it. `port`: the buffer's server starts here, for the run whose
    folder is `run_folder`; None on a host of replicas. Paths start in `folder`."""
    problems: list[str] = []
    own = digest()
    gpus: list[str] = []
    if own is not None:
        from headrace.base.devices import uuids
        from headrace.base.errors import HeadraceError
        from headrace.base.files import is_locked
        from headrace.run.history import RUN_LOCK

        if port is not None and is_locked(Path(folder, run_folder, RUN_LOCK)):  # a second server would spoil its files
            problems.append(f"the run of {run_folder} is up there; wait until it has ended, or give another run.id")
        try:
            gpus = uuids(os.environ)
        except HeadraceError as error:
            problems.append(str(error))
    written = tempfile.gettempdir()
    if not os.path.isdir(folder):
        problems.append(f"there is no folder {folder}, in which paths start; make it, or give --folder")
    elif port is not None:
        kept = Path(folder, run_folder)
        written = str(next(place for place in (kept, *kept.parents) if place.exists()))
    try:
        with tempfile.TemporaryFile(dir=written) as file:
            file.write(bytes(2**20))  # a full disk has files, but nothing in them
    except OSError as error:
        problems.append(f"{written} can't be written ({error.strerror}); give this user a folder that can")
    if port is not None:
        problems += _of_server(port)
    address = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2]
    return {"time": time.time(), "digest": own, "gpus": gpus, "address": address, "problems": problems}


def _of_server(port: int) -> list[str]:
    """Return what keeps the buffer's server from starting here."""
    problems = []
    if shutil.which("redis-server") is None:
        problems.append(
            "redis-server is not on the PATH of a command by ssh; install it (apt-get install redis-server)"
        )
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError as error:
            problems.append(
                f"port {port} can't be used ({error.strerror}); end what has it, or give replay.redis_port=N"
            )
    return problems


if __name__ == "__main__":
    print(json.dumps(look(*json.loads(sys.argv[1]))))  # noqa: T201
