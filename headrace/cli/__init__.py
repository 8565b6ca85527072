"""The command line: `headrace …`, one module a command."""

from headrace.cli.app import main

__all__ = ["main"]
