"""The values of the Helm chart deploy/helm/headrace for a run, from its configuration. Only what differs from the chart's own values is
written. Nothing here asks a cluster."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from headrace.base.devices import DeviceMemory, Site, say_one_node
from headrace.base.errors import ConfigError, MissingPackage, ServiceError
from headrace.config import Config
from headrace.config.data import DataSourceConfig, HubName
from headrace.config.environments import (
    AttachedConfig,
    CodeConfig,
    CommandConfig,
    EnvConfig,
    LLMJudgeConfig,
    RewardModelConfig,
    TargetConfig,
    VerifiersConfig,
)
from headrace.config.in_yaml import without_password
from headrace.config.yaml_text import dump
from headrace.launch.entry_points import load_entry_point

GIB = 2**30
# An environment of the chart listens on it.
PORT = 50400
# by the path that the examples give them, what `headrace model` calls them
DEMO_MODELS = {
    "models/tiny": "tiny",
    "models/tiny_two_turns": "tiny-two-turns",
    "models/tiny_calculator": "tiny-calculator",
    "models/smollm2": "smollm2",
}
_MODELS = "models/"
_HUB = 443
_NAME = re.compile(r"[a-z]([a-z0-9_]{0,17}[a-z0-9])?")
_FROM_SHELL = re.compile(r"\$\{oc\.env:(\w+)")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What a run gets of a cluster: nodes with so many GPUs each (0: it runs on CPUs), and by the name of an environment of yours
    the image that its pods run."""

    gpus_per_node: int = 0
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)


def chart_values(config: Config, cluster: Cluster) -> tuple[dict[str, Any], list[str]]:
    """Return the values, and remarks about what is left to do. Raises `ConfigError` for what the chart can't run, with the remedy."""
    _check(config, cluster)
    deployed = _with_targets(config, cluster.images)
    text = dump(deployed)
    if without_password(text) != text:
        raise ConfigError(
            "the configuration holds a password, which everybody who may read ConfigMaps could see; leave it out of replay.redis_url (the "
            "logins are in the chart's Secrets), or give another key as ${oc.env:NAME}"
        )
    values: dict[str, Any] = {"config": text}
    if config.run.id is not None:
        values["runId"] = config.run.id
    if config.replay.redis_url is not None:
        values["redis"] = {"url": config.replay.redis_url}
    else:
        most = -(-config.replay.max_bytes * 3 // 2 // GIB)
        values["redis"] = {"resources": _resources("500m", min(2, most), most)}
    if (made := DEMO_MODELS.get(config.policy.model_name)) is not None:
        values["demoModel"] = {"name": made, "path": config.policy.model_name}
    values["rollout"] = _rollout(config, cluster)
    values["trainer"] = _trainer(config, cluster)
    remarks = _size(config, cluster, values)
    if config.has_episodes:
        values["agents"] = {"enabled": True, "replicas": config.agents.runners}
    if config.page.port is None:
        values["page"] = {"enabled": False}
    values["environments"] = [_environment(name, config.env[name], image) for name, image in cluster.images.items()]
    values["networkPolicies"] = {"outbound": dict(_outbound(config, cluster))}
    return values, [*remarks, *_left_to_do(config, cluster, text)]


def _check(config: Config, cluster: Cluster) -> None:
    for name in cluster.images:
        if name not in config.custom:
            known = ", ".join(config.custom) or "there is none"
            raise ConfigError(f"--environment {name}: env has no environment of yours with that name ({known})")
        if _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"--environment {name}: the name becomes part of a Kubernetes name; give env.{name} one of at most 19 characters a-z, 0-9 "
                "and _, which starts with a letter"
            )
    for name, env in config.env.items():
        match env:
            case CommandConfig() if name not in cluster.images:
                raise ConfigError(
                    f"env.{name}.command {env.command}: the chart runs it in an image of yours; give --environment {name}=IMAGE:TAG"
                )
            case CodeConfig():
                raise ConfigError(
                    f"env.{name}.type code: programs need namespaces of their own, which the chart's pods may not make (seccomp "
                    "RuntimeDefault); run the reward service outside of the cluster's pods, or score with another environment"
                )
    for key, device in (("trainer.device", config.trainer.device), ("rollout.device", config.rollout.device)):
        if device == "cuda" and not cluster.gpus_per_node:
            raise ConfigError(f"{key} cuda: give --gpus-per-node, the number of GPUs of a node")
    if config.replay.redis_url is not None and not config.replay.redis_url.startswith(("rediss://", "sentinel://")):
        raise ConfigError(
            f"replay.redis_url {without_password(config.replay.redis_url)}: pods call it over TLS; give rediss://HOST:PORT/0, or null: the "
            "chart then runs a server"
        )
    slice_size = config.policy.generation.vllm_cfg.tensor_parallel_size
    if _on_gpus(config.rollout.device, cluster) and slice_size > cluster.gpus_per_node:
        raise ConfigError(say_one_node(slice_size, f"{cluster.gpus_per_node} GPUs of a node"))
    if (folder := config.checkpointing.checkpoint_dir) is not None and not folder.startswith("runs/"):
        raise ConfigError(
            f"checkpointing.checkpoint_dir {folder}: pods keep what lies under runs/; give such a folder, or null: that of the run"
        )
    if (store := config.checkpointing.store or "").startswith("file:"):
        raise ConfigError(
            f"checkpointing.store {store} is a folder of this machine; give s3://BUCKET/PREFIX, gs://… or az://…, or null"
        )
    if config.checkpointing.snapshot_dir is not None:
        raise ConfigError(
            f"checkpointing.snapshot_dir {config.checkpointing.snapshot_dir}: a rank that dies ends its pod, and the pod's memory with it; "
            "set it to null"
        )
    if Path(config.policy.model_name).is_absolute():
        raise ConfigError(
            f"policy.model_name {config.policy.model_name} is a folder of this machine; copy it to the volume `models`, as models/NAME"
        )


