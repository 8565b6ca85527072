"""`headrace samples` and `headrace groups show --text`: what the policy wrote, of steps, waiting groups and failed ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from headrace.records.score import Score
from headrace.replay import Limits, ReplayClient
from headrace.run.lineage import FOLDER
from headrace.run.sample_files import SampleFiles
from headrace.run.samples import failed_record
from headrace_services.trainer.control.lineage_writer import LineageWriter
from tests.support.buffer import begin, make_group, make_trajectory
from tests.support.command import headrace, refused, said
from tests.support.kept_run import kept_run
from tests.support.stored_samples import sample, write

TRACE = 'File "judge.py", line 3, in score'
BROKE = Score("UNSENDABLE", message="no number in it", traceback=TRACE)


def test_the_samples_of_steps_and_validations(tmp_path: Path, limits: Limits) -> None:
    async def nothing(_: ReplayClient) -> None: ...

    with kept_run(tmp_path, "seen", limits, nothing) as (folder, _):
        assert "no samples" in refused("samples", folder)
        logs = folder / "logs"
        write(logs, "train", 1, [sample("older")])
        other = {"messages": ({"role": "user", "content": "7+7"},), "extra_env_info": {}}
        worst = [sample("low", i, 0.0, finish_reason="length", content=f"wrong {i}", **other) for i in range(2)]
        write(logs, "train", 2, [*worst, sample("high", 0, 1.0, components={"exact": 1.0}), sample("high", 1, 0.5)])
        told = {"ratios": (1.25, None), "clipped": (1, None), "token_losses": (3.2e-4, 0.0)}
        write(logs, "val", 3, [sample("held-out", token_texts=(" two", "\n"), **told)])

        newest = said("samples", folder)
        assert "high, sums, step 2, mean reward 0.75 of 2" in newest
        for part in (
            "user: 1+1",
            "expected: 2",
            "reward 1 (exact 1)",
            "reward 0.5",
            "2 tokens, weights 3",
            "truncated",
        ):
            assert part in newest
        assert any("wrong 0" in line and "wrong 1" in line for line in newest.splitlines()), "side by side"
        narrow = said("samples", folder, columns=60)
        assert not any("wrong 0" in line and "wrong 1" in line for line in narrow.splitlines()), "below each other"

        assert "low" not in said("samples", folder, "--best", "-n", 1)
        assert "high" not in said("samples", folder, "--worst", "-n", 1)
        assert "high" not in said("samples", folder, "--prompt", "7+7")
        assert "older, sums, step 1" in said("samples", folder, "--step", 1)
        assert "held-out, sums, validation of version 3" in said("samples", folder, "--validation")

        tokens = said("samples", folder, "--validation", "--tokens").split()
        assert [part for part in ("1.250", "high", "3.2e-04", "two", r"\n") if part not in tokens] == []

        assert "no samples of step 9" in refused("samples", folder, "--step", 9)
        assert "it has those of 1, 2" in refused("samples", folder, "--step", 9)
        assert "step 2 with 'nowhere'" in refused("samples", folder, "--prompt", "nowhere")
        assert "give one of them" in refused("samples", folder, "--best", "--worst")
        assert "leave out --step" in refused("samples", folder, "--failed", "--step", 1)


def test_the_text_of_queued_failed_and_trained_groups_is_shown(tmp_path: Path, limits: Limits) -> None:
    logs = tmp_path / "seen" / "logs"

    async def fill(replay: ReplayClient) -> None:
        """A group with a trajectory, one whose prompt failed, and one that failed with a completion, which the scorer keeps."""
        one, two, three = await replay.lease(await begin(replay, 3), 3)
        await replay.push(one, make_trajectory(one, 0))
        await replay.reject(two, "its prompt is too long")
        await replay.push(three, make_trajectory(three, 1))
        for job in await replay.take_scoring({"math": 2}):
            broke = job.group.id == three.group.id
            await replay.score(job, BROKE if broke else Score("SCORED", 0.25))
            if broke:
                found = await replay.group(job.group.id)
                assert found is not None
                record = failed_record(job.group, job.trajectory, BROKE, found["reason"])
                SampleFiles(logs, None).append_failed([record])

    with kept_run(tmp_path, "seen", limits, fill) as (folder, server):
        waiting = said("groups", "show", "e0-train-0", "--run", folder, "--text")
        assert "user: 0+1" in waiting
        assert "reward 0.25" in waiting
        assert "user: 0+1" not in said("groups", "show", "e0-train-0", "--run", folder)

        # without being asked: it is what one wants to know of it
        broken = said("groups", "show", "e0-train-2", "--run", folder)
        for part in ("it can't be scored: no number in it", "user: 2+1", "expected: 3", TRACE, "unsendable"):
            assert part in broken
        shown = json.loads(said("groups", "show", "e0-train-2", "--run", folder, "--json"))
        assert shown["text"]["samples"][0]["content"] == "7"
        refused_prompt = said("groups", "show", "e0-train-1", "--run", folder)
        assert "no completion to show" in refused_prompt
        assert "user: 1+1" in refused_prompt

        trained = make_group(9)
        LineageWriter(folder / "checkpoints" / FOLDER, "t1").write(4, [trained], {trained.id: []})
        assert "is no longer kept" in refused("groups", "show", trained.id, "--run", folder, "--text")
        write(logs, "train", 4, [sample("another"), sample(trained.id, content="of the step")])
        text = said("groups", "show", trained.id, "--run", folder, "--text")
        assert "of the step" in text
        assert "another" not in text

        asyncio.run(server.stop())  # it is started again to look at
        failed = said("samples", folder, "--failed")
        assert failed.index("e0-train-2") < failed.index("e0-train-1"), "newest first"
        assert "too long" in failed
        assert TRACE in failed
        assert "e0-train-1" not in said("samples", folder, "--failed", "-n", 1)
        assert "no group failed with '9+9'" in refused("samples", folder, "--failed", "--prompt", "9+9")

        # a buffer that is gone leaves the completions
        (folder / "replay").rename(folder / "gone")
        left = headrace("samples", folder, "--failed")
        assert "without a completion" in left.stderr
        assert TRACE in left.stdout
        (logs / "failed_data.jsonl").unlink()
        assert "can't be reached" in refused("samples", folder, "--failed")
