"""How much memory the control groups of a process leave."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from headrace.base import control_groups
from headrace_services.reward.free_memory import free_memory


@pytest.mark.parametrize(
    ("line", "files", "left"),
    [
        (
            "0::/pod",
            {
                "pod/memory.max": "1000\n",
                "pod/memory.current": "700\n",
                "pod/memory.stat": "anon 5\ninactive_file 100\n",
            },
            400,
        ),
        (
            "0::/pod",
            {"pod/memory.max": "max\n", "pod/memory.current": "700\n", "pod/memory.stat": "inactive_file 100\n"},
            None,
        ),
        (
            "0::/pod/in",
            {"pod/memory.max": "9\n", "pod/memory.current": "2\n", "pod/memory.stat": "inactive_file 0\n"},
            7,
        ),
        (
            "4:memory:/pod",
            {
                "memory/pod/memory.limit_in_bytes": "1000\n",
                "memory/pod/memory.usage_in_bytes": "900\n",
                "memory/pod/memory.stat": "total_inactive_file 50\n",
            },
            150,
        ),
        ("3:cpu:/pod", {"cpu/pod/memory.max": "1\n"}, None),
        ("", {}, None),
    ],
)
def test_it_is_what_the_groups_leave_if_less_than_the_machines(
    line: str, files: dict[str, str], left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(control_groups, "own", lambda: line)
    monkeypatch.setattr(control_groups, "MOUNT", tmp_path)
    machine = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert free_memory() == (machine.available if left is None else left)
