"""The plan of faults: what a seed gives, and what it covers."""

from __future__ import annotations

import pytest

from tests.chaos.plan import KINDS, LONG, PHASES, TARGETS, Topology, make_plan, make_shape

TOPOLOGIES: tuple[Topology, ...] = ("embedded", "external")


@pytest.mark.parametrize("seed", range(20))
def test_every_process_is_hit_in_every_phase_in_31_faults_and_the_queue_is_closed_at_their_end(seed: int) -> None:
    for topology in TOPOLOGIES:
        *plan, last = make_plan(seed, 31, topology, lease_s=3.0)
        assert {(fault.target, fault.phase) for fault in plan} == {(t, p) for t in TARGETS for p in PHASES}
        assert (last.kind, last.phase) == ("torn_close", "closed")


@pytest.mark.parametrize("seed", range(20))
def test_five_faults_hit_every_phase_and_five_processes_the_environment_among_them(seed: int) -> None:
    for topology in TOPOLOGIES:
        plan = make_plan(seed, 5, topology, lease_s=3.0)
        assert len({fault.target for fault in plan}) == 5
        assert "environment" in {fault.target for fault in plan}
        assert sorted(fault.phase for fault in plan) == sorted(PHASES)


@pytest.mark.parametrize("seed", range(20))
def test_the_trainer_that_wakes_up_beside_its_successor_was_frozen_while_it_wrote_a_checkpoint(seed: int) -> None:
    rivals = [fault.phase for fault in make_plan(seed, 31, "embedded", lease_s=3.0) if fault.kind == "rival"]
    assert not rivals or rivals[0] == "checkpoint"


def test_only_long_runs_have_a_prompt_that_kills() -> None:
    assert make_shape(1, LONG, "embedded").deadly
    assert not make_shape(1, LONG - 1, "embedded").deadly
    assert all(fault.kind != "torn_close" for fault in make_plan(1, LONG - 1, "embedded", lease_s=3.0))


def test_every_kind_of_fault_befalls_every_process_it_applies_to() -> None:
    plan = make_plan(1, 100, "external", lease_s=3.0)
    everything = {(target, kind) for target in TARGETS for kind in KINDS[target]} | {("server", "torn_close")}
    assert {(fault.target, fault.kind) for fault in plan} == everything


def test_the_embedded_server_has_no_replica_to_fail_over_to() -> None:
    assert "failover" not in {fault.kind for fault in make_plan(1, 100, "embedded", lease_s=3.0)}


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert make_plan(5, 30, "external", 3.0) == make_plan(5, 30, "external", 3.0)
    assert make_plan(5, 30, "external", 3.0) != make_plan(6, 30, "external", 3.0)
    assert make_shape(5, 10, "external") == make_shape(5, 10, "external")


def test_stops_and_cuts_outlast_a_lease() -> None:
    plan = make_plan(3, 100, "external", lease_s=3.0)
    assert all(fault.seconds > 3.0 for fault in plan if fault.kind in ("stop", "cut", "half_open"))


def test_the_prompts_leave_one_over() -> None:
    for seed in range(20):
        shape = make_shape(seed, 10, "embedded")
        assert shape.prompts % shape.prompts_per_step == 1
