"""List the versions of the documentation that lie in a folder: `python scripts/list_versions.py FOLDER`.

Each subfolder is one version, as `build_site.py` built it, under its name: releases (`0.2.0`), and `main`. Writes `versions.json`, which
the pages of all versions read; `latest`, a copy of the newest release; and a first page that leads there, or to `main` before any release.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

LATEST = "latest"
_RELEASE = re.compile(r"\d+(\.\d+)*")


def main(folder: Path) -> None:
    names = [path.parent.name for path in folder.glob("*/index.html") if path.parent.name != LATEST]
    versions = sorted(names, key=_order, reverse=True)
    releases = [name for name in versions if _RELEASE.fullmatch(name)]
    newest = releases[0] if releases else None
    if newest is not None:
        shutil.rmtree(folder / LATEST, ignore_errors=True)
        shutil.copytree(folder / newest, folder / LATEST)
    (folder / "versions.json").write_text(json.dumps({"latest": newest, "versions": versions}) + "\n")
    first = LATEST if newest is not None else versions[0]
    (folder / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>Headrace</title><meta http-equiv="refresh" content="0; url={first}/">'
        f'<a href="{first}/">The documentation of Headrace</a>\n'
    )


def _order(name: str) -> tuple[bool, list[int], bool, str]:
    """What is no release is newer than all of them; a release candidate is older than its release."""
    release = _RELEASE.match(name)
    if release is None:
        return True, [], False, name
    return False, [int(part) for part in release[0].split(".")], release[0] == name, name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
