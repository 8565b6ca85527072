"""Validation beside training: a replica keeps the version to be measured, and the trainer and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.replay import ReplayClient
from headrace.run.journal import Line, surviving
from tests.support.small_replica import SmallReplica, installed, running, score_all
from tests.support.trainer_process import PROMPTS, STEPS, Trainer, check_history, ended, settled
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

EVALUATED = 3  # held-out prompts


class Fleet:
    """Small replicas of a trainer that validates beside training, which evaluate nothing before they may. Each can be killed."""

    def __init__(self, replay: ReplayClient, model: Path, count: int) -> None:
        self.may_validate = asyncio.Event()
        self.replicas = [SmallReplica(replay, model, may_validate=self.may_validate) for _ in range(count)]
        self._replay = replay
        self._tasks: dict[SmallReplica, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All are there before a trainer starts."""
        self._tasks = {replica: asyncio.create_task(replica.run()) for replica in self.replicas}
        try:
            await eventually(self._registered)
            yield
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.wait(self._tasks.values())

    async def _registered(self) -> bool:
        return len(await self._replay.replicas()) == len(self.replicas)

    async def find_validator(self, *others: SmallReplica) -> SmallReplica:
        """The replica that validates, once there is one that is none of `others`."""
        names = [other.id for other in others]

        async def ids() -> list[str]:
            return [each.id for each in await self._replay.replicas() if each.validates and each.id not in names]

        await eventually(ids)
        (found,) = await ids()
        return next(replica for replica in self.replicas if replica.id == found)

    async def kill(self, replica: SmallReplica) -> None:
        self._tasks[replica].cancel()
        await asyncio.wait([self._tasks[replica]])
        await self._replay.deregister(replica.id, died=True)


@pytest.fixture
def trainer(trainer: Trainer) -> Trainer:
    trainer.settings["trainer"]["validation_replicas"] = 1
    return trainer


def validations(trainer: Trainer) -> dict[int, Line]:
    return {line.step: line for line in surviving(trainer.journal()) if line.kind == "validation"}


def ends(line: Line) -> tuple[float, ...]:
    return tuple(line.metrics[name] for name in ("evaluated", "failed", "pending"))


async def test_law_2_a_result_is_of_its_version_while_training_goes_on(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    trainer.settings["grpo"]["max_num_steps"] = 6
    trainer.settings["checkpointing"] |= {"keep_top_k": 1, "metric_name": "val:accuracy", "higher_is_better": True}
    fleet = Fleet(replay, tiny_model, 2)
    async with fleet.running(), running(score_all(replay)):
        process = trainer.start()
        validator = await fleet.find_validator()
        (other,) = (replica for replica in fleet.replicas if replica is not validator)
        await installed(other, 3)
        assert validator.installed == [0]
        fleet.may_validate.set()
        assert await ended(process) == 0, trainer.said()
    check = [line.step for line in surviving(trainer.journal()) if line.kind == "train"]
    assert check == list(range(6))
    assert await settled(replay) == {"trained": 6 * PROMPTS}
    found = validations(trainer)
    assert sorted(found) == [0, 2, 4, 6]
    assert {version: ends(line) for version, line in found.items()} == {
        0: (EVALUATED, 0, 0),
        2: (0, 0, EVALUATED),  # that of version 0 was still running
        4: (EVALUATED, 0, 0),
        6: (EVALUATED, 0, 0),
    }
    assert "accuracy" not in found[2].metrics
    for version in (0, 4, 6):
        assert found[version].metrics["version_min"] == found[version].metrics["version_max"] == version
    assert "version 2 is not validated, because the validation of version 0 still runs" in trainer.said()
    lines = trainer.journal()
    assert [line.step for line in lines[: lines.index(found[0])] if line.kind == "train"][:3] == [0, 1, 2]
    assert "validation of version" not in "".join(line for line in trainer.said().splitlines() if "abandoned" in line)
    accuracy = {version: found[version].metrics["accuracy"] for version in (4, 6)}
    assert trainer.checkpoints().state(6).metrics["val:accuracy"] == accuracy[6]


async def test_law_6_a_dead_validators_groups_go_to_another_of_its_version(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    fleet = Fleet(replay, tiny_model, 3)
    async with fleet.running():
        process = trainer.start()
        validator = await fleet.find_validator()
        await fleet.kill(validator)  # nothing is scored, so the version is still the newest
        await fleet.find_validator(validator)
        fleet.may_validate.set()
        async with running(score_all(replay)):
            assert await ended(process) == 0, trainer.said()
    check_history(trainer)
    assert [ends(line) for line in validations(trainer).values()] == 3 * [(EVALUATED, 0, 0)]


async def test_law_7_a_validation_of_a_version_without_replica_is_lost(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    fleet = Fleet(replay, tiny_model, 2)
    async with fleet.running(), running(score_all(replay)):
        process = trainer.start()
        validator = await fleet.find_validator()
        (other,) = (replica for replica in fleet.replicas if replica is not validator)
        await installed(other, 1)
        await fleet.kill(validator)
        fleet.may_validate.set()
        assert await ended(process) == 0, trainer.said()
    check_history(trainer)
    found = validations(trainer)
    assert ends(found[0]) == (0, 0, EVALUATED)
    assert "accuracy" not in found[0].metrics
    assert "the validation of version 0 is abandoned: no verified replica holds its weights any more" in trainer.said()


async def test_law_6_a_validator_trains_where_no_other_replica_is_left(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    fleet = Fleet(replay, tiny_model, 2)
    async with fleet.running(), running(score_all(replay)):
        process = trainer.start()
        validator = await fleet.find_validator()
        (other,) = (replica for replica in fleet.replicas if replica is not validator)
        await installed(other, 1)
        await fleet.kill(other)
        await installed(validator, 2)
        fleet.may_validate.set()
        assert await ended(process) == 0, trainer.said()
    check_history(trainer)
    assert ends(validations(trainer)[0]) == (0, 0, EVALUATED)
    assert "is abandoned: no other replica is verified, so training needs those that validate" in trainer.said()


async def test_law_1_a_trainer_that_resumes_says_which_validation_is_lost(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    fleet = Fleet(replay, tiny_model, 2)
    async with fleet.running(), running(score_all(replay)):
        assert await trainer.run("after_reserve:3") == -signal.SIGKILL, trainer.said()
        fleet.may_validate.set()
        assert await trainer.run() == 0, trainer.said()
    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}
    found = validations(trainer)
    assert ends(found[0]) == (0, 0, EVALUATED)
    assert "the validation of version 0 is lost" in trainer.said()
    assert ends(found[2]) == ends(found[4]) == (EVALUATED, 0, 0)
