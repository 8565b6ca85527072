"""Finding services and model makers by entry point, so that `headrace` imports none of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from headrace.errors import HeadraceError


def names(group: str) -> list[str]:
    return sorted(entry_points(group=group).names)


def find(group: str, name: str, extra: str) -> Callable[..., Any]:
    """The object behind entry point `name` of `group`. Raises `HeadraceError` naming the `extra` to install if a package is missing."""
    found = [point for point in entry_points(group=group) if point.name == name]
    if not found:
        known = ", ".join(names(group)) or "none; is headrace installed?"
        raise HeadraceError(f"{name!r} is not one of {group} ({known})")
    return _import(found[0], extra)


def _import(point: EntryPoint, extra: str) -> Callable[..., Any]:
    try:
        loaded: Callable[..., Any] = point.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "headrace", "services"):  # ours: a fault in the program, not in the installation
            raise
        raise HeadraceError(
            f"{point.name} needs the package {missing!r}, which is not installed: pip install 'headrace[{extra}]'"
        ) from error
    return loaded
