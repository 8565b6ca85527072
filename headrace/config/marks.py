"""What a field of the configuration says about its key, besides its type: `seed: Fixed[int]`.

A section's mark applies to all keys in it.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeVar

T = TypeVar("T")


class Mark(enum.Enum):
    MAY_CHANGE = enum.auto()
    FIXED = enum.auto()
    PATH = enum.auto()
    READ = enum.auto()
    CODE = enum.auto()
    UNDECISIVE = enum.auto()


# Steps, periods, optimisation, deadlines, addresses, and whatever an error of a live run names as its remedy.
MayChange = Annotated[T, Mark.MAY_CHANGE]
# What decides the groups, weights and order of the run: a run can't continue from a checkpoint made under another value.
Fixed = Annotated[T, Mark.FIXED]

# A path. In a configuration that a run saved, a relative one starts where the run was started.
AnyPath = Annotated[T, Mark.PATH]
# A path that is read: a relative one in a file is looked for beside that file first.
ReadPath = Annotated[T, Mark.PATH, Mark.READ]
# Such a path only if it is FILE.py:NAME; otherwise a name.
CodePath = Annotated[T, Mark.PATH, Mark.READ, Mark.CODE]

# An option of an environment that decides no reward: how it is found, how much it does at a time. What may change decides none either.
Undecisive = Annotated[T, Mark.UNDECISIVE]
