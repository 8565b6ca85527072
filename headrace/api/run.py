"""A run from Python, up or ended, by its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from headrace.api import inputs, starting
from headrace.api.rows import Rows, import_package
from headrace.api.watching import ProgressDisplay, draw
from headrace.base.errors import CodecError, ServiceError
from headrace.cli.display import time_left
from headrace.cli.run_list import brief, steps
from headrace.cli.samples import choose_step
from headrace.config import Config
from headrace.launch import runs
from headrace.run import checkpoints, group_files, history, now
from headrace.run.folder import load_anywhere
from headrace.run.group_history import GroupHistory
from headrace.run.group_query import GroupQuery, GroupSummary
from headrace.run.history import RUN_LOCK, Best, RunHistory, State
from headrace.run.sample_files import Kind, SampleFiles
from headrace.run.samples import StoredSample

_POLL_S = 0.5
_PAGE = 1000  # groups that are asked for at a time
_FREE_FORM = ("messages", "components", "extra_env_info", "calls", "artifacts", "metadata")


class Run:
    """A run: one that `start` has started, or any other, by its folder or by its id under `./runs`. Reading needs its folder alone.

    run = headrace.Run.start("examples/arithmetic_tiny.yaml", {"grpo.max_num_steps": 20})
    run.wait()
    run.metrics()["reward"].plot()
    """

    def __init__(self, run: str | Path) -> None:
        """Raises `ConfigError` if there is no such run."""
        self.folder = runs.find_folder(str(run)).absolute()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        config: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        reward: inputs.Reward | None = None,
        data: Any = None,
    ) -> Run:
        """Start the run of a YAML as `headrace up` does, in processes of its own: it goes on when this one ends. Returns once its checks
        have passed.

        `overrides` are keys with values, `{"grpo.max_num_steps": 20}` or nested. `reward`, a function or a subclass of
        `headrace.Environment`, scores the training prompts. `data`, a list of dicts or a table of pandas or `datasets`, has the training
        prompts; `data.train.input_key` and `output_key` name its columns. Both are written into the run's folder.

        `with headrace.Run.start(…) as run:` stops it at the end of the block, if it is still up.

        Raises `ConfigError` and `ServiceError` as `headrace up` does.
        """
        folder, process = starting.start(Path(config), overrides or {}, reward, data)
        run = cls(folder)
        run._process = process
        return run

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.state == "running":
            self.stop()

    # -- while it is up

    @property
    def id(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def config(self) -> Config:
        """Its resolved configuration, as it was last started."""
        return load_anywhere(self.folder / runs.SAVED)

    @property
    def state(self) -> State:
        """Whether it is up, or how it ended; `unknown` for a run of a version that did not record it."""
        return self._outline(self.config).state

    @property
    def reason(self) -> str:
        """Why it failed; empty if it didn't."""
        return self._outline(self.config).reason

    def wait(self, timeout: float | None = None, *, show: bool = True) -> Run:
        """Return once the run has ended, finished or stopped. Until then `show` its progress: in a notebook a picture with its curves,
        elsewhere a line for each step. An interrupt ends the waiting alone.

        Raises `ServiceError` with the reason if it failed or was killed, `TimeoutError` after `timeout` seconds.
        """
        config = self.config  # not in the loop: to validate it takes a twentieth of a core
        display = ProgressDisplay(self.folder / history.JOURNAL, self._summary, self._broken) if show else None
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            outline = self._outline(config)
            if display is not None:
                display.update(outline)
            if outline.state != "running":
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"run {self.id} is still up after {timeout:g} s; it goes on")
            time.sleep(_POLL_S)
        if self._process is not None:
            self._process.wait()
        if outline.state in ("failed", "killed"):
            reason = f": {outline.reason}" if outline.reason else ""
            raise ServiceError(f"run {self.id} {'has failed' if outline.state == 'failed' else 'was killed'}{reason}")
        return self

    def stop(self) -> Run:
        """Stop the run as Ctrl-C stops `headrace up`: it saves a checkpoint first. Returns once it has ended. Does nothing if it is not
        up. Raises `ServiceError` if it is up, but not by a `headrace up` of this user on this machine."""
        holder = self._holder()
        if holder is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                holder.send_signal(signal.SIGINT)
        elif self.state == "running":
            raise ServiceError(
                f"run {self.id} is up, but not by `headrace up` on this machine; stop it where its trainer runs"
            )
        with contextlib.suppress(ServiceError):  # how it ended before it was stopped is `state`
            self.wait(show=False)
        return self

    def _holder(self) -> psutil.Process | None:
        """Return the process of the `headrace up` that is running the run; None if there is none here."""
        lock = self.folder / RUN_LOCK
        try:
            process = psutil.Process(int(lock.read_text()))
            holds_lock = any(os.path.samefile(each.path, lock) for each in process.open_files())
        except (OSError, ValueError, psutil.Error):
            return None
        return process if holds_lock else None

    # -- what it recorded

    def metrics(self, kind: Literal["train", "validation"] = "train") -> Any:
        """Return a `pandas.DataFrame` with a row for each step that led to the newest weights, or for each version that was validated, and
        a column for each metric. Raises `MissingPackage` without pandas."""
        pandas = import_package("pandas", "notebook")
        found = {line.step: line.metrics for line in self.history().lines if line.kind == kind}
        return pandas.DataFrame.from_dict(found, orient="index").rename_axis("step")

    def history(self) -> RunHistory:
        """Return its state and the surviving lines of its journal. Raises `ServiceError` for a journal that can't be read."""
        return history.read(self.config)

    @property
    def best(self) -> Best | None:
        """The best value of the metric that chooses checkpoints, or of the reward; None before the first."""
        return self.history().best()

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The policies of its checkpoints by version, oldest first: directories that transformers loads."""
        folder = self.config.checkpoint_folder
        return {version: checkpoints.policy_of(folder, version) for version in checkpoints.find_published(folder)}

    def groups(
        self,
        text: str = "",
        *,
        states: Collection[str] = (),
        step: int | None = None,
        environment: str | None = None,
        reason: str = "",
        sort: str = "order",
    ) -> Rows[GroupSummary]:
        """Return what became of every prompt, or of those with this text, as `headrace groups find` does. Raises `ConfigError` for a state
        or sort that there isn't."""
        groups = GroupHistory(self.folder / group_files.FOLDER)
        query = GroupQuery(
            text=text, states=states, step=step, environment=environment, reason=reason, sort=sort, limit=_PAGE
        )

        def read() -> Iterator[GroupSummary]:
            offset, total = 0, 1
            while offset < total:
                total, found = groups.find(dataclasses.replace(query, offset=offset))
                yield from found
                offset += _PAGE

        return Rows(read, GroupSummary)

    def samples(self, step: int | None = None, *, validation: bool = False) -> list[StoredSample]:
        """Return the trajectories of a step, by default the newest, or of the validation of a version. Raises `HeadraceError` naming the
        steps whose trajectories are kept (`logger.keep_step_data`)."""
        files, kind = self._sample_files(validation)
        return files.samples(kind, choose_step(files, kind, step))

    def trajectories(self, *, validation: bool = False) -> Rows[StoredSample]:
        """Return the trajectories of all steps, or validations, that are kept. In a table, columns such as `messages` are JSON text."""
        files, kind = self._sample_files(validation)

        def read() -> Iterator[StoredSample]:
            for step in sorted(files.steps(kind)):
                yield from files.samples(kind, step)

        return Rows(read, StoredSample, _FREE_FORM)

    def _sample_files(self, validation: bool) -> tuple[SampleFiles, Kind]:
        config = self.config
        return SampleFiles.of(config), "val" if validation else "train"

    # -- shown

    def __repr__(self) -> str:
        return f"Run({os.path.relpath(self.folder)!r}): {self._summary(self.history())}"

    def _repr_html_(self) -> str:
        past = self.history()
        return draw(f"run {self.id}: {self._summary(past)}", past.lines)

    def _summary(self, past: RunHistory) -> str:
        best = past.best()
        reason = f" ({brief(past.reason)})" if past.reason else ""
        parts = [f"{past.state}{reason}", f"steps {steps(past)}", *([f"best {best}"] if best is not None else [])]
        if past.state == "running":
            trained = [line.metrics for line in past.lines if line.kind == "train"]
            parts += filter(None, [time_left(trained, past.config.max_num_steps - (past.last_step or 0) - 1)])
            parts += self._broken()
        return ", ".join(parts)

    def _broken(self) -> list[str]:
        """Return a sentence about each environment that the run, which is up, waits for."""
        with contextlib.suppress(CodecError):  # a view, without which the run is read all the same
            if (state := now.read(self.folder)) is not None:
                return [
                    f"waits for environment {each.name}: {each.message}" for each in state.environments if each.broken
                ]
        return []

    def _outline(self, config: Config) -> RunHistory:
        """Return its state, without the lines of its journal."""
        if self._process is not None:
            self._process.poll()
        return history.judge(config, [], None)


def train(
    config: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    reward: inputs.Reward | None = None,
    data: Any = None,
) -> Run:
    """Start a run as `Run.start` does, show its progress, and return it when it has ended. Raises as `Run.start` and `Run.wait` do."""
    return Run.start(config, overrides, reward=reward, data=data).wait()
