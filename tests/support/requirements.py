"""What the tests need of the machine besides the Python packages."""

from __future__ import annotations

import shutil

# program -> Debian's package
PROGRAMS = {
    "redis-server": "redis-server",
    "ip": "iproute2",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "jq": "jq",
    "perl": "perl-base",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
}


def missing() -> str | None:
    """Which programs this machine lacks, and the command that installs them; None if it has all."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if not lacking:
        return None
    packages = sorted({PROGRAMS[program] for program in lacking})
    return f"the tests need {', '.join(lacking)}, not installed here: apt-get install {' '.join(packages)}"
