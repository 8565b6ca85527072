"""A real Jupyter kernel, whose cells a test runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import nbformat
from nbclient import NotebookClient

from tests.support.reward_hub import WAIT_S


class Notebook:
    """A kernel, and the outputs of what was run in it."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client

    def run(self, source: str) -> asyncio.Task[str]:
        """Run a cell; what it printed."""
        return asyncio.create_task(self._run(nbformat.v4.new_code_cell(source)))

    async def _run(self, cell: nbformat.NotebookNode) -> str:
        self._client.nb.cells.append(cell)
        await asyncio.wait_for(self._client.async_execute_cell(cell, len(self._client.nb.cells) - 1), WAIT_S)
        return "".join(output.get("text", "") for output in cell.outputs)

    def printed(self) -> str:
        """What the newest cell has shown so far."""
        return "".join(output.get("text", "") for output in self._client.nb.cells[-1].outputs)

    async def interrupt(self) -> None:
        await self._client.km.interrupt_kernel()


@contextlib.asynccontextmanager
async def notebook() -> AsyncIterator[Notebook]:
    client = NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3")
    async with client.async_setup_kernel():
        yield Notebook(client)
