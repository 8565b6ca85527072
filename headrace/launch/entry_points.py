"""Loads the code of services by entry point, so that `headrace` imports none of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from headrace.base.errors import HeadraceError, MissingPackage
from headrace.net.service import importing


def load_entry_point(group: str, name: str, extra: str) -> Callable[..., Any]:
    """Load entry point `name` of `group`. In this way `headrace` finds services and imports none.

    Raises `HeadraceError` if the entry point does not exist, and `MissingPackage` if a package that it needs is missing; `extra` names the
    extra to install.
    """
    points = entry_points(group=group)
    if name not in points.names:
        known = ", ".join(sorted(points.names)) or "none; is headrace installed?"
        raise HeadraceError(f"{name!r} is not an entry point of {group} ({known})")
    try:
        with importing():
            loaded: Callable[..., Any] = next(point for point in points if point.name == name).load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "headrace", "headrace_services"):  # Headrace's own module: a bug, not a missing package
            raise
        raise MissingPackage(f"the package {missing!r} is not installed: pip install 'headrace[{extra}]'") from error
    return loaded
