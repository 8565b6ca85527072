"""Everyone who calls the buffer, doing anything at any moment: a trainer, replicas, scorers, and the network between.

Numbers that choose among what there is count from the newest, so that a shrunk example speaks of the newest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis.stateful import initialize, rule

from headrace.records.score import Score
from headrace.replay import End, Reservation
from tests.properties.caller import deliveries
from tests.properties.runner_rules import RunnerRules, endings
from tests.properties.scorer_rules import Said, ScorerRules, Status, said
from tests.properties.setting import Setting, settings_of_runs
from tests.properties.trainer_rules import TrainerRules


class Everyone(TrainerRules, RunnerRules, ScorerRules):
    def __init__(self) -> None:
        super().__init__()
        self.slow: set[str] = set()  # tokens of leases that nobody finishes for now

    @initialize(setting=settings_of_runs)
    def open(self, setting: Setting) -> None:
        self.begin(setting)
        self.refit([0, 1])
        self.enter_runner(0)

    @rule(differ=st.booleans())
    def finish_everything(self, differ: bool) -> None:
        """Replicas and scorers catch up, so that runs get far. Rewards that do not `differ` are equal once they are clamped to 1."""
        open_tokens = {held.token for held in self.model.groups.values() if held.state == "open"}
        items = [
            (lease, self.trajectory(lease, index, "plain"))
            for lease in self.leases
            if lease.token in open_tokens - self.slow
            for index in range(lease.count)
        ]
        if items:
            self.call("push_many", items)
        self.finish_episodes(differ)
        self.call("release_scoring")
        while jobs := self.call("take_scoring", dict.fromkeys(self.all_environments, 64)):
            scores = [Score("SCORED", float(job.trajectory.index + (not differ))) for job in jobs]
            self.call("score_many", list(zip(jobs, scores, strict=True)))

    @rule(
        groups=st.integers(1, 4),
        versions=st.sampled_from(["plain", "plain", "refit", "old"]),
        differ=st.sampled_from([True, True, False]),
        until=st.sampled_from(["leased", "begun", "pushed", "taken", "scored", "trained", "trained", "trained"]),
    )
    def a_round(self, groups: int, versions: str, differ: bool, until: str) -> None:
        """What the pipeline does when nothing goes wrong, as far as it comes. `begun`: a trajectory is still missing."""
        if self.model.refill:
            self.refill(True, "once")
        if not self.model.closed:
            self.enqueue(groups, 0, 0, "once")
        replica = self.model.members.get(self.replica(0))
        if not self.model.healthy(self.replica(0)) or replica.version < self.model.next_step:
            self.refit([0])
        leases = self.call("lease", self.replica(0), 8) or []
        self.leases += leases
        if self.setting.episodes:
            self.be_there(0)
            episodes = self.lease_some_episodes(0, 16)
            if until != "leased":
                self.begin_episodes(episodes)
        items = [(lease, self.trajectory(lease, index, versions)) for lease in leases for index in lease.missing]
        if until == "begun":
            items = items[:-1]
        if items and until != "leased":
            self.call("push_many", items)
        if until == "taken":
            self.take_scoring(8, "once")
        if until in ("scored", "trained"):
            self.finish_everything(differ)
        if until == "trained":
            self.call("reserve", self.model.next_step, self.model.timeline)

    @rule(steps=st.integers(1, 4), saves=st.booleans())
    def a_group_falls_behind(self, steps: int, saves: bool) -> None:
        """One replica has begun it while the others train on; then it is passed on."""
        self.refit([0, 1])
        leases = self.call("lease", self.replica(1), 1) or []
        self.leases += leases
        self.slow = {lease.token for lease in leases}
        for lease in leases:
            first, *others = lease.missing
            self.call("push_many", [(lease, self.trajectory(lease, first, "plain"))])
            if others and saves:
                self.call("save_many", [(lease, self.trajectory(lease, others[0], "plain", 2))])
        self.some_steps(steps, False)
        self.slow = set()
        for lease in leases:
            self.call("release", lease, "leaving", False)
        self.a_round(1, "plain", True, "trained")

    @rule(
        groups=st.integers(1, 8),
        most=st.sampled_from([1, 2, 3, 8, 8]),
        deaths=st.lists(st.sampled_from(["silent", "died", "died", "left"]), min_size=2, max_size=5),
        busy=st.booleans(),
        pushes=st.booleans(),
    )
    def replicas_die(self, groups: int, most: int, deaths: Sequence[str], busy: bool, pushes: bool) -> None:
        """With what they hold, again and again. `busy`: another replica leases and trains beside them."""
        assert self.world
        self.run(self.world.limit(dataclasses.replace(self.setting, room=0).limits()))
        if self.model.closed:
            self.rewind(0, "once")
        for _ in range(2):  # until there is room for them
            self.a_round(groups, "plain", True, "trained")
        self.enqueue(groups, 0, 0, "once")
        for death in deaths:
            self.refit([0, 1])
            leases = self.call("lease", self.replica(1), most) or []
            self.leases += leases
            self.slow = {lease.token for lease in leases}
            if pushes and leases:
                self.call("push_many", [(leases[0], self.trajectory(leases[0], i, "plain")) for i in leases[0].missing])
            if busy:
                self.leases += self.call("lease", self.replica(0), 2) or []
            if death != "silent":
                self.call("deregister", self.replica(1), death == "died")
            else:
                self.run(self.world.pass_time(7_000))
                self.call("heartbeat", self.replica(0), [lease.token for lease in self.leases[-8:]])
                self.run(self.world.pass_time(14_000))
                self.call("heartbeat", self.replica(0), [])
            if busy:
                self.leases += self.call("lease", self.replica(0), 2) or []
        self.slow = set()

    @rule(
        steps=st.integers(1, 3),
        prompts=st.integers(1, 3),
        most=st.integers(1, 4),
        waited=st.booleans(),
        then=st.sampled_from(["evaluated", "the next", "the next", "given back", "died", "died", "dropped"]),
    )
    def a_replica_validates_beside_training(self, steps: int, prompts: int, most: int, waited: bool, then: str) -> None:
        """It keeps the version, and the others train on. `waited`: it got less than it asked for before. `then`: what becomes of what it
        holds."""
        if self.model.validation > self.model.next_step:
            self.some_steps(1, False)  # one of this version has been given up
        version = self.model.next_step
        if self.model.validation > version:
            return
        self.refit([0, 1])
        if waited:
            self.leases += self.call("lease", self.replica(0), 16) or []
            self.leases += self.call("lease", self.replica(1), 16) or []
        self.call("drop_validation", self.model.timeline, version, [self.replica(1)])
        self.enqueue_validation(prompts, True, 0, 0, "once")
        self.leases += (leases := self.call("lease", self.replica(1), most) or [])
        self.slow = {lease.token for lease in leases}
        self.some_steps(steps, False)
        self.leases += self.call("lease", self.replica(2), 2) or []
        self.slow = set()
        if then == "given back":
            for lease in leases:
                self.call("release", lease, "leaving", False)
        if then == "died":
            self.call("deregister", self.replica(1), True)
            self.call("drop_validation", self.model.timeline, version, [self.replica(0), self.replica(2)])
        if then == "dropped":
            self.call("drop_validation", self.model.timeline, version + 1)
        self.leases += self.call("lease", self.replica(1), 4) or []
        self.finish_everything(True)
        if then == "the next":  # which is of newer weights than it still holds
            self.validate_newest(prompts)
        self.leases += self.call("lease", self.replica(1), 4) or []

    def validate_newest(self, prompts: int) -> None:
        if self.model.validation <= self.model.next_step:
            self.call("drop_validation", self.model.timeline, self.model.next_step)
            self.enqueue_validation(prompts, True, 0, 0, "once")

    @rule(behind=st.integers(1, 3), groups=st.integers(4, 12), prompts=st.integers(0, 3))
    def a_replica_gets_each_version_late(self, behind: int, groups: int, prompts: int) -> None:
        """It pulls, and waits while another gets newer weights, which leaves it its share as long as it may begin work. Runners play
        episodes of a validation of these beside it."""
        self.pull(2, 0, 0)
        for _ in range(behind):
            self.leases += self.call("lease", self.replica(2), 16) or []
            self.a_round(groups, "plain", True, "trained")
        self.pull(2, 1, 0)
        if prompts:
            self.validate_newest(prompts)
            self.lease_some_episodes(0, 8)
        for which in (2, 0):
            self.leases += self.call("lease", self.replica(which), 16) or []

    @rule(
        groups=st.integers(1, 4),
        calls=st.integers(0, 2),
        endings=endings,
        how=deliveries,
        dies=st.sampled_from([False, False, True]),
    )
    def episodes_are_run(self, groups: int, calls: int, endings: Sequence[Said], how: str, dies: bool) -> None:
        """Of the groups that a runner gets. It ends some of them; the last as `how` says. `dies`: then another goes on."""
        if not self.setting.episodes:
            return
        self.a_round(groups, "plain", True, "leased")
        held = {group.token for group in self.model.groups.values() if group.state == "open" and group.episodes}
        tokens = list(dict.fromkeys(lease.token for lease in self.episodes if lease.token in held))[-groups:]
        if tokens and calls:
            self.programs_are_at_work(groups, calls, 0)
        for place, ending in enumerate(endings if tokens else ()):
            lease = self.newest_lease(tokens[place // self.setting.n % len(tokens)])
            delivery = how if place == len(endings) - 1 else "once"
            self.end_episode(lease, place % lease.count, ending, how=delivery)
        if dies:
            self.call("deregister_runner", self.runner_id(0), True)
            self.enter_runner(0)
            self.lease_some_episodes(0, 16)

    @rule(
        groups=st.integers(1, 4),
        slots=st.sampled_from([2, 8, 16]),
        deaths=st.lists(st.sampled_from(["silent", "died", "died", "left"]), min_size=1, max_size=4),
        calls=st.booleans(),
    )
    def runners_die(self, groups: int, slots: int, deaths: Sequence[str], calls: bool) -> None:
        """With what they hold, again and again."""
        assert self.world
        if not self.setting.episodes or self.model.closed:
            return
        self.enqueue(groups, 0, 0, "once")
        for death in deaths:
            self.refit([0])
            self.be_there(0)
            self.be_there(1)
            self.lease(0, 8, "once")
            leases = self.lease_some_episodes(1, slots)
            if calls and leases:
                self.programs_are_at_work(min(2, len(leases)), 2, 0)
            self.lease_some_episodes(0, 4)
            if death != "silent":
                self.call("deregister_runner", self.runner_id(1), death == "died")
            else:
                self.run(self.world.pass_time(7_000))
                self.call("runner_heartbeat", self.runner_id(0), [lease.token for lease in self.episodes[-8:]])
                self.call("heartbeat", self.replica(0), [lease.token for lease in self.leases[-8:]])
                self.run(self.world.pass_time(14_000))
                self.call("runner_heartbeat", self.runner_id(0), [])
            self.lease_some_episodes(0, 16)

    @rule(groups=st.integers(1, 4), said=st.lists(said, min_size=2, max_size=8), how=deliveries)
    def a_round_is_scored(self, groups: int, said: Sequence[Said], how: str) -> None:
        """By a scorer that also fails."""
        self.a_round(groups, "plain", True, "taken")
        if self.jobs:
            self.score(said, 0, how)

    @rule(
        which=st.integers(0, 1),
        status=st.sampled_from(["FAILED", "INVALID", "INTERRUPTED", "NOT_STARTED"]),
        rounds=st.integers(1, 6),
        groups=st.integers(1, 4),
    )
    def an_environment_breaks(self, which: int, status: Status, rounds: int, groups: int) -> None:
        """For some rounds it scores nothing."""
        self.a_round(groups, "plain", True, "pushed")
        for _ in range(rounds):
            jobs = self.call("take_scoring", {self.env_name(which): 8}) or []
            if jobs:
                self.call("score_many", [(job, Score(status, message="no")) for job in jobs])
            self.time_passes("the next")

    @rule(
        which=st.integers(0, 1),
        status=st.sampled_from(["FAILED", "INVALID", "INTERRUPTED"]),
        rounds=st.integers(4, 16),
        every=st.sampled_from([1, 2, 3]),
        most=st.sampled_from([1, 8]),
    )
    def an_environment_fails_on_some_prompts(
        self, which: int, status: Status, rounds: int, every: int, most: int
    ) -> None:
        """On all that wait for their scores, and on `every` few of those that are generated then."""
        self.a_round(4, "plain", True, "pushed")
        waiting = {group for env in self.all_environments for group, _ in self.model.waiting(env)}
        for _ in range(rounds):
            leases = self.call("lease", self.replica(0), most) or []
            self.leases += leases
            items = [(lease, self.trajectory(lease, index, "plain")) for lease in leases for index in lease.missing]
            if items:
                self.call("push_many", items)
            jobs = self.call("take_scoring", {self.env_name(which): 8}) or []
            bad = [job.group.id in waiting or job.group.order % every == 0 for job in jobs]
            scores = [Score(status, message="no") if each else Score("SCORED", 1.0) for each in bad]
            if jobs:
                self.call("score_many", list(zip(jobs, scores, strict=True)))
            self.time_passes("the next")

    @rule(steps=st.integers(2, 4), commits=st.booleans())
    def some_steps(self, steps: int, commits: bool) -> None:
        for _ in range(steps):
            self.a_round(self.setting.prompts, "plain", True, "trained")
        if commits:
            self.commit(0, "all", 0, "once")

    @rule(which=st.lists(st.integers(0, 3), min_size=1, max_size=3), again=st.booleans(), how=deliveries)
    def a_batch_is_given_back(self, which: list[int], again: bool, how: str) -> None:
        """The trainer took it and found that it breaks a law. `again`: it then takes the step anew."""
        self.some_steps(1, False)
        self.reject_step(0, which, 0, 0, how)
        if again:
            self.a_round(1, "plain", True, "trained")

    @rule(
        groups=st.integers(1, 4),
        at=st.sampled_from(["leased", "begun", "begun", "pushed", "taken", "taken", "scored"]),
        back=st.sampled_from([0, 0, 0, 1, 1, 1, 2, -1]),
        loses=st.sampled_from([False, False, False, True]),
    )
    def the_trainer_starts_again_amid_a_round(self, groups: int, at: str, back: int, loses: bool) -> None:
        """Replicas and scorers hold leases and tokens of the timeline that ends. `loses`: the store lost writes."""
        self.a_round(groups, "plain", True, at)
        if loses:
            self.restore(max(0, back), "once")
        else:
            self.rewind(back, "once")

    # -- the end

    def teardown(self) -> None:
        try:
            if self.world and not self.broken:
                self.drain()
        finally:
            if self.world:
                self.run(self.world.client.aclose())
            self.runner.close()

    def drain(self) -> None:
        """Everything is handed in, trained and committed: then every group has ended once, and no byte is left (law 1)."""
        assert self.world
        model = self.model
        self.run(self.world.compare_all())
        if model.closed:
            self.timelines.append(self.name())
            self.call("rewind", model.next_step, self.timelines[-1])
        self.run(self.world.limit(dataclasses.replace(self.setting, room=0, retain=0, max_scored=0).limits()))
        if model.refill:
            self.refill(True, "once")
        if model.wanted:
            self.supply("once")
        self.call("close", model.timeline)
        if model.validators or any(held.kind == "validators" for held in model.groups.values()):
            self.call("drop_validation", model.timeline, 10**6)  # the only replica that is left trains
        for _ in range(400):
            self.refit([0])
            self.finish_everything(True)
            self.be_there(0)
            while (leases := self.call("lease", self.replica(0), 8)) or self.lease_some_episodes(0, 64):
                self.leases += leases or []
                self.finish_everything(True)
            batch = self.call("reserve", model.next_step, model.timeline)
            if isinstance(batch, End):
                break
            # for a group leased to one who never heard of it, which law 6 brings back, or for a broken environment, which is asked again
            if not isinstance(batch, Reservation):
                self.run(self.world.pass_time((model.next_due() or model.now) - model.now))
        else:
            raise AssertionError("the run does not come to its end")
        self.call("commit", model.next_step, model.timeline)
        self.call("drop_validation", model.timeline, 10**6)
        self.run(self.world.compare_all())
        counts = model.count("train")
        assert set(counts) <= {"trained", "filtered", "failed", "unused"}
        assert sum(counts.values()) == model.enqueued + 1
        assert model.bytes == 0
