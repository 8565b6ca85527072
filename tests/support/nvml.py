"""GPUs where there are none: a library in place of NVIDIA's, for processes that are started with `environ`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def environ(folder: Path, gpus: str, base: Mapping[str, str] = os.environ, **more: str) -> dict[str, str]:
    """The environment of a process that sees `gpus` (nvml.c says how they are written) and no others; the library is made in `folder`."""
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    kept = {name: value for name, value in base.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "LD_LIBRARY_PATH": str(folder), "STANDIN_GPUS": gpus, **more}
