"""A Jinja template in a configuration: its text, or the file that has it."""

from __future__ import annotations

from pathlib import Path

from headrace.config.in_yaml import in_yaml


def read_template(template: str) -> str:
    """Return the text of a template. A file is read, so that what a run saves and sends to other machines has the template itself. Raises
    `ValueError`."""
    if "{" in template:
        return template
    if not template.endswith(".jinja"):
        raise ValueError(
            f"{in_yaml(template)} is neither a Jinja template, which has {{{{ and }}}}, nor a file that ends in .jinja"
        )
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{template} can't be read ({error}); give the path of a template, or its text") from error
