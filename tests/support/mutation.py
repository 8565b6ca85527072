"""Messages made wrong: bytes, and values of JSON and msgpack, changed at random places."""

from __future__ import annotations

import copy
import math
from random import Random
from typing import Any

import msgpack

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

# Values that somebody's parser may not expect, by kind.
VALUES: list[list[Any]] = [
    [None],
    [True, False],
    [{}, [], [[]], [{}], {"a": 1}, {1: "a", "a": 1}, {"": {"": ""}}, [None], ["x"] * 300, DEEP],
    [0, 1, -1, 255, 2**31, 2**32, 2**53 + 1, 10**14 - 1, 10**14, 2**63 - 1, -(2**63), 2**64 - 1],
    [0.5, -0.0, 5e-324, 1e14, 1e300, math.nan, math.inf, -math.inf],
    ["", "a", "a b", "\0", "\n", "é", "\u202e", "\U0001f600", "{run}", "*", "../..", "-1", "1e999", "nan", "%s%n"],
    ["x" * 257, "x" * 5_000, "9" * 5_000],
    ["\udcff\udcfe", "a\udce2\udc82", "\udced\udca0\udc80", "\udcc3é"],  # bytes that are no UTF-8, see `pack`
]


def pack(value: Any) -> bytes:
    """`value` in msgpack, each surrogate `\\udcXX` in a text as the byte XX."""
    packed: bytes = msgpack.packb(value, unicode_errors="surrogateescape")
    return packed


class Mutator:
    """Draws from `random`, so that a seed says what is drawn."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def value(self, like: Any = None) -> Any:
        """Any value, sometimes a number or a text that is nearly `like`."""
        if isinstance(like, bool) or self.random.random() < 0.6:
            return self._strange()
        if isinstance(like, int | float):
            return max(-(2**63), min(like + self.random.choice([-1, 1, 10**9, -(10**9)]), 2**64 - 1))
        if isinstance(like, str):
            return self.text(like)
        if isinstance(like, bytes):
            return self.bytes(like)
        return self._strange()

    def _strange(self) -> Any:
        return copy.deepcopy(self.random.choice(self.random.choice(VALUES)))

    def text(self, text: str) -> str:
        place = self.random.randint(0, len(text))
        new = self.random.choice(["", " ", "\0", "\n", "é", "\u2028", '"', "/", "{", "A", text[:20], "z" * 300])
        return text[:place] + new + text[place + self.random.randint(0, 3) :]

    def bytes(self, data: bytes) -> bytes:
        """`data` with some bits flipped, cut off, grown, or other bytes altogether."""
        changed, random = bytearray(data), self.random
        kind = random.choice(["flip", "flip", "flip", "cut", "grow", "insert", "repeat", "other", "nothing"])
        if not changed or kind == "other":
            return random.randbytes(random.choice([1, 2, 8, 64, 1000]))
        place = random.randrange(len(changed))
        match kind:
            case "flip":
                for _ in range(random.choice([1, 1, 2, 8])):
                    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
            case "cut":
                del changed[place:]
            case "grow":
                changed += random.randbytes(random.choice([1, 3, 100]))
            case "insert":
                changed[place:place] = random.randbytes(random.choice([1, 3]))
            case "repeat":
                changed[place:place] = changed[random.randrange(len(changed)) :]
            case _:
                changed.clear()
        return bytes(changed)

    def structure(self, value: Any) -> Any:
        """A copy of `value` (maps and lists of anything) with one place of it changed, sometimes two."""
        changed = copy.deepcopy(value)
        for _ in range(self.random.choice([1, 1, 1, 2])):
            changed = self._once(changed)
        return changed

    def _once(self, value: Any) -> Any:
        random = self.random
        if isinstance(value, dict) and value and random.random() < 0.9:
            key = random.choice(list(value))
            match random.choice(["drop", "add", *["change"] * 6]):
                case "drop":
                    del value[key]
                case "add":
                    value[random.choice(["more", "", "x" * 300, 7, key + " " if isinstance(key, str) else 1])] = (
                        self.value()
                    )
                case _:
                    value[key] = self._once(value[key])
            return value
        if isinstance(value, list) and value and random.random() < 0.8:
            place = random.randrange(len(value))
            match random.choice(["drop", "repeat", "hole", "many", *["change"] * 5]):
                case "drop":
                    del value[place]
                case "repeat":
                    value.insert(place, copy.deepcopy(value[place]))
                case "hole":
                    value[place:place] = [None, copy.deepcopy(value[place])]
                case "many":
                    value[:] = [value[place]] * random.choice([256, 257, 2000])
                case _:
                    value[place] = self._once(value[place])
            return value
        return self.value(like=value)
