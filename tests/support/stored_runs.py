"""A run that goes on from one machine to the next by way of an object store: its folder on each, without a model and a buffer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.config import Config
from headrace.launch import runs
from headrace.run.journal import JOURNAL, Journal
from headrace.run.lineage import FOLDER
from headrace.run.object_store import RunStore
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState
from headrace_services.trainer.control.uploads import Uploads

RUN = "adder"


class Machine:
    """The folder of the run in `parent`, and the trainer that works there."""

    def __init__(self, parent: Path, store: str, **checkpointing: object) -> None:
        source = {"dataset_name": "arithmetic", "env_name": "sums"}
        self.config = Config.model_validate(
            {
                "run": {"id": RUN, "dir": str(parent)},
                "policy": {"model_name": "none"},
                "data": {"train": source},
                "env": {"sums": {"type": "math"}},
                "checkpointing": {"store": store, **checkpointing},
            }
        )
        self.folder = self.config.run_folder
        self.checkpoints = Checkpoints(self.config.checkpoint_folder, self.config.checkpointing)
        self.store = RunStore.of(self.config)
        self.uploads = Uploads(self.config, self.store, silence_s=0.3)
        self.timeline = ""

    def claim(self, buffer: str = "another", stopped: bool = False) -> bool:
        return self.uploads.claim(buffer, lambda: stopped)

    def start(self, timeline: str, buffer: str = "another") -> int:
        """Start a trainer. Returns the version that it continues from."""
        assert self.claim(buffer)
        newest = self.checkpoints.newest() or 0
        self.ancestors = () if not newest else (*self._of(newest).ancestors, self._of(newest).timeline)
        self.resume(timeline, newest)
        return newest

    def resume(self, timeline: str, version: int) -> None:
        self.timeline = timeline
        self.checkpoints.start(timeline, version)
        journal = Journal(self.folder / JOURNAL)
        if journal.read():
            journal.append("rewind", version, timeline, {})
        self.uploads.begin(timeline)

    def publish(self, version: int, weights: bytes = b"", **metrics: float) -> None:
        """Train up to `version`, and publish its checkpoint."""
        runs.save(self.config)
        lineage = self.config.checkpoint_folder / FOLDER
        lineage.mkdir(exist_ok=True)
        (lineage / f"step_{version - 1}-{self.timeline}.jsonl.gz").write_bytes(b"lineage")
        (self.folder / "groups").mkdir(exist_ok=True)
        (self.folder / "groups" / f"0_{version}-0_{version}-1.parquet").write_bytes(b"groups")
        Journal(self.folder / JOURNAL).append("train", version - 1, self.timeline, {"reward": float(version)})
        folder = self.checkpoints.begin(version, self.timeline)
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_bytes(weights or b"weights of %d" % version)
        state = CheckpointState(
            version=version, timeline=self.timeline, ancestors=self.ancestors, cursor=9, run_id=RUN,
            metrics={f"val:{name}": value for name, value in metrics.items()},
        )  # fmt: skip
        self.checkpoints.publish(state, {version - 1: ["a"]})
        self.uploads.wake()

    def send(self, version: int, weights: bytes = b"", **metrics: float) -> None:
        """Publish a checkpoint, and wait until it is in the store."""
        self.publish(version, weights, **metrics)
        self.finish()

    def weights(self, version: int) -> bytes:
        return (self.checkpoints.path(version) / "policy" / "weights").read_bytes()

    def finish(self) -> None:
        asyncio.run(self.uploads.finish())

    def stored(self) -> list[int]:
        """The checkpoints in the store that a trainer may continue from."""
        return [*self.store.manifests(self.store.starts())]

    def _of(self, version: int) -> CheckpointState:
        return self.checkpoints.state(version)
