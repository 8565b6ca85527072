"""Which backend carries the weights, and when one is given up: decisions on values."""

from __future__ import annotations

from typing import Literal

import pytest

from headrace.base.errors import ServiceError
from headrace_services.refit.backends import MOST_LOST, Backend, Backends, nccl_problem

SHARED = "they share GPU-a"
PAIR = ("a", "b")


def backends(configured: Literal["auto", "gloo", "nccl"] = "auto", *, may_be_nonblocking: bool = True) -> Backends:
    return Backends(configured, may_be_nonblocking=may_be_nonblocking)


def fail(
    backends: Backends,
    backend: Backend,
    returned: tuple[str, ...] = PAIR,
    *,
    formed: bool = False,
    why: str = "Error 7",
) -> Backend:
    """A failure of a group of the pair, and then the backend for an attempt to which those come who `returned`."""
    backends.note_failure(backend, PAIR, why, formed=formed)
    return backends.choose(returned, None)


def test_the_backend_follows_the_devices_unless_it_is_configured() -> None:
    assert backends("auto").choose(PAIR, None) == "nccl"
    assert backends("auto", may_be_nonblocking=False).choose(PAIR, None) == "nccl-blocking"
    assert backends("auto").choose(PAIR, SHARED) == "gloo"
    assert backends("gloo").choose(PAIR, None) == "gloo"
    assert backends("nccl").choose(PAIR, None) == "nccl"
    with pytest.raises(ServiceError, match=rf"weight_channel\.backend: nccl, but {SHARED}; set it to auto or gloo"):
        backends("nccl").choose(PAIR, SHARED)


def test_a_backend_that_does_not_connect_is_given_up_for_the_next() -> None:
    auto = backends()
    assert fail(auto, "nccl") == "nccl-blocking"
    assert auto.choose(PAIR, None) == "nccl-blocking"  # nothing has failed since
    assert fail(auto, "nccl-blocking") == "gloo"
    assert auto.choose(PAIR, None) == auto.choose(PAIR, SHARED) == auto.choose(PAIR, None) == "gloo"
    assert fail(auto, "gloo") == "gloo"  # nothing is slower
    assert list(auto.given_up) == ["nccl", "nccl-blocking"]


@pytest.mark.parametrize("returned", [("a",), ("a", "c"), ()])
def test_a_member_that_does_not_come_back_may_have_been_the_cause(returned: tuple[str, ...]) -> None:
    auto = backends()
    assert fail(auto, "nccl", returned) == "nccl"
    assert auto.choose(PAIR, None) == "nccl"  # that failure is over
    assert fail(auto, "nccl", (*PAIR, "c")) == "nccl-blocking"


def test_members_that_die_each_time_die_of_the_backend() -> None:
    auto = backends()
    for _ in range(MOST_LOST - 1):
        assert fail(auto, "nccl", ("new",)) == "nccl"
    auto.note_success("nccl")  # what dies after that may die for another reason
    for _ in range(MOST_LOST - 1):
        assert fail(auto, "nccl", ("new",)) == "nccl"
    assert fail(auto, "nccl", ("new",), why="Error 7") == "nccl-blocking"
    assert "Error 7" in auto.given_up["nccl"]
    for _ in range(MOST_LOST - 1):
        assert fail(auto, "nccl-blocking", ("new",)) == "nccl-blocking"
    assert fail(auto, "nccl-blocking", ("new",)) == "gloo"
    for _ in range(MOST_LOST):
        assert fail(auto, "gloo", ("new",)) == "gloo"


def test_a_formed_group_counts_only_if_its_backend_never_carried() -> None:
    auto = backends()
    auto.note_success("nccl")
    assert fail(auto, "nccl", formed=True) == "nccl"
    assert fail(auto, "nccl", formed=False) == "nccl-blocking"  # a new member may not be reached
    assert fail(auto, "nccl-blocking", formed=True) == "gloo"


def test_who_names_nccl_gets_an_error_with_what_to_try_and_not_gloo() -> None:
    named = backends("nccl")
    assert fail(named, "nccl", why="in progress") == "nccl-blocking"
    with pytest.raises(ServiceError) as refused:
        fail(named, "nccl-blocking", why="no route")
    for token in (
        "weight_channel.backend",
        "in progress",
        "no route",
        "NCCL_P2P_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "gloo",
    ):
        assert token in str(refused.value)


A, B, MIG = ["GPU-a"], ["GPU-b"], ["MIG-x"]


@pytest.mark.parametrize(
    ("trainer", "replicas", "problem"),
    [
        (A, {"one": B, "two": ["GPU-c", "GPU-d"]}, None),
        (A, {"one": B, "two": A}, "the trainer and replica two share GPU-a"),
        (A, {"one": B, "two": ["GPU-c", "GPU-b"]}, "replica one and replica two share GPU-b"),
        (A, {"one": MIG}, "replica one has MIG-x, an instance of a divided GPU"),
        (MIG, {"one": A}, "the trainer has MIG-x, an instance of a divided GPU"),
        (A, {"one": []}, "replica one names no GPU"),
        ([], {"one": A}, "the trainer names no GPU"),
    ],
)
def test_nccl_needs_whole_gpus_none_of_which_is_shared(
    trainer: list[str], replicas: dict[str, list[str]], problem: str | None
) -> None:
    found = nccl_problem(trainer, replicas)
    assert found is None if problem is None else problem in (found or "")
