"""Every view of the page in a real browser, as `headrace page` serves it: wide and narrow, light and dark, by mouse and by keyboard. And
what people ask of a run: from the list of runs to the answer, by a few clicks, on recorded runs of which the answer is known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from headrace.run.journal import JOURNAL, Journal
from tests.support.browser import NARROW, WIDE, Person, Theme, Window, page_of
from tests.support.page_runs import STEPS, recorded_run, started_with, with_steps

HOSTILE = "</script><img src=x onerror=alert(1)><b>bold</b>\u202e\x1b[2J {{7*7}}"
# by address: a word that the view shows, or a pattern
VIEWS = {
    "/": "adder",
    "/runs/adder": "trained",
    "/runs/adder/metrics": "reward",
    "/runs/adder/prompts": "0-10",
    "/runs/adder/groups/0-10": "Story",
    "/runs/adder/groups/0-10/1": "Tokens",
    "/runs/adder/groups/0-91": "the environment says",
    "/runs/adder/timeline": "rollout-1",
    "/runs/adder/system": "num_prompts_per_step",
    "/compare?run=adder&run=wider": "wider",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: `adder` with hostile texts, `wider`, one without a history of groups, one that is damaged, and those of the questions."""
    folder = tmp_path_factory.mktemp("runs")
    recorded_run(folder, text=HOSTILE)
    recorded_run(folder, "wider")
    recorded_run(folder, "empty", groups=False)
    (recorded_run(folder, "broken") / JOURNAL).write_text("no journal\n")
    recorded_run(folder, "plain")
    times = {"timing/train/validation": 4.0, "timing/train/policy_training": 5.5}
    with_steps(recorded_run(folder, "slow"), [{"reward": 0.5, **times}] * 12)
    rewards = [0.2] * 5 + [0.8] * 10 + [0.1] * 10
    with_steps(recorded_run(folder, "collapsed"), [{"reward": reward, "reward_std": 0.4} for reward in rewards])
    ages = {"avg_trajectory_age": 1.5, "max_trajectory_age": 3.0}
    with_steps(recorded_run(folder, "stale"), [{"reward": 0.5, **ages}] * 4)
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    with page_of(folder) as address:
        yield address


@pytest.fixture(scope="module")
def wide(site: str, chromium: Browser) -> Window:
    """Signed in. A window takes the browser longer to make than a view to show, so there is one."""
    return Window(chromium, site)


@pytest.fixture(
    scope="module",
    params=[
        # by day the tests below look at views that are wide and light
        pytest.param((WIDE, "light"), id="wide", marks=pytest.mark.nightly),
        pytest.param((NARROW, "dark"), id="narrow"),
    ],
)
def reading(request: pytest.FixtureRequest, site: str, chromium: Browser, wide: Window) -> Iterator[Window]:
    width: int = request.param[0]
    theme: Theme = request.param[1]
    window = Window(chromium, site, wide.context.storage_state(), width, theme)
    yield window
    window.context.close()


@pytest.fixture
def window(wide: Window) -> Iterator[Window]:
    wide.faults.clear()
    yield wide
    wide.page.evaluate("localStorage.clear()")


@pytest.fixture
def asking(window: Window) -> Iterator[Window]:
    """For a person; no view may have a fault."""
    yield window
    window.check()


@pytest.mark.parametrize("address", VIEWS)
def test_every_view_is_read_without_a_fault(reading: Window, address: str) -> None:
    reading.open(address)
    assert VIEWS[address] in reading.text()
    reading.check()


@pytest.mark.parametrize("address", ["/runs/adder/prompts", "/runs/adder/groups/0-10", "/runs/adder/groups/0-10/1"])
def test_texts_of_others_stay_text(window: Window, address: str) -> None:
    page = window.open(address)
    text = window.text()
    assert "<img src=x onerror=alert(1)>" in text
    assert "\\u202e" in text
    assert "\\u001b" in text
    assert "\u202e" not in text
    assert page.locator("img[src=x], main b:text-is('bold')").count() == 0
    window.check()


