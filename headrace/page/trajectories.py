"""One trajectory, token by token, from the sample file of its step."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import CodecError
from headrace.base.files import UNREADABLE
from headrace.page.groups import find_story, sample_paths
from headrace.page.run_files import NotHere, RunFiles, check_file

MOST_TOKENS = 20_000
# Lists of a line that have an entry for each token of the completion, and are no columns of numbers.
_NO_COLUMNS = ("token_ids", "token_texts")


def describe_trajectory(run: RunFiles, group_id: str, index: int, first: int = 0, count: int = 5000) -> dict[str, Any]:
    """Return the tokens `[first, first + count)` of a trajectory, with all that is known of each. Raises `NotHere` if its group is unknown
    or its step's samples are no longer kept, `CodecError` for a sample file that can't be read."""
    story, _ = find_story(run, group_id)
    for path in sample_paths(run, story.summary):
        if (line := _find_line(path, group_id, index)) is not None:
            return _describe(group_id, index, line, first, min(count, MOST_TOKENS))
    kept = run.config.logger.keep_step_data
    raise NotHere(
        f"trajectory {index} of group {group_id!r:.100} is in no sample file of run {run.name}: those of the newest {kept} steps are kept "
        "(logger.keep_step_data)"
    )


def _find_line(path: Path, group: str, index: int) -> dict[str, Any] | None:
    begin = b'{"group":' + msgspec.json.encode(group) + b","
    try:
        with gzip.open(check_file(path, path.parent)) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                if line.startswith(begin) and line.endswith(b"\n"):
                    fields: dict[str, Any] = msgspec.json.decode(line)
                    if fields.get("index") == index:
                        return fields
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise CodecError(f"{path}: not a file of samples ({error}); move it away") from error
    return None


def _describe(group: str, index: int, line: dict[str, Any], first: int, count: int) -> dict[str, Any]:
    ids = line["token_ids"]
    total, last = len(ids), min(first + count, len(ids))
    texts = line.get("token_texts") or [None] * total
    columns = {
        name: values[first:last]
        for name, values in line.items()
        if isinstance(values, list) and len(values) == total and name not in _NO_COLUMNS and _are_numbers(values)
    }
    prompt = line.get("prompt_token_ids") or []
    prompt_texts = line.get("prompt_token_texts") or [None] * len(prompt)
    return {
        "group": group,
        "index": index,
        "step": line.get("step"),
        "total": total,
        "first": first,
        "tokens": [{"id": ids[place], "text": texts[place]} for place in range(first, last)],
        "columns": columns,
        "versions": line.get("spans", []),
        "calls": [
            {
                "number": number,
                "parent": call["parent"],
                "start": call["tokens"][0],
                "end": call["tokens"][1],
                "trained": call["trained"],
                "finish_reason": call["finish_reason"],
                "replica": call["replica"],
                "messages": call["messages"],
                "answer": call["answer"],
                "timings": call.get("timings", {}),
            }
            for number, call in enumerate(line.get("calls", []))
        ],
        "prompt_tokens": [{"id": token, "text": text} for token, text in zip(prompt, prompt_texts, strict=True)],
        "reward": line.get("rewards"),
        "components": line.get("components", {}),
        "metadata": line.get("metadata", {}),
        "artifacts": line.get("artifacts", {}),
    }


def _are_numbers(values: list[Any]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in values)
