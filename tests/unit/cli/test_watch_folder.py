"""The folder of a run, watched while the run is up."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from headrace.base.errors import ServiceError
from headrace.launch import pipeline as pipeline_module
from tests.support.idle_pipeline import idle_pipeline


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_file_server_away_ends_no_run_and_a_deleted_folder_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    saved = tmp_path / "config.yaml"
    saved.touch()
    (tmp_path / "kept").mkdir()
    kept = {"checkpoint_dir": str(tmp_path / "kept")} if elsewhere else {}
    monkeypatch.setattr(pipeline_module, "LOOK_S", 0.0)
    looked: list[bool] = []
    lstat, away = Path.lstat, True

    def answer(path: Path) -> os.stat_result:
        looked.append(away)
        if away:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return lstat(path)

    with idle_pipeline(tmp_path, checkpointing=kept) as pipeline:
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