def test_a_browser_that_is_not_signed_in_sees_no_run(site: str, chromium: Browser) -> None:
    window = Window(chromium, site.partition("#")[0])
    window.page.goto(window.site + "/runs/adder")
    assert "headrace page" in window.text()
    assert "trained" not in window.text()
    window.context.close()


def test_what_cant_be_shown_says_why(window: Window) -> None:
    window.open("/runs/nowhere")
    assert "nowhere" in window.page.get_by_role("alert").first.inner_text()
    window.open("/runs/adder/groups/none-such")
    assert "none-such" in window.page.get_by_role("alert").first.inner_text()
    window.open("/runs/%ff")
    assert "%ff" in window.page.get_by_role("alert").first.inner_text(), "no text is encoded so"
    window.open("/")
    assert "broken" in " ".join(window.page.get_by_role("alert").all_inner_texts())


def test_prompts_are_opened_by_keys_alone(window: Window) -> None:
    page = window.open("/runs/adder/prompts")
    page.locator("tbody tr").first.focus()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/runs/adder/groups/0-2")
    window.settle()
    page.keyboard.press("n")
    page.wait_for_url("**/runs/adder/groups/0-3")
    window.settle()
    window.check()


def test_a_view_that_is_drawn_hears_keys(window: Window) -> None:
    """Before anything else runs in the browser: on a busy machine a person is faster than what a view does after it is drawn."""
    page = window.open("/runs/adder/prompts")
    page.evaluate("""() => new MutationObserver((_, observer) => {
        if (!document.querySelector("[aria-label=Neighbours]")) return;
        observer.disconnect();
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "n", bubbles: true }));
    }).observe(document.body, { childList: true, subtree: true })""")
    page.locator("tbody tr").first.press("Enter")
    page.wait_for_url("**/runs/adder/groups/0-1")


def test_a_view_that_is_opened_in_the_background_is_read(site: str, chromium: Browser, wide: Window) -> None:
    window = Window(chromium, site, wide.context.storage_state())  # of its own, whose pages stay in the background
    window.context.add_init_script("Object.defineProperty(document, 'hidden', { get: () => true })")
    window.open("/runs/adder/groups/0-10")
    assert "Story" in window.text()
    window.context.close()


def test_filters_are_part_of_the_address(window: Window) -> None:
    page = window.open("/runs/adder/prompts?state=failed")
    assert "0-91" in window.text()
    assert "0-10" not in window.text()
    page = window.open("/runs/adder/prompts")
    page.get_by_role("searchbox").fill("bold")
    page.get_by_role("group", name="State").get_by_role(
        "button", name="failed"
    ).click()  # before the text is in the address
    page.wait_for_url(re.compile(r"\?text=bold&state=failed|\?state=failed&text=bold"))
    page = window.open("/runs/adder/metrics?re=%5Ereward%24")
    assert page.get_by_text("policy_training").count() == 0


def test_a_run_that_goes_on_is_followed(folder: Path, window: Window) -> None:
    page = window.open("/runs/wider")
    before = window.text()
    metrics = {"reward": 0.875, "timing/train/total_step_time": 10.0}
    Journal(folder / "wider" / JOURNAL).append("train", STEPS, "a", metrics)
    expect(page.get_by_role("main")).to_contain_text("0.875", timeout=30_000)
    assert "0.875" not in before
    window.check()


def test_a_program_opens_a_view_for_its_person(window: Window) -> None:
    page = window.open("/")
    cookies = "; ".join(f"{each['name']}={each['value']}" for each in window.context.cookies())
    answer = window.context.request.post(
        f"{window.site}/api/view",
        data=json.dumps({"path": "/runs/adder/groups/0-10"}),
        headers={"content-type": "application/json", "cookie": cookies, "origin": window.site},
    )
    assert answer.ok, answer.text()
    page.wait_for_url("**/runs/adder/groups/0-10")


def test_each_arrow_has_its_groups_a_minute(window: Window) -> None:
    page = window.open("/runs/empty")
    rates = page.locator(".stage .rate").all_inner_texts()
    assert rates == [""] * 5 + ["12/min"], "without a history only what was trained is known"
    page = window.open("/runs/adder")
    assert page.locator(".stage .rate").all_inner_texts() == ["14/min", "14/min", "13/min", *["12/min"] * 3]
    filtered = page.locator(".end").filter(has_text="filtered").locator(".rate")
    expect(filtered).to_have_text("1/min")
    page.get_by_role("button", name="last step").click()
    expect(filtered).to_have_text("6/min")
    expect(page.get_by_role("heading", name="in the last step")).to_be_visible()
    window.check()


