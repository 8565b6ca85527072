"""The command line, `headrace …`."""

from headrace.net.service import importing

with importing():
    from headrace.cli.app import main, run

__all__ = ["main", "run"]
