"""Who may import whom, and that a user's environment loads nothing heavy."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ABSOLUTE = re.compile(r"^ *(?:from|import) (?:headrace_)?services\b.*", re.MULTILINE)
HEAVY = {"torch", "vllm", "transformers", "headrace_services"}
# What an environment has no use for: the servers, the buffer's client, the command line, and the configuration.
NOT_FOR_ENVIRONMENTS = {
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "redis",
    "typer",
    "rich",
    "pydantic",
    "omegaconf",
    "yaml",
}
ERRORS = {"headrace", "headrace.base", "headrace.base.errors"}
SDK = ERRORS | {
    "headrace.base.deferred",
    "headrace.env",
    "headrace.records",
    "headrace.records.codec",
    "headrace.env.environment",
    "headrace.env.episode",
    "headrace.env.source_build",
    "headrace.records.score",
    "headrace.records.trajectory",
}
SERVED = """
import asyncio, headrace
from headrace.env.server import serving

async def main():
    async with serving(headrace.Environment()):
        pass

asyncio.run(main())
"""


def modules_after(*codes: str) -> list[set[str]]:
    """Names of all modules that a fresh interpreter has loaded after each of these, one after the other."""
    report = "\nprint(__import__('json').dumps(sorted(__import__('sys').modules)))\n"
    code = "".join(code + report for code in codes)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def top_level(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_what_starts_and_watches_runs_loads_only_what_it_uses() -> None:
    """What it doesn't use would be a third of what it takes to start."""
    ours = ("headrace.replay", "headrace.cli", "headrace.net.service", "headrace.launch.pipeline")
    services = "headrace.cli.up, headrace.cli.status, headrace_services.replay.main, headrace_services.reward.main"
    *loaded, started = modules_after(*(f"import {module}" for module in (*ours, services)))
    for module, names in zip(ours, loaded, strict=True):
        assert not top_level(names) & HEAVY, module
    assert not top_level(started) & {"numpy", "jinja2", "pydantic_settings", "torch", "transformers", "vllm"}


def test_what_commands_draw_with_loads_no_torch() -> None:
    """`headrace up` draws a run's curves at its end, `headrace env try` a page of groups."""
    (loaded,) = modules_after("from headrace_services.trainer.telemetry import batch_samples, plots")
    assert not top_level(loaded) & {"torch", "transformers"}


def test_what_is_started_again_and_again_loads_next_to_nothing() -> None:
    modules = (
        "headrace.base.parent",
        "headrace_services.reward.code_worker",
        "headrace_services.reward.judge.template",
    )
    for module, loaded in zip(modules, modules_after(*(f"import {module}" for module in modules)), strict=True):
        assert not top_level(loaded) & {"asyncio", "numpy", "pydantic"}, module


def test_an_environment_loads_the_sdk_alone_and_no_service_or_client() -> None:
    errors, sdk, in_pytest, *served, checked = modules_after(
        "import headrace",
        "from headrace import Environment",
        "import headrace.pytest_plugin",
        SERVED,
        "import headrace.env.attachment",
        "import headrace.testing",
        "import headrace.cli.env_check",
    )
    assert {module for module in errors if module.startswith("headrace")} == ERRORS
    assert "numpy" not in errors
    assert {module for module in sdk if module.startswith("headrace")} <= SDK
    assert not top_level(sdk) & (HEAVY | NOT_FOR_ENVIRONMENTS | {"asyncio", "grpc"})
    # what pytest loads of us in every session
    assert {module for module in in_pytest if module.startswith("headrace")} <= SDK | {"headrace.pytest_plugin"}
    for loaded in served:
        assert "headrace.env.server" in loaded
        assert not top_level(loaded) & (HEAVY | NOT_FOR_ENVIRONMENTS)
        assert not {"headrace.cli", "headrace.config", "headrace.replay", "headrace.launch"} & loaded
    # checking one needs the base package
    assert not top_level(checked) & (HEAVY | {"fastapi", "uvicorn", "prometheus_client", "httpx"})


def test_services_import_their_own_modules_relatively() -> None:
    """So each import shows which folder it leads to, whatever name the package has where it is installed."""
    files = [*(ROOT / "services").rglob("*.py")]
    assert [(path.name, line) for path in files for line in ABSOLUTE.findall(path.read_text(encoding="utf-8"))] == []


# Reading what they wrote can run anything. torch's checkpoints pickle their metadata.
PICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch.distributed.checkpoint"}
PICKLING_WORDS = {name.rpartition(".")[2] for name in PICKLING}


def pickles(source: str) -> list[str]:
    """What a module does that pickles: imports, torch's collectives of objects, and files that torch loads without `weights_only`."""
    if not any(word in source for word in (*PICKLING_WORDS, "_object", "torch.load", "torch.save")):
        return []  # to parse all takes a second
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name in PICKLING]
            case ast.ImportFrom(module=str(module), names=names):
                origins = {module, *(f"{module}.{name.name}" for name in names)}
                found += sorted(origins & PICKLING) or [module for kind in PICKLING if module.startswith(f"{kind}.")]
            case ast.Call(func=ast.Attribute(attr=name)) if name.endswith(("_object", "_object_list")):
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save"), keywords=keywords):
                found += [] if any(keyword.arg == "weights_only" for keyword in keywords) else ["torch.load"]
    return found


def test_nothing_is_pickled() -> None:
    for bad in ("import pickle", "from torch.distributed import checkpoint", "dist.gather_object(1)", "torch.load(f)"):
        assert pickles(bad), bad
    modules = [path for folder in ("headrace", "services") for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 100
    assert {str(path): found for path in modules if (found := pickles(path.read_text()))} == {}
