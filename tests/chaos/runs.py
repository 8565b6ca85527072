"""A run under faults, from outside: in namespaces of its own, ended by a deadline, then judged."""

from __future__ import annotations

import dataclasses
import functools
import signal
import subprocess
import sys
from pathlib import Path

from headrace.base.parent import die_with_parent
from tests.chaos.auditor import judge
from tests.chaos.evidence import read
from tests.chaos.plan import Topology

# Users, network, mounts and process ids of its own: no privilege is needed, and nothing is left behind whatever happens.
NAMESPACES = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
ROOT = Path(__file__).parents[2]

_STARTING_S, _FAULT_S, _ENDING_S = 600.0, 120.0, 600.0


def missing() -> str | None:
    """What a machine lacks to run this, or None."""
    try:
        done = subprocess.run([*NAMESPACES, "ip", "link", "add", "type", "bridge"], capture_output=True, text=True)
        subprocess.run(["redis-server", "--version"], capture_output=True, check=True)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed: apt-get install util-linux iproute2 redis-server"
    if done.returncode:
        return f"namespaces can't be made without privileges here ({done.stderr.strip()}): allow user namespaces, or run as root"
    return None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`problem`: why there is none, else None. `objections`: what the auditor objects to."""

    problem: str | None
    objections: tuple[str, ...]

    @property
    def good(self) -> bool:
        return self.problem is None and not self.objections


def run(seed: int, faults: int, topology: Topology, model: Path, folder: Path, *, episodes: bool) -> Verdict:
    """Never raises for what the run does; `folder` must exist and be empty."""
    kind = "episodes" if episodes else "completions"
    shape = [str(seed), str(faults), topology, kind]
    driver = [sys.executable, "-m", "tests.chaos.driver", *shape, str(model), str(folder)]
    deadline = _STARTING_S + faults * _FAULT_S + _ENDING_S
    try:
        code = subprocess.run(
            [*NAMESPACES, *driver],
            cwd=ROOT,
            timeout=deadline,
            preexec_fn=functools.partial(die_with_parent, signal.SIGKILL),
        ).returncode
    except subprocess.TimeoutExpired:
        return Verdict(f"the run did not end within {deadline:.0f} s", ())
    if code:
        return Verdict(f"the driver left with {code}", ())
    return Verdict(None, tuple(judge(read(folder))))
