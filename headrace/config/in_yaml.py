"""Values as YAML writes them, for errors."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel


class _Dumper(yaml.SafeDumper):
    """Also takes sections, and shows the keys that were given."""


_Dumper.add_multi_representer(
    BaseModel, lambda dumper, section: dumper.represent_dict(section.model_dump(exclude_unset=True))
)


def in_yaml(value: Any, width: int = 60) -> str:
    """Return `value` as one line of YAML, cut off at `width` characters, for errors: true, null, 'text', 1e-06, [1, 2]."""
    if isinstance(value, str):
        # cut first: what is left has both its quotes
        shown = value if len(value) <= width - 2 else f"{value[: width - 3]}…"
        return "'" + shown.replace("'", "''").replace("\n", "\\n") + "'"
    written = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True)
    written = written.removesuffix("...\n").strip()
    return written if len(written) <= width else f"{written[: width - 1]}…"
