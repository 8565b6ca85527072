"""TensorBoard: event files, which hide what a rewind made void (`purge_step`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from services.trainer.telemetry.loggers.tracker import Entry, flat


class TensorBoard:
    """The curves of one run: the event files of one folder, which is its name."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        self.run_id = str(folder)
        self._parameters = parameters
        self._writer = SummaryWriter(self.run_id)
        self._write_parameters()

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = SummaryWriter(self.run_id, purge_step=step)
        self._write_parameters()  # of step 0, which a rewind to the beginning hides too

    def write(self, entry: Entry) -> None:
        for name, value in entry.metrics.items():
            self._writer.add_scalar(name, value, entry.step, walltime=entry.time)
        for name, text in entry.texts.items():
            self._writer.add_text(name, text, entry.step, walltime=entry.time)
        for name, path in entry.pictures.items():
            image = Summary.Image(encoded_image_string=path.read_bytes())
            summary = Summary(value=[Summary.Value(tag=name, image=image)])
            self._add(summary, entry.step, entry.time)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write_parameters(self) -> None:
        now = time.time()
        plain = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in flat(self._parameters).items()
        }
        for summary in hparams(plain, {}):
            self._add(summary, 0, now)

    def _add(self, summary: Summary, step: int, when: float) -> None:
        file: Any = self._writer.file_writer  # there from the beginning until `close`
        file.add_summary(summary, step, when)
