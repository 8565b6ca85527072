"""The page with a long run: how long a person waits, and what the server and the browser take.

    python -m benchmarks.page [--steps 10000] [--groups 100000] [--folder FOLDER]

A generated run: 150 metrics of each step, every group with its events, spread over 8 replicas, a trajectory of 131,072 tokens, and an
episode of 500 calls. `headrace page` serves it, and Chromium reads it. A view's time is that from the call of its address until all of it
has been read; an interaction's from the key or click until what it changes is shown. Memory is that of the processes, in MB: resident for
the server, after each row, and for the browser the sum of what each of its processes has alone (USS). The limits are the goals that the
page was built for.

An existing folder is used as it is; its index is built anew.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, expect
from rich.console import Console
from rich.table import Table

from benchmarks.group_history import make
from headrace.run import group_files
from headrace.run.group_history import INDEX
from headrace.run.sample_files import SampleFiles
from headrace.run.samples import COLUMNS
from tests.support.browser import Window, browser, page_of
from tests.support.page_runs import START, STEP_S, long_run

METRICS, TOKENS, CALLS = 150, 131_072, 500
VIEW_S, INTERACTION_S, BROWSER_MB, SERVER_MB = 1.0, 0.2, 500, 300
RUN, GROUP, EPISODE = "long", "e0-train-0", "e0-train-1"
REPEATED, INDEX_S = 3, 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="of the generated run; by default one that is removed at the end")
    arguments = parser.parse_args()
    console = Console()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / RUN).exists():
            generate(folder, arguments.steps, arguments.groups)
        (folder / RUN / group_files.FOLDER / INDEX).unlink(missing_ok=True)
        address = stack.enter_context(page_of(folder))
        chromium = stack.enter_context(browser())
        console.print(measure(chromium, address, console))


def generate(folder: Path, steps: int, groups: int) -> None:
    """Write the run."""
    run = long_run(folder, RUN, steps, METRICS)
    make(run / group_files.FOLDER, groups, int(START * 1000), int(STEP_S * steps * 1000) // groups)
    samples = SampleFiles(run / "logs", None)
    samples.write("train", 1, [long_sample(GROUP, 0, 1, TOKENS, 0), long_sample(EPISODE, 0, 1, 20 * CALLS, CALLS)])


def long_sample(group: str, index: int, step: int, tokens: int, calls: int) -> dict[str, Any]:
    """Return a line of a sample file, with every column; an episode if there are `calls`, each the continuation of one before it."""
    chance = random.Random(0)
    words = [" the", " sum", " of", " both", "\n", " 42", ","]
    length = tokens // max(1, calls)
    message = {"role": "user", "content": "What is 1+1?"}
    parts = [
        {
            "parent": -1 if number == 0 else chance.randrange(max(0, number - 5), number),
            "context_token_ids": [],
            "context_token_texts": [],
            "tokens": [number * length, (number + 1) * length],
            "trained": True,
            "finish_reason": "stop",
            "replica": "r1",
            "messages": [message],
            "answer": {"role": "assistant", "content": f"call {number}", "reasoning": "it follows"},
            "timings": {},
        }
        for number in range(calls)
    ]
    return {
        "step": step,
        "group": group,
        "task": "trains",
        "index": index,
        "attempt": 1,
        "environment": "math",
        "build": "b1",
        "rewards": 1.0,
        "components": {},
        "metadata": {},
        "finish_reason": "stop",
        "spans": [[0, 0, tokens // 2], [1, tokens // 2, tokens]],
        "replica": "r1",
        "messages": [message],
        "extra_env_info": {"answer": "2"},
        "content": "".join(words[place % 7] for place in range(tokens)),
        **({"calls": parts} if calls else {}),
        "token_ids": [place % 7 for place in range(tokens)],
        "prompt_token_ids": [1, 2, 3],
        "prompt_token_texts": ["What", " is", " it"],
        "token_texts": [words[place % 7] for place in range(tokens)],
        **{name: [round(chance.gauss(0, 1), 6) for _ in range(tokens)] for name in COLUMNS},
    }


def measure(chromium: Browser, address: str, console: Console) -> Table:
    """Read every view once, and use it."""
    window = Window(chromium, address)
    page = window.page
    began = time.perf_counter()
    page.goto(f"{window.site}/runs/{RUN}/prompts")
    expect(page.locator("tbody tr").first).to_be_visible(timeout=INDEX_S * 1000)
    console.print(f"the first view of the groups: {time.perf_counter() - began:.1f} s")
    expect(page.get_by_role("note")).to_have_count(0, timeout=INDEX_S * 1000)
    console.print(f"their index built: {time.perf_counter() - began:.1f} s, {memory_mb()[0]:.0f} MB")
    table = Table("what", "s", "at most", "MB of the server", title=f"the page, {REPEATED} times each, the median")

    def add(what: str, limit: float, act: Callable[[], object]) -> None:
        took = []
        for _ in range(REPEATED):
            began = time.perf_counter()
            act()
            took.append(time.perf_counter() - began)
        table.add_row(what, f"{statistics.median(took):.2f}", f"{limit:g}", f"{memory_mb()[0]:.0f}")

    views = {
        "runs": "/",
        "overview": f"/runs/{RUN}?window=all",
        "metrics": f"/runs/{RUN}/metrics",
        "prompts": f"/runs/{RUN}/prompts",
        "group": f"/runs/{RUN}/groups/{GROUP}",
        f"trajectory of {TOKENS} tokens": f"/runs/{RUN}/groups/{GROUP}/0",
        f"episode of {CALLS} calls": f"/runs/{RUN}/groups/{EPISODE}/0",
        "timeline": f"/runs/{RUN}/timeline",
        "system": f"/runs/{RUN}/system",
    }
    for name, path in views.items():
        add(f"view: {name}", VIEW_S, lambda path=path: window.open(path))  # type: ignore[misc]
    window.open(f"/runs/{RUN}/prompts")
    for name, act in {"a text is searched": search, "the next page": next_page, "a state is chosen": choose}.items():
        add(f"prompts: {name}", INTERACTION_S, lambda act=act: act(page))  # type: ignore[misc]
    window.open(f"/runs/{RUN}/timeline")
    add("timeline: zoomed", INTERACTION_S, lambda: zoom(page))
    window.settle()
    add("timeline: zoomed, and its details read", VIEW_S, lambda: zoom_and_read(page))
    assert not window.faults, window.faults
    server, browsers = memory_mb()
    table.add_row("MB of the server", f"{server:.0f}", f"{SERVER_MB}", "")
    table.add_row("MB of the browser", f"{browsers:.0f}", f"{BROWSER_MB}", "")
    return table


_number = iter(range(1_000))


def search(page: Page) -> None:
    number = next(_number) * 7919
    page.get_by_role("searchbox").fill(f"Question {number}:")
    expect(page.locator("tbody")).to_contain_text(f"Question {number}:")


def next_page(page: Page) -> None:
    if page.get_by_role("searchbox").input_value():
        page.get_by_role("searchbox").fill("")
        expect(page.locator("tbody tr")).not_to_have_count(1)
    first = page.locator("tbody tr").first.inner_text()
    page.get_by_role("button", name="Next page").click()
    expect(page.locator("tbody tr").first).not_to_have_text(first)


def choose(page: Page) -> None:
    button = page.get_by_role("group", name="State").get_by_role("button", name="failed")
    pressed = button.get_attribute("aria-pressed") == "true"
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false" if pressed else "true")


def zoom(page: Page) -> None:
    title = page.locator("main h2").first
    before = title.inner_text()
    page.get_by_role("button", name="Zoom in").click()
    expect(title).not_to_have_text(before)


def zoom_and_read(page: Page) -> None:
    """Zoom, and wait until the range has been in the address, and its details have been read."""
    address = page.url
    zoom(page)
    expect(page).not_to_have_url(address)
    expect(page.locator("main [aria-busy=true]")).to_have_count(0)


def memory_mb() -> tuple[float, float]:
    """Return what the server and the browser hold."""
    server = browsers = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if "headrace.cli page" in command:
                server += process.memory_info().rss / 1e6
            elif "chrom" in process.name() or "chrom" in command:
                browsers += process.memory_full_info().uss / 1e6
    return server, browsers


if __name__ == "__main__":
    main()
