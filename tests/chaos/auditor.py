"""Judges a run by its evidence: every law, by what files and Redis say, with no help of the code that is judged.

Each law is a function that returns what it objects to. `python -m tests.chaos.auditor FOLDER` judges a run that lies in a folder.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos.evidence import ENDS, Batch, Evidence, Group, Line, Trajectory, group_id, read
from tests.chaos.tokens import following

Law = Callable[[Evidence], Iterator[str]]

# Ways to end that a person or an orchestrator answers by starting the service again, and what it has to say of it.
_TRY_AGAIN, _PART_DIED, _MUST_BE_MENDED = 75, 70, 1
_WORDS = {
    _PART_DIED: (
        "the engine died",
        "the engine's process died",
        "the engine does not answer",
        "the embedded server ended",
        "the buffer's server lost",
        "can't be reached, or fails",  # the object store
    ),
    _MUST_BE_MENDED: (
        "can't write",
        "the embedded server ended",
        "another trainer has taken over the run",
        "is less than 1.25 x replay.max_bytes",
    ),
}
_KILLED, _STOPPED = -9, 143
_MAX_ATTEMPTS = 3  # the default
_CLOCK_TOLERANCE_S = 60
_MINUTE_S = 65.0  # by the driver's clock, which sees a death before the service does
# Faults that an environment fails of, or is late for. (One that is dead or overloaded has begun nothing.)
_CHARGED = {"stop", "slow", "bad_answers", "raises", "cut", "node"}
_CALLS = 5  # of an episode


def judge(evidence: Evidence) -> list[str]:
    """Everything that any law objects to, each with the law's name before it."""
    return [f"{law.__name__}: {objection}" for law in LAWS for objection in law(evidence)]


def nothing_is_lost(e: Evidence) -> Iterator[str]:
    """Law 1: every prompt is in exactly one end; a run whose prompts ran out has none in between."""
    trained = {order for checkpoint in e.checkpoints for order in checkpoint.trained}
    for order in range(len(e.moods)):
        ends = ["trained"] if order in trained else []
        state = e.states.get(order)
        if state in ENDS:
            ends.append(state)
        elif state is not None:
            yield f"prompt {order} is still {state} after the end"
        if order in e.ended and state not in ("failed", "filtered"):
            ends.append("ended")  # its record is gone, its end is kept
        if len(ends) != 1:
            yield f"prompt {order} is in {len(ends)} ends {ends}"
    for order in sorted((set(e.states) | trained | e.ended) - set(range(len(e.moods)))):
        yield f"prompt {order} was never asked for"


def none_is_trained_twice(e: Evidence) -> Iterator[str]:
    """Law 1, in the history of the surviving weights: by the checkpoints' ledgers and by the trainer's lineage."""
    ledger = Counter(id_ for _, ids in _history(e) for id_ in ids)
    lineage = Counter(group.id for batch in _lineage(e) for group in batch.groups)
    for name, counted in (("ledgers", ledger), ("lineage", lineage)):
        for id_, times in counted.items():
            if times > 1:
                yield f"group {id_} was trained {times} times by the {name}"


def steps_are_whole(e: Evidence) -> Iterator[str]:
    """The history of the newest weights is steps 0, 1, 2, …, each of P groups, the same in every record of it."""
    if not e.checkpoints:
        yield "no checkpoint was published"
        return
    newest = e.checkpoints[-1]
    steps = [step for step, _ in _history(e)]
    if steps != list(range(newest.version)):
        yield f"the ledgers of version {newest.version} hold steps {steps}"
    for step, ids in _history(e):
        if len(ids) != e.prompts_per_step or len(set(ids)) != len(ids):
            yield f"step {step} was trained on {ids}, not on {e.prompts_per_step} different groups"
    if sorted(newest.trained) != sorted(_order(id_) for _, ids in _history(e) for id_ in ids):
        yield f"the places that version {newest.version} says it was trained on are not those of its ledgers"
    if [line.step for line in _surviving(e)] != list(range(newest.version)):
        yield f"metrics.jsonl holds steps {[line.step for line in _surviving(e)]} of version {newest.version}'s history"
    if [batch.step for batch in _lineage(e)] != list(range(newest.version)):
        yield f"the lineage holds steps {[batch.step for batch in _lineage(e)]} of version {newest.version}'s history"
    for checkpoint in e.checkpoints:
        if checkpoint.timeline not in (*newest.ancestors, newest.timeline):
            yield f"version {newest.version} does not descend from checkpoint {checkpoint.version}"


