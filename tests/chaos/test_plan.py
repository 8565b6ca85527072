"""The plan of faults: what a seed gives, and what it covers."""

from __future__ import annotations

import dataclasses

import pytest

from tests.chaos.plan import KINDS, LONG, PHASES, Fault, Shape, Topology, has_episodes, make_shape, topology_of
from tests.chaos.plan import make_plan as make_plan_with

TOPOLOGIES: tuple[Topology, ...] = ("embedded", "external", "up")
TORN = {
    ("torn_step", "committed"),
    ("torn_refilled", "refilled"),
    ("torn_validation", "validation"),
    ("torn_close", "closed"),
}


def make_plan(
    seed: int, faults: int, topology: Topology, lease_s: float = 3.0, *, clocks: bool = True, **shape: bool
) -> list[Fault]:
    made = a_shape(topology, **shape)
    return make_plan_with(seed, faults, made, lease_s, clocks=clocks)


def a_shape(topology: Topology, **shape: bool) -> Shape:
    return dataclasses.replace(make_shape(1, LONG, topology), **{"store": False, "sentinels": False, **shape})


SEEDS = range(20)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_whole_run_hits_every_process_in_every_phase(topology: Topology) -> None:
    for seed in SEEDS:
        plan = make_plan(seed, a_shape(topology).whole, topology)
        usual = {(target, phase) for target in a_shape(topology).targets for phase in PHASES}
        assert {(fault.target, fault.phase) for fault in plan} == usual | {("server", phase) for _, phase in TORN}, seed
        torn = [(fault.kind, fault.phase) for fault in plan if (fault.kind, fault.phase) in TORN]
        assert set(torn) == TORN, seed
        assert plan[-1].kind == "torn_close", seed
        # the end of a refill can be torn off where there was one: the server had forgotten a step of the checkpoint
        kinds = [fault.kind for fault in plan]
        assert kinds.index("torn_refilled") == kinds.index("torn_step") + 1, seed


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_five_faults_hit_every_phase_and_five_processes(topology: Topology) -> None:
    for seed in SEEDS:
        plan = make_plan(seed, 5, topology)
        assert len({fault.target for fault in plan}) == 5, seed
        assert "environment" in {fault.target for fault in plan}
        assert sorted(fault.phase for fault in plan) == sorted(PHASES)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_three_faults_hit_three_phases_and_three_processes(topology: Topology) -> None:
    for seed in SEEDS:
        plan = make_plan(seed, 3, topology)
        assert len({fault.target for fault in plan}) == len({fault.phase for fault in plan}) == 3, seed
        assert "environment" in {fault.target for fault in plan}, seed


def test_the_trainer_that_wakes_up_was_frozen_while_it_wrote() -> None:
    for seed in SEEDS:
        plan = make_plan(seed, a_shape("embedded").whole, "embedded")
        rivals = [fault.phase for fault in plan if fault.kind == "rival"]
        assert not rivals or rivals[0] == "checkpoint", seed


def test_only_long_runs_have_a_deadly_prompt_and_a_forgetful_server() -> None:
    assert make_shape(1, LONG, "embedded").deadly
    assert not make_shape(1, LONG - 1, "embedded").deadly
    assert not {(fault.kind, fault.phase) for fault in make_plan(1, LONG - 1, "embedded")} & TORN
    assert {(fault.kind, fault.phase) for fault in make_plan(1, LONG, "embedded")} >= TORN


def test_every_kind_of_fault_befalls_every_process_it_applies_to() -> None:
    plan = make_plan(1, 140, "external")
    spared = {("reward", "thief"), ("trainer", "node")}  # they need a supervisor, and a store
    everything = {(target, kind) for target in a_shape("external").targets for kind in KINDS[target]} - spared
    assert {(fault.target, fault.kind) for fault in plan} == everything | {("server", kind) for kind, _ in TORN}


