"""The chart deploy/helm/headrace, rendered by Helm: its objects are Kubernetes', keep the rules of tests/support/manifests, and start each
service as the compose file does. (That a cluster runs them, a cluster must show.)"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from headrace.base.errors import MissingPackage
from headrace.config import load
from headrace.launch import chart_values as module
from headrace.launch import exposure
from headrace.launch.chart_values import Cluster, chart_values
from headrace.net.service import EXIT_ALARM, EXIT_USER_ERROR, SAVE_DEADLINE_S
from tests.support import manifests
from tests.support.helm import CHART, NAMESPACE, RELEASE, ROOT, VERSIONS, Helm, merged
from tests.support.manifests import COMPONENT, Manifest, by_component, kinds, ports, title

Change = Callable[[list[Manifest]], None]

RESOURCES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
MINE = [
    {"name": "exact_two", "image": "registry.example/exact:1", "port": 50400, "resources": RESOURCES},
    {"name": "mine", "image": "registry.example/mine:2", "attached": True, "resources": RESOURCES},
]
GIVEN = frozenset({"tokens", "bucket", "reader", "keys", "ca", "my-runs", "shared-models"}) | {
    f"my-{component}-{kind}"
    for component in ("redis", "replay", "reward", "rollout", "trainer", "page")
    for kind in ("tls", "credentials")
}
# by name: an example, the GPUs of a node, and what else is in the values
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "demo": ("arithmetic_tiny", 0, {}),
    "one node": ("gpu_8b_8gpus", 8, {}),
    "several nodes": ("gpu_32b_16gpus", 8, {"trainer": {"rdma": {"rdma/hca": 8}, "nodeSelector": {"gpu": "h100"}}}),
    "external redis": ("arithmetic_tiny", 0, {"redis": {"url": "rediss://redis.example:6379/0", "caSecret": "ca"}}),
    "cert-manager": ("arithmetic_tiny", 0, {"secrets": {"source": "cert-manager", "issuer": {"name": "ca"}}}),
    "agents": ("repair_game", 0, {}),
    "environments": ("arithmetic_tiny", 0, {"environments": MINE}),
    "agents and environments": ("repair_game", 0, {"environments": MINE, "agents": {"replicas": 2}}),
    "existing secrets": ("arithmetic_tiny", 0, {"secrets": {"source": "existing", "prefix": "my"}}),
    "keda": ("arithmetic_tiny", 0, {"autoscaling": {"by": "keda", "prometheus": {"url": "http://prometheus:9090"}}}),
    "hpa": ("gpu_8b_8gpus", 8, {"autoscaling": {"by": "hpa", "minReplicas": 2, "maxReplicas": 8}}),
    "no page": ("arithmetic_tiny", 0, {"page": {"enabled": False}}),
    "queue": ("gpu_8b_8gpus", 8, {"kueue": {"queue": "team", "topology": "cloud.example/rack"}}),
    "given": (
        "arithmetic_tiny",
        0,
        {
            "secrets": {"variables": "tokens", "store": "bucket", "pull": "reader"},
            "reward": {"keys": "keys"},
            "storage": {"runs": {"existingClaim": "my-runs"}, "models": {"existingClaim": "shared-models"}},
            "image": {"pullSecrets": ["tokens"]},
        },
    ),
}

BY_DAY = ("demo", "several nodes", "cert-manager", "agents and environments", "hpa")
ALL_CASES = [pytest.param(case, marks=[] if case in BY_DAY else pytest.mark.nightly) for case in CASES]
ALL_VERSIONS = [
    pytest.param(version, marks=[] if version in ("1.30", "1.33", VERSIONS[-1]) else pytest.mark.nightly)
    for version in VERSIONS
]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tmp_path_factory.mktemp("helm"))


@functools.cache
def of_example(name: str, gpus: int) -> dict[str, Any]:
    # to plan the memory makes each model, which takes seconds: the unit tests do
    with mock.patch.object(module, "load_entry_point", side_effect=MissingPackage("torch is left out")):
        return chart_values(load(ROOT / "examples" / f"{name}.yaml"), Cluster(gpus))[0]


def values_of(case: str) -> dict[str, Any]:
    name, gpus, more = CASES[case]
    return merged(of_example(name, gpus), more)


@pytest.fixture(scope="module")
def rendered(helm: Helm) -> Callable[[str], list[Manifest]]:
    """The objects of a case. Each test has its own copy."""
    once = functools.cache(lambda case: helm.render(values_of(case)))
    return lambda case: copy.deepcopy(once(case))


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_chart_is_free_of_lint(helm: Helm, case: str) -> None:
    assert helm.lint(values_of(case)) == ""


@pytest.mark.parametrize("version", ALL_VERSIONS)
@pytest.mark.parametrize("case", ALL_CASES)
def test_every_object_is_one_of_kubernetes(
    helm: Helm, rendered: Callable[[str], list[Manifest]], case: str, version: str
) -> None:
    foreign = ("cert-manager.io/", "keda.sh/")
    objects = [each for each in rendered(case) if not each["apiVersion"].startswith(foreign)]
    assert len(objects) > 20
    assert [problem for each in objects for problem in helm.violations(each, version)] == []


def test_an_unknown_field_is_not_kubernetes(helm: Helm, rendered: Callable[[str], list[Manifest]]) -> None:
    deployment = kinds(rendered("demo"), "Deployment")[0]
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    assert helm.violations(deployment, VERSIONS[0])


@pytest.mark.parametrize("rule", manifests.RULES)
@pytest.mark.parametrize("case", ALL_CASES)
def test_the_objects_keep_the_rules(
    rendered: Callable[[str], list[Manifest]], case: str, rule: Callable[..., list[str]]
) -> None:
    given = (GIVEN,) if rule is manifests.what_is_named_exists else ()
    assert rule(rendered(case), *given) == []


def test_replicas_are_scaled_by_what_the_run_wants(rendered: Callable[[str], list[Manifest]]) -> None:
    """One replica for each that is wanted, and no other number of the chart's."""
    for case, kind in (("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")):
        objects = rendered(case)
        (scaler,) = kinds(objects, kind)
        (rollout,) = (
            each
            for each in kinds(objects, "Deployment")
            if each["metadata"]["name"] == scaler["spec"]["scaleTargetRef"]["name"]
        )
        assert rollout["metadata"]["labels"][COMPONENT] == "rollout"
        assert "replicas" not in rollout["spec"]
    (keda,) = kinds(rendered("keda"), "ScaledObject")
    (trigger,) = keda["spec"]["triggers"]
    assert (trigger["type"], trigger["metricType"], trigger["metadata"]["threshold"]) == (
        "prometheus",
        "AverageValue",
        "1",
    )
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    (gauge,) = re.findall(r"(headrace_\w+)\{", trigger["metadata"]["query"])
    (hpa,) = kinds(rendered("hpa"), "HorizontalPodAutoscaler")
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == gauge == "headrace_replay_replicas_wanted"
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]) == (2, 8)
    assert not kinds(rendered("demo"), "ScaledObject")
    assert not kinds(rendered("demo"), "HorizontalPodAutoscaler")