def records_agree(e: Evidence) -> Iterator[str]:
    """Ledger, lineage and what was seen in Redis tell of the same groups and trajectories."""
    ledger = dict(_history(e))
    lineage = _lineage(e)
    for batch in lineage:
        if [group.id for group in batch.groups] != ledger.get(batch.step):
            yield f"step {batch.step}: lineage and ledger name other groups"
        for group in batch.groups:
            if group.id != group_id(group.order):
                yield f"step {batch.step}: group {group.id} says its place is {group.order} (law 5)"
        seen = _seen(e, batch)
        if seen is not None and _facts(seen) != _facts(batch):
            yield f"step {batch.step}: the trainer's lineage is not what lay in the buffer"
    # on a busy machine the watcher misses steps
    if lineage and all(_seen(e, batch) is None for batch in lineage):
        yield "none of the steps was seen in the buffer: the records can't be checked"


def the_store_has_the_run(e: Evidence) -> Iterator[str]:
    """The newest weights are in the object store when the trainer has ended, and each checkpoint that is listed there is whole."""
    if e.stored is None:
        return
    for stored in e.stored:
        if stored.wrong:
            yield f"checkpoint {stored.version} in the store lacks {stored.wrong[0]}, …"
    newest = [(checkpoint.version, checkpoint.timeline) for checkpoint in e.checkpoints[-1:]]
    if not set(newest) <= {(stored.version, stored.timeline) for stored in e.stored}:
        yield f"the store has not the newest checkpoint {newest}"


def none_is_over_age(e: Evidence) -> Iterator[str]:
    """Law 2, for every trajectory that was trained, whatever was rewound later. Under `mask` it is a law of tokens: a group needs
    a young one, and the old ones are left out of the loss."""
    for batch in (*e.lineage, *e.observed):
        for group, t in ((g, t) for g in batch.groups for t in g.trajectories):
            where = f"step {batch.step} on {batch.timeline}: {group.id}[{t.index}]"
            if not t.versions:
                yield f"{where} has no tokens"
            elif e.policy != "mask" and batch.step - min(t.versions) > e.max_age:
                yield f"{where} has tokens of version {min(t.versions)}, older than {e.max_age} steps"
            elif max(t.versions) > batch.step:
                yield f"{where} has tokens of version {max(t.versions)}, which those weights do not come from"
        for group in batch.groups if e.policy == "mask" else ():
            if all(batch.step - version > e.max_age for t in group.trajectories for version in t.versions):
                yield f"step {batch.step} on {batch.timeline}: {group.id} has no token of at most {e.max_age} steps"
    for line in e.lines:
        if e.policy != "mask" and line.age_max is not None and not line.age_max <= e.max_age:
            yield f"metrics.jsonl: step {line.step} was of age {line.age_max}"


def groups_are_complete(e: Evidence) -> Iterator[str]:
    """Law 3: n trajectories with distinct indices."""
    for batch in (*e.lineage, *e.observed):
        if len({group.id for group in batch.groups}) != e.prompts_per_step:
            yield f"step {batch.step} on {batch.timeline} has not {e.prompts_per_step} different groups"
        for group in batch.groups:
            indices = [t.index for t in group.trajectories]
            if len(indices) != e.generations or len(set(indices)) != e.generations:
                yield f"step {batch.step} on {batch.timeline}: group {group.id} has trajectories {sorted(indices)}"


