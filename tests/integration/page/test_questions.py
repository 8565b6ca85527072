"""What people ask of a run: from the list of runs to the answer, by a few clicks, on recorded runs of which the answer is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import Person, Window, page_of
from tests.support.page_runs import recorded_run, with_steps


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs: `adder`, and one for each of three questions."""
    folder = tmp_path_factory.mktemp("runs")
    recorded_run(folder, "adder")
    times = {"timing/train/validation": 4.0, "timing/train/policy_training": 5.5}
    with_steps(recorded_run(folder, "slow"), [{"reward": 0.5, **times}] * 12)
    rewards = [0.2] * 5 + [0.8] * 10 + [0.1] * 10
    with_steps(recorded_run(folder, "collapsed"), [{"reward": reward, "reward_std": 0.4} for reward in rewards])
    ages = {"avg_trajectory_age": 1.5, "max_trajectory_age": 3.0}
    with_steps(recorded_run(folder, "stale"), [{"reward": 0.5, **ages}] * 4)
    with page_of(folder) as address:
        yield address


@pytest.fixture(scope="module")
def signed_in(site: str, chromium: Browser) -> Window:
    return Window(chromium, site)


@pytest.fixture
def window(signed_in: Window) -> Iterator[Window]:
    signed_in.faults.clear()
    yield signed_in
    signed_in.check()


def test_why_is_it_slow(window: Window) -> None:
    person = Person(window, patience=2)
    page = person.page
    person.click(page.get_by_role("link", name="slow"))
    finding = page.locator(".findings li").first
    expect(finding).to_contain_text("validations held up training")
    expect(finding).to_contain_text("40 % of the time")
    expect(finding).to_contain_text("grpo.val_period=")
    person.click(finding.get_by_role("link", name="Evidence"))
    expect(page.get_by_role("region", name="timing/train/validation")).to_contain_text("4")


def test_what_happened_to_this_prompt(window: Window) -> None:
    person = Person(window, patience=3)
    page = person.page
    person.click(page.get_by_role("link", name="adder"), page.get_by_role("link", name="Prompts", exact=True))
    page.get_by_role("searchbox").fill("0-91")
    expect(page.get_by_role("heading", name="1 group")).to_be_visible()
    person.click(page.get_by_role("row").filter(has_text="0-91").get_by_role("link").first)
    page.wait_for_url("**/runs/adder/groups/0-91")
    expect(page.get_by_role("main")).to_contain_text("the environment says")


def test_which_tokens_drove_the_loss(window: Window) -> None:
    """Of two tokens the second, whose text is 1+1, has three quarters of it."""
    person = Person(window, patience=4)
    page = person.page
    person.click(
        page.get_by_role("link", name="adder"),
        page.get_by_role("link", name="Prompts", exact=True),
        page.get_by_role("row").filter(has_text="0-10").get_by_role("link").first,
        page.get_by_role("link", name="#1"),
    )
    largest = page.locator(".top li").first
    expect(largest).to_contain_text("1+1")
    expect(largest.locator(".faint").last).to_have_text("75 %")


def test_where_did_it_collapse(window: Window) -> None:
    person = Person(window, patience=3)
    page = person.page
    expect(page.get_by_role("row").filter(has_text="collapsed")).to_contain_text("collapse")
    person.click(page.get_by_role("link", name="collapsed"))
    expect(page.get_by_role("alert")).to_contain_text("collapsed at step 15")
    person.click(page.get_by_role("link", name="Metrics"), page.get_by_role("button", name="1 mark"))
    expect(page.get_by_role("list", name="Marks")).to_contain_text("step 15")


def test_how_stale_are_its_data(window: Window) -> None:
    person = Person(window, patience=2)
    page = person.page
    person.click(page.get_by_role("link", name="stale"))
    age = page.locator(".tile").filter(has_text="age").filter(has_text="steps")
    expect(age).to_contain_text("1.5 steps")
    expect(age).to_contain_text("oldest 3 steps")
    person.click(age)
    expect(page.get_by_role("region", name="avg_trajectory_age")).to_contain_text("1.5")