@pytest.mark.parametrize("given", [{"by": "keda"}, {"by": "hpa", "minReplicas": 0}, {"by": "vpa"}])
def test_an_autoscaler_that_could_not_work_is_refused(helm: Helm, given: dict[str, Any]) -> None:
    assert "autoscaling" in helm.lint(merged(of_example("arithmetic_tiny", 0), {"autoscaling": given}))


def test_an_autoscaler_whose_bounds_cross_is_refused(helm: Helm) -> None:
    given = {"by": "hpa", "minReplicas": 5, "maxReplicas": 4}
    with pytest.raises(
        AssertionError, match="maxReplicas 4 is less than"
    ):  # `helm lint` lets pass what a template refuses
        helm.render(merged(of_example("arithmetic_tiny", 0), {"autoscaling": given}))


# -- each rule is broken once


def pod(objects: list[Manifest], component: str) -> Manifest:
    return by_component(objects)[component]["spec"]


def first(objects: list[Manifest], component: str) -> Manifest:
    container: Manifest = pod(objects, component)["containers"][0]
    return container


def without(kind: str, name: str) -> Change:
    def take_out(objects: list[Manifest]) -> None:
        objects.remove(next(each for each in kinds(objects, kind) if each["metadata"]["name"] == f"{RELEASE}-{name}"))

    return take_out


