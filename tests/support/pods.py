"""The pods of rendered objects, run by `podman kube play`. What Podman 4.3 lacks is here: controllers, names of Services, Secrets, probes,
fsGroup, volumes in memory. Nothing stands in for a scheduler, for network policies, or for a Service that balances."""

from __future__ import annotations

import copy
import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.api_server import ApiServer, api_server
from tests.support.manifests import Manifest, kinds, selects

_INSTANCE = "app.kubernetes.io/instance"
# of a container: Podman would ask with systemd and curl, and give the ports to this machine
_UNWANTED = ("startupProbe", "livenessProbe", "readinessProbe", "ports")
_MUST_BE_MENDED = (1, 3)  # by which the chart's Job fails


def podman(*arguments: object, check: bool = True, given: str = "") -> str:
    done = subprocess.run(["podman", *map(str, arguments)], input=given, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"podman {arguments}: {done.stderr}"
    return done.stdout.strip()


def lacking(images: Mapping[str, str]) -> str | None:
    """What is missing here to run pods of these images, each with the command that gets it; None if nothing is."""
    if shutil.which("podman") is None:
        return "podman is not installed: apt-get install podman crun netavark aardvark-dns catatonit"
    if os.geteuid():
        return "podman's networks reach a server of this machine only as root: run as root"
    for image, remedy in images.items():
        if subprocess.run(["podman", "image", "exists", image]).returncode:
            return f"podman has no image {image}: {remedy}"
        done = subprocess.run(["podman", "run", "--rm", "--entrypoint", "true", image], capture_output=True, text=True)
        if done.returncode:
            return f"podman can't run {image} here: {done.stderr}"
    return None


class Pods:
    """`started` are the pods that must be there, by name, with their workload and their index in it; `ready` are those that ever were."""

    def __init__(self, objects: list[Manifest], api: ApiServer, network: str, folder: Path) -> None:
        self._objects, self._api, self._network, self._folder = objects, api, network, folder
        self.started: dict[str, tuple[Manifest, int | None]] = {}
        self.ready: set[str] = set()

    def run(self, job: Manifest) -> int:
        """Run the pod of the Job to its end. Return its exit code."""
        name = self.start(job)
        code = int(podman("wait", self.container(name)))
        del self.started[name]
        return code

    def start(self, workload: Manifest, index: int | None = None, name: str | None = None) -> str:
        """Start a pod of the workload in place of the one of its name, after its init containers; of an Indexed Job, that with `index`."""
        name = name or workload["metadata"]["name"] + ("" if index is None else f"-{index}")
        labels = workload["spec"]["template"]["metadata"]["labels"]
        spec = self._spec(name, workload, {} if index is None else {"JOB_COMPLETION_INDEX": str(index)})
        # removed with the pod and their volumes; by default they are removed when they end, and their volumes stay
        kept = {"io.podman.annotations.init.container.type": "always"}
        metadata = {"name": name, "labels": labels, "annotations": kept}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        services = kinds(self._objects, "Service")
        names = [each["metadata"]["name"] for each in services if selects(each["spec"]["selector"], labels)]
        names += [f"{name}.{spec['subdomain']}"] if "subdomain" in spec else []
        network = ":".join([self._network, ",".join(f"alias={each}" for each in names)]).rstrip(":")
        manifests = [*kinds(self._objects, "ConfigMap"), pod]
        podman("pod", "rm", "--force", "--ignore", name)
        podman("kube", "play", "--network", network, "-", given="\n---\n".join(map(json.dumps, manifests)))
        self.started[name] = (workload, index)
        return name

    def container(self, name: str) -> str:
        """Podman's name of the pod's container, which has but one besides those of its start."""
        return f"{name}-{self._manifest(name)['name']}"

    def state(self, name: str) -> tuple[str, int]:
        status, code = self._inspect(name, ".State.Status}} {{.State.ExitCode").split()
        return status, int(code)

    def logs(self, name: str) -> str:
        command = ["podman", "logs", "--tail", "30", self.container(name)]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout

    def passes(self, name: str, probe: str) -> bool:
        match self._manifest(name)[probe]:
            case {"exec": {"command": command}}:
                done = subprocess.run(["podman", "exec", self.container(name), *command], capture_output=True)
                return done.returncode == 0
            case {"httpGet": {"port": port, "path": path}}:
                address = self._inspect(name, "range .NetworkSettings.Networks}}{{.IPAddress}}{{end")
                trusting = ssl._create_unverified_context()  # as a kubelet, which trusts any certificate
                url = f"https://{address}:{port}{path}"
                try:
                    with urllib.request.urlopen(url, timeout=5, context=trusting) as answer:
                        return bool(answer.status == 200)
                except OSError:
                    return False
        raise AssertionError(f"{name}: an unknown kind of {probe}")

    def keep_until(self, happened: Callable[[], bool], timeout_s: float) -> None:
        """Wait until it has happened. Meanwhile a container that ends is started again, and a Job's pod that fails is replaced."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline, "\n".join(f"{name}: {self.logs(name)}" for name in self.started)
            for name, (workload, index) in list(self.started.items()):
                status, code = self.state(name)
                if status == "exited" and workload["kind"] != "Job":
                    podman("start", self.container(name))
                elif status == "exited" and code:
                    assert code not in _MUST_BE_MENDED, self.logs(name)
                    self.start(workload, index)
                elif status == "running" and name not in self.ready and self.passes(name, "readinessProbe"):
                    failing = [each for each in ("startupProbe", "livenessProbe") if not self.passes(name, each)]
                    # a trainer may end meanwhile
                    assert not failing or self.state(name)[0] == "exited", (name, failing)
                    self.ready.add(name)
            time.sleep(2)

    def _inspect(self, name: str, what: str) -> str:
        return podman("inspect", self.container(name), "--format", f"{{{{{what}}}}}")

    def _manifest(self, name: str) -> Manifest:
        workload, _ = self.started[name]
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        return dict(container)

    def _spec(self, name: str, workload: Manifest, given: Mapping[str, str]) -> Manifest:
        spec: Manifest = copy.deepcopy(workload["spec"]["template"]["spec"])
        spec["restartPolicy"] = "Never"  # Podman would start the init containers again too, even those that ended well
        spec["securityContext"]["supplementalGroups"] = [spec["securityContext"]["fsGroup"]]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            for unwanted in _UNWANTED:
                container.pop(unwanted, None)
            variables = {**self._api.variables, **given}
            container.setdefault("env", []).extend({"name": key, "value": value} for key, value in variables.items())
        volumes = spec.setdefault("volumes", [])
        for volume in volumes:
            if sources := volume.pop("projected", {}).get("sources"):
                volume["hostPath"] = {"path": str(self._write_files(self._folder / name / volume["name"], sources))}
        for claim in workload["spec"].get("volumeClaimTemplates", ()):
            own = claim["metadata"]["name"]
            volumes.append({"name": own, "persistentVolumeClaim": {"claimName": f"{own}-{name}"}})
        return spec

    def _write_files(self, folder: Path, sources: list[Manifest]) -> Path:
        """Write what a volume shows of Secrets or of the service account."""
        files: dict[str, bytes] = {}
        for source in sources:
            match source:
                case {"secret": secret}:
                    found = self._api.files(secret["name"])
                    paths = {each["key"]: each["path"] for each in secret.get("items", ())}
                    files |= {paths.get(key, key): found[key] for key in paths or found}
                case {"serviceAccountToken": _}:
                    self._api.write_account(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o444)  # the container's group need not be one of this machine
        return folder


@contextmanager
def pods(objects: list[Manifest], release: str, folder: Path) -> Iterator[Pods]:
    """A network, and an API server on its gateway. All is removed at the end, and before what was left by a test that was killed."""
    _remove(release)
    podman("network", "create", release)
    try:
        # the gateway is there while there is a pod
        holder = f"{release}-network"
        podman("pod", "create", "--name", holder, "--network", release, "--label", f"{_INSTANCE}={release}")
        podman("pod", "start", holder)
        gateway = podman("network", "inspect", release, "--format", "{{(index .Subnets 0).Gateway}}")
        with api_server(gateway) as api:
            yield Pods(objects, api, release, folder)
    finally:
        _remove(release)


def _remove(release: str) -> None:
    found = podman("pod", "ls", "--quiet", "--filter", f"label={_INSTANCE}={release}").split()
    podman("pod", "rm", "--force", "--time", 0, *found, check=False)
    podman("network", "rm", "--force", release, check=False)
    volumes = podman("volume", "ls", "--quiet", "--filter", f"name={release}").split()
    podman("volume", "rm", "--force", *volumes, check=False)
