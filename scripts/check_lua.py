"""Check the buffer's Lua files with luacheck: `python scripts/check_lua.py`.

The files take names from each other, so luacheck reads them joined, as a server gets them. What it finds is printed with file and line.
Their format is not checked: StyLua comes from npm and cargo, and what `make setup` installs from PyPI.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from headrace_services.replay.library import built_in, source

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "services/replay/functions"


def main() -> int:
    """Return luacheck's exit status: 0 if it finds nothing."""
    command = ["luacheck", "--codes", "--formatter", "plain", "-"]
    try:
        checked = subprocess.run(command, input=source(), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    except FileNotFoundError:
        sys.exit("error: luacheck is not installed: apt-get install lua-check")
    for found in checked.stdout.splitlines():
        _, line, rest = found.split(":", 2)
        # luacheck adds where a shadowed name is defined, in the joined source
        sys.stdout.write(f"{FOLDER}/{built_in().place(int(line))}:{re.sub(r' on line [0-9]+$', '', rest)}\n")
    return checked.returncode


if __name__ == "__main__":
    sys.exit(main())
