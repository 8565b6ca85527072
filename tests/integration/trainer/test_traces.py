"""The traces of a run, as its trainer exports them."""

from __future__ import annotations

import pytest

from headrace.net.tracing import epoch_span, group_span, step_span
from headrace.replay import ReplayClient
from tests.support.collector import collecting
from tests.support.trainer_process import PROMPTS, STEPS, Trainer, check_history, run_with_replica

pytestmark = pytest.mark.slow


async def test_every_trained_group_and_every_step_has_its_trace(
    trainer: Trainer, replay: ReplayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        for name, value in collector.variables.items():
            monkeypatch.setenv(name, value)
        await run_with_replica(trainer, replay)
    trained, run = check_history(trainer), replay.run_id
    timeline = trainer.journal()[0].timeline
    roots = {span["group_id"]: span for span in collector.named("group")}
    assert {name for name, span in roots.items() if span["end"] == "trained"} == set(trained)
    for place, name in enumerate(trained):
        root = group_span(run, name)
        assert (roots[name].id, roots[name].parent, roots[name].service) == (root, None, "headrace-trainer")
        states = [span for span in collector.spans if span.parent == root]
        assert [span.name for span in states] == ["queued", "generating", "scoring", "ready", "reserved"]
        assert states[-1].links == [step_span(run, timeline, place // PROMPTS)]
    for step in range(STEPS):
        root = step_span(run, timeline, step)
        assert [span["step"] for span in collector.named("step") if span.id == root] == [step]
        of_step = {span.name: span for span in collector.spans if span.parent == root}
        assert of_step.keys() >= {"refit", "train"}
        groups = trained[step * PROMPTS : (step + 1) * PROMPTS]
        assert of_step["train"].links == [group_span(run, name) for name in groups]
        (epoch,) = [span for span in collector.named("epoch") if span["version"] == step]
        assert epoch.parent == of_step["refit"].id
        assert epoch["verified"] == epoch["members"]
        assert epoch.id.trace == root.trace == epoch_span(run, timeline, step, "any").trace
