"""Generate `headrace/replay/build.py` from the buffer's Lua files: `python scripts/generate_build.py`.

The output is committed, because clients have no Lua files; a test fails when it is stale.
"""

from __future__ import annotations

from pathlib import Path

from headrace_services.replay.library import built_in

OUTPUT = Path(__file__).resolve().parent.parent / "headrace" / "replay" / "build.py"

TEXT = '''"""The build of the buffer's functions that this client calls. Generated from services/replay/functions: run `make build`."""

BUILD = "{build}"
'''

if __name__ == "__main__":
    OUTPUT.write_text(TEXT.format(build=built_in().build), encoding="utf-8")
