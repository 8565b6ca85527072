"""Writes a SkyPilot task that runs a run on several nodes."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.config.yaml_text import dump_value
from headrace.launch.hosts import place, refuse_given

# SkyPilot lets the nodes of a cluster into each other by ssh. What runs on the others ends when what the first one runs does.
_RUN = """\
[ "$SKYPILOT_NODE_RANK" = 0 ] || exit 0
exec .venv/bin/headrace deploy ssh {arguments} --hosts "$(echo "$SKYPILOT_NODE_IPS" | paste -sd, -)"
"""
_SETUP = """\
command -v redis-server > /dev/null || {{ sudo apt-get update && sudo RUNLEVEL=1 apt-get install -y redis-server; }}
[ -e .venv ] || uv venv --python 3.12 .venv
uv pip install --python .venv/bin/python {package}
"""
_CPU = "--index-strategy unsafe-best-match --extra-index-url https://download.pytorch.org/whl/cpu "


def write_task(config: Config, path: Path, overrides: Sequence[str], *, nodes: int, gpus: str, folder: Path) -> str:
    """Return the text of a task for `sky launch` that runs the configuration of `path`, which is in `folder`, with `overrides` on `nodes`
    nodes, each with `gpus`: NAME:N, as SkyPilot names them, or "none". Raises `ConfigError` if the run has no place there."""
    if config.run.id is None:
        raise ConfigError("run.id is not set: give run.id=NAME, by which the next task continues the run")
    refuse_given(config)
    file = path.absolute()
    if not file.is_relative_to(folder):
        raise ConfigError(
            f"{path} is not in {folder}, which SkyPilot copies to the nodes; go to a folder that has it and what it names"
        )
    count = 0 if gpus == "none" else _count(gpus)
    place(config, [f"node {node}" for node in range(nodes)], [count] * nodes)
    extra = f"headrace[{'cuda' if count else 'cpu'}]=={importlib.metadata.version('headrace')}"
    task = {
        "name": f"headrace-{re.sub('[^a-z0-9-]+', '-', config.run.id.lower()).strip('-')}",
        "workdir": ".",
        "num_nodes": nodes,
        "resources": {"accelerators": gpus} if count else {"cpus": "8+"},
    }
    scripts = {
        "setup": _SETUP.format(package=("" if count else _CPU) + shlex.quote(extra)),
        "run": _RUN.format(arguments=shlex.join([str(file.relative_to(folder)), *overrides])),
    }
    blocks = "".join(f"{key}: |\n{textwrap.indent(script, '  ')}" for key, script in scripts.items())
    return (
        f"# The run {config.run.id}, written by `headrace deploy skypilot`: sky launch FILE\n{dump_value(task)}{blocks}"
    )


def _count(gpus: str) -> int:
    name, _, count = gpus.partition(":")
    if not name or not (count or "1").isdecimal() or count == "0":
        raise ConfigError(f"--gpus {gpus}: give NAME:N as `sky gpus list` names them, or none")
    return int(count or "1")