def rewound_steps_are_unchanged(e: Evidence) -> Iterator[str]:
    """Law 5: the step that a rewind goes back to is handed out as before, if it was reserved and the server lost nothing."""
    for line in e.lines:
        if line.kind != "rewind" or any(line.time - 120 < lost <= line.time for lost in e.lost_writes):
            continue
        again = next((b for b in e.observed if (b.timeline, b.step) == (line.timeline, line.step)), None)
        if again is None:
            continue
        before = [b for b in e.observed if b.step == line.step and b.incarnation == again.incarnation]
        before = before[: before.index(again)]
        if before and _facts(before[-1]) != _facts(again):
            yield f"step {line.step} was another one after the rewind to timeline {line.timeline}"


def failures_are_not_zero(e: Evidence) -> Iterator[str]:
    """Law 7: what was trained has the environment's own reward; what can't be scored was never trained, and ended as failed."""
    for batch in e.observed:
        for group, t in ((g, t) for g in batch.groups for t in g.trajectories):
            if t.status != "SCORED" or t.reward is None or t.reward != t.right_reward:
                yield f"step {batch.step}: {group.id}[{t.index}] is {t.status} with {t.reward}, not {t.right_reward}"
    for order, mood in enumerate(e.moods):
        trained = any(order in checkpoint.trained for checkpoint in e.checkpoints)
        if mood == "poison" and trained:
            yield f"prompt {order} can't be scored, and was trained"
        if mood == "flat" and trained:
            yield f"the answers to prompt {order} are all worth the same, and it was trained"


def tokens_are_those_that_were_sampled(e: Evidence) -> Iterator[str]:
    """Of episodes: each token that was trained is what its weights write behind the path that the record says it had."""
    for batch in e.observed if e.episodes else ():
        for group, t in ((g, t) for g in batch.groups for t in g.trajectories):
            paths: list[tuple[int, ...]] = []
            for number, call in enumerate(t.calls):
                path = (*(paths[call.parent] if call.parent >= 0 else ()), *call.context)
                for place, (token, version) in enumerate(zip(call.completion, call.versions, strict=True)):
                    if place and call.trained and token != following(path, version):
                        where = f"step {batch.step}: {group.id}[{t.index}], call {number}"
                        yield f"{where}: token {place} is not what version {version} writes there"
                    path = (*path, token)
                paths.append(path)


def an_episode_is_of_one_program(e: Evidence) -> Iterator[str]:
    """All calls of an episode, and no other episode's, are one instance's: it asks five times, and each time but the first it says how
    often, with its mark."""
    of_mark: dict[str, tuple[str, int]] = {}
    for batch in e.observed if e.episodes else ():
        for group, t in ((g, t) for g in batch.groups for t in g.trajectories):
            where, mark = f"step {batch.step}: {group.id}[{t.index}]", _mark(t)
            if mark is None:
                said = [(call.parent, call.asked, call.trained) for call in t.calls]
                yield f"{where} is no conversation of one program over {_CALLS} calls: {said}"
            elif of_mark.setdefault(mark, (group.id, t.index)) != (group.id, t.index):
                yield f"{where} and {of_mark[mark]} are of the same program"


def _mark(t: Trajectory) -> str | None:
    """That of the instance which an episode is of, if it is of one."""
    asked = [call.asked[-1] if call.asked else "" for call in t.calls]
    mark = asked[1].partition("-")[2] if len(asked) > 1 else ""
    chain = all(call.trained and call.parent == number - 1 for number, call in enumerate(t.calls))
    right = chain and asked[1:] == [f"{turn}-{mark}" for turn in range(1, _CALLS)]
    return mark if right and mark else None


