"""Values as YAML writes them, for errors."""

from __future__ import annotations

import re
from typing import Any

import yaml
from pydantic import BaseModel

# the passwords of an address: before its host, and among its parameters
_PASSWORDS = {
    re.compile(r"(://[^/@\s:]*):[^/@\s]*@"): r"\1:***@",
    re.compile(r"([?&]\w*password=)[^&\s'\"]+"): r"\1***",
}


def without_password(text: str) -> str:
    """Return the text with the passwords of addresses masked."""
    for password, mask in _PASSWORDS.items():
        text = password.sub(mask, text)
    return text


def escape(text: str) -> str:
    """Return `text` written so that, in a configuration, it stands for itself and not for an interpolation."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


class _Dumper(yaml.SafeDumper):
    """Also takes sections, and shows the keys that were given."""


_Dumper.add_multi_representer(
    BaseModel, lambda dumper, section: dumper.represent_dict(section.model_dump(exclude_unset=True))
)
_Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str(text)))


def in_yaml(value: Any, width: int = 60) -> str:
    """Return `value` as one line of YAML, cut off at `width` characters, for errors: true, null, 'text', 1e-06, [1, 2]."""
    if isinstance(value, str):
        value = without_password(value)
        # cut first: what is left has both its quotes
        shown = value if len(value) <= width - 2 else f"{value[: width - 3]}…"
        return "'" + shown.replace("'", "''").replace("\n", "\\n") + "'"
    written = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True)
    written = without_password(written.removesuffix("...\n").strip())
    return written if len(written) <= width else f"{written[: width - 1]}…"
