"""The class of a file, served while a command runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import ServiceError
from headrace.launch.served_file import served_file
from headrace.net.service import bind

ENVIRONMENT = """
import headrace

class Mine(headrace.Environment):
    def score(self, sample: headrace.Sample) -> float:
        return 1.0
"""


async def test_nobody_else_gets_its_port_while_it_is_started_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ENVIRONMENT)
    async with served_file(f"{file}:Mine") as served:
        host, _, port = served.address.rpartition(":")
        await served.stop()
        with pytest.raises(ServiceError, match=port):
            bind(host, int(port), "port").close()
        await served.start()
        with pytest.raises(ServiceError, match=port):
            bind(host, int(port), "port").close()
    bind(host, int(port), "port").close()