def _on_gpus(device: str, cluster: Cluster) -> bool:
    return device != "cpu" and cluster.gpus_per_node > 0


def _with_targets(config: Config, images: Mapping[str, str]) -> Config:
    """Return the configuration with the environments that have an image as ones that listen elsewhere. The chart sets their addresses."""
    environments = dict(config.env)
    for name in images:
        env = environments[name]
        if not isinstance(env, AttachedConfig):
            common = env.model_dump(exclude={"command", "target", "port"})
            environments[name] = TargetConfig.model_validate({**common, "target": f"{name}:{PORT}"})
    return config.model_copy(update={"env": environments})


def _rollout(config: Config, cluster: Cluster) -> dict[str, Any]:
    values: dict[str, Any] = {"replicas": config.rollout.replicas}
    if _on_gpus(config.rollout.device, cluster):
        values["gpus"] = config.policy.generation.vllm_cfg.tensor_parallel_size
        values["startupSeconds"] = int(config.rollout.load_deadline_s)
    return values


def _trainer(config: Config, cluster: Cluster) -> dict[str, Any]:
    ranks = config.trainer.num_processes
    if not _on_gpus(config.trainer.device, cluster):
        return {"nodes": 1, "ranksPerNode": ranks}
    # nodes with ranks have equally many
    nodes = next(count for count in range(-(-ranks // cluster.gpus_per_node), ranks + 1) if ranks % count == 0)
    on_node = ranks // nodes
    return {
        "nodes": nodes,
        "ranksPerNode": on_node,
        "gpus": on_node,
        "startupSeconds": int(config.rollout.load_deadline_s),
    }


# -- memory of the host. The plan is of GPUs; what the host holds beside them is estimated from the same sizes (docs/kubernetes.md).


def _size(config: Config, cluster: Cluster, values: dict[str, Any]) -> list[str]:
    """Add the resources of trainer and replicas to the `values`. Return a remark if the plan of memory is not available."""
    device = DeviceMemory("a GPU of 80 GiB", 80 * GIB, 80 * GIB)
    try:
        model = config.policy.model_name
        if model.startswith(_MODELS) and not os.path.isdir(model):
            raise ServiceError(f"policy.model_name {model} is not here")
        plan = load_entry_point("headrace.tools", "plan-memory", extra="trainer")(
            config, Site(device, device, cluster.gpus_per_node or 1, cluster.gpus_per_node or 1)
        )
        _, trainer = plan.peak
        replica = plan.replica
    except (MissingPackage, ServiceError) as error:
        return [
            f"resources of trainer and replicas are the chart's defaults, because the plan of memory is not available: {error}"
        ]
    nodes, ranks = values["trainer"]["nodes"], values["trainer"]["ranksPerNode"]
    parameters = sum(size for part, size in trainer.items() if part.endswith("parameters, float32"))
    # a checkpoint takes the moments of each rank, and whole models at rank 0, which also loads them
    checkpoint = ranks * 2 * parameters + parameters * ranks * nodes
    if "gpus" in values["trainer"]:
        _add(values["trainer"], cpu=4 * ranks, memory=4 * ranks + checkpoint / GIB, shm=1 + ranks)
    else:
        tensors = sum(size for part, size in trainer.items() if not part.startswith(("CUDA", "NCCL")))
        _add(values["trainer"], cpu=ranks, memory=2 * ranks + (ranks * tensors + checkpoint) / GIB, shm=1)
    weights = replica["weights"] / GIB
    engine = config.policy.generation.vllm_cfg
    if (gpus := values["rollout"].get("gpus")) is not None:
        _add(values["rollout"], cpu=4 * gpus, memory=4 * gpus + weights * gpus, shm=1 + gpus)
    else:
        # packed copies of the weights, the file that is read, and the cache
        cache = (engine.kv_cache_memory_bytes or GIB // 4) / GIB
        _add(values["rollout"], cpu=engine.tensor_parallel_size, memory=3 + 3 * weights + cache, shm=1)
    return []


def _add(values: dict[str, Any], *, cpu: int, memory: float, shm: int) -> None:
    """Add the resources of a pod: what is requested may not be exceeded, but for a fourth."""
    requested = int(memory) + 1 + shm  # what lies in /dev/shm is the pod's memory
    values |= {"shm": f"{shm}Gi", "resources": _resources(str(cpu), requested, -(-requested * 5 // 4))}


def _resources(cpu: str, requested: int, most: int) -> dict[str, Any]:
    return {"requests": {"cpu": cpu, "memory": f"{requested}Gi"}, "limits": {"memory": f"{most}Gi"}}


# -- environments, the network, and what the chart doesn't do


def _environment(name: str, env: EnvConfig, image: str) -> dict[str, Any]:
    values: dict[str, Any] = {"name": name, "image": image, "resources": _resources("1", 1, 2)}
    match env:
        case CommandConfig():
            return values | {"command": env.command, "port": PORT}
        case TargetConfig(is_started=True):
            files = ["--tls-cert", "/run/headrace/tls.pem", "--tls-key", "/run/headrace/tls.key"]
            return values | {"command": ["headrace", "env", "serve", env.target, *files], "port": PORT}
        case AttachedConfig():
            return values | {"attached": True}
    return values | {"port": PORT}  # the image's own program


def _outbound(config: Config, cluster: Cluster) -> Iterator[tuple[str, list[int]]]:
    """Yield the TCP ports that each component opens outside of the run."""
    downloads = not all(name.startswith(_MODELS) for name in (config.policy.model_name, config.tokenizer[1]))
    if downloads or config.rollout.weights_from == "store":
        yield "rollout", [_HUB]
    if (
        not all(name.startswith(_MODELS) for name in (*config.models.values(), config.tokenizer[1]))
        or any(map(_is_on_hub, config.data.sources))
        or config.checkpointing.store is not None
        or config.logger.wandb_enabled
        or config.logger.mlflow_enabled
    ):
        yield "trainer", [_HUB]
    ports = set()
    for name, env in config.env.items():
        asks = isinstance(env, RewardModelConfig) and not env.model_name.startswith(_MODELS)
        if asks or isinstance(env, LLMJudgeConfig | VerifiersConfig):
            ports.add(_HUB)
        elif env.address is not None and name not in cluster.images:
            ports.add(int(env.address.rpartition(":")[2]))
    if ports:
        yield "reward", sorted(ports)


def _is_on_hub(source: DataSourceConfig) -> bool:
    path = source.data_path or ""
    is_there = path.startswith(_MODELS) or path.endswith((".json", ".jsonl", ".parquet")) or os.path.exists(path)
    return source.dataset_name in get_args(HubName) or (not is_there and path.count("/") == 1)


def _left_to_do(config: Config, cluster: Cluster, text: str) -> Iterator[str]:
    for name in dict.fromkeys(_FROM_SHELL.findall(text)):
        yield f"the configuration refers to the variable {name}: give it under `env` in the values"
    model = config.policy.model_name
    if model.startswith(_MODELS) and model not in DEMO_MODELS:
        yield f"policy.model_name {model}: copy the model to the volume `models` before the run starts"
    if (store := config.checkpointing.store) is not None:
        yield (
            f"checkpointing.store {store}: give the Secret with its credentials as secrets.store, and its port in "
            f"networkPolicies.outbound.trainer if that is not {_HUB}"
        )
    if config.rollout.weights_from == "store":
        yield f"rollout.weights_from store: give the Secret with which replicas read {store} as secrets.pull"
    for name, env in config.env.items():
        if isinstance(env, TargetConfig) and env.is_started and name not in cluster.images:
            yield f"env.{name}.target {env.target}: the reward service serves the file, which must be in the image, under /data"
        elif isinstance(env, LLMJudgeConfig):
            yield f"env.{name}: give the Secret with the judges' keys as reward.keys, and /run/keys/FILE as their api_key_file"
        elif isinstance(env, AttachedConfig) and name not in cluster.images:
            yield f"env.{name}: your process attaches to the reward hub; with --environment {name}=IMAGE:TAG the chart runs it"
    for source in config.data.sources:
        code = [name.rpartition(":")[0] for name in (source.dataset_name, source.processor) if name and ".py:" in name]
        for path in (source.data_path, source.prompt_file, source.system_prompt_file, *code):
            if path is not None and os.path.exists(path):
                yield f"data: {path} is a file of this machine: it must be in the image, under /data, or on the volume `models`"
