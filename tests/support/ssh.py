"""`ssh` for a test: it runs the command here, as if the host, whose name is an address, were another machine."""

from __future__ import annotations

from pathlib import Path

SSH = """#!/bin/bash
[[ ${@: -1} != *$'\n'* ]] || { echo "Unmatched '." >&2; exit 1; }  # as csh says it
while [[ $1 == -* ]]; do shift 2; done
case ${1#*@} in
unknown) echo "Host key verification failed." >&2; exit 255 ;;
locked) echo "user@locked: Permission denied (publickey,password)." >&2; exit 255 ;;
away) echo "ssh: connect to host away port 22: Connection timed out" >&2; exit 255 ;;
twin) own=10.0.0.1 ;;
near) own=127.0.1.1 ;;
*) own=${1#*@} ;;
esac
SSH_CONNECTION="10.0.0.9 4000 $own 22" exec sh -c "$2"
"""


def install(folder: Path, programs: dict[str, str]) -> None:
    """Write `ssh` and other `programs`, by the code of a shell, into `folder`, for a PATH."""
    for name, code in {"ssh": SSH, **{name: f"#!/bin/bash\n{code}\n" for name, code in programs.items()}}.items():
        (folder / name).write_text(code)
        (folder / name).chmod(0o755)
