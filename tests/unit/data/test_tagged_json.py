from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import CodecError
from headrace.base.tagged_json import from_json, to_json

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.fractions()
keys = (
    st.text()
    | st.integers()
    | st.tuples(st.integers(), st.text())
    | st.sampled_from(["__tuple__", "__set__", "__map__", "__fraction__"])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.sets(st.integers()),
    max_leaves=20,
)


@given(values)
def test_any_value_survives_json(value: Any) -> None:
    back = from_json(json.loads(json.dumps(to_json(value))))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | dict | list | tuple)


def test_numpy_becomes_python() -> None:
    assert to_json({"a": np.int64(3), "b": np.array([[1, 2]])}) == {"a": 3, "b": [[1, 2]]}


def test_what_json_cannot_carry_is_refused_by_place() -> None:
    with pytest.raises(CodecError, match=r"entry\.a\[1\] is a object"):
        to_json({"a": [0, object()]}, "entry")


@pytest.mark.parametrize("items", [[1, 0], [1], ["1e999999999", 1], "1/2", None])
def test_what_is_no_fraction_is_not_made_one(items: Any) -> None:
    assert from_json({"__fraction__": items}) == {"__fraction__": items}
