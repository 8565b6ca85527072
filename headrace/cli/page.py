"""`headrace page`: serve the page of all runs of a folder, or print the address of one that is served already."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from headrace.base.errors import ConfigError, HeadraceError, MissingPackage, ServiceError
from headrace.base.scratch import scratch_folder
from headrace.cli import common
from headrace.config import Config, load
from headrace.launch import exposure, runs
from headrace.launch.probe import ask_ready
from headrace.net import credentials
from headrace.net.http_access import HttpAccess, new_code
from headrace.net.service import bind, ending_recorded
from headrace.run.history import read_record


def page(
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER|RUN]", help="A folder of runs; or a run's folder, or its id under ./runs.")
    ] = "runs",
    host: Annotated[str | None, typer.Option(help="Host on which to listen.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.", show_default="8396 if it is free"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Serve the page as a service of the run with this YAML: at its page.host and page.port, with its credentials.",
        ),
    ] = None,
) -> None:
    """Serve one page for all runs of a folder, live or dead, from their files alone, until Ctrl-C.

    The printed address signs one browser in, once. If `headrace up` serves the page of that folder already, print a new address of it.
    """
    if config is not None:
        _serve_for_run(config, host, port)
        return
    saved = runs.find_saved(folder)
    if saved is None and not Path(folder).is_dir():
        raise ConfigError(
            f"{folder} is neither a folder of runs, nor a run: {' and '.join(map(str, runs.places(folder)))} don't exist"
        )
    place = Path(folder).resolve() if saved is None else saved.resolve().parent.parent
    run = None if saved is None else saved.resolve().parent.name
    for served in _served(place, run) if host is None and port is None else ():
        _say_address(runs.page_address(served, run), served.page.port or 0)
        return
    _serve_alone(place, run, host, port)


def _serve_for_run(file: Path, host: str | None, port: int | None) -> None:
    given = [f"page.{name}={value}" for name, value in (("host", host), ("port", port)) if value is not None]
    with ending_recorded():
        config = load(file, given)
        if config.page.port is None:
            raise ConfigError("page.port is null, so this run has no page; give a port")
        common.log_lines()
        exposure.check(config, "page")
        # the run comes first, where both want a processor
        os.nice(10)
        _serve(config, config.run_folder.absolute().parent, config.page.port, lambda _: None)


def _serve_alone(folder: Path, run: str | None, host: str | None, port: int | None) -> None:
    """Serve with credentials of its own, which end with it."""
    common.log_lines()
    with scratch_folder("headrace-page-") as own:
        file = own / "page.yaml"
        file.write_text(f"run: {{id: page, dir: '{own}'}}\n", encoding="utf-8")
        tokens = own / credentials.FILE
        credentials.complete(tokens, ["operator", "reader"])
        given = [f"security.credentials={tokens}", *([] if host is None else [f"page.host={host}"])]
        config = load(file, given)
        exposure.check(config, "page")
        if port is None:
            port = config.page.port or 0
            try:
                bind(config.page.host, port, "page.port").close()
            except ServiceError:
                port = 0

        def say(bound: int) -> None:
            at = runs.page_url(config, config.page.host, bound)
            view = "/" if run is None else f"/runs/{quote(run)}"
            _say_address(f"{at}{view}#code={new_code(config.run_folder)}", bound)
            typer.echo("Ctrl-C ends it")

        _serve(config, folder, port, say)


def _say_address(address: str, port: int) -> None:
    typer.echo(f"page: {address}")
    if tunnel := runs.tunnel(port):
        typer.echo(f"from your own machine: {tunnel}")


def _serve(config: Config, folder: Path, port: int, started: Callable[[int], None]) -> None:
    try:
        from headrace.page import server
    except ImportError as error:
        raise MissingPackage(
            f"the page needs packages that are not installed ({error}); pip install 'headrace[page]'"
        ) from error
    access = HttpAccess.of(config, config.page.host)
    asyncio.run(server.serve(folder, access, config.page.host, port, started))


def _served(folder: Path, run: str | None) -> Iterator[Config]:
    """Yield the configurations of the runs, that of `run` first, whose pages of this folder are served now."""
    names = sorted(path.parent.name for path in folder.glob(f"*/{runs.SAVED}"))
    for name in sorted(names, key=lambda name: name != run):
        try:
            record = read_record(folder / name)
            # a page may outlive its run, as a container does
            if name != run and (record is None or record.state != "running"):
                continue
            config = runs.load_saved(folder / name / runs.SAVED)
            if config.page.port is not None:
                status, _ = asyncio.run(ask_ready(config, config.page.host, config.page.port, timeout_s=2.0))
                if status == HTTPStatus.OK:
                    yield config
        except HeadraceError:  # another run's folder: what is wrong with it is shown on the page
            continue
