"""A version of the weights is fetched whole or not at all, and what versions have in common moves once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import CodecError, ServiceError
from headrace.run import object_store
from headrace.run.object_store import RunStore
from headrace.run.weight_store import (
    NotBegun,
    PublishedWeights,
    PulledWeights,
    StillFetching,
    apply_patch,
    cut,
    make_patch,
    select_superseded,
    select_unused,
)
from tests.support.s3_server import CUT, DONE, S3Server, s3_server
from tests.support.waiting import wait_until

BLOCK = 1024
SIZES = (5 * BLOCK + 100, 3 * BLOCK)
OFFERS, BLOCKS = "weights/t1/offers/", "weights/t1/blocks/"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(object_store, "_PATIENCE", {"max_retries": 2})
    with s3_server(monkeypatch) as server:
        yield server


class Weights:
    """Random bytes, in parts."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.parts = [self.random.integers(0, 256, size, np.uint8) for size in SIZES]

    def change(self, offset: int) -> None:
        """The block there, in the first part."""
        self.parts[0][offset : offset + BLOCK] += 1

    def publish(self, published: PublishedWeights, version: int) -> str:
        return published.publish(version, {"names": []}, [version], [memoryview(part.copy()) for part in self.parts])

    def bytes(self) -> bytes:
        return b"".join(part.tobytes() for part in self.parts)


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def published(s3: S3Server) -> PublishedWeights:
    return PublishedWeights(RunStore("s3://bucket/runs/r"), "t1", block_bytes=BLOCK)


@pytest.fixture
def pulled(s3: S3Server, tmp_path: Path) -> PulledWeights:
    return PulledWeights(RunStore("s3://bucket/runs/r", writes=False), tmp_path / "weights")


def pull(pulled: PulledWeights, version: int, digest: str) -> bytes:
    pulled.fetch(pulled.read_list("t1", version, digest))
    return pulled.file.read_bytes()


def test_blocks_reach_into_one_part_only() -> None:
    assert cut((10, 4, 3), 4) == [4, 4, 2, 4, 3]


@pytest.mark.parametrize(
    ("versions", "reach", "superseded"),
    [([0], 0, []), ([3, 1, 2], 1, [1]), ([3, 4, 9], 1, [3, 4]), ([5, 6], 1, []), ([5, 6], 0, [5]), ([1, 2, 3], 9, [])],
)
def test_law_2_no_version_is_removed_that_work_may_begin_with(
    versions: list[int], reach: int, superseded: list[int]
) -> None:
    assert select_superseded(versions, reach) == superseded


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_only_changed_blocks_are_sent_and_fetched(s3: S3Server, weights: Weights, tmp_path: Path, kind: str) -> None:
    url = "s3://bucket/runs/r" if kind == "s3" else f"file://{tmp_path}/mount/r"
    published = PublishedWeights(RunStore(url), "t1", block_bytes=BLOCK)
    first = weights.publish(published, 1)
    assert published.sent_bytes == sum(SIZES)
    pulled = PulledWeights(RunStore(url, writes=False), tmp_path / "weights")
    assert pull(pulled, 1, first) == weights.bytes()
    assert pulled.fetched_bytes == sum(SIZES)
    weights.change(2 * BLOCK)
    second = weights.publish(published, 2)
    assert published.sent_bytes == BLOCK
    assert pull(pulled, 2, second) == weights.bytes()
    assert pulled.fetched_bytes == BLOCK
    late = PulledWeights(RunStore(url, writes=False), tmp_path / "late")
    assert pull(late, 2, second) == weights.bytes()


def test_equal_blocks_are_sent_once(published: PublishedWeights, weights: Weights, s3: S3Server) -> None:
    for part in weights.parts:
        part[:] = 0
    weights.publish(published, 1)
    assert len(s3.names(BLOCKS)) == 2  # whole ones, and the rest of the first part


