"""The folder of a run, watched while the run is up."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from rich.console import Console

from headrace.base.errors import ServiceError
from headrace.cli.display import LineDisplay
from headrace.config import Config
from headrace.launch import pipeline as pipeline_module
from headrace.launch.pipeline import Pipeline
from headrace.net import credentials


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_file_server_away_ends_no_run_and_a_deleted_folder_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    file, saved = tmp_path / credentials.FILE, tmp_path / "config.yaml"
    (tmp_path / "kept").mkdir()
    kept = {"checkpoint_dir": str(tmp_path / "kept")} if elsewhere else {}
    config = Config.model_validate(
        {"run": {"id": "r", "dir": str(tmp_path)}, "security": {"credentials": str(file)}, "checkpointing": kept}
    )
    credentials.complete(file, credentials.list_roles(config, redis=True))
    saved.touch()
    monkeypatch.setattr(pipeline_module, "LOOK_S", 0.0)
    pipeline = Pipeline(config, saved, None, {}, LineDisplay(Console()))
    looked: list[bool] = []
    lstat, away = Path.lstat, True

    def answer(path: Path) -> os.stat_result:
        looked.append(away)
        if away:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", answer)
    watching = asyncio.create_task(pipeline._watch_folder())
    try:
        for expected in (True, False):
            away = expected
            while looked.count(expected) < 3:
                await asyncio.sleep(0)
                assert not watching.done()
        saved.unlink()
        with pytest.raises(ServiceError, match="was deleted or moved") as ended:
            await watching
        assert ("and so were its checkpoints" in str(ended.value)) != elsewhere
    finally:
        watching.cancel()
        pipeline.supervisor.close()
