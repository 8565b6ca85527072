"""The trainer's outputs besides `metrics.jsonl`: curves, trackers, samples, alarms, GPU metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.records.trajectory import Group
from headrace.replay import Evaluated
from headrace.run.history import CURVES, are_curves_old
from headrace.run.journal import Journal, Line
from headrace.run.sample_files import SampleFiles
from headrace.run.samples import make_sample
from headrace.run.token_texts import TokenTexts

from ...refit.backends import Backend
from ...refit.probe import Differences
from ..data.sources import Problem
from ..learning.batch import Batch
from . import alarm
from .batch_samples import (
    choose,
    failure_record,
    show,
    training_records,
    validation_record,
)
from .gpus import GPUMonitor
from .plots import (
    draw_curve,
    draw_disagreement,
    on_drawing_thread,
    read_shown,
    write_page,
)
from .trackers import TrackerThread, list_enabled, tracker_metrics

log = logging.getLogger(__name__)

# How long a tracker may take to catch up at the end. A stopped trainer has less time before it is killed.
FINISH_S, STOP_S = 60.0, 10.0
# Drawing the curves takes up to a second of a core that the training step could use. The pause before the next drawing is this many times
# as long as the last one took; the first is drawn after this many seconds.
DRAWING_PAUSES = 50


class Telemetry:
    """Starts, feeds and ends all of them on rank 0. Raises `ServiceError` for a tracker whose library is missing.

    `failures` returns the page's text about what failed.
    """

    def __init__(self, config: Config, journal: Journal, failures: Callable[[], str] = str) -> None:
        self._config = config
        self._journal, self._failures = journal, failures
        self._title = f"Headrace, run {config.run.id}"
        self._settings = config.logger
        self._limits = alarm.alarm_limits(config)
        self._folder = config.log_folder
        self._samples = SampleFiles.of(config)
        shown = config.logger.num_val_samples_to_print
        self._trackers = [
            TrackerThread(name, opener, server, journal.path, self._samples, shown)
            for name, opener, server in list_enabled(config)
        ]
        self._gpus = GPUMonitor(config.logger.gpu_monitoring.collection_interval)
        self._texts: TokenTexts | None = None
        self._disagreement = alarm.Streak()
        self._off_policy, self._equal = alarm.Streak(alarm.OFF_POLICY_STEPS), alarm.Streak(alarm.EQUAL_STEPS)
        self._slower_weights = 0
        self._writing: asyncio.Task[None] | None = None
        self._drawing: asyncio.Task[Sequence[Line]] | None = None
        self._draw_after = time.monotonic() + DRAWING_PAUSES  # when the curves may be drawn again

    def start(self, tokenizer: Any) -> None:
        """Start what runs in the background. `tokenizer` is the run's."""
        self._texts = TokenTexts(tokenizer)
        if self._settings.monitor_gpus:
            self._gpus.start()
        for thread in self._trackers:
            thread.start()
        if are_curves_old(self._config.run_folder):  # the trainer before was killed
            self._drawing = asyncio.create_task(self._draw())

    def notify(self) -> None:
        """Take note of a new line in the journal. Raises `ServiceError` if the curves could not be written."""
        for thread in self._trackers:
            thread.notify()
        if self._drawing is not None and self._drawing.done():
            self._drawing.result()
            self._drawing = None
        if self._drawing is None and time.monotonic() >= self._draw_after:
            self._drawing = asyncio.create_task(self._draw())

    async def draw_end(self) -> None:
        """Draw the page of curves and the learning curve of the whole run. Raises `ServiceError` if the disk is full."""
        if self._drawing is not None:
            await self._drawing
        lines = await self._draw()
        path = self._config.run_folder / "curve.png"
        with _writing(path):
            await on_drawing_thread(draw_curve, lines, path, self._title)

    async def aclose(self, *, finished: bool) -> None:
        """Wait, within a deadline, until trackers and files have everything. Raises `ServiceError` for unwritten samples."""
        deadline = time.monotonic() + (FINISH_S if finished else STOP_S)
        for thread in self._trackers:
            thread.finish(deadline)
        await asyncio.to_thread(self._gpus.stop)
        for thread in self._trackers:
            await asyncio.to_thread(thread.join)
        await self._await_written()
        if self._drawing is not None:
            await self._drawing

    def agree(self, agreement: Differences) -> None:
        """Set what a refit accepts as agreement of trainer and inference, from the next step on."""
        self._limits = alarm.alarm_limits(self._config, agreement)

    def note_given_up(self, backends: Collection[Backend]) -> None:
        """Take note of which backends of the weight channel were given up."""
        self._slower_weights = 2 if "nccl-blocking" in backends else int("nccl" in backends)

    def wants_batch(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the trajectories of a step with these metrics will be written or drawn. Gathering them from the ranks is
        expensive."""
        return self._samples.wanted or bool(alarm.find_exceeded(metrics, self._limits))

    async def report_step(
        self, step: int, groups: Sequence[Group], batch: Batch | None, metrics: dict[str, float]
    ) -> dict[str, float]:
        """Write the samples of step `step` in the background, and check its metrics for alarms. Returns metrics to add. `batch` is the
        whole batch if `wants_batch` returned True, else None.

        Raises `ServiceError` if the samples of the previous step could not be written.
        """
        await self._await_written()
        if self._samples.wanted:
            assert batch is not None

            def write() -> None:
                self._samples.write("train", step, training_records(step, groups, batch, self._texts))

            self._writing = asyncio.create_task(asyncio.to_thread(write))
        found = alarm.find_exceeded(metrics, self._limits)
        self._off_policy.count(not all(excess.on_policy for excess in found))
        if not self._off_policy.is_alarm:
            found = [excess for excess in found if excess.on_policy]
        self._disagreement.count(bool(found))
        if self._disagreement.is_reported:
            assert batch is not None
            await on_drawing_thread(self._report_alarm, step, batch, found)
        self._equal.count(alarm.has_equal_rewards(metrics, self._config))
        if self._equal.is_reported:
            log.warning("%s", alarm.equal_rewards_message(step, self._equal.length, metrics["reward"]))
        return {
            "train_inference_alarm": float(self._disagreement.is_alarm),
            "equal_rewards_alarm": float(self._equal.is_alarm),
            **({"weight_channel_alarm": float(self._slower_weights)} if self._slower_weights else {}),
            **tracker_metrics(self._trackers),
            **self._gpus.take(),
        }

    async def report_validation(
        self, version: int, evaluated: Sequence[Evaluated], failed: Sequence[tuple[str, Group | Problem, str]]
    ) -> None:
        """Write and print what weights `version` generated in a validation, and write the groups that `failed`, each with its id and the
        reason. Raises `ServiceError` if the disk is full."""
        failures = [failure_record(version, *failure) for failure in failed]
        await asyncio.to_thread(self._samples.replace, "val_failed", version, failures)
        scored = [(one.group, trajectory, score) for one in evaluated for trajectory, score in one.trajectories]
        if scored:
            records = (validation_record(version, *each, self._texts) for each in scored)
            await asyncio.to_thread(self._samples.write, "val", version, records)
        if shown := self._settings.num_val_samples_to_print:
            samples = [make_sample(*each) for each in scored]
            show(Console(stderr=True), f"validation of version {version}", choose(samples, shown))

    def _report_alarm(self, step: int, batch: Batch, found: Sequence[alarm.LimitExceeded]) -> None:
        picture = None
        if worst := alarm.worst(batch):
            picture = alarm.picture_path(self._folder, step)
            self._samples.make_folder()
            draw_disagreement(batch, worst, step, picture)
            alarm.drop_old_pictures(self._folder)
        log.warning("%s", alarm.disagreement_message(step, found, alarm.error_by_age(batch), picture))

    async def _draw(self) -> Sequence[Line]:
        """Draw the page of curves from the surviving lines of the journal, and return the outline of those lines."""

        def draw() -> Sequence[Line]:
            shown, path = read_shown(self._journal.path), self._config.run_folder / CURVES
            with _writing(path):
                write_page(shown, path, self._title, self._failures())
            return shown.outline

        began = time.monotonic()
        lines = await on_drawing_thread(draw)
        now = time.monotonic()
        self._draw_after = now + DRAWING_PAUSES * (now - began)
        return lines

    async def _await_written(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ServiceError(f"can't write the curves to {path} ({error}); free space there") from error
