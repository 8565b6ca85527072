"""One trajectory, token by token, from the sample file of its step."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.page.groups import find_story, sample_places, say_unkept
from headrace.page.run_files import NotHere, RunFiles, written
from headrace.run.sample_files import SampleFiles
from headrace.run.samples import view_record

MOST_TOKENS = 20_000


def describe_trajectory(run: RunFiles, group: str, index: int, first: int = 0, count: int = 5000) -> dict[str, Any]:
    """Return the tokens `[first, first + count)` of a trajectory, with all that is known of each. Raises `NotHere` if its group is unknown
    or its step's samples are no longer kept, `CodecError` for a sample file that can't be read."""
    story, _ = find_story(run, group)
    files = SampleFiles.of(run.config)
    for kind, step in sample_places(run, story.summary):
        # pages ask for a long one window by window; a file of a step is written once
        paths = files.failed_paths if kind == "failed" else (files.path(kind, step),)
        line = run.find_once((paths, *map(written, paths), group, index), partial(files.find, kind, step, group, index))
        if line is not None:
            return view_record(line, first, count)
    why = say_unkept(run, story.summary)
    raise NotHere(f"trajectory {index} of group {group!r:.100} is in no sample file of run {run.name}: {why}")