def named(objects: list[Manifest], kind: str, name: str) -> Manifest:
    return next(each for each in kinds(objects, kind) if each["metadata"]["name"] == f"{RELEASE}-{name}")


def other_port(objects: list[Manifest]) -> None:
    named(objects, "NetworkPolicy", "reward-from-replay")["spec"]["ingress"][0]["ports"][0]["port"] = 1


BROKEN: dict[str, tuple[Callable[..., list[str]], Change]] = {
    "latest": (manifests.images_have_a_tag, lambda all_: first(all_, "reward").update(image="headrace:latest")),
    "no tag": (manifests.images_have_a_tag, lambda all_: first(all_, "reward").update(image="registry:5000/headrace")),
    "no limit": (manifests.containers_have_bounds, lambda all_: first(all_, "page")["resources"].pop("limits")),
    "root": (
        manifests.containers_can_do_nothing_else,
        lambda all_: pod(all_, "page")["securityContext"].update(runAsUser=0),
    ),
    "writable": (
        manifests.containers_can_do_nothing_else,
        lambda all_: first(all_, "page")["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    "token": (
        manifests.containers_can_do_nothing_else,
        lambda all_: pod(all_, "trainer").pop("automountServiceAccountToken"),
    ),
    "the host's": (manifests.containers_can_do_nothing_else, lambda all_: pod(all_, "trainer").update(hostIPC=True)),
    "no probe": (manifests.what_listens_is_probed, lambda all_: first(all_, "trainer").pop("livenessProbe")),
    "no budget": (manifests.drains_take_one_pod_at_a_time, without("PodDisruptionBudget", "rollout")),
    "other port": (manifests.policies_name_ports_that_listen, other_port),
    "open": (
        manifests.policies_name_ports_that_listen,
        lambda all_: named(all_, "NetworkPolicy", "reward-from-replay")["spec"]["ingress"][0].pop("from"),
    ),
    "no default": (manifests.every_pod_is_behind_the_default, without("NetworkPolicy", "default")),
    "one end": (manifests.both_ends_of_an_arrow_allow_it, without("NetworkPolicy", "reward-from-replay")),
    "no secrets": (manifests.what_is_named_exists, without("Job", "secrets")),
    "no configuration": (manifests.what_is_named_exists, without("ConfigMap", "config")),
    "no claim": (manifests.what_is_named_exists, without("PersistentVolumeClaim", "runs")),
    "no volume": (manifests.mounts_have_volumes, lambda all_: pod(all_, "page")["volumes"].pop()),
    "other target": (
        manifests.services_reach_pods,
        lambda all_: named(all_, "Service", "reward")["spec"]["ports"][0].update(port=1),
    ),
    "other label": (
        manifests.services_reach_pods,
        lambda all_: by_component(all_)["reward"]["metadata"]["labels"].update({COMPONENT: "rewards"}),
    ),
    "long name": (
        manifests.names_are_valid_and_unique,
        lambda all_: named(all_, "Service", "reward")["metadata"].update(name="r" * 64),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_rule_tells_what_breaks_it(rendered: Callable[[str], list[Manifest]], what: str) -> None:
    rule, breaking = BROKEN[what]
    objects = rendered("demo")
    breaking(objects)
    assert rule(objects)


def test_every_rule_is_broken_once() -> None:
    assert {rule for rule, _ in BROKEN.values()} == set(manifests.RULES)


# -- who may call whom

ARROWS = {
    ("replay", "redis"),
    ("replay", "reward"),
    ("rollout", "redis"),
    ("trainer", "redis"),
    ("trainer", "rollout"),
    ("rollout", "trainer"),
}
EPISODES = {
    ("agents", "redis"),
    ("agents", "reward"),
    ("agents", "rollout"),
    ("agents", "agents"),
    ("reward", "agents"),
}
CALLED = {("reward", "environment-exact-two"), ("environment-mine", "reward")}
OF_CASES = {
    "demo": ARROWS,
    "one node": ARROWS,
    "several nodes": ARROWS | {("trainer", "trainer")},
    "external redis": {arrow for arrow in ARROWS if "redis" not in arrow},
    "given": ARROWS | {("rollout", "rollout")},
    "agents": ARROWS | EPISODES,
    "environments": ARROWS | CALLED,
    "agents and environments": ARROWS
    | EPISODES
    | CALLED
    | {("environment-exact-two", "agents"), ("environment-mine", "agents")},
}


@pytest.mark.parametrize("case", OF_CASES)
def test_the_network_lets_through_the_arrows_of_the_architecture(
    rendered: Callable[[str], list[Manifest]], case: str
) -> None:
    arrows = manifests.arrows(rendered(case), "egress")
    assert {(start, end) for start, end, _ in arrows} == OF_CASES[case]
    # NCCL's and gloo's ports, and the weight channel's, are the system's choice
    anywhere = {(start, end) for start, end, to in arrows if to is None}
    assert anywhere == OF_CASES[case] & {("trainer", "rollout"), ("rollout", "trainer"), ("trainer", "trainer")}


def test_a_service_that_refuses_to_call_unprotected_may_call(rendered: Callable[[str], list[Manifest]]) -> None:
    """Each variable that names a Service of the run is for a service which has an arrow to it."""
    objects = rendered("agents and environments")
    services = {each["metadata"]["name"] for each in kinds(objects, "Service")}
    arrows = {(start, end) for start, end, _ in manifests.arrows(objects, "egress")}
    callers = {
        "HEADRACE_REPLAY__REDIS_URL": ("replay", "rollout", "trainer", "agents"),
        "HEADRACE_REWARD__ADDRESS": ("replay", "agents"),
        "HEADRACE_ENV__EXACT_TWO__TARGET": ("reward",),
        "HEADRACE_ROLLOUT__ADVERTISE_HOST": ("agents",),
        "HEADRACE_AGENTS__ADVERTISED_URL": ("reward",),
    }
    for variable in first(objects, "replay")["env"]:
        called = [name for name in services if name in str(variable.get("value")).replace("/", ":").split(":")]
        for name in called:
            component = named(objects, "Service", name.removeprefix(f"{RELEASE}-"))["spec"]["selector"][COMPONENT]
            assert {(caller, component) for caller in callers[variable["name"]]} <= arrows, variable


# -- each service starts as in the compose file

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())["services"]
OURS = ("replay", "reward", "rollout", "agents", "trainer", "page")


@pytest.mark.parametrize("component", OURS)
def test_a_service_starts_with_a_configuration_that_it_takes(
    rendered: Callable[[str], list[Manifest]], tmp_path: Path, component: str
) -> None:
    objects = rendered("agents")
    container = first(objects, component)
    file = tmp_path / "run.yaml"
    file.write_text(named(objects, "ConfigMap", "config")["data"]["run.yaml"])
    variables = {each["name"]: each["value"] for each in container["env"]}
    config = load(file, (), {name: value for name, value in variables.items() if name.startswith("HEADRACE_")})
    exposure.check(config, component)
    assert config.run.id == RELEASE
    assert str(config.run_folder) == f"/data/runs/{RELEASE}"
    assert container["args"] == [component, "--config", "/etc/headrace/run.yaml"]
    in_compose = COMPOSE[component]["environment"]
    assert {key for key in in_compose if key.startswith("HEADRACE_")} - variables.keys() == {
        "HEADRACE_WEIGHT_CHANNEL__HOST",  # replicas reach the trainer's pod by its address
        "HEADRACE_TELEMETRY__ENABLED",
    }
    assert {key: value for key, value in variables.items() if key.endswith("PORT")} == {
        key: value for key, value in in_compose.items() if key.startswith("HEADRACE_") and key.endswith("PORT")
    }


@pytest.mark.parametrize("component", OURS)
def test_a_probe_asks_what_the_health_check_asks(rendered: Callable[[str], list[Manifest]], component: str) -> None:
    container = first(rendered("agents"), component)
    _, program, port = COMPOSE[component]["healthcheck"]["test"]
    command = container["readinessProbe"]["exec"]["command"]
    assert " ".join(command).endswith(f"{program} {port}")
    assert int(port) in ports(by_component(rendered("agents"))[component])


def test_the_redis_of_the_chart_is_that_of_the_compose_file(rendered: Callable[[str], list[Manifest]]) -> None:
    container = first(rendered("demo"), "redis")
    assert container["image"] == COMPOSE["redis"]["image"]
    assert [*container["command"], *container["args"]] == [str(each) for each in COMPOSE["redis"]["command"]]


def test_each_pod_has_its_own_secrets_alone(rendered: Callable[[str], list[Manifest]]) -> None:
    for case in ("demo", "agents and environments"):
        for component, template in by_component(rendered(case)).items():
            if component != "secrets":
                sources = [volume.get("projected", {}).get("sources", ()) for volume in template["spec"]["volumes"]]
                names = {source["secret"]["name"] for each in sources for source in each}
                assert names == {f"{RELEASE}-{component}-tls", f"{RELEASE}-{component}-credentials"}


def test_credentials_that_write_to_the_store_are_the_trainers_alone(rendered: Callable[[str], list[Manifest]]) -> None:
    sources = {
        component: [source["secretRef"]["name"] for source in template["spec"]["containers"][0].get("envFrom", ())]
        for component, template in by_component(rendered("given")).items()
    }
    assert {component: names for component, names in sources.items() if names} == {
        "rollout": ["tokens", "reader"],
        "trainer": ["tokens", "bucket"],
    }


def test_only_the_job_of_the_secrets_has_a_token_of_the_cluster(rendered: Callable[[str], list[Manifest]]) -> None:
    objects = rendered("demo")
    with_token = {
        component
        for component, template in by_component(objects).items()
        for volume in template["spec"]["volumes"]
        if any("serviceAccountToken" in source for source in volume.get("projected", {}).get("sources", ()))
    }
    assert with_token == {"secrets"}
    (role,) = kinds(objects, "Role")
    assert {tuple(rule["resources"]) for rule in role["rules"]} == {("secrets",)}
    assert all(rule["verbs"] == ["create"] or rule["resourceNames"] for rule in role["rules"])


# -- GPUs and several nodes


def test_a_replica_gets_its_gpus_and_the_trainer_those_of_a_node(rendered: Callable[[str], list[Manifest]]) -> None:
    objects = rendered("several nodes")
    assert first(objects, "rollout")["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert first(objects, "trainer")["resources"]["limits"]["nvidia.com/gpu"] == 6
    assert first(objects, "trainer")["resources"]["limits"]["rdma/hca"] == 8
    assert first(objects, "trainer")["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert pod(objects, "trainer")["nodeSelector"] == {"gpu": "h100"}
    assert named(objects, "Deployment", "rollout")["spec"]["replicas"] == 2


def trainer_job(objects: list[Manifest]) -> Manifest:
    (job,) = (each for each in kinds(objects, "Job") if each["metadata"]["labels"][COMPONENT] == "trainer")
    return job


def test_ranks_of_several_nodes_meet_at_the_first_pod(rendered: Callable[[str], list[Manifest]]) -> None:
    objects = rendered("several nodes")
    job = trainer_job(objects)
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    service = named(objects, "Service", "trainer")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod(objects, "trainer")["subdomain"] == service["metadata"]["name"]
    (script,) = first(objects, "trainer")["args"]
    assert "launch 6 --nnodes 2" in script
    assert "-0.demo-trainer" in script
    variables = {each["name"]: each["value"] for each in first(objects, "trainer")["env"]}
    assert variables["HEADRACE_TRAINER__NUM_PROCESSES"] == "12"


@pytest.mark.parametrize("case", ["demo", "several nodes"])
def test_a_trainer_is_not_restarted_after_what_you_must_fix(
    case: str, rendered: Callable[[str], list[Manifest]]
) -> None:
    """It is after it lost a peer (tests/integration/trainer/test_launch.py)."""
    spec = trainer_job(rendered(case))["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    failing = spec["podFailurePolicy"]["rules"][0]
    assert failing["action"] == "FailJob"
    assert failing["onExitCodes"]["values"] == [EXIT_USER_ERROR, EXIT_ALARM]


def test_a_trainer_has_as_long_to_save_wherever_it_runs(rendered: Callable[[str], list[Manifest]]) -> None:
    assert pod(rendered("demo"), "trainer")["terminationGracePeriodSeconds"] == SAVE_DEADLINE_S
    assert COMPOSE["trainer"]["stop_grace_period"] == f"{SAVE_DEADLINE_S / 60:g}m"


def test_only_a_change_of_its_pods_makes_another_trainer(helm: Helm, rendered: Callable[[str], list[Manifest]]) -> None:
    name = trainer_job(rendered("demo"))["metadata"]["name"]
    scaled = helm.render(merged(values_of("demo"), {"rollout": {"replicas": 5}}))
    assert trainer_job(scaled)["metadata"]["name"] == name
    changed = helm.render(merged(values_of("demo"), {"env": {"HF_HUB_OFFLINE": "1"}}))
    assert trainer_job(changed)["metadata"]["name"] != name


# -- values


@pytest.mark.parametrize(
    ("values", "token"),
    [
        ({"config": ""}, "config"),
        ({"trainer": {"gpus": 1, "ranksPerNode": 2}}, "trainer.ranksPerNode 2"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"rollout": {"nodesPerReplica": 2}}, "nodesPerReplica"),
        ({"secrets": {"source": "cert-manager"}}, "name"),
        ({"redis": {"url": "redis://redis:6379"}}, "url"),
        ({"redis": {"url": "rediss://user:secret@redis:6379"}}, "url"),
        ({"trainer": {"resources": {"limits": {"memory": 5}}}}, "memory"),
        ({"environments": [{"name": "exact", "image": "exact:1", "resources": RESOURCES}]}, "port"),
        ({"networkPolicies": {"outbound": {"everything": [443]}}}, "everything"),
    ],
)
def test_values_that_the_chart_does_not_take_are_refused(
    helm: Helm, tmp_path: Path, values: dict[str, Any], token: str
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(merged(values_of("demo"), values)))
    done = helm.run("template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", file)
    assert done.returncode != 0
    assert token in done.stderr


def test_the_schema_has_every_value_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"].keys() - {"global"} == values.keys() == set(schema["required"])


def test_whatever_a_release_is_called_its_names_are_valid(helm: Helm) -> None:
    objects = helm.render(merged(values_of("several nodes"), {"environments": MINE}), "r" + ".x" * 10 + "-x" * 16)
    assert manifests.names_are_valid_and_unique(objects) == []
    assert manifests.services_reach_pods(objects) == []


def test_policies_can_be_left_out(helm: Helm) -> None:
    objects = helm.render(merged(values_of("demo"), {"networkPolicies": {"enabled": False}}))
    assert [title(each) for each in kinds(objects, "NetworkPolicy")] == []


# -- the demo


def test_the_demo_for_kind_gives_values_that_the_chart_takes(helm: Helm) -> None:
    script = (CHART.parent / "kind_demo.sh").read_text()
    given = [f"--set={each}" for each in re.findall(r"--set (\S+)", script)]
    assert len(given) > 3
    objects = helm.render(values_of("demo"), "demo", *given)
    for rule in manifests.RULES:
        assert rule(objects) == []
    assert {each["spec"]["accessModes"][0] for each in kinds(objects, "PersistentVolumeClaim")} == {"ReadWriteOnce"}
    assert f"image={first(objects, 'replay')['image']}\n" in script
    assert f"deployment/{named(objects, 'Deployment', 'page')['metadata']['name']} " in script
