"""Helm and the schemas of Kubernetes' objects, and the chart of the project as Helm renders it."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

from tests.support.own_python import pip

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "headrace"
RELEASE, NAMESPACE = "demo", "training"
# the oldest that the chart takes, to the newest that there are schemas of
VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))

Manifest = dict[str, Any]


def merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm merges them."""
    both = dict(defaults)
    for key, value in values.items():
        both[key] = merged(both.get(key) or {}, value) if isinstance(value, dict) else value
    return both


class Helm:
    """The `helm` command, in `folder`. Skips the test if the registry can't be reached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packages = packages = folder / "packages"
        requirements = ROOT / "requirements" / "helm.txt"
        pip(Path(sys.executable), "install", "--no-deps", "--target", str(packages), "--requirement", str(requirements))
        with tarfile.open(next(packages.glob("aws_cdk/*/_jsii/*.tgz"))) as archive:
            archive.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(folder / "package" / "lib" / "layer.zip") as layer:
            self._helm = Path(layer.extract("helm/helm", folder))
        self._helm.chmod(0o755)

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environ = {f"HELM_{kind}_HOME": str(self._folder / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        return subprocess.run([self._helm, *arguments], capture_output=True, text=True, env=environ)

    def render(self, values: Mapping[str, Any], release: str = RELEASE, *options: str) -> list[Manifest]:
        """Return the objects of the chart with these values."""
        file = self._folder / "values.yaml"
        file.write_text(json.dumps(values))
        done = self.run("template", release, CHART, "--namespace", NAMESPACE, "--values", file, *options)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]

    def lint(self, values: Mapping[str, Any]) -> str:
        """Return what `helm lint --strict` finds; nothing if all is well."""
        file = self._folder / "values.yaml"
        file.write_text(json.dumps(values))
        done = self.run("lint", CHART, "--strict", "--quiet", "--values", file)
        return done.stdout + done.stderr if done.returncode else ""

    def violations(self, manifest: Manifest, version: str) -> list[str]:
        """Return what in the object the schemas of a Kubernetes version don't know or allow."""
        kind, group = manifest["kind"].lower(), manifest["apiVersion"]
        name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", group)  # rbac.authorization.k8s.io/v1 -> rbac-v1
        validator = self._validator(version, f"{kind}-{name}")
        return [
            f"{kind} {manifest['metadata']['name']}, {version}: {each.message}"
            for each in validator.iter_errors(manifest)
        ]

    @functools.cache  # noqa: B019 - there is one Helm, which lives as long as the tests
    def _validator(self, version: str, schema: str) -> jsonschema_rs.Validator:
        (folder,) = self._packages.glob(f"kubernetes_validate/kubernetes-json-schema/v{version}.*-local-strict")
        of_all = jsonschema_rs.Registry(
            [("file:///_definitions.json", json.loads((folder / "_definitions.json").read_text()))]
        )
        return jsonschema_rs.validator_for(json.loads((folder / f"{schema}.json").read_text()), registry=of_all)
