"""Generate `headrace/v1` from `proto/`: messages, gRPC stubs and their types. Offline; `python scripts/generate_stubs.py [OUTPUT]`.

The output is committed, so that `pip install headrace` needs no compiler; a test generates it again and compares.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> None:
    """Write `headrace/v1/*_pb2*.py[i]` under `output`. Raises `SystemExit` if the compiler refuses the .proto files."""
    proto = ROOT / "proto"
    scripts = Path(sysconfig.get_path("scripts"))
    sources = sorted(str(path.relative_to(proto)) for path in proto.glob("headrace/v1/*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={proto}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={output}",
            f"--grpc_python_out={output}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--mypy_out=quiet:{output}",
            f"--mypy_grpc_out=quiet:{output}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
