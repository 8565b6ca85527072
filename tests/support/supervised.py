"""A supervisor to be killed: keeps a service that has a child of its own, both deaf to SIGTERM if asked, until it is killed.

`python -m tests.support.supervised FOLDER deaf|hearing`; the service writes `PID PID` (its own and its child's) to FOLDER/pids.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from headrace.launch.supervisor import Child, Supervisor

SERVICE = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, deaf = Path(sys.argv[1]), sys.argv[2] == "deaf"
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by the child below
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
fresh = folder / "pids.new"
fresh.write_text(f"{os.getpid()} {child.pid}")
fresh.rename(folder / "pids")
signal.pause()
"""


async def main(folder: Path, hearing: str) -> None:
    supervisor = Supervisor(os.environ, sys.stderr.write, grace_s=1.0)
    argv = [sys.executable, "-c", SERVICE, str(folder), hearing]
    await supervisor.supervise(Child("service", argv, folder / "service.log"))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