def test_a_changed_key_is_told_at_its_mark(folder: Path, window: Window) -> None:
    started_with(recorded_run(folder, "changed"), (25, ["grpo.seed: 1 -> 2"]))
    page = window.open("/runs/changed/metrics?re=%5Ereward%24")
    area = page.locator(".u-over").first
    size = area.bounding_box()
    assert size is not None
    area.hover(position={"x": size["width"] * 2 / (STEPS - 1), "y": 40})
    expect(page.locator(".tip")).to_contain_text("grpo.seed: 1 -> 2")
    area.hover(position={"x": size["width"] * 4.5 / (STEPS - 1), "y": 40})
    expect(page.locator(".tip")).to_be_hidden()
    page.get_by_role("img", name="reward").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".plot [role=status]")).to_contain_text("grpo.seed: 1 -> 2")
    window.check()


def test_the_theme_is_the_persons_choice(window: Window) -> None:
    page = window.open("/runs/adder")
    page.get_by_title("Light or dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    window.open("/runs/adder/timeline")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    window.check()


def test_why_is_it_slow(asking: Window) -> None:
    person = Person(asking, patience=2)
    page = person.page
    person.click(page.get_by_role("link", name="slow"))
    finding = page.locator(".findings li").first
    expect(finding).to_contain_text("validations held up training")
    expect(finding).to_contain_text("40 % of the time")
    expect(finding).to_contain_text("grpo.val_period=")
    person.click(finding.get_by_role("link", name="Evidence"))
    expect(page.get_by_role("region", name="timing/train/validation")).to_contain_text("4")


def test_what_happened_to_this_prompt(asking: Window) -> None:
    person = Person(asking, patience=3)
    page = person.page
    person.click(page.get_by_role("link", name="plain"), page.get_by_role("link", name="Prompts", exact=True))
    page.get_by_role("searchbox").fill("0-91")
    expect(page.get_by_role("heading", name="1 group")).to_be_visible()
    person.click(page.get_by_role("row").filter(has_text="0-91").get_by_role("link").first)
    page.wait_for_url("**/runs/plain/groups/0-91")
    expect(page.get_by_role("main")).to_contain_text("the environment says")


def test_which_tokens_drove_the_loss(asking: Window) -> None:
    """Of two tokens the second, whose text is 1+1, has three quarters of it."""
    person = Person(asking, patience=4)
    page = person.page
    person.click(
        page.get_by_role("link", name="plain"),
        page.get_by_role("link", name="Prompts", exact=True),
        page.get_by_role("row").filter(has_text="0-10").get_by_role("link").first,
        page.get_by_role("link", name="#1"),
    )
    largest = page.locator(".top li").first
    expect(largest).to_contain_text("1+1")
    expect(largest.locator(".faint").last).to_have_text("75 %")


def test_where_did_it_collapse(asking: Window) -> None:
    person = Person(asking, patience=3)
    page = person.page
    expect(page.get_by_role("row").filter(has_text="collapsed")).to_contain_text("collapse")
    person.click(page.get_by_role("link", name="collapsed"))
    expect(page.get_by_role("alert")).to_contain_text("collapsed at step 15")
    person.click(page.get_by_role("link", name="Metrics"), page.get_by_role("button", name="1 mark"))
    expect(page.get_by_role("list", name="Marks")).to_contain_text("step 15")


def test_how_stale_are_its_data(asking: Window) -> None:
    person = Person(asking, patience=2)
    page = person.page
    person.click(page.get_by_role("link", name="stale"))
    age = page.locator(".tile").filter(has_text="age").filter(has_text="steps")
    expect(age).to_contain_text("1.5 steps")
    expect(age).to_contain_text("oldest 3 steps")
    person.click(age)
    expect(page.get_by_role("region", name="avg_trajectory_age")).to_contain_text("1.5")