def nothing_is_left_open(e: Evidence) -> Iterator[str]:
    """When the run is over no runner plays, and the buffer keeps nothing of what was played or generated but what its groups name."""
    for name, episodes in e.open.items():
        if episodes is None:
            yield f"{name} did not say how many episodes it has open"
        elif episodes:
            yield f"{name} still has {episodes} episodes open"
    if e.episodes and not e.open:
        yield "there was no runner"
    if e.kept:
        yield f"the buffer keeps {len(e.kept)} payloads that no group names: {e.kept[0]}, …"
    if e.bytes_held[0] != e.bytes_held[1]:
        yield f"the buffer counts {e.bytes_held[0]} bytes, and its groups hold {e.bytes_held[1]}"


def validations_are_whole(e: Evidence) -> Iterator[str]:
    """Each validation asked all prompts that are held out, none failed, and none was done twice for the surviving weights."""
    done = [line for line in _surviving(e, "validation") if line.groups is not None]
    for line in done:
        evaluated, failed, pending = line.groups or (0, 0, 0)
        where = f"the validation of version {line.step}"
        if evaluated + failed + pending != e.held_out:
            yield f"{where} has {evaluated:g} groups evaluated, {failed:g} failed, {pending:g} pending, of {e.held_out} prompts"
        if failed > sum(times >= _MAX_ATTEMPTS for times in e.struck_alone.values()):
            yield f"{where}: {failed:g} groups failed, and no fault of their own explains it"
    for version, times in Counter(line.step for line in done).items():
        if times > 1:
            yield f"version {version} was validated {times} times"
    if e.checkpoints and not any(line.groups and line.groups[0] == e.held_out for line in done):
        yield "no validation was completed"


def a_clock_is_nobodys_fault(e: Evidence) -> Iterator[str]:
    """A machine's clock that is set: it was seen to be off, nothing ended or was believed dead of it."""
    for moved in e.moved:
        where = f"the clock of {moved.machine} was moved by {moved.asked_s:+g} s"
        if abs(moved.seen_s - moved.asked_s) > _CLOCK_TOLERANCE_S:
            yield f"{where}, and its machine found it {moved.seen_s:+.0f} s off"
        if moved.dead:
            yield f"{where}, and {', '.join(moved.dead)} was believed dead"
        for exit_ in e.exits:
            if moved.since <= exit_.time <= moved.over and not exit_.by_us and exit_.code != 0:
                yield f"{where}, and {exit_.name} ended with {exit_.code}: {exit_.last_words.splitlines()[-1:]}"


def a_wrong_replica_trains_no_more(e: Evidence) -> Iterator[str]:
    """A replica that computes something else has no weight once it is noticed: nothing that it hands in later is trained. Others go on."""
    timelines = list(dict.fromkeys(line.timeline for line in e.lines))
    for wrong in e.quarantined:
        if wrong.holds or not wrong.healthy:
            healthy = ", ".join(wrong.healthy) or "nobody"
            yield f"{wrong.replica} was quarantined, and held {wrong.holds} groups later, while {healthy} was healthy"
        # a timeline that a rewind ended before may have come further, when the replica was right
        ended = timelines[: timelines.index(wrong.timeline)] if wrong.timeline in timelines else []
        for batch in e.observed:
            for group, t in ((g, t) for g in batch.groups for t in g.trajectories if batch.timeline not in ended):
                if t.replica == wrong.replica and max(t.versions, default=0) > wrong.version:
                    yield f"step {batch.step}: {group.id}[{t.index}] is of {wrong.replica}, quarantined at version {wrong.version}"


