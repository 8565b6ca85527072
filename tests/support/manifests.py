"""What holds for the objects of the chart, whatever its values: each rule returns what breaks it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Manifest = dict[str, Any]
Labels = Mapping[str, str]

COMPONENT = "app.kubernetes.io/component"
WORKLOADS = ("Deployment", "StatefulSet", "Job")
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def kinds(objects: list[Manifest], *wanted: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] in wanted]


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def pods(objects: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """The workloads, each with the template of its pods."""
    for each in kinds(objects, *WORKLOADS):
        yield each, each["spec"]["template"]


def containers(objects: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    for workload, pod in pods(objects):
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            yield f"{title(workload)}, {container['name']}", container, pod["spec"]


def selects(selector: Labels, labels: Labels) -> bool:
    return selector.items() <= labels.items()


def by_component(objects: list[Manifest]) -> dict[str, Manifest]:
    """The templates of the pods, by component."""
    return {pod["metadata"]["labels"][COMPONENT]: pod for _, pod in pods(objects)}


def ports(pod: Manifest) -> set[int]:
    return {port["containerPort"] for container in pod["spec"]["containers"] for port in container.get("ports", ())}


def images_have_a_tag(objects: list[Manifest]) -> list[str]:
    return [
        f"{name}: {container['image']}"
        for name, container, _ in containers(objects)
        if not re.search(r":[^/]+$|@sha256:", container["image"]) or container["image"].endswith(":latest")
    ]


def containers_have_bounds(objects: list[Manifest]) -> list[str]:
    return [
        name
        for name, container, _ in containers(objects)
        if not {"cpu", "memory"} <= container.get("resources", {}).get("requests", {}).keys()
        or "memory" not in container["resources"].get("limits", {})
    ]


def containers_can_do_nothing_else(objects: list[Manifest]) -> list[str]:
    found = []
    for name, container, pod in containers(objects):
        own, common = container.get("securityContext", {}), pod.get("securityContext", {})
        held = {
            "read-only root": own.get("readOnlyRootFilesystem") is True,
            "no more privileges": own.get("allowPrivilegeEscalation") is False,
            "no capabilities": own.get("capabilities", {}).get("drop") == ["ALL"]
            and set(own["capabilities"].get("add", ())) <= {"IPC_LOCK"},
            "not root": common.get("runAsNonRoot") is True and common.get("runAsUser", 0) > 0,
            "seccomp": common.get("seccompProfile") == {"type": "RuntimeDefault"},
            "no token": pod.get("automountServiceAccountToken") is False,
            "no variables of Services": pod.get("enableServiceLinks") is False,
            "not the host's": not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
        }
        found += [f"{name}: {what}" for what, holds in held.items() if not holds]
    return found


def what_listens_is_probed(objects: list[Manifest]) -> list[str]:
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    return [
        f"{name}: {probe}"
        for name, container, _ in containers(objects)
        if container.get("ports")
        for probe in probes
        if probe not in container
    ]


def drains_take_one_pod_at_a_time(objects: list[Manifest]) -> list[str]:
    budgets = kinds(objects, "PodDisruptionBudget")
    return [
        title(workload)
        for workload, pod in pods(objects)
        if workload["kind"] != "Job"
        and not any(
            selects(budget["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"])
            and budget["spec"].get("maxUnavailable") == 1
            for budget in budgets
        )
    ]


def policies_name_ports_that_listen(objects: list[Manifest]) -> list[str]:
    found = []
    for policy in kinds(objects, "NetworkPolicy"):
        selected = _selected(objects, policy["spec"]["podSelector"]["matchLabels"])
        if not selected:
            found.append(f"{title(policy)}: selects no pod")
        for rule in policy["spec"].get("ingress", ()):
            listening = set.union(set(), *map(ports, selected))
            found += [
                f"{title(policy)}: {port['port']}" for port in rule.get("ports", ()) if port["port"] not in listening
            ]
            if not rule.get("from"):
                found.append(f"{title(policy)}: from anywhere")
        for rule in policy["spec"].get("egress", ()):
            for peer in rule.get("to", ()):
                called = _selected(objects, peer["podSelector"]["matchLabels"])
                listening = set.union(set(), *map(ports, called))
                given = [port["port"] for port in rule.get("ports", ())]
                found += [f"{title(policy)}: {port}" for port in given if port not in listening]
                if not called:
                    found.append(f"{title(policy)}: to no pod")
    return found


def _selected(objects: list[Manifest], selector: Labels) -> list[Manifest]:
    return [pod for _, pod in pods(objects) if selects(selector, pod["metadata"]["labels"])]


def every_pod_is_behind_the_default(objects: list[Manifest]) -> list[str]:
    """The policy that lets nothing in, and nothing out but questions to the DNS."""
    denying = [
        policy["spec"]["podSelector"]["matchLabels"]
        for policy in kinds(objects, "NetworkPolicy")
        if policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        and "ingress" not in policy["spec"]
        and all(
            {port["port"] for port in rule.get("ports", ({"port": 0},))} == {53} for rule in policy["spec"]["egress"]
        )
    ]
    return [
        title(workload)
        for workload, pod in pods(objects)
        if not any(selects(selector, pod["metadata"]["labels"]) for selector in denying)
    ]


def arrows(objects: list[Manifest], direction: str) -> set[tuple[str, str, tuple[int, ...] | None]]:
    """Who may connect to whom and to which ports (None: all), as the policies of one direction (`ingress`, `egress`) say."""
    found = set()
    for policy in kinds(objects, "NetworkPolicy"):
        own = policy["spec"]["podSelector"]["matchLabels"].get(COMPONENT)
        for rule in policy["spec"].get(direction, ()):
            for peer in rule.get("from" if direction == "ingress" else "to", ()):
                other = peer["podSelector"]["matchLabels"][COMPONENT]
                to = tuple(port["port"] for port in rule["ports"]) if "ports" in rule else None
                found.add((other, own, to) if direction == "ingress" else (own, other, to))
    return found


def both_ends_of_an_arrow_allow_it(objects: list[Manifest]) -> list[str]:
    differing = arrows(objects, "ingress") ^ arrows(objects, "egress")
    return [f"{start} to {end}: {to}" for start, end, to in differing]


def what_is_named_exists(objects: list[Manifest], given: frozenset[str] = frozenset()) -> list[str]:
    """The Secrets, ConfigMaps, claims and accounts to which pods refer: of the chart, made by its Job or by cert-manager, or `given`."""
    known = {(each["kind"], each["metadata"]["name"]) for each in objects}
    known |= {("Secret", name) for name in given} | {("PersistentVolumeClaim", name) for name in given}
    known |= {("Secret", each["spec"]["secretName"]) for each in kinds(objects, "Certificate")}
    known |= {("ConfigMap", "kube-root-ca.crt")}
    for _, container, _ in containers(objects):
        if container.get("command", [""])[0] == "make-kubernetes-secrets":
            told = {each["name"]: each["value"] for each in container["env"]}
            for component in told["COMPONENTS"].split():
                own = f"{told['PREFIX']}-{component.replace('_', '-')}"
                known |= {("Secret", f"{own}-credentials")}
                known |= {("Secret", f"{own}-tls")} if told["CERTIFICATES"] == "yes" else set()
    return [
        f"{title(workload)}: {kind} {name}"
        for workload, kind, name in _references(objects)
        if (kind, name) not in known
    ]


def _references(objects: list[Manifest]) -> Iterator[tuple[Manifest, str, str]]:
    for workload, pod in pods(objects):
        spec = pod["spec"]
        for volume in spec.get("volumes", ()):
            for source in (volume, *volume.get("projected", {}).get("sources", ())):
                if "secret" in source:
                    yield workload, "Secret", source["secret"].get("secretName") or source["secret"]["name"]
                if "configMap" in source:
                    yield workload, "ConfigMap", source["configMap"]["name"]
            if "persistentVolumeClaim" in volume:
                yield workload, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            for source in container.get("envFrom", ()):
                yield workload, "Secret", source["secretRef"]["name"]
        if "serviceAccountName" in spec:
            yield workload, "ServiceAccount", spec["serviceAccountName"]


def mounts_have_volumes(objects: list[Manifest]) -> list[str]:
    found = []
    for workload, pod in pods(objects):
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            named = {mount["name"] for mount in container.get("volumeMounts", ())}
            found += [f"{title(workload)}, {container['name']}: {name}" for name in named - volumes]
    return found


def services_reach_pods(objects: list[Manifest]) -> list[str]:
    found = []
    for service in kinds(objects, "Service"):
        selected = _selected(objects, service["spec"]["selector"])
        listening = set.union(set(), *map(ports, selected))
        found += [
            f"{title(service)}: {port['port']}" for port in service["spec"]["ports"] if port["port"] not in listening
        ]
    for workload, pod in pods(objects):
        selector = workload["spec"].get("selector", {}).get("matchLabels", {})
        if not selects(selector, pod["metadata"]["labels"]):
            found.append(f"{title(workload)}: does not select its own pods")
    return found


def names_are_valid_and_unique(objects: list[Manifest]) -> list[str]:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    twice = [f"{kind} {name}: twice" for kind, name in sorted(set(names)) if names.count((kind, name)) > 1]
    # a pod of a Job is called after it
    return twice + [f"{kind} {name}" for kind, name in names if not _DNS_NAME.fullmatch(name + "-00" * (kind == "Job"))]


RULES = (
    images_have_a_tag,
    containers_have_bounds,
    containers_can_do_nothing_else,
    what_listens_is_probed,
    drains_take_one_pod_at_a_time,
    policies_name_ports_that_listen,
    every_pod_is_behind_the_default,
    both_ends_of_an_arrow_allow_it,
    what_is_named_exists,
    mounts_have_volumes,
    services_reach_pods,
    names_are_valid_and_unique,
)
