"""A run whose machine is lost goes on elsewhere from its store, with the buffer or without it: no step is trained twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.net.service import EXIT_STOPPED
from headrace.replay import Limits, ReplayClient
from headrace.run.journal import surviving
from headrace.run.lineage import FOLDER, LineageFiles
from headrace.run.object_store import RunStore
from headrace_services.trainer.control.checkpoint import TRAINED, Ledger
from tests.support.s3_server import S3Server, s3_server
from tests.support.small_replica import SmallReplica, repeated, running, score_all
from tests.support.trainer_process import PROMPTS, STEPS, Trainer, ended, run_with_replica, settled
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        yield server


def stored(trainer: Trainer) -> list[int]:
    store = RunStore.of(trainer.config)
    assert store is not None
    return [*store.manifests(store.starts())]


def check_whole(trainer: Trainer) -> None:
    """The surviving weights were trained on every step once, and on every group once, wherever that was."""
    train = [line for line in surviving(trainer.journal()) if line.kind == "train"]
    assert [line.step for line in train] == list(range(STEPS)), trainer.said()
    checkpoints = trainer.checkpoints()
    assert checkpoints.newest() == STEPS
    assert len(Ledger.decode(checkpoints.file(STEPS, TRAINED)).trained) == STEPS * PROMPTS
    files = LineageFiles(trainer.config.checkpoint_folder / FOLDER)
    assert [step for step, _ in files.files()] == list(range(STEPS))
    groups = [group.group for step in range(STEPS) for group in files.read(step)]
    assert (len(groups), repeated(groups)) == (STEPS * PROMPTS, [])


@pytest.mark.parametrize("buffer", ["kept", "lost"])
async def test_law_1_an_empty_machine_goes_on_from_the_store(
    trainer: Trainer, replay: ReplayClient, limits: Limits, s3: S3Server, tmp_path: Path, buffer: str
) -> None:
    trainer.settings["checkpointing"]["store"] = "s3://bucket/runs"
    await run_with_replica(trainer, replay, f"in_upload:{STEPS}", code=-signal.SIGKILL)
    assert stored(trainer) == [2], trainer.said()
    assert trainer.checkpoints().find_published() == [2, STEPS]
    # the machine is lost
    elsewhere = Trainer(
        {**trainer.settings, "run": {**trainer.settings["run"], "dir": str(tmp_path / "b")}}, trainer.log
    )
    if buffer == "lost":
        async for key in replay.redis.scan_iter(f"hr:{{{replay.run_id}}}*"):
            await replay.redis.delete(key)
        await replay.open_run(limits)
    await run_with_replica(elsewhere, replay)
    assert "fetching checkpoint 2 " in elsewhere.said()
    assert elsewhere.checkpoints().find_published() == [2, STEPS]
    check_whole(elsewhere)
    assert stored(elsewhere) == [2, STEPS]
    assert (await settled(replay))["trained"] == STEPS * PROMPTS


# It takes ten seconds. By day the test above kills there too, and `unit/trainer/test_uploads.py` sees that nothing is sent twice.
@pytest.mark.nightly
async def test_a_trainer_killed_in_an_upload_sends_the_rest(
    trainer: Trainer, replay: ReplayClient, s3: S3Server
) -> None:
    trainer.settings["checkpointing"]["store"] = "s3://bucket/runs"
    await run_with_replica(trainer, replay, f"in_upload:{STEPS}", code=-signal.SIGKILL)
    sent = s3.sent(f"step_{STEPS}-")
    assert any("model.safetensors" in name for name in sent)
    await run_with_replica(trainer, replay)
    check_whole(trainer)
    assert stored(trainer) == [2, STEPS]
    again = [name for name in s3.sent(f"step_{STEPS}-")[len(sent) :] if "/checkpoint/" in name]
    assert again == []


async def test_what_a_signal_saves_is_in_the_store_when_it_ends(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path, s3: S3Server
) -> None:
    """As a machine that is taken away gives it."""
    trainer.settings["checkpointing"] |= {"store": "s3://bucket/runs", "save_period": 1000}
    trainer.settings["grpo"]["max_num_steps"] = 25  # it is stopped before
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        process = trainer.start()
        await eventually(lambda: any(line.kind == "train" for line in trainer.journal()))
        process.terminate()
        assert await ended(process) == EXIT_STOPPED, trainer.said()
    (saved,) = trainer.checkpoints().find_published()
    assert stored(trainer) == [saved]
