"""What people see of a run beside `metrics.jsonl`: trackers, trajectories token by token, the alarm, the GPUs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from rich.console import Console

from headrace.config import Config
from headrace.replay import Evaluated
from headrace.trajectory import Group
from services.trainer.telemetry import alarm
from services.trainer.telemetry.gpus import GPUMonitor
from services.trainer.telemetry.journal import Journal
from services.trainer.telemetry.loggers.follower import counts
from services.trainer.telemetry.loggers.opening import followers
from services.trainer.telemetry.samples import (
    SampleFiles,
    TrainingSample,
    choose,
    show,
    shown,
    training_record,
    validation_record,
)

log = logging.getLogger(__name__)

# a tracker may take this long to catch up at the end; a stopped trainer has less time, before it is killed
FINISH_S, STOP_S = 60.0, 10.0


class Tracking:
    """Rank 0's. Raises `ServiceError` for a tracker whose library is missing."""

    def __init__(self, config: Config, journal: Journal, console: Console | None = None) -> None:
        self._settings = config.logger
        self._folder = config.log_folder
        self._samples = SampleFiles(self._folder, config.logger.keep_step_data)
        self._followers = followers(config, journal.path, self._samples)
        self._gpus = GPUMonitor(config.logger.gpu_monitoring.collection_interval)
        self._streak = alarm.Streak()
        self._console = console or Console(stderr=True)
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._settings.monitor_gpus:
            self._gpus.start()
        for follower in self._followers:
            follower.start()

    def nudge(self) -> None:
        """The journal has a new line."""
        for follower in self._followers:
            follower.nudge()

    async def aclose(self, *, finished: bool) -> None:
        """Let what is under way come to its end. Raises `ServiceError` where trajectories could not be written."""
        deadline = time.monotonic() + (FINISH_S if finished else STOP_S)
        for follower in self._followers:
            follower.ask_to_end(deadline)
        await asyncio.to_thread(self._gpus.stop)
        for follower in self._followers:
            await asyncio.to_thread(follower.join)
        await self._written()

    def wants_samples(self, metrics: Mapping[str, float]) -> bool:
        """Whether a step with these metrics is to be written down, or shown for an alarm: gathering it from the ranks costs."""
        return self._samples.wanted or bool(alarm.excesses(metrics, self._settings.train_inference_alarm))

    async def trained(
        self, step: int, groups: Sequence[Group], samples: Sequence[TrainingSample], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Step `step` has trained on `samples` with these metrics; the metrics to add to them.

        Raises `ServiceError` where the trajectories of the step before could not be written.
        """
        await self._written()
        by_id = {group.id: group for group in groups}

        def write() -> None:
            records = [training_record(step, by_id[sample.trajectory.group_id], sample) for sample in samples]
            self._samples.write("train", step, records)

        if self._samples.wanted:
            self._writing = asyncio.create_task(asyncio.to_thread(write))
        found = alarm.excesses(metrics, self._settings.train_inference_alarm)
        if self._streak.told(bool(found)):
            await asyncio.to_thread(self._tell, step, samples, found)
        return {"train_inference_alarm": float(bool(found)), **counts(self._followers), **self._gpus.take()}

    async def validated(self, version: int, evaluated: Sequence[Evaluated]) -> None:
        """Weights `version` have written these. Raises `ServiceError` for a full disk."""
        records = [
            validation_record(version, one.group, trajectory, score)
            for one in evaluated
            for trajectory, score in one.trajectories
        ]
        if not records:
            return
        await asyncio.to_thread(self._samples.write, "val", version, records)
        chosen = choose([record["rewards"] for record in records], self._settings.num_val_samples_to_print)
        show(self._console, f"validation of version {version}", [shown(records[place]) for place in chosen])

    def _tell(self, step: int, samples: Sequence[TrainingSample], found: Sequence[alarm.Excess]) -> None:
        picture = None
        if pictured := alarm.worst(samples):
            picture = alarm.picture_path(self._folder, step)
            alarm.draw(pictured, step, picture)
            alarm.drop_old_pictures(self._folder)
        log.warning("%s", alarm.words(step, found, alarm.error_by_age(samples, step), picture))

    async def _written(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing
