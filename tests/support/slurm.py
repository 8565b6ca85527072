"""Slurm's commands for a test: two nodes, each a network namespace, and a job that runs on the first.

    unshare … python -m tests.support.slurm FOLDER JOB [RANK]

Runs inside namespaces of its own (`tests.chaos.runs.NAMESPACES`). `srun` enters the namespace of the node that it names, whose own
`checkpointing.snapshot_dir` is in FOLDER. With `RANK`, that rank of the trainer is killed after the first snapshot. The exit code is the
job's. As Slurm's own, `srun` hands SIGUSR1 on to its task, and kills it at SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil

from headrace.base.parent import die_with_parent
from tests.support.network import Network
from tests.support.waiting import wait_until

NODES = {"node-1": 2, "node-2": 3}
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 != --nodelist=* ]] || node=${1#*=}; shift; done
$(cat "$0.$node") "$@" & task=$!
trap 'kill -s KILL $task' TERM HUP QUIT
trap 'kill -s USR1 $task' USR1
while kill -0 $task 2> /dev/null; do wait $task; done
wait $task
"""


def commands(folder: Path, enter: dict[str, list[str]]) -> None:
    """Write `srun` and `scontrol` into `folder`; `enter` is what to put before a command to run it on a node."""
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf '%s\\n' " + " ".join(enter) + "\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for node, prefix in enter.items():
        (folder / f"srun.{node}").write_text(" ".join(prefix))


def environ(folder: Path) -> dict[str, str]:
    """The environment of a job whose commands are in `folder`."""
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_ID": "7",
    }


def main(folder: Path, job: Path, killed: str | None) -> int:
    network = Network()
    hosts = folder / "etc_hosts"
    addresses = {name: network.add(name, host) for name, host in NODES.items()}
    own = f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n"  # as Debian installs it
    hosts.write_text(own + "".join(f"{address} {name}\n" for name, address in addresses.items()))
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    memory = {name: folder / f"memory-of-{name}" for name in NODES}
    for each in memory.values():
        each.mkdir()
    variable = "HEADRACE_CHECKPOINTING__SNAPSHOT_DIR"
    commands(folder, {name: [*network.enter(name), "env", f"{variable}={memory[name]}"] for name in NODES})
    running = subprocess.Popen(
        [*network.enter("node-1"), "bash", str(job)], env=environ(folder), preexec_fn=die_with_parent
    )
    if killed is not None:
        wait_until(lambda: any(folder.glob("memory-*/*/step_*")) or running.poll() is not None)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "trainer" in process.cmdline() and process.environ().get("RANK") == killed:
                    process.kill()
    return running.wait()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None))
