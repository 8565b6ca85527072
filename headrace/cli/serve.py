"""`headrace serve`: serve a model with vLLM's own OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from headrace.base import devices
from headrace.base.addresses import LOOPBACK, is_loopback, with_port
from headrace.base.errors import ConfigError
from headrace.base.scratch import scratch_folder
from headrace.base.tasks import cancel
from headrace.cli import weights
from headrace.cli.common import check_engine
from headrace.cli.weights import NamedModel, WeightsArgument
from headrace.config import Config, threads
from headrace.launch.supervisor import Child, Supervisor, child_environ
from headrace.net import api_key
from headrace.net.service import bind, stop_signals

_SERVER, _LIMITED = "vllm.entrypoints.openai.api_server", "headrace.net.limited_server"
# For requests in progress when the server is stopped.
_GRACE_S = 10.0


def serve(
    model: WeightsArgument,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_OPTION…]", help="Options of vLLM's server, as for `vllm serve`."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    tls_cert: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Certificate chain (PEM); by default security.tls_cert of the run."),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Its private key (PEM); by default security.tls_key of the run.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond the loopback interface without TLS.")
    ] = False,
) -> None:
    """Serve a model over OpenAI's API (/v1/chat/completions and the rest) under the name RUN@STEP, until the command is stopped.

    The engine of a run's model is configured like the run's replicas (policy.generation.vllm_cfg); options after `--` override that. With
    VLLM_API_KEY in the environment a client needs that key. Beyond the loopback interface a key is required.
    """
    found = weights.find(model)
    tls = _tls(found.run.config if found.run is not None else None, tls_cert, tls_key)
    insecure = insecure or (found.run is not None and found.run.config.security.insecure)
    check(host, options or (), os.environ, tls=tls is not None, insecure=insecure)
    check_engine("serve")
    on_cpu = not devices.engine_is_for_cuda(devices.installed_versions())
    bind(host, port, "--port").close()
    typer.echo(f"{found.name} ({found.model}) on {'http' if tls is None else 'https'}://{with_port(host, port)}/v1")
    sys.stdout.flush()
    ours = arguments(found, host, port, tls, options or (), on_cpu=on_cpu)
    with scratch_folder("headrace-engine-") as folder:  # where the engine's processes meet
        code = asyncio.run(_run(ours, {**environment(found, os.environ), "VLLM_RPC_BASE_PATH": str(folder)}))
    if code:
        raise typer.Exit(code)


def check(host: str, options: Sequence[str], environ: Mapping[str, str], *, tls: bool, insecure: bool) -> None:
    """Refuse to listen beyond the loopback interface without TLS and a key. Raises `ConfigError` naming the remedy."""
    if any(option.replace("_", "-").partition("=")[0] == "--api-key" for option in options):
        raise ConfigError(
            f"--api-key: everybody on this machine can read a command line; give the key in the variable {api_key.VARIABLE}"
        )
    if is_loopback(host):
        return
    if not environ.get(api_key.VARIABLE):
        raise ConfigError(
            f"--host {host}: a key is required beyond the loopback interface; set {api_key.VARIABLE} (`openssl rand -hex 32` makes one), "
            "which clients then present as their API key"
        )
    if not tls and not insecure:
        raise ConfigError(
            f"--host {host}: TLS is required beyond the loopback interface; give --tls-cert and --tls-key (`headrace certs` makes both), "
            "or --insecure to do without on a network that you trust"
        )


def _tls(config: Config | None, cert: str | None, key: str | None) -> tuple[str, str] | None:
    if (cert is None) != (key is None):
        raise ConfigError(f"--tls-cert {cert} with --tls-key {key}: give both, or neither")
    if cert is None and config is not None:
        cert, key = config.security.tls_cert, config.security.tls_key
    return None if cert is None or key is None else (cert, key)


def arguments(
    found: NamedModel, host: str, port: int, tls: tuple[str, str] | None, options: Sequence[str], *, on_cpu: bool
) -> list[str]:
    """Return the arguments of vLLM's server, which uses the last of two equal options: the user's override the run's, and Headrace decides
    the address."""
    ours = ["--host", host, "--port", str(port)]
    if tls is not None:
        ours += ["--ssl-certfile", tls[0], "--ssl-keyfile", tls[1]]
    if not is_loopback(host):
        # vLLM itself asks for the key only under some paths, such as /v1
        ours += ["--middleware", f"{api_key.__name__}.{api_key.KeyGuard.__name__}"]
    return ["--model", found.model, "--served-model-name", found.name, *_engine(found, on_cpu), *options, *ours]


def _engine(found: NamedModel, on_cpu: bool) -> list[str]:
    """Return the engine options of the run's replicas."""
    if found.run is None:
        return []
    policy = found.run.config.policy
    vllm_cfg = policy.generation.vllm_cfg.resolve(on_cpu=on_cpu)
    given: dict[str, object] = {
        "dtype": policy.rollout_precision[1],
        "max-model-len": policy.max_total_sequence_length,
        "tensor-parallel-size": vllm_cfg.tensor_parallel_size,
        "gpu-memory-utilization": vllm_cfg.gpu_memory_utilization,
        "kv-cache-memory-bytes": vllm_cfg.kv_cache_memory_bytes,
        "max-num-seqs": policy.generation.vllm_cfg.max_num_seqs,  # null is vLLM's choice: a server has no refits
        "max-num-batched-tokens": vllm_cfg.max_num_batched_tokens,
        "tokenizer": policy.tokenizer.name if found.run.step == 0 else None,
        "hf-overrides": json.dumps(policy.hf_config_overrides) if policy.hf_config_overrides else None,
    }
    flags = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return [*flags, *(["--enforce-eager"] if vllm_cfg.enforce_eager else [])]


def environment(found: NamedModel, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of vLLM's server. Variables that are already set stay."""
    ours = {"VLLM_NO_USAGE_STATS": "1"}
    if found.run is not None:
        # no trainer runs beside a server
        ours[threads.VARIABLE] = str(
            threads.of(found.run.config, threads.usable_cores(), environ, trains=False, generates=True).rollout
        )
    if Path(found.model).is_dir():
        ours["HF_HUB_OFFLINE"] = "1"
    return ours | child_environ(environ)


async def _run(options: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run vLLM's server until it ends or is stopped. Returns its exit code, or 128 + the signal. No process is left.

    The server can't stop itself reliably: while its engine loads it loses a signal, and keeps waiting for an engine that it no longer
    answers.
    """
    supervisor = Supervisor(environ, lambda line: typer.echo(line, err=True), grace_s=_GRACE_S)
    server = Child("vLLM", [sys.executable, "-m", _LIMITED, _SERVER, *options], log=None)
    signals, stopped = list[int](), asyncio.Event()

    def on(signum: int) -> None:
        if signals:
            supervisor.kill()
        else:
            typer.echo(f"{signal.Signals(signum).name}: stopping (once more to kill at once)", err=True)
        signals.append(signum)
        stopped.set()

    for signum in stop_signals():
        asyncio.get_running_loop().add_signal_handler(signum, on, signum)
    running, stopping = asyncio.create_task(supervisor.run(server)), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not signals:
            code = running.result()
            return code if code >= 0 else 128 - code
        return 128 + signals[0]
    finally:
        await cancel([running, stopping])
        await supervisor.stop([server])
        supervisor.close()