def test_in_a_run_of_episodes_runners_are_struck_in_every_phase() -> None:
    plan = make_plan(1, a_shape("embedded", episodes=True).whole, "embedded", episodes=True)
    assert {fault.phase for fault in plan if fault.target == "agents"} == set(PHASES)
    long = make_plan(1, 140, "embedded", episodes=True)
    assert {fault.kind for fault in long if fault.target == "agents"} == set(KINDS["agents"])
    assert "kill_engine" not in {fault.kind for fault in long}
    assert "agents" not in {fault.target for fault in make_plan(1, 140, "embedded")}


def test_some_runs_are_of_episodes_and_none_of_those_under_up() -> None:
    ways = {(topology_of(seed), has_episodes(seed)) for seed in range(30)}
    assert ways == {("embedded", False), ("embedded", True), ("external", False), ("external", True), ("up", False)}
    assert "drop" not in {make_shape(seed, 10, "embedded", episodes=True).policy for seed in range(30)}
    assert {make_shape(seed, 10, "embedded", episodes=True).graded for seed in range(30)} == {True, False}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_an_object_store_is_struck_in_every_phase(topology: Topology) -> None:
    plan = make_plan(1, a_shape(topology, store=True).whole, topology, store=True)
    assert {fault.phase for fault in plan if fault.target == "store"} == set(PHASES)
    assert {fault.kind for fault in plan if fault.target == "store"} == set(KINDS["store"])
    assert "store" not in {fault.target for fault in make_plan(1, 140, topology)}


def test_sentinels_are_struck_in_every_phase() -> None:
    plan = make_plan(1, a_shape("external", sentinels=True).whole, "external", sentinels=True)
    assert {fault.phase for fault in plan if fault.target == "sentinel"} == set(PHASES)
    assert {fault.kind for fault in plan if fault.target == "sentinel"} == set(KINDS["sentinel"])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_machine_is_lost_that_the_run_can_do_without(topology: Topology) -> None:
    """A trainer's only where its checkpoints are in a store, and a server's only where a replica can take its place."""

    def lost(**shape: bool) -> set[str]:
        return {fault.target for fault in make_plan(1, 140, topology, **shape) if fault.kind == "node"}

    if topology == "up":
        assert lost() == {"environment"}
        assert lost(store=True) == {"environment", "up"}
        return
    always = {"replay", "reward", "environment", "rollout"} | ({"server"} if topology == "external" else set())
    assert lost() == always
    assert lost(store=True, episodes=True) == always | {"trainer", "agents"}


def test_some_runs_have_a_store_a_puller_a_validator_or_sentinels() -> None:
    shapes = [make_shape(seed, 10, topology_of(seed), episodes=has_episodes(seed)) for seed in range(60)]
    assert {(shape.topology, shape.store) for shape in shapes} == {(t, s) for t in TOPOLOGIES for s in (True, False)}
    assert {shape.puller for shape in shapes if shape.store and shape.topology != "up"} == {True, False}
    assert not any(shape.puller for shape in shapes if not shape.store or shape.episodes or shape.topology == "up")
    assert {shape.validators for shape in shapes} == {0, 1}
    pairs = {(shape.duplicates, shape.sentinels) for shape in shapes if shape.topology == "external"}
    assert pairs == {(True, False), (False, True), (False, False)}
    assert not any(shape.sentinels for shape in shapes if shape.topology != "external")
    assert not any(shape.validators for shape in shapes if shape.episodes)


def test_under_up_nothing_strikes_the_network_the_disk_or_the_clock() -> None:
    plan = make_plan(1, 140, "up")
    services = {fault.kind for fault in plan if fault.target not in ("environment", "up", "server")}
    assert services == {"kill", "stop", "damaged", "thief"}
    assert {fault.kind for fault in plan if fault.target == "up"} == {*KINDS["up"]} - {"node"}  # it has no store


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_where_no_clock_can_be_moved_none_is(topology: Topology) -> None:
    assert "clock" in {fault.kind for fault in make_plan(1, 140, topology)}
    plan = make_plan(1, 140, topology, clocks=False)
    assert len(plan) == 140
    assert "clock" not in {fault.kind for fault in plan}


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
    for seed in SEEDS:
        shape = make_shape(seed, 10, "embedded")
        assert shape.prompts % shape.prompts_per_step == 1