def the_supervisor_tells_how_it_ended(e: Evidence) -> Iterator[str]:
    """`headrace up`: it starts again what was killed, and says so; it ends with 143 when it is stopped, else with 0 and the table. Nothing
    ends otherwise but the replay service, whose server was killed three times within a minute, and a trainer that can't reach its store at
    its start."""
    if e.said is None:
        return
    ends = [exit_ for exit_ in e.exits if exit_.name == "up"]
    for name, times in Counter(e.killed).items():
        said = sum(one.code == _KILLED for one in e.restarted if one.name == name)
        # it may be ended itself before it has said so
        if name not in ("up", "server", "environment") and said + len(ends) - 1 < times:
            yield f"{name} was killed {times} times, and started again {said} times"
    thrice = any(third - first < _MINUTE_S for first, third in zip(e.server_killed, e.server_killed[2:], strict=False))
    for one in e.restarted:
        gave_up = one.code == _PART_DIED and {"replay": thrice, "trainer": e.stored is not None}.get(one.name, False)
        if one.code not in (_KILLED, _TRY_AGAIN) and not gave_up:
            yield f"{one.name} ended with {one.code}"
    for exit_ in ends:
        if exit_.code not in (0, _STOPPED) and not (exit_.by_us and exit_.code == _KILLED):
            yield f"`headrace up` ended with {exit_.code}"
    last = ends[-1].last_words if ends else ""
    newest = f"step_{e.checkpoints[-1].version}" if e.checkpoints else ""
    for part in ("run chaos", "prompts", "learning curve:", newest):
        if part not in last:
            yield f"what `headrace up` said at its end lacks {part!r}"


def no_innocent_group_failed(e: Evidence) -> Iterator[str]:
    """Blame: only what can't be scored, what kills its replicas, and what was alone with a replica each time that one was struck, fails."""
    for order, reason in e.failures.items():
        explained = e.moods[order] in ("poison", "deadly") or e.struck_alone[group_id(order)] >= _MAX_ATTEMPTS
        if not explained:
            yield f"prompt {order} ({e.moods[order]}) ended as failed, and no fault of its own explains it: {reason}"
    for order, mood in enumerate(e.moods):
        if mood in ("fine", "flaky", "flat") and e.states.get(order, "") == "failed" and order not in e.failures:
            yield f"prompt {order} ended as failed, and nobody knows why"


def nobody_is_charged_for_others(e: Evidence) -> Iterator[str]:
    """Blame, of what did not fail: an attempt is charged to a group that was alone with a replica that was struck, and one at scoring where
    an environment failed or was late with it."""
    for batch in e.observed:
        for group in batch.groups:
            if group.charged > e.struck_alone[group.id]:
                alone = e.struck_alone[group.id]
                yield f"{group.id} was charged {group.charged} attempts, and was alone with {alone} replicas that were struck"
            for t in group.trajectories:
                if t.tries > 1 and e.moods[group.order] != "flaky" and not e.misconduct & _CHARGED:
                    yield f"{group.id}[{t.index}] was charged {t.tries - 1} attempts at scoring, and its environment was well"


def the_buffer_counts_right(e: Evidence) -> Iterator[str]:
    """What the buffer counts is what it holds."""
    held = Counter(e.states.values())
    for state in ("queued", "open", "scoring", "ready", "unused"):
        if e.counts.get(state, 0) != held[state]:
            yield f"the buffer counts {e.counts.get(state, 0)} groups {state} and holds {held[state]}"
    if e.checkpoints and e.counts.get("trained", 0) > len(e.checkpoints[-1].trained):
        yield f"the buffer counts {e.counts['trained']} groups trained, the ledger {len(e.checkpoints[-1].trained)}"


def the_run_finished(e: Evidence) -> Iterator[str]:
    """Under every fault that was planned: the prompts are used up, and what is left can't fill a step."""
    if e.struck != e.planned:
        yield f"{e.struck} of {e.planned} faults were struck"
    if not e.closed:
        yield "the queue of prompts was never closed"
    unused = sum(state == "unused" for state in e.states.values())
    if unused >= e.prompts_per_step:
        yield f"{unused} prompts were left over, enough for another step"
    last = "trainer" if e.said is None else "up"
    ends = [exit_ for exit_ in e.exits if exit_.name == last]
    if not ends or ends[-1].code != 0:
        yield f"the last exit code of {last} was {ends[-1].code if ends else None}"


