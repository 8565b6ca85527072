"""The documentation builds as a site without a dead link, shows what the code says of itself, and leads from one version to the others."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from playwright.sync_api import expect

import headrace
from tests.support.browser import NARROW, WIDE, browser
from tests.support.http_server import Quiet, serving

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW, MAIN = "0.9.0", "0.10.0", "main"


def build(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/build_site.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site") / OLD
    build(str(site), OLD)
    return site


def list_versions(folder: Path) -> dict[str, object]:
    subprocess.run([sys.executable, "scripts/list_versions.py", str(folder)], cwd=ROOT, check=True)
    listed: dict[str, object] = json.loads((folder / "versions.json").read_text())
    return listed


def test_no_page_has_a_dead_link_and_each_is_in_the_contents() -> None:
    build("--check")


@pytest.mark.nightly  # to write the pages takes as long again as to find what is wrong in them, which the one before does
def test_the_site_has_every_page(built: Path) -> None:
    pages = {path.stem for path in built.glob("*.html")}
    assert pages >= {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    python = (built / "python-api.html").read_text()
    assert [name for name in headrace.__all__ if f'id="headrace.{name}"' not in python] == []
    assert 'id="headrace-groups-find"' in (built / "commands.html").read_text()
    assert "/api/runs/{run}" in (built / "http-api.html").read_text()
    assert "EnvironmentService" in (built / "grpc-api.html").read_text()


def test_the_newest_release_is_the_latest_version(tmp_path: Path) -> None:
    for name in (MAIN, NEW, OLD, "0.11.0rc1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(name)
    assert list_versions(tmp_path) == {"latest": NEW, "versions": [MAIN, "0.11.0rc1", NEW, OLD]}
    assert (tmp_path / "latest" / "index.html").read_text() == NEW
    assert "url=latest/" in (tmp_path / "index.html").read_text()
    shutil.rmtree(tmp_path / NEW)
    assert list_versions(tmp_path)["latest"] == OLD
    assert (tmp_path / "latest" / "index.html").read_text() == OLD


def test_before_any_release_the_site_leads_to_main(tmp_path: Path) -> None:
    (tmp_path / MAIN).mkdir()
    (tmp_path / MAIN / "index.html").touch()
    assert list_versions(tmp_path) == {"latest": None, "versions": [MAIN]}
    assert "url=main/" in (tmp_path / "index.html").read_text()
    assert not (tmp_path / "latest").exists()


@pytest.fixture
def served(built: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a site of three versions; `data.html` is only in the newest release."""
    for name in (OLD, NEW, MAIN):
        shutil.copytree(built, tmp_path / name)
        for page in (tmp_path / name).rglob("*.html"):
            page.write_text(page.read_text().replace(f'data-version="{OLD}"', f'data-version="{name}"'))
    (tmp_path / MAIN / "data.html").unlink()
    list_versions(tmp_path)
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with serving(handler) as address:
        yield f"http://{address}"


class _Quiet(Quiet, SimpleHTTPRequestHandler):
    pass


@pytest.mark.nightly  # a browser, for what is seldom changed
def test_a_reader_goes_from_a_version_to_the_same_page_of_another(served: str) -> None:
    with browser() as found:
        page = found.new_page(viewport={"width": WIDE, "height": 900})
        page.goto(f"{served}/{OLD}/data.html")
        expect(page.locator(".announcement")).to_contain_text(f"{OLD}, an old version")
        choice = page.locator(".site-versions select")
        assert choice.locator("option").all_text_contents() == [MAIN, f"{NEW} (latest)", OLD]
        page.locator(".announcement a").click()
        page.wait_for_url(f"{served}/latest/data.html")
        expect(choice).to_have_value(NEW)
        expect(page.locator(".announcement")).to_have_count(0)
        choice.select_option(MAIN)
        page.wait_for_url(f"{served}/{MAIN}/")  # it has no such page
        expect(page.locator(".announcement")).to_contain_text("not released yet")
        page.goto(f"{served}/{NEW}/_modules/headrace/testing.html")
        choice.select_option(OLD)
        page.wait_for_url(f"{served}/{OLD}/_modules/headrace/testing.html")


@pytest.mark.nightly  # a browser, for what is seldom changed
def test_pages_fit_and_the_search_works_without_a_server(built: Path) -> None:
    with browser() as found:
        page = found.new_page(viewport={"width": NARROW, "height": 800})
        for name in sorted(path.name for path in built.glob("*.html")):
            page.goto(f"{(built / name).as_uri()}")
            room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert room[0] <= room[1], (name, room)
            assert page.locator(".site-versions").is_hidden()
        page.goto(f"{(built / 'search.html').as_uri()}?q=lease")
        expect(page.locator("#search-results li a").first).to_be_visible()
