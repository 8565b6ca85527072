"""One trajectory of a sample file for a viewer: only its line is read, also from files of before."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.base.errors import CodecError
from headrace.page.groups import SampleHead
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Group, Sampling, Span
from headrace.run import samples
from headrace.run.sample_files import SampleFiles, read_heads
from headrace.run.samples import COLUMNS, MaskReason, failed_record, record, view_record
from headrace.run.token_texts import TokenTexts
from tests.support.episodes import call, episode
from tests.support.stored_samples import sample

GROUP = Group("g", "train", 0, "sums", "math", (), np.array([1], np.int32), {}, 0, 2, Sampling(1.0, 4))


class Letters:
    """A tokenizer whose token 1 is `a`; 26 is half a character."""

    def __len__(self) -> int:
        return 27

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join("\N{REPLACEMENT CHARACTER}" if id_ == 26 else chr(96 + id_) for id_ in ids)

    def convert_ids_to_tokens(self, _: int) -> str:
        return "<0xE2>"


def line(group: str, index: int, **more: Any) -> dict[str, Any]:
    made = json.loads(msgspec.json.encode(sample(group, index)))
    return {**made, "prompt_token_ids": [3], "step": 7, **more}


def many(count: int, **more: Any) -> list[dict[str, Any]]:
    return [line(f"g{place // 4}", place % 4, **more) for place in range(count)]


def view(files: SampleFiles, kind: Any, step: int, group: str, index: int, first: int = 0, count: int = 5000) -> Any:
    found = files.find(kind, step, group, index)
    assert found is not None
    return view_record(found, first, count)


PLAYED = episode(
    [call(-1, [1], [2, 3], version=3), call(0, [4], [5, 26], spans=(Span(3, 0, 1), Span(4, 1, 2)), trained=False)]
)


def test_a_view_has_the_columns_tokens_and_calls_of_one_trajectory(tmp_path: Path) -> None:
    played = msgspec.structs.replace(PLAYED, artifacts={"board": [1]})
    score = Score("SCORED", 0.5, {"exact": 0.5}, metadata={"judge": "well argued"})
    of_step = {"step": 7, "token_losses": [0.5, -0.25, None, None], "ratios": None}
    group = f'{GROUP.id}"\\'
    files = SampleFiles(tmp_path, None)
    files.write(
        "train", 7, [*many(8), {**record(GROUP, played, score, TokenTexts(Letters())), **of_step, "group": group}]
    )
    found = view(files, "train", 7, group, played.index, first=1, count=2)
    assert (found["total"], found["first"], found["step"], found["reward"]) == (4, 1, 7, 0.5)
    assert found["tokens"] == [{"id": 3, "text": "c"}, {"id": 5, "text": "e"}]
    assert found["columns"] == {"generation_logprobs": [-0.5, None], "token_losses": [-0.25, None]}
    assert found["prompt_tokens"] == [{"id": 1, "text": "a"}]
    assert found["versions"] == [[3, 0, 3], [4, 3, 4]]
    assert (found["metadata"], found["artifacts"]) == ({"judge": "well argued"}, {"board": [1]})
    second = found["calls"][1]
    assert (second["number"], second["parent"], second["start"], second["end"], second["trained"]) == (
        1,
        0,
        2,
        4,
        False,
    )
    assert second["context_tokens"] == [{"id": 4, "text": "d"}]
    assert found["legend"]["mask_reasons"][2] == "UNTRAINED_CALL"
    assert found["legend"]["clipped"][-1] == "LOW"
    rest = view(files, "train", 7, group, played.index, first=3)
    assert rest["tokens"] == [{"id": 26, "text": "<0xE2>"}]
    beyond = view(files, "train", 7, group, played.index, first=9)
    assert beyond["tokens"] == []
    json.dumps(found, allow_nan=False)


def test_what_is_not_kept_is_none(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    files.write("train", 7, many(8))
    assert files.find("train", 7, "g1", 4) is None
    assert files.find("train", 7, "g", 1) is None
    assert files.find("train", 8, "g1", 1) is None


def test_only_the_line_that_is_asked_for_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SampleFiles(tmp_path, None)
    files.write("train", 7, many(40, content="x" * 30_000))
    unpacked: list[int] = []
    whole = gzip.decompress

    def decompress(data: bytes) -> bytes:
        found = whole(data)
        unpacked.append(len(found))
        return found

    monkeypatch.setattr("headrace.run.indexed_lines.gzip.decompress", decompress)
    for place in (0, 17, 39):
        found = view(files, "train", 7, f"g{place // 4}", place % 4)
        assert (found["group"], found["index"]) == (f"g{place // 4}", place % 4)
    assert len(unpacked) == 3
    assert max(unpacked) < 400_000, "of 1.2 MB"
    (path,) = tmp_path.iterdir()
    found_group = list(read_heads(path, "g5", SampleHead))
    assert [(one.group, one.index) for one in found_group] == [("g5", place) for place in range(4)]
    assert len(unpacked) <= 5


@pytest.mark.parametrize("one", [PLAYED, PLAYED.flat()], ids=["an episode", "a completion"])
def test_of_a_long_line_what_precedes_its_tokens_is_unpacked(tmp_path: Path, one: AnyTrajectory) -> None:
    """The tokens are overwritten: whoever unpacked them would fail."""
    noise = [random.Random(0).random() for _ in range(100_000)]
    # what an environment attaches looks like the tokens
    score = Score("SCORED", 0.5, metadata={"a": 1, "token_ids": [7]})
    line = {**record(GROUP, one, score), "token_losses": noise}
    files = SampleFiles(tmp_path, None)
    files.write("train", 7, [line])
    path = files.path("train", 7)
    written = path.read_bytes()
    path.write_bytes(written[: -len(written) // 2] + b"\0" * (len(written) // 2))
    (head,) = read_heads(path, GROUP.id, SampleHead)
    assert (head.metadata, head.content, len(head.calls)) == (score.metadata, one.text, len(line.get("calls", [])))
    with pytest.raises(CodecError, match=path.name):
        files.find("train", 7, GROUP.id, one.index)


def test_every_reader_of_gzip_reads_an_indexed_file(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    for lines in (many(40, content="x" * 30_000), []):
        files.write("val", 1, lines)
        assert files.read("val", 1) == lines
        text = subprocess.run(["zcat", files.path("val", 1)], capture_output=True, check=True).stdout
        assert [json.loads(each) for each in text.splitlines()] == lines


def test_a_line_without_texts_or_columns_is_read(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    files.write("train", 7, many(8))
    found = view(files, "train", 7, "g1", 2)
    assert found["tokens"] == [{"id": 5, "text": None}, {"id": 6, "text": None}]
    assert list(found["columns"]) == ["generation_logprobs"]
    assert found["metadata"] == found["artifacts"] == {}
    assert found["calls"] == []
    assert [one.index for one in read_heads(files.path("train", 7), "g1", SampleHead)] == [0, 1, 2, 3]
    assert len(files.samples("train", 7)) == 8


@pytest.mark.parametrize("cut", [1, 20, 2000])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, cut: int) -> None:
    files = SampleFiles(tmp_path, None)
    files.write("train", 7, many(40, content="x" * 30_000))
    path = files.path("train", 7)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CodecError, match="train_data_step7"):
        files.find("train", 7, "g9", 3)


def test_of_a_completion_that_failed_twice_the_last_is_viewed(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, None)
    (completion,) = episode([call(-1, [1], [2])]).paths()
    for message in ("first", "second"):
        failed = Score("FAILED", message=message, metadata={"stderr": message})
        files.append_failed([failed_record(GROUP, completion, failed, "bad")], segment_bytes=1)
    found = view(files, "failed", 0, GROUP.id, completion.index)
    assert found["metadata"] == {"stderr": "second"}


def test_metadata_too_large_for_a_score_has_a_note_in_its_place() -> None:
    (completion,) = episode([call(-1, [1], [2])]).paths()
    large = Score("SCORED", 1.0, metadata={"judge": "x" * 10_000}).fit()
    assert "left out" in record(GROUP, completion, large)["metadata"]["headrace"]


def test_small_losses_keep_seven_digits() -> None:
    values = np.array([1.23456789e-9, -3.0e-20, 0.0, 12345.678], np.float32)
    np.testing.assert_allclose(samples.round_digits(values), values, rtol=1e-6)
    assert samples.round_digits(values)[2] == 0
    assert samples.whole_numbers(np.array([1, np.nan, -1], np.float32)) == [1, None, -1]


def test_the_documentation_defines_every_list_and_every_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = text.partition("\n## Trajectories\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ")[0].strip("| `") for row in section.splitlines() if row.startswith("| ")]
    assert [row for row in rows if row in COLUMNS] == list(COLUMNS)
    assert [row for row in rows if row.isdigit()] == [str(int(reason)) for reason in MaskReason]
