"""The bucket plan, and a manifest's codec against everything malformed."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import CodecError
from headrace_services.refit.manifest import Manifest

shapes = st.lists(st.integers(1, 9), max_size=3)
tensors = st.lists(st.tuples(st.sampled_from(["float32", "bfloat16", "int64"]), shapes), min_size=1, max_size=20)


def manifest(*entries: tuple[str, list[int]], bucket_bytes: int = 64) -> Manifest:
    return Manifest.of([(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(entries)], bucket_bytes)


@given(tensors, st.integers(1, 500))
def test_buckets_hold_every_tensor_once_in_order_within_their_size(entries: list, bucket_bytes: int) -> None:
    made = manifest(*entries, bucket_bytes=bucket_bytes)
    buckets = made.buckets()
    assert [tensor for bucket in buckets for tensor in bucket.tensors] == list(made.tensors)
    assert sum(bucket.nbytes for bucket in buckets) == made.nbytes
    for bucket in buckets:
        assert {tensor.dtype for tensor in bucket.tensors} == {bucket.dtype}
        assert bucket.nbytes <= bucket_bytes or len(bucket.tensors) == 1


def test_neighbours_share_a_bucket_until_it_is_full() -> None:
    made = manifest(("float32", [8]), ("float32", [8]), ("float32", [1]), ("bfloat16", [2]), ("float32", [100]))
    assert [[e.name for e in b.tensors] for b in made.buckets()] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert [bucket.nbytes for bucket in made.buckets()] == [64, 4, 4, 400]


def test_layers_are_cut_only_where_they_are_larger_than_a_bucket() -> None:
    names = ["embed", "layers.0.q.0.w", "layers.0.o.w", "layers.1.q.0.w", "layers.1.o.w", "layers.10.q.0.w", "head.w"]
    made = Manifest.of(
        [(name, "float32", [size]) for name, size in zip(names, [2, 4, 4, 4, 4, 17, 1], strict=True)], 64
    )
    assert [[tensor.name for tensor in bucket.tensors] for bucket in made.buckets()] == [
        names[:3],
        names[3:5],
        names[5:6],
        names[6:],
    ]
    small = Manifest(made.names, made.dtypes, made.shapes, 16)
    assert [len(bucket.tensors) for bucket in small.buckets()] == 7 * [1]


@given(tensors)
def test_round_trip_through_msgpack(entries: list) -> None:
    made = manifest(*entries)
    assert Manifest.decode(msgpack.unpackb(msgpack.packb(made.encode()))) == made


GOOD = {"names": ["a", "b"], "dtypes": ["float32", "int8"], "shapes": [[2, 3], []], "bucket_bytes": 10}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"names": ["a"]}, "1 names"),
        ({"names": "ab"}, "names"),
        ({"names": ["a", 1]}, "names"),
        ({"names": ["a", "a"]}, "twice"),
        ({"names": [], "dtypes": [], "shapes": []}, "no tensors"),
        ({"dtypes": ["float32", "complex64"]}, "complex64"),
        ({"dtypes": None}, "dtypes"),
        ({"shapes": [[2, 0], []]}, "at least 1"),
        ({"shapes": [[2, -1], []]}, "at least 1"),
        ({"shapes": [[2, 1.5], []]}, "Expected `int`.*shapes"),
        ({"shapes": [[True], []]}, "Expected `int`.*shapes"),
        ({"shapes": [2, 3]}, "shapes"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"bucket_bytes": "64"}, "Expected `int`.*bucket_bytes"),
    ],
)
def test_what_is_malformed_is_refused_by_name(change: dict, says: str) -> None:
    assert Manifest.decode(GOOD).nbytes == 25
    with pytest.raises(CodecError, match=says):
        Manifest.decode({**GOOD, **change})


def test_not_a_map_is_refused() -> None:
    with pytest.raises(CodecError, match="manifest: Expected `object`"):
        Manifest.decode([1])
