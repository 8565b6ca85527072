"""The page of curves while a run goes on: drawn beside the training, and not after every step."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from headrace.base.errors import HeadraceError, ServiceError
from headrace.cli import up
from headrace.config import Config
from headrace.run.history import CURVES, are_curves_old
from headrace.run.journal import JOURNAL, Journal
from headrace_services.trainer.telemetry import telemetry as module
from headrace_services.trainer.telemetry.plots import write_curves
from headrace_services.trainer.telemetry.telemetry import Telemetry


class Run:
    """A run whose steps are written down, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.config = Config.model_validate({"run": {"id": "run", "dir": str(folder)}})
        self.page, self.picture = (self.config.run_folder / name for name in (CURVES, "curve.png"))
        self._journal = Journal(self.config.run_folder / JOURNAL)
        self.telemetry = Telemetry(self.config, self._journal, lambda: "1 prompts failed")
        self._steps = 0

    def step_line(self) -> None:
        self._journal.append("train", self._steps, "t", {"reward": 0.5})
        self._steps += 1

    def step(self) -> None:
        self.step_line()
        self.telemetry.notify()

    async def drawn(self) -> None:
        """Wait for what is being drawn."""
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """One that has gone on for a while."""
    with monkeypatch.context() as before:
        before.setattr(module, "DRAWING_PAUSES", 0)
        return Run(tmp_path)


async def test_a_run_that_has_just_begun_is_not_drawn_before_its_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    await run.drawn()
    assert not run.page.exists()
    await run.telemetry.draw_end()
    assert run.page.exists()


async def test_it_is_drawn_without_a_validation_and_once_per_pause(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.step()
    await run.drawn()
    first = run.page.read_text()
    assert "1 prompts failed" in first
    run.step()
    await run.drawn()
    assert run.page.read_text() == first
    monkeypatch.setattr(module, "DRAWING_PAUSES", 0)
    another = Run(run.config.run_folder.parent)
    for _ in range(2):
        another.step()
        await another.drawn()
        assert another.page.read_text() != first
        first = another.page.read_text()


async def test_a_trainer_draws_what_one_that_was_killed_has_not(tmp_path: Path) -> None:
    killed = Run(tmp_path)
    killed.telemetry.start(tokenizer=[])
    assert not killed.page.exists()  # nothing has been trained
    killed.step()
    again = Run(tmp_path)
    again.telemetry.start(tokenizer=[])
    await again.drawn()
    assert "1 steps, the last one 0" in again.page.read_text()
    assert not are_curves_old(killed.config.run_folder)
    os.utime(again.page, (0, 0))
    assert are_curves_old(killed.config.run_folder)
    await again.telemetry.draw_end()


def test_up_draws_what_a_trainer_that_was_killed_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = Run(tmp_path), list[str]()
    missing = HeadraceError("matplotlib is not there")

    def load(*names: str, extra: str) -> Callable[..., None]:
        if missing in to_raise:
            raise missing
        return write_curves

    monkeypatch.setattr(up, "load_entry_point", load)
    to_raise = [missing]
    with up.curves_drawn(run.config, said.append):
        pass
    assert said == []  # nothing to draw
    run.step_line()
    with pytest.raises(KeyError), up.curves_drawn(run.config, said.append):
        raise KeyError
    assert "matplotlib is not there" in said.pop()
    to_raise.clear()
    with pytest.raises(KeyError), up.curves_drawn(run.config, said.append):
        raise KeyError
    assert "1 steps, the last one 0" in run.page.read_text()
    monkeypatch.setattr(up, "load_entry_point", None)
    with up.curves_drawn(run.config, said.append):  # it is drawn
        pass
    assert said == []


async def test_the_end_draws_what_the_pauses_left_out(run: Run) -> None:
    run.step()
    await run.drawn()
    first = run.page.read_text()
    run.step()
    await run.telemetry.draw_end()
    assert run.page.read_text() != first
    assert run.picture.read_bytes().startswith(b"\x89PNG")


async def test_a_page_that_can_not_be_written_is_an_error_that_names_it(run: Run) -> None:
    run.page.mkdir()
    run.step()
    await run.drawn()
    with pytest.raises(ServiceError, match=rf"{run.page}"):
        run.step()


async def test_every_picture_is_drawn_on_one_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread's pictures have used stays with that thread: the trainer would grow with the number of threads."""
    drew: list[int] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args: object, **kwargs: object) -> None:
        drew.append(threading.get_ident())
        save(figure, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", savefig)
    run.step()
    await run.drawn()
    await asyncio.gather(*(run.telemetry.draw_end() for _ in range(3)))
    assert len(drew) >= 4
    assert len({*drew}) == 1
