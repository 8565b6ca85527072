"""Trainers of one run as processes, and the laws in what they leave behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config
from headrace.replay import ReplayClient
from headrace.run.group_files import FOLDER as GROUPS
from headrace.run.group_history import GroupHistory
from headrace.run.group_query import GroupQuery
from headrace.run.journal import Journal, Line, surviving
from headrace.run.lineage import FOLDER, LineageFiles, find_timeline
from headrace.run.sample_files import SampleFiles
from headrace_services.trainer.control.checkpoint import TRAINED, Checkpoints, Ledger
from tests.support import dying_trainer
from tests.support.forks import ROOT, Forked, fork, fork_ranks
from tests.support.small_replica import SmallReplica, repeated, running, score_all

STEPS, PROMPTS = 4, 2


class Trainer:
    """Starts trainers of one run, one after the other; what they say goes to a file."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self.settings, self.log = settings, log
        self.processes: list[Forked] = []

    @property
    def config(self) -> Config:
        return Config.model_validate(self.settings)

    def start(self, fault: str = "none") -> Forked:
        process = fork(dying_trainer.run, json.dumps(self.settings), fault, log=self.log)
        self.processes.append(process)
        return process

    async def run(self, fault: str = "none") -> int:
        return await ended(self.start(fault))

    async def run_ranks(self, ranks: int, fault: str = "none", hosts: Sequence[str] = ()) -> list[int]:
        """The exit code of each. With `hosts` each rank is on a host of its own, whose memory is this folder."""
        arguments = (json.dumps(self.settings), fault, hosts)
        with fork_ranks(ranks, dying_trainer.run, *arguments, log=self.log) as processes:
            return [await ended(process) for process in processes]

    async def run_torchrun(self, ranks: int) -> int:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        arguments = ("-m", dying_trainer.__name__, json.dumps(self.settings), "none")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *torchrun, *arguments, stdout=log, stderr=log, env=environment, cwd=ROOT
            )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    def said(self) -> str:
        return self.log.read_text()

    def journal(self) -> list[Line]:
        return Journal(self.config.run_folder / "metrics.jsonl").read()

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.config.checkpoint_folder, self.config.checkpointing)


async def run_with_replica(
    trainer: Trainer, replay: ReplayClient, fault: str = "none", *, code: int = 0, equal_every: int = 0, **replica: Any
) -> None:
    """Run it to its end, which has this `code`, beside a scorer and a small replica of its model."""
    small = SmallReplica(replay, Path(trainer.settings["policy"]["model_name"]), **replica)
    async with running(small.run(), score_all(replay, equal_every)):
        assert await trainer.run(fault) == code, trainer.said()


async def ended(process: Forked) -> int:
    return await asyncio.to_thread(process.wait)


def check_history(trainer: Trainer, steps: int = STEPS, prompts: int = PROMPTS) -> list[str]:
    """Laws 1, 2 and 5 in what the surviving weights were made of: every step once, every group once, no age above the bound.
    Returns the groups in the order they were trained."""
    lines = surviving(trainer.journal())
    train = [line for line in lines if line.kind == "train"]
    assert [line.step for line in train] == list(range(steps)), trainer.said()
    assert all(line.metrics["max_trajectory_age"] <= trainer.config.algorithm.max_age for line in train)
    checkpoints = trainer.checkpoints()
    ledger: dict[int, list[str]] = {}
    for version in checkpoints.find_published():
        part = checkpoints.ledger(version)
        assert not ledger.keys() & part.keys()
        ledger |= part
    assert sorted(ledger) == list(range(steps))
    groups = [group for step in sorted(ledger) for group in ledger[step]]
    assert repeated(groups) == []
    assert len(groups) == steps * prompts
    state = checkpoints.state(checkpoints.newest() or 0)
    assert state.version == steps
    assert len(Ledger.decode(checkpoints.file(state.version, TRAINED)).trained) == len(groups)
    check_lineage(trainer, ledger, {line.step: line.timeline for line in train})
    check_groups(trainer, ledger)
    return groups


def check_groups(trainer: Trainer, ledger: dict[int, list[str]]) -> None:
    """The files of groups know every group that was trained, its prompt, and what it came from."""
    history = GroupHistory(trainer.config.run_folder / GROUPS)
    _, trained = history.find(GroupQuery(states=["trained"], limit=1000))
    assert {group.id: group.step for group in trained} == {id_: step for step, ids in ledger.items() for id_ in ids}
    assert all(group.prompt and group.replicas and len(group.rewards) == group.n for group in trained)
    assert (history.lost(), history.damaged) == (0, [])


def check_lineage(trainer: Trainer, ledger: dict[int, list[str]], timelines: dict[int, str]) -> None:
    """Every trajectory that the surviving weights were trained on says where it comes from, in the words of the other records."""
    files = LineageFiles(trainer.config.checkpoint_folder / FOLDER)
    assert [step for step, _ in files.files()] == sorted(ledger)
    changes = files.timelines()
    for step, groups in ledger.items():
        trained = files.read(step)
        assert [group.group for group in trained] == groups
        for group in trained:
            assert (group.step, group.timeline) == (step, timelines[step])
            assert [origin.index for origin in group.trajectories] == [0, 1]
            for origin in group.trajectories:
                assert origin.reward is not None
                (written,) = origin.ranges
                assert (written.start, written.end) == (0, origin.tokens)
                assert written.timeline == timelines.get(written.version - 1) == find_timeline(changes, written.version)


def check_samples(files: SampleFiles, journal: list[Line]) -> None:
    """Every step and validation left its trajectories, and they say what the metrics say."""
    for line in journal:
        records = files.read("train" if line.kind == "train" else "val", line.step)
        rewards = [record["rewards"] for record in records]
        assert sum(rewards) / len(rewards) == pytest.approx(
            line.metrics["reward" if line.kind == "train" else "accuracy"]
        )
        if line.kind == "train":
            pairs = [
                (gen, start)
                for record in records
                for gen, start in zip(record["generation_logprobs"], record["prev_logprobs"], strict=True)
            ]
            error = sum(math.exp(abs(gen - start)) for gen, start in pairs) / len(pairs)
            assert error == pytest.approx(line.metrics["token_mult_prob_error"], abs=1e-4)
            assert len(pairs) == sum(len(record["advantages"]) for record in records)


async def settled(replay: ReplayClient) -> dict[str, int]:
    return {state: count for state, count in (await replay.state()).counts.items() if count}
