"""Reads JSON without the constants and the infinite numbers that Python's reader lets through."""

from __future__ import annotations

import json
import math
from typing import NoReturn


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number} is not a JSON number")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(f"{number:.40}, larger than a float64 can be,")


decode = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite).decode
