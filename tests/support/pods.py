"""The pods of rendered objects, as containers of a Docker engine: each with its user, file system, limits, volumes, variables and probes.
What ends is started again. Nothing stands in for a scheduler, for network policies, or for a Service that balances."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.api_server import ApiServer, api_server
from tests.support.manifests import Manifest, kinds, selects

_GROUP = 1000  # fsGroup


def docker(*arguments: object, check: bool = True) -> str:
    done = subprocess.run(["docker", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"docker {arguments}: {done.stderr}"
    return done.stdout.strip()


def lacking(*images: str) -> str | None:
    """What is missing here to run the pods; None if nothing is."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        return "there is no Docker engine"
    absent = [
        image
        for image in images
        if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode
    ]
    return f"the Docker engine has no image {', '.join(absent)}" if absent else None


class Pods:
    """Containers are called after their pods; `release` is in all of their names."""

    def __init__(self, objects: list[Manifest], image: str, api: ApiServer, network: str, folder: Path) -> None:
        self._objects, self._image, self._api, self._network, self._folder = objects, image, api, network, folder
        self.containers: dict[str, Manifest] = {}
        self.volumes: set[str] = set()

    def run(self, workload: Manifest) -> int:
        """Run the workload's pod to its end. Return its exit code."""
        return int(docker("wait", self.start(workload)))

    def start(self, workload: Manifest, index: int | None = None) -> str:
        """Start a pod of the workload, after its init containers; of an Indexed Job, that with `index`."""
        name = workload["metadata"]["name"] + ("" if index is None else f"-{index}")
        pod = workload["spec"]["template"]
        given = {} if index is None else {"JOB_COMPLETION_INDEX": str(index)}
        docker("rm", "--force", "--volumes", name, check=False)
        for container in pod["spec"].get("initContainers", ()):
            docker("run", "--rm", *self._options(name, workload, container, given))
        (container,) = pod["spec"]["containers"]
        options = self._options(name, workload, container, given)
        docker("run", "--detach", "--name", name, "--hostname", name, *options)
        self.containers[name] = container
        return name

    def state(self, name: str) -> tuple[str, int]:
        status, code = docker("inspect", name, "--format", "{{.State.Status}} {{.State.ExitCode}}").split()
        return status, int(code)

    def passes(self, name: str, probe: str) -> bool:
        match self.containers[name][probe]:
            case {"exec": {"command": command}}:
                return subprocess.run(["docker", "exec", name, *command], capture_output=True).returncode == 0
            case {"httpGet": {"port": port, "path": path}}:
                url = f"https://{self._address(name)}:{port}{path}"
                try:
                    # as a kubelet, which trusts any certificate
                    with urllib.request.urlopen(url, timeout=5, context=ssl._create_unverified_context()) as answer:
                        return bool(answer.status == 200)
                except OSError:
                    return False
            case {"tcpSocket": {"port": port}}:
                try:
                    socket.create_connection((self._address(name), port), 5).close()
                except OSError:
                    return False
                return True
        raise AssertionError(f"{name}: an unknown kind of {probe}")

    def keep_until(self, finished: list[str], timeout_s: float) -> set[str]:
        """Wait until the pods `finished` have ended with 0, and start others again that end. Return those that became ready."""
        ready: set[str] = set()
        deadline = time.monotonic() + timeout_s
        while pending := [name for name in finished if self.state(name) != ("exited", 0)]:
            assert time.monotonic() < deadline, f"{pending} did not end: {docker('logs', '--tail', 20, pending[0])}"
            for name in self.containers.keys() - ready:
                status, code = self.state(name)
                if status == "exited":
                    assert name not in finished or code not in (1, 3), docker("logs", "--tail", 20, name)
                    if name not in finished or code:
                        docker("start", name)
                elif "readinessProbe" in self.containers[name] and self.passes(name, "readinessProbe"):
                    assert self.passes(name, "startupProbe"), name
                    assert self.passes(name, "livenessProbe"), name
                    ready.add(name)
            time.sleep(2)
        return ready

    def _address(self, name: str) -> str:
        return docker("inspect", name, "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")

    def _options(self, name: str, workload: Manifest, container: Manifest, given: Mapping[str, str]) -> list[str]:
        """The arguments of `docker run` for a container, with its image and command."""
        pod = workload["spec"]["template"]
        spec, labels = pod["spec"], pod["metadata"]["labels"]
        user, security = spec["securityContext"], container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        memory = container["resources"]["limits"]["memory"].replace("Gi", "g").replace("Mi", "m")
        found = ["--network", self._network, "--read-only", "--security-opt", "no-new-privileges", "--memory", memory]
        found += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(user["fsGroup"])]
        found += [f"--cap-drop={each}" for each in security["capabilities"]["drop"]]
        for service in kinds(self._objects, "Service"):
            if selects(service["spec"]["selector"], labels):
                found += ["--network-alias", service["metadata"]["name"]]
        if "subdomain" in spec:
            found += ["--network-alias", f"{name}.{spec['subdomain']}"]
        variables = {each["name"]: each["value"] for each in container.get("env", ())}
        for key, value in (variables | self._api.variables | dict(given)).items():
            found += ["--env", f"{key}={value}"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for claim in workload["spec"].get("volumeClaimTemplates", ()):
            claimed = claim["metadata"]["name"]
            volumes[claimed] = {"name": claimed, "persistentVolumeClaim": {"claimName": f"{claimed}-{name}"}}
        for mount in container["volumeMounts"]:
            found += self._mount(name, volumes[mount["name"]], mount)
        entry = [
            re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in container.get("command", ())
        ]
        words = [*entry[1:], *container.get("args", ())]
        return [*found, *(["--entrypoint", entry[0]] if entry else []), container["image"], *words]

    def _mount(self, pod: str, volume: Manifest, mount: Manifest) -> list[str]:
        match volume:
            case {"persistentVolumeClaim": {"claimName": name}}:
                only = ":ro" if mount.get("readOnly") else ""
                return ["--volume", f"{self._make_volume(name)}:{mount['mountPath']}{only}"]
            case {"emptyDir": {"medium": "Memory", "sizeLimit": size}} if mount["mountPath"] == "/dev/shm":
                return ["--shm-size", size.replace("Gi", "g")]
            case {"emptyDir": _}:
                own = self._make_volume(f"{pod}-{volume['name']}")
                return ["--volume", f"{own}:{mount['mountPath']}"]
        return ["--volume", f"{self._write_files(pod, volume)}:{mount['mountPath']}:ro"]

    def _make_volume(self, name: str) -> str:
        """Return a volume whose group may write, as fsGroup makes it."""
        own = f"{self._network}-{name}"
        if own not in self.volumes:
            self.volumes.add(own)
            change = f"chown 0:{_GROUP} /v && chmod 2777 /v"
            docker(
                "run", "--rm", "--user", "0", "--entrypoint", "sh", "--volume", f"{own}:/v", self._image, "-c", change
            )
        return own

    def _write_files(self, pod: str, volume: Manifest) -> Path:
        """Write what the volume shows of Secrets, ConfigMaps, the service account and the pod itself."""
        folder = self._folder / pod / str(volume["name"])
        for source in volume.get("projected", {}).get("sources", [volume]):
            match source:
                case {"secret": secret}:
                    files = self._api.files(secret.get("name") or secret["secretName"])
                    paths = {each["key"]: each["path"] for each in secret.get("items", ())}
                    self._write(folder, {paths.get(key, key): files[key] for key in paths or files})
                case {"configMap": {"name": "kube-root-ca.crt"}}:
                    self._write(folder, {"ca.crt": self._api.authority.cert_pem.bytes()})
                case {"configMap": {"name": name}}:
                    (found,) = (each for each in kinds(self._objects, "ConfigMap") if each["metadata"]["name"] == name)
                    self._write(folder, {key: text.encode() for key, text in found["data"].items()})
                case {"serviceAccountToken": _}:
                    self._write(folder, {"token": b"the-token\n"})
                case {"downwardAPI": _}:
                    self._write(folder, {"namespace": b"training"})
        return folder

    def _write(self, folder: Path, files: Mapping[str, bytes]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o444)  # the container's group need not be one of this machine


@contextmanager
def pods(objects: list[Manifest], image: str, folder: Path) -> Iterator[Pods]:
    """A network, and an API server on its gateway. All is removed at the end."""
    network = f"headrace-{folder.name.replace('_', '-')}"
    docker("network", "create", network)
    started: Pods | None = None
    try:
        gateway = docker("network", "inspect", network, "--format", "{{(index .IPAM.Config 0).Gateway}}")
        with api_server(gateway) as api:
            started = Pods(objects, image, api, network, folder)
            yield started
    finally:
        attached = docker("ps", "--all", "--quiet", "--filter", f"network={network}").split()
        docker("rm", "--force", "--volumes", *attached, check=False)
        docker("volume", "rm", "--force", *(started.volumes if started else ()), check=False)
        docker("network", "rm", network, check=False)
