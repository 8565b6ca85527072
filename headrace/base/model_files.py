"""Finds files of a model that are not what their name says: cut off, empty, a pointer of git-lfs, a page of HTML. Only beginnings are read.

The libraries that load models report such files as "header too large", as out of memory, or without the name of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What the libraries read beside the weights, where it exists.
_DESCRIPTIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

_POINTER = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")


def problem_of_model(folder: Path) -> str | None:
    """Return what is wrong with the first unusable file of the model or tokenizer in `folder`, with the remedy; None if there is none."""
    for path in _read_files(folder):
        if (problem := find_problem(path)) is not None:
            return problem
    return None


def problem_of_weights(model: str, lacking: Iterable[str]) -> str | None:
    """Return what is wrong with a model, by the name of its class, whose files lack these weights; None if they lack none. transformers
    draws them at random, and only warns."""
    names = sorted({*lacking})
    if not names:
        return None
    some = ", ".join(names[:3])
    return f"{model} has {len(names)} weights that its files lack, or have in another shape: {some}; they would be random numbers"


def find_problem(path: Path) -> str | None:
    """Return why `path`, a `.json`, `.safetensors` or `.bin`, can't be what its name says, with the remedy; None if it can."""
    again = "; download or copy it again"
    try:
        with path.open("rb") as file:
            begin = file.read(512)
        if not begin:
            return f"{path} is empty{again}"
        if begin.startswith(_POINTER):
            return f"{path} is a pointer of git-lfs, not the file itself: run `git lfs pull` in {path.parent}"
        if begin.lstrip().lower().startswith(_HTML):
            return f"{path} is a page of HTML, perhaps one that asks to sign in{again}"
        if path.suffix == ".safetensors" and (cut := _cut(path)) is not None:
            return f"{path} {cut}{again}"
        if path.suffix == ".json":
            json.loads(path.read_bytes())
    except FileNotFoundError:
        return f"{path} does not exist{again}"
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    except ValueError as error:
        return f"{path} is not JSON ({error}){again}"
    return None


def _read_files(folder: Path) -> Iterator[Path]:
    """Yield the files that the libraries read. The parts of weights are those that the index names."""
    yield from (path for name in _DESCRIPTIONS if (path := folder / name).exists())
    if (folder / WEIGHTS).exists():
        yield folder / WEIGHTS
    elif (folder / INDEX).exists():
        yield folder / INDEX
        index = json.loads((folder / INDEX).read_bytes())
        parts = index.get("weight_map", {}) if isinstance(index, dict) else {}
        yield from (folder / part for part in sorted(set(parts.values())))
    else:
        yield from sorted(folder.glob("pytorch_model*.bin"))


def _cut(path: Path) -> str | None:
    """Return why a file is not a whole one of safetensors, whose header says where each tensor ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return "is cut off, or no safetensors file"
        try:
            header = json.loads(file.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "is no safetensors file"
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"has {size} bytes, and its header says {whole}"
