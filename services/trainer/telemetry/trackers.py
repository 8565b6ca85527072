"""TensorBoard, Weights & Biases and MLflow: a run of Headrace is one run of each.

Each delivers by its library's own means. TensorBoard writes event files. W&B's own process writes its files and uploads them, or leaves
that to `wandb sync` with `WANDB_MODE=offline`. MLflow writes to a SQLite file, or to a server with retries.

No library knows which lines of `metrics.jsonl` it has already after a restart or a rewind. So a `TrackerThread` feeds each tracker from
that file, which is the source of truth: only the trainer writes it, and first. Each tracker's position in the file is stored beside the
run. A tracker that fails does not disturb the run. The failure is logged and counted in the metrics `trackers/failures` and
`trackers/lines_behind`. The tracker is reopened every half minute, and once more at the end. Once it works again, even after a restart, it
gets every line that it missed. A tracker that is enabled late gets the run from its beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.base.addresses import url_through_proxy
from headrace.base.errors import ServiceError
from headrace.base.files import atomic_write, fsync
from headrace.config import Config
from headrace.config.compare import flatten
from headrace.config.in_yaml import without_password
from headrace.config.keys import Keys
from headrace.launch.tracker_login import is_logged_in
from headrace.run.journal import Line, parse_lines, read_bytes, size, surviving
from headrace.run.metric_names import tracked_name
from headrace.run.sample_files import SampleFiles

from . import alarm
from .batch_samples import as_markdown, choose

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 30.0


@dataclasses.dataclass(frozen=True)
class TrackerEntry:
    """A `train` or `validation` line for a tracker.

    `number` counts all entries sent to it, from 0. `metrics` have their tracked names (`train/loss`). `texts` (Markdown) and `pictures`
    (PNG files) of the step are by name.
    """

    number: int
    step: int
    time: float
    metrics: Mapping[str, float]
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pictures: Mapping[str, Path] = dataclasses.field(default_factory=dict)


class Tracker(Protocol):
    """One run of a tracker. Every method may raise whatever the library raises. The tracker is then reopened."""

    run_id: str

    def write(self, entries: Sequence[TrackerEntry], rewound_to: int | None) -> None:
        """Write entries. They survive the process once this returns. With `rewound_to`, earlier entries of that step and later ones are
        void; a tracker removes them if it can."""

    def close(self) -> None: ...


# Opens a tracker on the run with this id, or on a new run for None.
Opener = Callable[[str | None], Tracker]


def list_enabled(config: Config) -> Iterator[tuple[str, Opener, str]]:
    """Yield name, opener and server (a URL; empty: none) of the enabled trackers. Their libraries are imported only when they are opened.
    Raises `ServiceError` naming the extra of a missing library."""
    logger = config.logger
    for _, message in logger.missing_libraries():
        raise ServiceError(message)
    if logger.tensorboard_enabled:
        yield "tensorboard", lambda run_id: TensorBoard(config), ""
    if logger.wandb_enabled:
        server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
        yield "wandb", lambda run_id: WeightsAndBiases(config, run_id), server
    if logger.mlflow_enabled:
        yield "mlflow", lambda run_id: MLflowRun(config, run_id), config.logger.mlflow.server or ""


class TensorBoard:
    """The event files in one folder, which TensorBoard shows as a run. `purge_step` hides the steps that a rewind undid."""

    def __init__(self, config: Config) -> None:
        self.run_id = config.logger.tensorboard.log_dir or str(config.log_folder / "tensorboard")
        self._parameters = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in flatten(parameters(config))
        }
        self._open()

    def write(self, entries: Sequence[TrackerEntry], rewound_to: int | None) -> None:
        from matplotlib.image import imread

        if rewound_to is not None:
            self.close()
            self._open(rewound_to)
        for entry in entries:
            at = {"global_step": entry.step, "walltime": entry.time}
            for name, value in entry.metrics.items():
                self._writer.add_scalar(name, value, **at)
            for name, text in entry.texts.items():
                self._writer.add_text(name, text, **at)
            for name, path in entry.pictures.items():
                self._writer.add_image(name, imread(path), dataformats="HWC", **at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _open(self, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(self.run_id, purge_step=purge_step)
        file: Any = self._writer.file_writer  # there until `close`
        # at step 0, which a rewind to the beginning hides; `add_hparams` would make a separate run for them
        for summary in hparams(self._parameters, {}):
            file.add_summary(summary, 0)


class WeightsAndBiases:
    """A run of Weights & Biases, resumed after every restart.

    W&B's own step never goes back, so each entry gets the next one, and curves are drawn over the metric `step`. A step that was trained
    again after a rewind appears twice; the newest value counts.
    """

    def __init__(self, config: Config, run_id: str | None) -> None:
        import wandb

        config.log_folder.mkdir(parents=True, exist_ok=True)
        settings = config.logger.wandb
        self.run_id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or config.run_folder.name,
            id=self.run_id,
            resume="allow",
            dir=str(config.log_folder),
            mode=None if is_logged_in() else "offline",
            config=parameters(config),
            # don't record console output and code; an unreachable server must not delay the trainer's exit
            settings=wandb.Settings(
                console="off",
                silent=True,
                reinit="create_new",
                init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 20)),
            ),
        )
        if self._run.offline and "WANDB_MODE" not in os.environ:
            log.warning(
                "not logged in to Weights & Biases (`wandb login`, or WANDB_API_KEY): the run is written to %s, and "
                "`wandb sync %s` sends it",
                self._run.dir, Path(self._run.dir).parent,
            )  # fmt: skip
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, entries: Sequence[TrackerEntry], rewound_to: int | None) -> None:
        """Log the entries to W&B's own process, which outlives this one until it has written them."""
        import wandb

        for entry in entries:
            texts = {name: wandb.Html(f"<pre>{html.escape(text)}</pre>") for name, text in entry.texts.items()}
            pictures = {name: wandb.Image(str(path)) for name, path in entry.pictures.items()}
            self._run.log({**entry.metrics, **texts, **pictures, "step": entry.step}, step=entry.number)

    def close(self) -> None:
        self._run.finish()