def services_end_for_a_reason(e: Evidence) -> Iterator[str]:
    """A service that was not killed leaves with 0; with 75 while the buffer is away, or 70 when its engine died or the buffer lost writes:
    it is started again. With 1 it asks a person for help, and only a full disk needs one here (or a server that died thrice within a minute
    or is limited to too little memory, or a trainer whose place another has). There is no other way, for a process that was struck neither.
    """
    for exit_ in e.exits:
        said = [line for line in exit_.last_words.splitlines() if line.startswith("error: ")]
        words = _WORDS.get(exit_.code, ())
        stopped = exit_.name == "up" and exit_.code == _STOPPED
        explained = stopped or exit_.code in (0, _TRY_AGAIN) or (said and any(word in said[-1] for word in words))
        if not (exit_.by_us and exit_.code == _KILLED) and not explained:
            yield f"{exit_.name} ended with {exit_.code}: {exit_.last_words.splitlines()[-1:]}"


LAWS: tuple[Law, ...] = (
    nothing_is_lost,
    none_is_trained_twice,
    steps_are_whole,
    records_agree,
    the_store_has_the_run,
    none_is_over_age,
    groups_are_complete,
    rewound_steps_are_unchanged,
    failures_are_not_zero,
    tokens_are_those_that_were_sampled,
    an_episode_is_of_one_program,
    nothing_is_left_open,
    validations_are_whole,
    no_innocent_group_failed,
    nobody_is_charged_for_others,
    the_buffer_counts_right,
    the_run_finished,
    services_end_for_a_reason,
    a_clock_is_nobodys_fault,
    a_wrong_replica_trains_no_more,
    the_supervisor_tells_how_it_ended,
)


def _history(e: Evidence) -> list[tuple[int, list[str]]]:
    """Step and group ids by the ledgers of all checkpoints, oldest first; a step that two of them claim is there twice."""
    return [item for checkpoint in e.checkpoints for item in sorted(checkpoint.ledger.items())]


def _order(id_: str) -> int:
    return int(id_.rpartition("-")[2])


def _lineage(e: Evidence) -> list[Batch]:
    """Of the newest weights' history. A trainer that wakes up beside its successor may still write down a step of its own timeline."""
    made_on = {step: checkpoint.timeline for checkpoint in e.checkpoints for step in checkpoint.ledger}
    return [batch for batch in e.lineage if batch.timeline == made_on.get(batch.step, batch.timeline)]


def _surviving(e: Evidence, kind: str = "train") -> list[Line]:
    """Lines that no later rewind took back, and none of a trainer that has a successor. A rewind goes back to a version: the step of that
    number is taken again, while a validation of that version stays."""
    kept: list[Line] = []
    timeline = None
    for line in e.lines:
        if line.kind == "rewind":
            kept = [k for k in kept if k.step < line.step + (kind == "validation")]
            timeline = line.timeline
        elif line.kind == kind and timeline in (None, line.timeline):
            kept.append(line)
    return kept


def _seen(e: Evidence, batch: Batch) -> Batch | None:
    return next((b for b in e.observed if (b.step, b.timeline) == (batch.step, batch.timeline)), None)


def _facts(batch: Batch) -> list[tuple[str, list[tuple[int, tuple[int, ...], float | None]]]]:
    def of(group: Group) -> list[tuple[int, tuple[int, ...], float | None]]:
        return sorted((t.index, t.versions, t.reward) for t in group.trajectories)

    return [(group.id, of(group)) for group in batch.groups]


def main() -> int:
    objections = judge(read(Path(sys.argv[1])))
    for objection in objections:
        sys.stdout.write(objection + "\n")
    return 1 if objections else 0


if __name__ == "__main__":
    sys.exit(main())
