"""The model's part of scores, batches, checkpoints and validation: with `Episodes`, the whole of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.base.errors import EnvironmentBroken, SamplingStarved, WrongStep
from headrace.records.trajectory import AnyTrajectory, Trajectory
from headrace.replay import End, Ended, Reservation, RunState, Waiting
from tests.properties.episodes import Episodes
from tests.properties.fleet import milliseconds
from tests.properties.records import IN_FLIGHT, Held


class Model(Episodes):
    # -- scores

    def settle(self, held: Held) -> None:
        """The first n that are scored are the group; what else was started is surplus."""
        if len(held.scored) < held.group.n:
            return
        held.surplus, held.cohort = not held.generated, None
        self.meters.trajectories["surplus"] += held.count - held.group.n - len(held.dropped) - len(held.unscored)
        for piece in held.unscored.values():
            self.meters.add("surplus", piece, self.next_step)
        held.pieces, held.saved, held.calls = held.scored, {}, {}
        if held.lane == "validation":
            held.state = "evaluated"
            return
        self.scored_since += 1
        self.meter("generated", held)
        if self.limits.filter_equal and self._are_equal(held):
            self.filtered_since += 1
            self.meter("filtered", held)
            self.end(held, "filtered")
            self.forget(held, "filtered")
        else:
            held.state = "ready"

    def _are_equal(self, held: Held) -> bool:
        """Whether the clamped rewards of the group are equal, but for rounding."""
        low = -math.inf if self.limits.reward_min is None else self.limits.reward_min
        high = math.inf if self.limits.reward_max is None else self.limits.reward_max
        rewards = [min(max(piece.reward, low), high) for piece in held.pieces.values() if piece.reward is not None]
        return all(math.isclose(reward, rewards[0], rel_tol=1e-6) for reward in rewards)

    # -- batches

    def unlawful(self) -> list[str]:
        """Groups that may not be trained at the next step: whether `reserve` sends them back now or later is its own affair."""
        return [held.id for held in self.train("ready") if not self.lawful(held.oldest, held.newest)]

    def reserve(self, step: int, timeline: str, sent_back: set[str], seen: object) -> object:
        """`sent_back`: those of `unlawful` that the server has requeued."""
        self.expire()
        self.require_timeline(timeline)
        if step == self.next_step - 1 and self._may_be_repeated(step):
            return self._batch(step)
        if step != self.next_step:
            self.refuse(WrongStep)
        prompts = self.limits.prompts_per_step
        if self.refill:
            return Waiting(0, prompts)
        for held in self.train("ready"):
            if held.id in sent_back or (held.step == step and not self.lawful(held.oldest, held.newest)):
                # newer than the step: a rejection took the run back to it
                old = not self.lawful(held.oldest, min(held.newest, self.next_step))
                self.requeue(held, "over_age" if old else "too_new", counted=False)
        kept = self.of_step(step, "ready")
        need = prompts - len(kept)
        if self.closed:
            if len(self.train("queued", *IN_FLIGHT)) + len(self.wanted) < prompts:
                if not self._waits_for_environment():
                    return self._end_run()
                return Waiting(len(kept), prompts)
            self._unpin(need)
        fresh = self._fresh(step, need)
        if fresh is None:
            return self._wait(step, need, sent_back, seen)
        if sent_back and isinstance(seen, Waiting):
            return seen  # the next call finds them
        for held in [*kept, *fresh]:
            held.state, held.step = "reserved", step
        self.next_step += 1
        self.batch_counts, self.scored_since, self.filtered_since = (self.scored_since, self.filtered_since), 0, 0
        return self._batch(step)

    def reserve_again(self, number: int, step: int, timeline: str, seen: object) -> object:
        """It reserves nothing."""
        self.expire()
        self.require_timeline(timeline)
        if step == self.next_step - 1 and self._may_be_repeated(step):
            return self._batch(step)
        if step != self.next_step:
            self.refuse(WrongStep)
        return Waiting(0, self.limits.prompts_per_step)

    def _may_be_repeated(self, step: int) -> bool:
        """Its trainer may have lost the reply: it is neither committed nor, after the rejection of a later step, without its payloads."""
        groups = self.of_step(step, "reserved")
        return step >= self.committed and bool(groups) and not any(held.evicted for held in groups)

    def _fresh(self, step: int, need: int) -> list[Held] | None:
        """What fills the holes: `ordered` the lowest tickets, all ready; else the lowest tickets among the ready. None: wait."""
        line = self.line()
        if self.limits.staleness_policy != "ordered":
            line = [held for held in line if held.state == "ready" and self.lawful(held.oldest, held.newest)]
        line = line[:need]
        whole = len(line) == need and all(
            held.state == "ready" and self.lawful(held.oldest, held.newest) for held in line
        )
        return line if whole else None

    def _wait(self, step: int, need: int, sent_back: set[str], seen: object) -> Waiting:
        line = self.line()
        ready = [held for held in line if held.state == "ready"]
        lowest = line[:need] if self.limits.staleness_policy == "ordered" else ready
        count = sum(held.state == "ready" for held in lowest)
        stuck = [held.id for held in lowest if held.state == "ready" and not self.lawful(held.oldest, held.newest)]
        is_whole = count >= need or self.limits.staleness_policy != "ordered"
        if is_whole and not sent_back:  # else the next call finds them
            assert not stuck, f"{stuck} can never be trained, and block the line"
        most = self.limits.max_scored_per_step
        if most and len(ready) < need and self.scored_since > most:
            self.refuse(SamplingStarved)
        self._waits_for_environment()
        prompts = self.limits.prompts_per_step
        if sent_back and isinstance(seen, Waiting):
            count = seen.ready - (prompts - need)  # before or after they left
            assert 0 <= count < need
        return Waiting(prompts - need + count, prompts)

    def _waits_for_environment(self) -> bool:
        """Whether something waits for a broken one, which the end of the run waits for; refused if it has been broken for too long."""
        broken = {name: e.broken for name, e in self.environments.items() if e.broken is not None}
        for name, since in broken.items():
            limits = self.limits.environments.get(name)
            if (
                limits
                and limits.give_up_after_s is not None
                and self.now - since >= milliseconds(limits.give_up_after_s)
            ):
                self.refuse(EnvironmentBroken)
        return any(self.waiting(name) or self.taken(name) for name in broken)

    def _batch(self, step: int) -> tuple[object, ...]:
        groups = self.of_step(step, "reserved")
        assert len(groups) == self.limits.prompts_per_step
        return (
            step,
            tuple(held.id for held in groups),
            [place for held in groups for place in _described(held)],
            *self.batch_counts,
            tuple(held.attempt for held in groups),
        )

    def reject_step(
        self, step: int, timeline: str, nonce: str, attempts: Mapping[str, int], reason: str, seen: object
    ) -> None:
        """The newest step, if nothing was trained on it, is open again: those named start over, the others keep it."""
        self.expire()
        self.require_timeline(timeline)
        if nonce == self.rejected:
            return
        epoch = self.epoch_now.version if self.epoch_now and self.epoch_now.timeline == self.timeline else 0
        trained = max([self.committed, epoch, *(offer.version for offer in self.offers.values())])
        batch = self.of_step(step, "reserved") if trained <= step == self.next_step - 1 else []
        if not batch or not set(attempts.items()) <= {(held.id, held.attempt) for held in batch}:
            self.refuse(WrongStep)
        if any(held.evicted for held in batch):  # the groups that are not named could not be handed out again
            self.refuse(WrongStep)
        for held in batch:
            if held.id in attempts:
                self.requeue(held, "invariant", counted=True)
            else:
                held.state = "ready"
        self.next_step, self.rejected = step, nonce
        self.scored_since = self.filtered_since = 0
        self.batch_counts = (0, 0)

    def _unpin(self, need: int) -> None:
        """Nothing else can fill the holes: survivors of the last steps give up theirs."""
        while len(self.queue("train")) + len(self.wanted) + len(self.line()) < need:
            steps = [held.step for held in self.in_flight() if held.pinned and held.step != self.next_step]
            if not steps:
                return
            for held in self.of_step(max(steps), "ready"):  # type: ignore[type-var]
                held.step = None

    def _end_run(self) -> End:
        for held in self.train("queued", *IN_FLIGHT):
            self.end(held, "unused")
        return End(len(self.train("unused")))

    # -- checkpoints

    def commit(
        self, version: int, timeline: str, trained: Mapping[int, Sequence[str]] | None = None, *, seen: object
    ) -> None:
        self.expire()
        self.require_timeline(timeline)
        if version > self.next_step or (trained and version > self.committed and trained != self.uncommitted(version)):
            self.refuse(WrongStep)
        self._commit(version)

    def uncommitted(self, version: int) -> dict[int, list[str]]:
        """The groups of each step < version that is not committed."""
        steps = range(max(0, self.committed), version)
        return {step: sorted(held.id for held in self.of_step(step, "reserved")) for step in steps}

    def _commit(self, version: int) -> None:
        for held in self.train("reserved"):
            if held.step is not None and held.step < version:
                held.state = "trained"
                self.meter_trained(held)
        self.committed = max(self.committed, version)
        self.freed = max(self.freed, version - self.limits.retain_steps)
        for held in self.train("trained"):
            if held.step is not None and held.step < self.freed:
                self.forget(held, "trained")

    def rewind(self, version: int, timeline: str, seen: object) -> RunState:
        """With the call that frees what the rewind committed."""
        self.expire()
        if timeline != self.timeline:
            self.require_unused(timeline)
            if version > self.next_step:
                self.refuse(WrongStep)
            if version < self.committed:
                self._take_back(version)
            else:
                self._commit(version)
            self._reopen(version)
            self.used.add(self.timeline)
            self.next_step, self.closed, self.timeline = version, False, timeline
            self.timelines = [entry for entry in self.timelines if entry[1] < version] + [(timeline, version)]
            self.scored_since = self.filtered_since = 0
            self.batch_counts = (0, 0)
        expected = self.state()
        self.commit(version, timeline, seen=None)
        return expected

    def _take_back(self, version: int) -> None:
        """What was trained from `version` on is so no longer: held groups are reserved again, the others are for the refill."""
        held = self.train("trained")
        missing = (self.committed - version) * self.limits.prompts_per_step
        for group in held:
            if group.step is not None and group.step >= version:
                group.state = "reserved"
                missing -= 1
        self.gone["train", "trained"] -= missing
        self.committed, self.refill, self.freed = version, True, min(self.freed, version)

    def _reopen(self, version: int) -> None:
        for held in list(self.groups.values()):
            if held.lane == "validation":
                self._drop(held)
            elif held.state == "queued":
                held.passed = False
            elif held.state == "unused":
                self.requeue(held, "rewind", counted=False)
            elif held.state in ("open", "scoring", "ready", "reserved"):
                is_open = held.state == "open"
                if self._goes_on(held, version) if is_open else not held.evicted and held.newest <= version:
                    held.state = "ready" if held.state == "reserved" else held.state
                else:
                    self.requeue(held, "rewind", counted=False)
        self.void_scoring()
        self.validation, self.validators = 0, set()
        self.epochs = set()
        self.offers = {}
        if self.epoch_now:
            self.epoch_now.state = "aborted"

    def _goes_on(self, held: Held, version: int) -> bool:
        """Whether its lease goes on: nothing is written, and its replica holds nothing, but what the next weights descend from."""
        begun = [piece.trajectory.newest_version for piece in held.pieces.values()]
        begun += [prefix.newest_version for prefix in held.saved.values()]
        begun += [span.version for calls in held.calls.values() for _, call in calls for span in call.spans]
        if held.episodes:
            goes_on = held.token is not None and held.version <= version
        else:
            goes_on = not held.kind and self.healthy(held.replica) and self.members[held.replica].version <= version
        return goes_on and max(begun, default=0) <= version

    def restore(
        self, version: int, timeline: str, incarnation: str, enqueued: int, ended: Ended, seen: object
    ) -> RunState:
        self.expire()
        if incarnation != self.incarnation:
            self.require_unused(incarnation, timeline)
            self.used |= {self.timeline, self.incarnation, *self.members, *self.runners}
            self.begin(timeline, incarnation, version, version, enqueued)
            self.refill = True
            self.gone["train", "trained"] = version * self.limits.prompts_per_step
            self.gone["train", "failed"], self.gone["train", "filtered"] = ended.failed, ended.filtered
            self.ended, self.failures = orders(ended.bitmap), orders(ended.failures)
        return self.state()

    def end_refill(self, timeline: str, seen: object) -> None:
        self.expire()
        self.require_timeline(timeline)
        if self.refill and sum(self.count("train").values()) <= self.enqueued:
            self.refuse(WrongStep)
        self.refill = False

    def groups_ended(self, seen: object) -> tuple[object, ...]:
        counts = self.count("train")
        retries = {order: times for order, times in self.retries.items() if times}
        return counts.get("failed", 0), counts.get("filtered", 0), self.ended, self.failures, retries

    def state(self, seen: object = None) -> RunState:
        return RunState(
            "",
            self.timeline,
            self.incarnation,
            self.next_step,
            self.committed,
            self.enqueued,
            self.closed,
            self.count("train"),
            self.refill,
            len(self.wanted),
            tuple(self.timelines),
            self.waiting_episodes(),
            sum(not runner.dead for runner in self.runners.values()),
            self.validation if any(held.lane == "validation" for held in self.groups.values()) else -1,
        )

    # -- validation

    def read_evaluated(self, ids: Sequence[str], seen: object) -> object:
        self.expire()
        lane = {group.id: group for group in self.groups.values() if group.lane == "validation"}
        held = [lane[group] for group in ids if group in lane]
        done = [group for group in held if group.state == "evaluated"]
        failed = {group.id for group in held if group.state == "failed"}
        return [(group.id, _described(group)) for group in done], failed, [group for group in ids if group not in lane]

    def drop_validation(self, timeline: str, before: int, validators: Sequence[str] = (), *, seen: object) -> None:
        self.drop_validation_again(0, timeline, before, seen=seen)
        if before == self.validation:
            holding = [id_ for id_ in validators if self.healthy(id_) and self.members[id_].version == before]
            holding = [id_ for id_ in holding if not self.members[id_].pulls]
            self.validators |= {*holding}
            for id_ in holding:
                self.members[id_].waits = False

    def drop_validation_again(
        self, number: int, timeline: str, before: int, validators: Sequence[str] = (), *, seen: object
    ) -> None:
        """It names no validators."""
        self.expire()
        self.require_timeline(timeline)
        if before > self.validation:
            self.validation, self.validators = before, set()
        for held in list(self.groups.values()):
            if held.lane == "validation" and held.validation < before:
                self._drop(held)

    def _drop(self, held: Held) -> None:
        self.forget(held, held.state if held.state in ("evaluated", "failed") else "unused")


def _described(held: Held) -> list[tuple[object, ...]]:
    """Group, index, reward, length, oldest and newest version of each trajectory, in the order of indices."""
    places = sorted(held.pieces.items())
    return [(held.id, index, piece.reward, *shape(piece.trajectory)) for index, piece in places]


def shape(trajectory: AnyTrajectory) -> tuple[int, int, int]:
    """Its tokens that are trained, and their oldest and newest version; of an episode counted from its calls."""
    t = trajectory
    if isinstance(t, Trajectory):
        return (t.completion_token_ids.size, t.oldest_version, t.newest_version)
    spans = [span for call in t.calls if call.trained for span in call.spans]
    versions = [span.version for span in spans]
    return (sum(span.end - span.start for span in spans), min(versions), max(versions))


def orders(bitmap: bytes) -> set[int]:
    """The orders in a bitmap of those that ended: the most significant bit of the first byte is order 0."""
    return {8 * i + bit for i, byte in enumerate(bitmap) for bit in range(8) if byte >> (7 - bit) & 1}


def seen_batch(batch: Reservation) -> tuple[object, ...]:
    """A reservation as the model describes it."""
    places = [(t.group_id, t.index, t.reward, t.length, t.oldest_version, t.newest_version) for t in batch.trajectories]
    return (batch.step, batch.groups, places, batch.scored, batch.filtered, batch.attempts)
