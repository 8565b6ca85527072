"""A file of a model that is not what its name says is named with the remedy, before a library takes it for something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.base.errors import ServiceError
from headrace.base.model_files import problem_of_model
from headrace.base.model_name import MODEL

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daa\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html><html><title>Sign in</title></html>"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    save_file({"a": np.arange(20, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_whole_model_has_no_problem(model: Path) -> None:
    assert problem_of_model(model) is None
    MODEL.check("policy.model_name", str(model))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (POINTER, r"git lfs pull"),
        (PAGE, "a page of HTML"),
        (b"", "is empty"),
        (b"\xff" * 40, r"; download or copy it again"),
    ],
    ids=["pointer", "page", "empty", "noise"],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"])
def test_what_is_no_such_file_is_named_with_the_remedy(model: Path, name: str, content: bytes, said: str) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(ServiceError, match=rf"policy\.model_name: {model / name} .*{said}"):
        MODEL.check("policy.model_name", str(model))


@pytest.mark.parametrize("left", [5, 50, 100, -1])
def test_weights_that_were_cut_off_are_named(model: Path, left: int) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    problem = problem_of_model(model)
    assert problem is not None
    assert problem.startswith(f"{weights} ")
    assert problem.endswith("; download or copy it again")


def _index(model: Path, *parts: str) -> None:
    index = {"weight_map": {f"tensor.{part}": part for part in parts}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_part_that_the_index_names_and_is_not_there_is_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    _index(model, "model-1.safetensors")
    assert problem_of_model(model) is None
    _index(model, "model-1.safetensors", "model-2.safetensors")
    problem = problem_of_model(model)
    assert f"{model / 'model-2.safetensors'} does not exist" in (problem or "")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}'])
def test_an_index_without_parts_is_left_to_the_libraries(model: Path, index: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(index)
    assert problem_of_model(model) is None


def _other(model: Path) -> Path:
    return model / "consolidated.safetensors"


@pytest.mark.parametrize("other", [_other, lambda model: model / "notes.json"], ids=["weights", "notes"])
def test_files_that_no_library_reads_may_be_anything(model: Path, other: Callable[[Path], Path]) -> None:
    other(model).write_bytes(POINTER)
    assert problem_of_model(model) is None
