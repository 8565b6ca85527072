"""Runs a command on another host by ssh, as a child of this one would run: with its output, its exit code, and the signals of its parent.

`near` is here, below the supervisor: it starts ssh. `far` is there: it starts the command. Over ssh's standard input `near` sends what the
command needs, in one line, and then the numbers of signals, and a point every now and then. When they stop, `near` has ended or can't be
reached: `far` ends the command. So nothing is left on a host, whichever of them is killed or cut off.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.base.parent import die_with_parent
from headrace.base.scratch import scratch_folder
from headrace.launch.guard import end_groups
from headrace.launch.supervisor import child_environ

# ssh's own exit code: there is no connection
NO_CONNECTION = 255
BEAT_S = 10.0
# ssh gives a connection up after as long a silence: `headrace.launch.hosts`
SILENT_S = 120.0
# In arguments and variables this stands for the folder of the command's files.
FILES = "{files}"


class Command(msgspec.Struct, frozen=True):
    """A command on another host. Its `files`, by name, are in a folder that only this user may enter and that is removed at the end."""

    argv: Sequence[str]
    folder: str  # where it runs
    grace_s: float  # between SIGTERM and SIGKILL
    environ: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


def near(command: str, ssh: Sequence[str]) -> int:
    """Run what the file `command` contains by `ssh`, and return its exit code; 255 if it can't be reached. SIGTERM is handed on."""
    header = Path(command).read_bytes()
    process = subprocess.Popen(ssh, stdin=subprocess.PIPE)
    assert process.stdin is not None
    pipe = process.stdin.fileno()

    def send(data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # ssh has ended, and is waited for
            while data:
                data = data[os.write(pipe, data) :]

    signal.signal(signal.SIGTERM, lambda number, _: send(b"%d\n" % number))

    def beat() -> None:
        while True:
            time.sleep(BEAT_S)
            send(b".\n")

    send(header)
    threading.Thread(target=beat, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else NO_CONNECTION  # ssh itself was killed


def far() -> int:
    """Run the command that standard input gives. Returns its exit code, as a shell would."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # nothing beyond the line is read
        command = msgspec.json.decode(stdin.readline(), type=Command)
    with scratch_folder("headrace-host-") as folder:
        for name, text in command.files.items():
            path = folder / name
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        process = subprocess.Popen(
            [each.replace(FILES, str(folder)) for each in command.argv],
            cwd=command.folder,
            env={
                **child_environ(os.environ),
                **{key: value.replace(FILES, str(folder)) for key, value in command.environ.items()},
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda *_: process.terminate())
        threading.Thread(target=_obey, args=(process, command.grace_s), daemon=True).start()
        code = process.wait()
        end_groups([process.pid], 5.0)
    return code if code >= 0 else 128 - code


def _obey(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send the command the signals that arrive, and end it when nothing does any more."""
    while select.select([0], [], [], SILENT_S)[0] and (data := os.read(0, 4096)):
        for word in data.split():
            if word.isdigit():
                process.send_signal(int(word))
    end_groups([process.pid], grace_s)


def encode(command: Command) -> bytes:
    """Return the line that `far` reads first."""
    return msgspec.json.encode(command) + b"\n"


def main() -> int:
    return far() if sys.argv[1] == "far" else near(sys.argv[2], sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
