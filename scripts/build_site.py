"""Build the documentation as a site: `python scripts/build_site.py OUTPUT [VERSION]`.

README.md is its first page, docs/README.md its contents, and docs/*.md are its pages. What the code says itself becomes pages too: the
Python API from docstrings, the commands from their help, the page's HTTP API from its OpenAPI description, and the gRPC contract. A dead
link, or a page that docs/README.md doesn't list, is an error.

VERSION is the name of this version among others, beside which the output lies (`list_versions.py`); by default the package's. `--check` in
the place of both finds the same, and writes no page, which takes half as long.
"""

from __future__ import annotations

import gc
import importlib.metadata
import re
import shutil
import sys
import tempfile
from pathlib import Path

import typer.cli
import typer.main
from sphinx.cmd.build import build_main

from headrace.cli.app import app as commands
from headrace.page.server import build_app

ROOT = Path(__file__).resolve().parent.parent
# Pages beside docs/, and what they are called in it; docs/ has a security.md.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "vulnerabilities.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}
# What pages link to: Sphinx copies such a file to the site.
LINKED = ("deploy", "examples", "proto", "services")
# What `site/` adds to the theme: the choice of a version.
ADDED = "_site"
CONFIGURATION = f"""
project = "Headrace"
html_title = "Headrace " + version
templates_path = html_static_path = [{ADDED!r}]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
html_context = {{"site_version": version}}
html_sidebars = {{
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["README.md"]
html_theme = "furo"
html_show_copyright = False
myst_heading_anchors = 4
autodoc_typehints = "description"
default_role = "code"
autodoc_member_order = "bysource"
"""


def main(output: Path | None, version: str) -> int:
    """Write the site of this version to `output`, None for nowhere. Returns Sphinx's exit code, which is not 0 if there was any warning."""
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        shutil.copytree(ROOT / "docs", docs)
        shutil.copytree(ROOT / "scripts" / "site", docs / ADDED)
        for name in LINKED:
            (Path(folder) / name).symlink_to(ROOT / name)
        contents = _contents(docs / "README.md")
        generated = {
            "python-api.md": _python_api(),
            "commands.md": _commands(),
            "http-api.md": _http_api(),
            "grpc-api.md": _grpc_api(),
            "conf.py": f"version = release = {version!r}\n{CONFIGURATION}",
            **{there: _seen_from_docs((ROOT / here).read_text()) for here, there in PAGES.items()},
        }
        generated["index.md"] += contents
        for name, text in generated.items():
            (docs / name).write_text(text)
        for page in docs.glob("*.md"):
            page.write_text(_adapt(page.read_text()))
        builder, there = ("html", output) if output else ("dummy", Path(folder) / "nothing")
        return build_main(["-b", builder, "-W", "--keep-going", "-q", str(docs), str(there)])


def _seen_from_docs(text: str) -> str:
    """A page that lies beside docs/, with its links as they are from docs/."""
    return re.sub(r"\]\((?!docs/|https?:|#)", "](../", text).replace("](docs/", "](")


def _adapt(text: str) -> str:
    """A page of docs/ in Sphinx's way: names of places, and links to pages that lie elsewhere."""
    text = re.sub(r'<a id="(.+?)"></a>', r"(\1)=", text).replace("](README.md", "](index.md")
    for here, there in PAGES.items():
        text = text.replace(f"](../{here}", f"]({there}")
    return text


def _contents(page: Path) -> str:
    """The sections of docs/README.md as Sphinx's tables of contents, with the pages that are generated."""
    generated = {
        "Reference": ["python-api", "commands", "http-api", "grpc-api"],
        "Project": ["contributing", "conduct", "changelog", "vulnerabilities"],
    }
    contents = ""
    _, *parts = re.split(r"^## (.+)\n", page.read_text() + "\n## Project\n", flags=re.MULTILINE)
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        pages = [*re.findall(r"\]\((.+?)\.md\)", text), *generated.get(title, ())]
        contents += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])
    return contents


def _python_api() -> str:
    modules = ("headrace", "headrace.testing")
    return "# Python\n" + "".join(
        f"\n## `{module}`\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n   :imported-members:\n```\n"
        for module in modules
    )


def _commands() -> str:
    """The help of all commands, in the format of Typer's own generator, one level deeper."""
    group = typer.main.get_command(commands)
    context = typer.Context(group, info_name="headrace")
    text = typer.cli.get_docs_for_click(obj=group, ctx=context, name="headrace")
    return "# Commands" + text.removeprefix("# `headrace`")


def _http_api() -> str:
    with tempfile.TemporaryDirectory() as folder:
        described = build_app(Path(folder)).openapi()
    text = (
        "# HTTP\n\nThe page of runs answers programs in JSON ([who may ask](security.md)). Each service describes its own paths at "
        "`/openapi.json`.\n"
    )
    for path, methods in described["paths"].items():
        for method, call in methods.items():
            text += f"\n## `{method.upper()} {path}`\n\n{call.get('description') or call['summary']}\n\n"
            for each in call.get("parameters", ()):
                needed = "" if each.get("required") else ", optional"
                text += f"- `{each['name']}` ({each['in']}{needed}): {each.get('description', '')}".rstrip(": ") + "\n"
    return text


def _grpc_api() -> str:
    text = (
        "# gRPC\n\nWhat a service in another language speaks: [environments](environments.md), [agents](agents.md).\n"
    )
    for path in sorted((ROOT / "proto" / "headrace" / "v1").glob("*.proto")):
        text += f"\n## `{path.name}`\n\n```{{literalinclude}} ../{path.relative_to(ROOT)}\n:language: proto\n```\n"
    return text


if __name__ == "__main__":
    gc.disable()  # what Sphinx makes is needed to the end; to look through it again and again takes a seventh of the time
    given, *name = sys.argv[1:]
    sys.exit(main(None if given == "--check" else Path(given), *(name or [importlib.metadata.version("headrace")])))