class MLflowRun:
    """A run of MLflow, on a server or in a SQLite file beside the run. `run_id` None makes a new one, unless the configuration names one.

    MLflow's parameters can't be changed, so they are those of the first start. The configuration of every start is stored as a file
    (`config/<time>.json`). For a step that was trained again after a rewind, both values are kept and the newest is shown.
    """

    def __init__(self, config: Config, run_id: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        settings, folder = config.logger.mlflow, config.log_folder.absolute()
        store = config.logger.mlflow.server
        files = settings.artifact_location
        if store is None:
            folder.mkdir(parents=True, exist_ok=True)
            store, files = f"sqlite:///{folder}/mlflow.db", files or str(folder / "mlflow")
        # the model registry is not used, and mlflow-skinny supports none in a database
        self._client = MlflowClient(store, registry_uri=store if store.startswith("http") else folder.as_uri())
        known = run_id or settings.run_id
        if known is None:
            experiment = self._client.get_experiment_by_name(settings.experiment_name)
            place = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(settings.experiment_name, files)
            )
            run = self._client.create_run(place, run_name=settings.run_name or config.run_folder.name)
            self.run_id: str = run.info.run_id
            params = [
                Param(_sanitize(key), (value if isinstance(value, str) else json.dumps(value))[:MAX_PARAM_VAL_LENGTH])
                for key, value in flatten(parameters(config))
            ]
            for batch in _batches(params, MAX_PARAMS_TAGS_PER_BATCH):
                self._client.log_batch(self.run_id, params=batch)
        else:
            self.run_id = known
            self._client.set_terminated(known, "RUNNING")
        self._client.log_dict(self.run_id, parameters(config), f"config/{int(time.time())}.json")

    def write(self, entries: Sequence[TrackerEntry], rewound_to: int | None) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        metrics = [
            Metric(_sanitize(name), value, int(entry.time * 1000), entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
        ]
        for batch in _batches(metrics, MAX_METRICS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=batch)
        for entry in entries:
            for name, text in entry.texts.items():
                self._client.log_text(self.run_id, text, f"{name}/step_{entry.step}.md")
            for name, path in entry.pictures.items():
                self._client.log_artifact(self.run_id, str(path), name)

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


def _batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _sanitize(name: str) -> str:
    """Return the name without characters that MLflow rejects. Names of tasks and environments may have them."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)


# Text that a tracker gets, by the beginning of its keys; `*` is any name. Of all other keys it gets numbers and switches alone.
_SENT_TEXT = (
    *(("run", key) for key in ("id", "dir")),
    *((section,) for section in ("grpo", "ppo", "loss_fn", "value_loss_fn", "policy", "value", "data")),
    *(("env", "*", key) for key in ("type", "function", "grader", "model_name")),
    *((service, "device") for service in ("trainer", "rollout")),
    ("checkpointing", "metric_name"),
)


def parameters(config: Config) -> dict[str, Any]:
    """Return what a tracker gets of the configuration: every number and switch, and the text of the keys in `_SENT_TEXT`. Text from the
    environment is the expression that gives it."""

    def sent(value: Any, keys: Keys) -> Any:
        if isinstance(value, dict):
            inner = {key: sent(one, (*keys, key)) for key, one in value.items()}
            return {key: one for key, one in inner.items() if one is not None or value[key] is None}
        if isinstance(value, list):
            return [one for one in (sent(one, keys) for one in value) if one is not None]
        if not isinstance(value, str):
            return value
        allowed = any(all(one in ("*", key) for one, key in zip(place, keys, strict=False)) for place in _SENT_TEXT)
        return without_password(value) if allowed else None

    plain: dict[str, Any] = sent(config.show(), ())
    return plain


# -- feeding them -----------------------------------------------------------------------------------------------------


class Position(msgspec.Struct, frozen=True):
    """A tracker's position: bytes of the file read, entries sent in total, and its id of the run (None: it has no id yet)."""

    run_id: str | None = None
    offset: int = 0
    entries: int = 0


def _identity(line: Line) -> tuple[object, ...]:
    return line.kind, line.step, line.timeline, line.time


class TrackerThread:
    """Sends tracker `name` the lines of `journal` that it lacks, `samples_shown` trajectories of each validation, and alarm pictures.
    `server` is the URL that its library calls; empty for a tracker that writes files."""

    def __init__(
        self, name: str, opener: Opener, server: str, journal: Path, samples: SampleFiles, samples_shown: int = 0
    ) -> None:
        self.name = name
        self._server = server
        self.failures = 0
        self._open = opener
        self._journal = journal
        self._samples = samples
        self._samples_shown = samples_shown
        self._file = samples.folder / f"{name}.json"
        self._position = self._load()
        self._tracker: Tracker | None = None
        self._failing = False
        self._wake = threading.Event()
        self._finishing = threading.Event()
        self._deadline = 0.0
        # a tracker that hangs must not keep a finished trainer from exiting
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    def start(self) -> None:
        self._wake.set()  # a tracker that can't be opened is reported at once
        self._thread.start()

    def notify(self) -> None:
        """Wake the thread, because the file has grown."""
        self._wake.set()

    def finish(self, deadline: float) -> None:
        """Catch up once more and close. Returns at once; `join` waits until `deadline` (`time.monotonic`)."""
        self._deadline = deadline
        self._finishing.set()
        self._wake.set()

    def join(self) -> None:
        """Wait for the end, at most until the deadline of `finish`. Log what the tracker still lacks."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive() or self.behind():
            log.error(
                "%s lacks %d lines of %s; the next start with this run.id sends them",
                self.name, self.behind(), self._journal,
            )  # fmt: skip

    def behind(self) -> int:
        """Return the number of lines of the file that the tracker lacks."""
        return self._unread().count(b"\n")

    def _run(self) -> None:
        ending = False
        while not ending:
            if self._failing:
                self._finishing.wait(RETRY_S)
            else:
                self._wake.wait()
            self._wake.clear()
            ending = self._finishing.is_set()
            try:
                self._catch_up()
                if ending and self._tracker is not None:
                    self._tracker.close()
            except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything, and that must not stop the run
                self._note_failure(error)
            else:
                if self._failing:
                    log.warning("%s works again; it has every line of %s", self.name, self._journal)
                self._failing = False

    def _catch_up(self) -> None:
        if self._tracker is None:
            self._tracker = self._open(self._position.run_id)
            self._save(Position(self._tracker.run_id, self._position.offset, self._position.entries))
        data = self._unread()
        if not data:
            return
        position, end = self._position, self._position.offset + len(data)
        lines = [line for line in parse_lines(data, str(self._journal)) if line.kind != "retry"]
        rewound_to = min((line.step for line in lines if line.kind == "rewind"), default=None)
        if rewound_to is not None:
            # of those steps, lines are void, except for a validation of the version that was rewound to
            whole = parse_lines(read_bytes(self._journal)[:end], str(self._journal))
            new = {_identity(line) for line in lines}
            lines = [line for line in surviving(whole) if line.step >= rewound_to or _identity(line) in new]
        entries = [self._entry(number, line) for number, line in enumerate(lines, start=position.entries)]
        self._tracker.write(entries, rewound_to)
        self._save(Position(position.run_id, end, position.entries + len(entries)))

    def _entry(self, number: int, line: Line) -> TrackerEntry:
        """Make the entry for a line, with the trajectories of a validation and the picture of an alarm if their files still exist."""
        texts, pictures = {}, {}
        samples = self._samples.samples("val", line.step) if line.kind == "validation" and self._samples_shown else []
        if samples:
            texts["validation/samples"] = as_markdown(choose(samples, self._samples_shown))
        picture = alarm.picture_path(self._samples.folder, line.step)
        if line.metrics.get("train_inference_alarm") and picture.exists():
            pictures["train/disagreement"] = picture
        metrics = {tracked_name(line.kind, name): value for name, value in line.metrics.items()}
        return TrackerEntry(number, line.step, line.time, metrics, texts, pictures)

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        if not self._failing:
            log.error(
                "%s can't be written to (%s: %s%s). Training continues; every metric is in %s, and %s gets the lines it "
                "misses once it works again",
                self.name, type(error).__name__, " ".join(str(error).split())[:300], url_through_proxy(self._server),
                self._journal, self.name,
            )  # fmt: skip
        self._failing = True
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception):  # it has failed already, and is reopened
                tracker.close()

    def _unread(self) -> bytes:
        """Return the complete lines after the position."""
        return read_bytes(self._journal, self._position.offset)

    def _load(self) -> Position:
        """Return the saved position, limited to the journal's size, because a power cut may have removed lines. Raises `ServiceError` for a
        file that `_save` did not write."""
        if not self._file.exists():
            return Position()
        try:
            position = msgspec.json.decode(self._file.read_bytes(), type=Position)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServiceError(
                f"{self._file} can't be read ({error}); remove it: {self.name} then gets the whole run again, as a new one"
            ) from error
        return Position(position.run_id, min(position.offset, size(self._journal)), position.entries)

    def _save(self, position: Position) -> None:
        self._position = position
        self._samples.make_folder()
        with atomic_write(self._file) as unfinished:
            unfinished.write_bytes(msgspec.json.encode(position))
            fsync(unfinished)


def tracker_metrics(threads: Sequence[TrackerThread]) -> dict[str, float]:
    """Return `trackers/failures` and `trackers/lines_behind`; nothing without a tracker."""
    if not threads:
        return {}
    return {
        "trackers/failures": float(sum(thread.failures for thread in threads)),
        "trackers/lines_behind": float(max(thread.behind() for thread in threads)),
    }