@pytest.mark.parametrize("share", [0.0, 0.03, 0.43, 1.0])
@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 2048])
def test_a_patch_turns_one_block_into_another(share: float, size: int) -> None:
    random = np.random.default_rng(size)
    old = random.integers(0, 256, size, np.uint8)
    new = old.copy()
    changed = random.choice(size, round(share * size), replace=False)
    new[changed] += 1
    patch = make_patch(old.tobytes(), memoryview(new))
    if share == 0.03:
        assert patch is not None
    if patch is not None:
        assert apply_patch(old.tobytes(), patch) == new.tobytes()
        assert len(patch) <= max(1, size // 2)
    else:
        assert share > 0.2 or size <= 2


def test_whoever_has_the_version_before_fetches_patches(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server, tmp_path: Path
) -> None:
    pull(pulled, 1, weights.publish(published, 1))
    for version in (2, 3):
        for part in weights.parts:  # 3 % of the numbers of a model in bfloat16, everywhere
            changed = weights.random.choice(len(part) // 2, round(0.03 * len(part) / 2), replace=False)
            part.view(np.uint16)[changed] += 1
        digest = weights.publish(published, version)
        before = len(s3.requests)
        assert pull(pulled, version, digest) == weights.bytes()
        assert pulled.fetched_bytes < 0.11 * sum(SIZES)
        assert not any("/blocks/" in request for request in s3.requests[before:])
    # who doesn't have it fetches blocks
    late = PulledWeights(RunStore("s3://bucket/runs/r"), tmp_path / "late")
    assert pull(late, 3, digest) == weights.bytes()
    assert late.fetched_bytes == sum(SIZES)
    # a patch goes with its version
    published.clean(reach=0)
    assert len(s3.names("/patches/")) in (8, 9)  # nothing may have changed in the last block, a small one
    assert len(s3.names(BLOCKS)) == 9


def test_a_patch_that_is_no_use_is_passed_over(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    pull(pulled, 1, weights.publish(published, 1))
    for part in weights.parts:
        part[7::BLOCK] += 1
    digest = weights.publish(published, 2)
    first, second, third, *_ = (s3.objects[name] for name in s3.names("/patches/"))
    first.data, second.data, third.data = b"", bytes(len(second.data)), third.data + b"1"
    del s3.objects[s3.names("/patches/")[3]]
    assert pull(pulled, 2, digest) == weights.bytes()


def test_a_list_of_another_digest_is_refused(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    digest = weights.publish(published, 1)
    weights.publish(published, 2)
    for data in (s3.objects["runs/r/weights/t1/offers/2.json"].data, b"", b"{"):
        s3.objects["runs/r/weights/t1/offers/1.json"].data = data
        with pytest.raises(CodecError, match="not the list"):
            pulled.read_list("t1", 1, digest)


def test_a_corrupted_block_is_refused_and_fetched_again(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    digest = weights.publish(published, 1)
    name = s3.names(BLOCKS)[3]
    whole = s3.objects[name].data
    for data in (whole[:-1], whole + b"1", bytes(len(whole))):
        s3.objects[name].data = data
        with pytest.raises(CodecError, match="SHA-256"):
            pull(pulled, 1, digest)
    s3.objects[name].data = whole
    assert pull(pulled, 1, digest) == weights.bytes()
    assert pulled.fetched_bytes <= len(whole) + 8 * BLOCK  # the last try had most of it


def test_half_a_version_is_refused(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    digest = weights.publish(published, 1)
    lost = s3.names(BLOCKS)[0]
    kept = s3.objects.pop(lost)
    with pytest.raises(ServiceError, match="is missing: version 1 was superseded"):
        pull(pulled, 1, digest)
    s3.objects[lost] = kept
    assert pull(pulled, 1, digest) == weights.bytes()
    with pytest.raises(ServiceError, match="version 2 was superseded"):
        pulled.read_list("t1", 2, digest)


@pytest.mark.parametrize("fault", [CUT, 500, 403])
def test_nothing_shows_of_a_version_whose_upload_was_cut(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server, fault: int
) -> None:
    digest = weights.publish(published, 1)
    weights.change(0)
    weights.change(BLOCK)
    reached: list[str] = []

    def spoil(method: str, name: str) -> int | None:
        if method != "PUT":
            return None
        reached.append(name)
        return fault if OFFERS in name or len(set(reached)) > 1 else None

    s3.spoil = spoil
    with pytest.raises(ServiceError):
        weights.publish(published, 2)
    assert s3.names(OFFERS) == ["runs/r/weights/t1/offers/1.json"]
    assert pull(pulled, 1, digest)
    s3.spoil = lambda method, name: None
    second = weights.publish(published, 2)
    assert published.sent_bytes <= BLOCK  # the other had come
    assert pull(pulled, 2, second) == weights.bytes()


@pytest.mark.parametrize("fault", [CUT, 503, DONE])
def test_a_store_that_fails_now_and_then_is_asked_again(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server, fault: int
) -> None:
    failed: set[tuple[str, str]] = set()

    def spoil(method: str, name: str) -> int | None:
        if (method, name) in failed:
            return None
        failed.add((method, name))
        return fault

    s3.spoil = spoil
    digest = weights.publish(published, 1)
    assert pull(pulled, 1, digest) == weights.bytes()


def test_a_fetch_that_was_cut_goes_on(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    digest = weights.publish(published, 1)
    last = s3.names(BLOCKS)[-1]
    s3.spoil = lambda method, name: 403 if name == last else None
    with pytest.raises(ServiceError, match="refuses"):
        pull(pulled, 1, digest)
    had = pulled.fetched_bytes
    s3.spoil = lambda method, name: None
    assert pull(pulled, 1, digest) == weights.bytes()
    assert pulled.fetched_bytes == sum(SIZES) - had
    assert had > 0


def test_a_fetch_ends_when_it_is_stopped(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    listed = pulled.read_list("t1", 1, weights.publish(published, 1))
    asked = len(s3.requests)
    with pytest.raises(ServiceError, match="is not fetched"):
        pulled.fetch(listed, lambda: True)
    with pytest.raises(ServiceError, match="is not sent"):
        published.publish(2, {}, [], [memoryview(part) for part in weights.parts], lambda: True)
    assert len(s3.requests) == asked


def test_a_replica_needs_the_right_to_read_objects_alone(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    digest = weights.publish(published, 1)
    s3.spoil = lambda method, name: 403 if method != "GET" or not name else None
    assert pull(pulled, 1, digest) == weights.bytes()


def test_retention_removes_what_no_admissible_version_has(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    digests = {}
    for version in range(4):
        weights.change(version * BLOCK)
        digests[version] = weights.publish(published, version)
    assert len(s3.names(BLOCKS)) == 9 + 3
    published.clean(reach=1)
    assert s3.names(OFFERS) == [f"runs/r/{OFFERS}{version}.json" for version in (2, 3)]
    assert len(s3.names(BLOCKS)) == 9 + 1
    assert pull(pulled, 3, digests[3]) == weights.bytes()
    assert pull(pulled, 2, digests[2])
    # one that is needed again is sent again
    weights.parts[0][BLOCK : 3 * BLOCK] -= 1
    digest = weights.publish(published, 4)
    assert pull(pulled, 4, digest) == weights.bytes()


def test_retention_that_fails_leaves_whole_versions(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    weights.publish(published, 0)
    weights.change(0)
    digest = weights.publish(published, 1)
    s3.spoil = lambda method, name: 500 if method in ("DELETE", "POST") else None
    with contextlib.suppress(ServiceError):
        published.clean(reach=0)
    assert pull(pulled, 1, digest) == weights.bytes()
    s3.spoil = lambda method, name: None
    published.clean(reach=0)
    assert s3.names(OFFERS) == [f"runs/r/{OFFERS}1.json"]


def test_law_4_a_trainer_touches_only_its_own_timeline(
    published: PublishedWeights, weights: Weights, s3: S3Server, tmp_path: Path
) -> None:
    weights.publish(published, 5)
    s3.objects["runs/r/manifests/step_5-t1.json"] = s3.objects["runs/r/weights/t1/offers/5.json"]
    store = RunStore("s3://bucket/runs/r")
    successor = PublishedWeights(store, "t2", block_bytes=BLOCK)
    store.remove(successor.list_others())
    assert s3.names() == ["runs/r/manifests/step_5-t1.json"]
    digest = weights.publish(successor, 3)
    weights.publish(published, 6)  # it was frozen, and does not know yet
    published.clean(reach=0)
    pulled = PulledWeights(RunStore("s3://bucket/runs/r"), tmp_path / "weights")
    pulled.fetch(pulled.read_list("t2", 3, digest))
    assert pulled.file.read_bytes() == weights.bytes()


def test_select_unused_keeps_shared_blocks(
    published: PublishedWeights, weights: Weights, pulled: PulledWeights
) -> None:
    listed = pulled.read_list("t1", 1, weights.publish(published, 1))
    assert select_unused([*listed.objects, "other"], [listed]) == ["other"]
    assert select_unused(listed.objects, []) == sorted(listed.objects)


def test_weights_of_another_shape_replace_those_in_the_file(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights
) -> None:
    assert pull(pulled, 1, weights.publish(published, 1)) == weights.bytes()
    weights.parts.reverse()
    assert pull(pulled, 2, weights.publish(published, 2)) == weights.bytes()
    weights.parts.reverse()
    assert pull(pulled, 3, weights.publish(published, 3)) == weights.bytes()
    weights.parts.pop()
    assert pull(pulled, 4, weights.publish(published, 4)) == weights.bytes()


def test_what_is_here_is_given_to_others(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    with pytest.raises(NotBegun):
        pulled.serve("t1", 1, "blocks/1", 0.0)
    digest = weights.publish(published, 1)
    pull(pulled, 1, digest)
    assert pulled.serve("t1", 1, "offers/1.json", 0.0) == s3.objects[f"runs/r/{OFFERS}1.json"].data
    for name in s3.names(BLOCKS):
        assert pulled.serve("t1", 1, name.removeprefix("runs/r/weights/t1/"), 0.0) == s3.objects[name].data
    assert pulled.serve("t1", 1, "blocks/1", 0.0) is None
    assert pulled.serve("t1", 0, "offers/0.json", 0.0) is None  # superseded
    for timeline, version in (("t1", 2), ("t2", 0)):
        with pytest.raises(NotBegun):
            pulled.serve(timeline, version, f"offers/{version}.json", 0.0)
    # a patch is there for whoever has the version before, once this one had it
    for part in weights.parts:
        part[7::BLOCK] += 1
    pull(pulled, 2, weights.publish(published, 2))
    patches = s3.names("/patches/")
    assert patches
    for name in patches:
        assert pulled.serve("t1", 2, name.removeprefix("runs/r/weights/t1/"), 0.0) == s3.objects[name].data
    # and is not kept beyond it
    kept = pulled.file.with_name("weights.patches")
    size = kept.stat().st_size
    for part in weights.parts:
        part[7::BLOCK] += 1
    pull(pulled, 3, weights.publish(published, 3))
    assert kept.stat().st_size == size
    assert pulled.serve("t1", 2, patches[0].removeprefix("runs/r/weights/t1/"), 0.0) is None


def test_who_asks_too_early_waits_until_it_comes(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    digest = weights.publish(published, 1)
    one, last = s3.names(BLOCKS)[-2:]
    listed = f"runs/r/{OFFERS}1.json"
    held_back = {each: threading.Event() for each in (listed, one, last)}
    name, other = (each.removeprefix("runs/r/weights/t1/") for each in (one, last))
    s3.spoil = lambda method, asked: (held_back[asked].wait(30), None)[1] if asked in held_back else None
    fetching = threading.Thread(target=pull, args=(pulled, 1, digest))
    fetching.start()
    try:
        wait_until(lambda: f"GET {listed}" in s3.requests)
        for asked in ("offers/1.json", name):  # it waits for the store, as it may for a block
            with pytest.raises(StillFetching):
                pulled.serve("t1", 1, asked, 0.01)
        threading.Timer(0.05, held_back[listed].set).start()
        assert pulled.serve("t1", 1, "offers/1.json", 30.0)
        with pytest.raises(StillFetching):
            pulled.serve("t1", 1, name, 0.01)
        threading.Timer(0.05, held_back[one].set).start()
        assert pulled.serve("t1", 1, name, 20.0) == s3.objects[one].data
        with pytest.raises(StillFetching):  # not all is here
            pulled.serve("t1", 1, other, 0.01)
    finally:
        for event in held_back.values():
            event.set()
        fetching.join()


def test_what_is_overwritten_while_it_is_read_is_not_given_away(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(pulled, 1, weights.publish(published, 1))
    name = s3.names(BLOCKS)[0].removeprefix("runs/r/weights/t1/")
    for part in weights.parts:
        part += 1
    second = weights.publish(published, 2)
    read = os.pread

    def read_late(file: int, size: int, offset: int) -> bytes:
        monkeypatch.undo()
        pull(pulled, 2, second)
        return read(file, size, offset)

    monkeypatch.setattr(os, "pread", read_late)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    assert pulled.serve("t1", 1, name, 0.0) is None


def test_a_disk_without_room_for_patches_costs_others_alone(
    published: PublishedWeights, pulled: PulledWeights, weights: Weights, s3: S3Server
) -> None:
    pull(pulled, 1, weights.publish(published, 1))
    (pulled.file.parent / "weights.patches").mkdir()
    for part in weights.parts:
        part[7::BLOCK] += 1
    assert pull(pulled, 2, weights.publish(published, 2)) == weights.bytes()
    assert pulled.serve("t1", 2, s3.names("/patches/")[0].removeprefix("runs/r/weights/t1/"), 0.0) is None
