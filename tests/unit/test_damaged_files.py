"""Files of a run in which bytes are no UTF-8: each reader names its file, as for all other damage."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base.errors import CodecError, ConfigError, ServiceError
from headrace.config import Config
from headrace.run import checkpoints, history, prompt_counts
from headrace.run.journal import JOURNAL
from headrace.run.lineage import LineageFiles
from headrace.run.sample_files import SampleFiles
from headrace.testing import read_samples


def _history(folder: Path) -> object:
    return history.read(Config.model_validate({"run": {"id": folder.name, "dir": str(folder.parent)}}))


def _bad_metrics(folder: Path) -> object:
    checkpoint = folder / "step_1"
    checkpoint.mkdir()
    (folder / checkpoints.STATE).rename(checkpoint / checkpoints.STATE)
    return checkpoints.read_metrics(folder, 1)


READERS: dict[str, tuple[Callable[[Path], object], bytes]] = {
    history.RECORD: (_history, b'{"state": "\xff"}'),
    prompt_counts.FILE: (prompt_counts.read, b'{"fixed": "\xff"}'),
    checkpoints.CHAIN: (checkpoints.read_chain, b'{"timeline": "\xff"}\n'),
    JOURNAL: (_history, b'{"kind": "\xff"}\n'),
    checkpoints.STATE: (_bad_metrics, b'{"timeline": "\xff"}'),
    "golden.jsonl": (lambda folder: read_samples(folder / "golden.jsonl"), b'{"completion": "\xff"}'),
    "failed_data.jsonl": (lambda folder: SampleFiles(folder, keep=None).read_failed(), b'{"group": "\xff"}\n'),
    "step_0-t.jsonl.gz": (lambda folder: LineageFiles(folder).read(0), gzip.compress(b'{"timeline": "\xff"}\n')),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_names_its_file(tmp_path: Path, name: str) -> None:
    read, damaged = READERS[name]
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises((CodecError, ConfigError, ServiceError), match=name):
        read(tmp_path)
