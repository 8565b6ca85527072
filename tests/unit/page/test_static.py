"""The files that a browser loads: all of them at once, all of them from here, none with code in the document."""

from __future__ import annotations

import re

from headrace.page.server import STATIC

INDEX = (STATIC / "index.html").read_text()


def test_a_browser_asks_for_all_modules_at_once() -> None:
    asked = set(re.findall(r'(?:modulepreload" href|type="module" src)="/static/([^"]+)"', INDEX))
    assert asked == {str(path.relative_to(STATIC)) for path in STATIC.rglob("*.js")}


def test_the_document_has_no_code_and_no_style_of_its_own() -> None:
    assert "style=" not in INDEX
    assert not re.search(r"<script(?![^>]* src=)", INDEX)
    assert not re.search(r"\son\w+=", INDEX)


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in STATIC.rglob("*.js"):
        if path.parent.name == "vendor":
            continue
        text = path.read_text()
        assert not re.search(r"""(?:from|import\(|fetch\()\s*["'`]https?:""", text), path
        assert "innerHTML" not in text, path
        assert all(name.startswith(".") for name in re.findall(r'from "([^"]+)"', text)), path
