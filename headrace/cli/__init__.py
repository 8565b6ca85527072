"""The command line: `headrace …`, one module a command."""


def main() -> None:
    raise NotImplementedError
