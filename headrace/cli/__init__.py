"""The command line, `headrace …`."""

from headrace.net.service import importing

with importing():
    from headrace.cli.app import main

__all__ = ["main"]
