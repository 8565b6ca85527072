"""One trajectory, token by token, from the sample file of its step."""

from __future__ import annotations

from typing import Any

from headrace.page.groups import find_story, sample_places
from headrace.page.run_files import NotHere, RunFiles
from headrace.run.samples import SampleFiles

MOST_TOKENS = 20_000


def describe_trajectory(run: RunFiles, group: str, index: int, first: int = 0, count: int = 5000) -> dict[str, Any]:
    """Return the tokens `[first, first + count)` of a trajectory, with all that is known of each. Raises `NotHere` if its group is unknown
    or its step's samples are no longer kept, `CodecError` for a sample file that can't be read."""
    story, _ = find_story(run, group)
    files = SampleFiles(run.config.log_folder, None)
    for kind, step in sample_places(run, story.summary):
        if (found := files.view(kind, step, group, index, first=first, count=count)) is not None:
            return found
    kept = run.config.logger.keep_step_data
    raise NotHere(
        f"trajectory {index} of group {group!r:.100} is in no sample file of run {run.name}: those of the newest {kept} steps are kept "
        "(logger.keep_step_data)"
    )
