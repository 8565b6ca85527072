"""Which backend carries the weights, and when one is given up: decisions on values."""

from __future__ import annotations

from typing import Literal

import pytest

from headrace.base.errors import ServiceError
from headrace_services.refit.ladder import Backend, Ladder

SHARED = "they share GPU-a"
PAIR = ("a", "b")


def ladder(configured: Literal["auto", "gloo", "nccl"] = "auto", *, may_be_nonblocking: bool = True) -> Ladder:
    return Ladder(configured, may_be_nonblocking=may_be_nonblocking)


def fail(
    ladder: Ladder, backend: Backend, returned: tuple[str, ...] = PAIR, *, connected: bool = False, why: str = "Error 7"
) -> bool:
    """A failure of a group of the pair, and then an attempt to which those come who `returned`."""
    ladder.suspect(backend, PAIR, why, connected=connected)
    return ladder.decide(returned)


def test_the_backend_follows_the_devices_unless_it_is_configured() -> None:
    assert ladder("auto").choose(None) == "nccl"
    assert ladder("auto", may_be_nonblocking=False).choose(None) == "nccl-blocking"
    assert ladder("auto").choose(SHARED) == "gloo"
    assert ladder("gloo").choose(None) == "gloo"
    assert ladder("nccl").choose(None) == "nccl"
    with pytest.raises(ServiceError, match=rf"weight_channel\.backend: nccl, but {SHARED}; set it to auto or gloo"):
        ladder("nccl").choose(SHARED)


def test_a_backend_that_does_not_connect_is_given_up_for_the_next() -> None:
    auto = ladder()
    assert fail(auto, "nccl")
    assert auto.choose(None) == "nccl-blocking"
    assert fail(auto, "nccl-blocking")
    assert auto.choose(None) == auto.choose(SHARED) == auto.choose(None) == "gloo"
    assert list(auto.given_up) == ["nccl", "nccl-blocking"]
    assert not auto.decide(PAIR)  # nothing has failed since
    assert not fail(auto, "gloo")  # nothing is below it
    assert auto.choose(None) == "gloo"


@pytest.mark.parametrize("returned", [("a",), ("a", "c"), ()])
def test_a_member_that_does_not_come_back_may_have_been_the_cause(returned: tuple[str, ...]) -> None:
    auto = ladder()
    assert not fail(auto, "nccl", returned)
    assert auto.choose(None) == "nccl"
    assert not auto.decide(PAIR)  # the suspicion is over
    assert fail(auto, "nccl", (*PAIR, "c"))


def test_a_connected_group_is_suspected_only_if_it_never_carried() -> None:
    auto = ladder()
    auto.carried("nccl")
    assert not fail(auto, "nccl", connected=True)
    assert fail(auto, "nccl", connected=False)  # a new member may not be reached
    assert fail(auto, "nccl-blocking", connected=True)
    assert auto.choose(None) == "gloo"


def test_who_names_nccl_gets_an_error_with_what_to_try_and_not_gloo() -> None:
    named = ladder("nccl")
    fail(named, "nccl", why="in progress")
    assert named.choose(None) == "nccl-blocking"
    fail(named, "nccl-blocking", why="no route")
    with pytest.raises(ServiceError) as refused:
        named.choose(None)
    for token in (
        "weight_channel.backend",
        "in progress",
        "no route",
        "NCCL_P2P_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "gloo",
    ):
        assert token in str(refused.value)
