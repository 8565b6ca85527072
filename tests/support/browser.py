"""A real browser: Chromium, driven by Playwright. What its console calls an error, and what the page's policy stops, is a fault."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

from playwright.sync_api import Browser, Dialog, Locator, Page, StorageState, expect, sync_playwright

Theme = Literal["light", "dark"]
WIDE, NARROW = 1600, 390  # pixels

# What a person should never read in the place of a value.
_OF_A_PROGRAM = re.compile(r"\b(undefined|NaN)\b|\[object \w+\]")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # root has no sandbox, and a container little room in /dev/shm
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        try:
            yield found
        finally:
            found.close()


@contextlib.contextmanager
def page_of(*arguments: object) -> Iterator[str]:
    """`headrace page` with these arguments, as a process; yields the address that it prints."""
    command = [sys.executable, "-m", "headrace.cli", "page", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("page: http"), line + process.stdout.read()
        yield line.split()[1]
    finally:
        process.terminate()
        process.wait()


class Person:
    """Somebody who begins at the list of runs, and goes on by clicks alone, of which they take at most `patience`."""

    def __init__(self, window: Window, patience: int) -> None:
        self.window, self.page, self._patience = window, window.open("/"), patience

    def click(self, *place: Locator) -> None:
        for each in place:
            assert self._patience > 0, f"one click too many: {each}"
            self._patience -= 1
            each.click()
            self.window.settle()


class Window:
    """A window of a browser, signed in by an address with a code, or with the state of one that is. `faults` are errors in its console,
    exceptions, and dialogs that opened."""

    def __init__(
        self,
        browser: Browser,
        address: str,
        state: StorageState | None = None,
        width: int = WIDE,
        theme: Theme = "light",
    ) -> None:
        self.site = address.partition("/#")[0]
        self.width = width
        self.context = browser.new_context(
            viewport={"width": width, "height": 1000}, color_scheme=theme, storage_state=state
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        if state is None and "#" in address:
            self.page.goto(address)
            self.settle()
        self.faults: list[str] = []
        self.page.on("console", lambda message: self.faults.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", self._dismiss)

    def _dismiss(self, dialog: Dialog) -> None:
        self.faults.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, path: str) -> Page:
        """Go to a view, and wait until it has been read."""
        self.page.goto(self.site + path)
        self.settle()
        return self.page

    def settle(self) -> None:
        expect(self.page.get_by_role("main")).not_to_be_empty()
        expect(self.page.locator("main [aria-busy=true]")).to_have_count(0, timeout=30_000)

    def text(self) -> str:
        return self.page.locator("body").inner_text()

    def check(self, expected_errors: int = 0) -> None:
        """The view is shown without faults, within its width, in words for people."""
        assert len(self.faults) <= expected_errors, self.faults
        across = self.page.evaluate("document.documentElement.scrollWidth")
        assert across <= self.width, f"{across} pixels in a window of {self.width}"
        found = _OF_A_PROGRAM.search(self.text())
        assert found is None, found
