"""CONTRIBUTING.md and AGENTS.md name what there is; a recipe's table names every place of its sibling."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md")
# where a sibling is looked for; headrace/v1 is generated
CODE = ("headrace", "services", "proto", "docs", "examples", "benchmarks", "scripts", "deploy", "README.md")
_PATH = re.compile(r"[\w./*-]*(?:/[\w.*-]*|\.(?:py|lua|md|toml|yaml|lock))")
RECIPES = dict(
    (title, body)
    for title, body in re.findall(
        r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
    )
    if "Sibling: " in body
)


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def rows(body: str) -> list[str]:
    """The first cells of a recipe's table."""
    return re.findall(r"^\| (`.*?) \|", body, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_is_there(page: str) -> None:
    named = [each for each in quoted((ROOT / page).read_text()) if _PATH.fullmatch(each) and ".." not in each]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert named + links
    assert [each for each in named + links if not list(ROOT.glob(each.rstrip("/")))] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_target_of_make_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    code = "\n".join([*quoted(text), *re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= targets


@pytest.mark.parametrize("title", RECIPES)
def test_every_symbol_of_a_recipe_is_in_its_file(title: str) -> None:
    for row in rows(RECIPES[title]):
        *_, path = (each for each in quoted(row) if _PATH.fullmatch(each))
        for symbol in (each for each in quoted(row) if not _PATH.fullmatch(each)):
            assert re.search(rf"\b{symbol}\b", (ROOT / path).read_text()), f"{symbol} is not in {path}"


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_names_every_place_of_its_sibling(title: str) -> None:
    sibling = quoted(RECIPES[title].partition("Sibling: ")[2])[0]
    named = {each for row in rows(RECIPES[title]) for each in quoted(row) if _PATH.fullmatch(each)}
    assert {each for each in named if not has(sibling, ROOT / each)} == set()
    places = {
        str(path.relative_to(ROOT))
        for folder in CODE
        for path in ([ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".lua", ".proto", ".md", ".yaml", ".yml") and "v1" not in path.parent.name
    }
    occurs = {each for each in places if has(sibling, ROOT / each)}
    assert occurs == {each for each in named if not each.startswith("tests/")}


def has(word: str, path: Path) -> bool:
    return word in path.name or word in path.read_text()


def test_there_are_recipes_for_what_is_added_most_often() -> None:
    assert len(RECIPES) == 7
