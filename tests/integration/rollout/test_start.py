"""How a replica that can't start says so, and what it leaves behind when it is stopped on the way."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from headrace.base.errors import ServiceError
from headrace.base.scratch import remove_abandoned
from headrace.cli import serve
from headrace.cli.weights import NamedModel, RunCheckpoint
from headrace.config import Config
from headrace.replay import ReplayClient
from headrace_services.rollout.engine import running_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def settings(redis_url: str, replay: ReplayClient, run_id: str, tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": {"id": run_id, "dir": str(tmp_path)},
        "replay": {"redis_url": redis_url},
        "policy": {
            "model_name": str(tiny_model),
            "precision": "float32",
            "max_total_sequence_length": 2048,
            "generation": {"max_new_tokens": 64, "vllm_cfg": {"kv_cache_memory_bytes": 2**24}},
        },
    }


def start(settings: dict[str, Any], folder: Path, *changes: str) -> subprocess.Popen[str]:
    file = folder / f"{secrets.token_hex(4)}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", "rollout", "--config", str(file), *changes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refusal(settings: dict[str, Any], folder: Path, *changes: str) -> str:
    """The one line in which the command says why it can't start."""
    process = start(settings, folder, *changes)
    try:
        said, complaint = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 1, complaint[-3000:]
    assert said == ""
    lines = [line for line in complaint.splitlines() if line.startswith("error: ")]
    assert lines == [complaint.splitlines()[-1]]
    return lines[0]


def test_a_model_path_that_is_not_there(settings: dict[str, Any], tmp_path: Path) -> None:
    line = refusal(settings, tmp_path, f"policy.model_name={tmp_path}/no-such-model")
    assert f"policy.model_name: the directory {tmp_path}/no-such-model" in line


def test_a_directory_that_holds_no_model(settings: dict[str, Any], tmp_path: Path) -> None:
    assert "has no config.json" in refusal(settings, tmp_path, f"policy.model_name={tmp_path}")


def engine_refusal(settings: dict[str, Any]) -> str:
    """Why the engine doesn't start in this process. A command would import vLLM anew, which is half of what the engine's start takes."""
    before = dict(os.environ)
    try:
        with pytest.raises(ServiceError) as refused, running_engine(Config.model_validate(settings)):
            pass
    finally:
        os.environ.clear()
        os.environ.update(before)
    return str(refused.value)


def test_a_model_that_does_not_generate(settings: dict[str, Any], tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 2048, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    settings["policy"]["model_name"] = str(folder)
    said = engine_refusal(settings)
    assert f"policy.model_name {folder}" in said
    assert "causal language model" in said


@pytest.mark.nightly  # an engine more; a model that does not generate is refused on the same road
def test_too_little_memory_for_the_kv_cache(settings: dict[str, Any]) -> None:
    settings["policy"]["generation"]["vllm_cfg"]["kv_cache_memory_bytes"] = 2**20
    said = engine_refusal(settings)
    assert f"policy.generation.vllm_cfg.kv_cache_memory_bytes: {2**20} is too little" in said
    assert "policy.max_total_sequence_length 2048" in said


@pytest.mark.nightly  # what a cache that is too small goes through as well; only vLLM's words differ
def test_a_kv_cache_larger_than_the_machine(settings: dict[str, Any]) -> None:
    settings["policy"]["generation"]["vllm_cfg"]["kv_cache_memory_bytes"] = 2**50
    assert f"kv_cache_memory_bytes {2**50}; lower it" in engine_refusal(settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_a_gpu_where_there_is_none(settings: dict[str, Any]) -> None:
    settings["rollout"] = {"device": "cuda"}
    assert "rollout.device: cuda" in engine_refusal(settings)


def test_vllms_server_takes_what_headrace_serve_starts_it_with(settings: dict[str, Any], tiny_model: Path) -> None:
    """tests/e2e serves a checkpoint with it, at night."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = NamedModel("adder@4", str(tiny_model), RunCheckpoint(Config.model_validate(settings), 4))
    given = serve.arguments(found, "0.0.0.0", 8000, ("cert", "key"), [], on_cpu=True)
    taken = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    validate_parsed_serve_args(taken)
    assert (taken.model, taken.served_model_name, taken.port) == (str(tiny_model), ["adder@4"], 8000)
    assert (taken.max_model_len, taken.kv_cache_memory_bytes, taken.dtype) == (2048, 2**24, "float32")
    assert taken.ssl_certfile == "cert"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


# test_service.py has both of a running one by day, unit/rollout/test_child.py the processes of one that starts
@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_while_its_engine_starts_it_leaves_no_orphan(
    settings: dict[str, Any], tmp_path: Path, signum: signal.Signals, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = start(settings, tmp_path)
    try:
        engine = os.pidfd_open(_engine_of(process))
        assert [*temporary.glob("headrace-engine-*")]
        process.send_signal(signum)
        process.communicate(timeout=120)
        assert process.returncode == (0 if signum == signal.SIGTERM else -signum)
        assert select.select([engine], [], [], 120)[0], "an orphan"
        os.close(engine)
        remove_abandoned(parent=temporary)  # as the end of `up`, and the next start of a replica
        assert not [*temporary.glob("headrace-*")]
    finally:
        process.kill()


def _engine_of(process: subprocess.Popen[str]) -> int:
    """Process id of the engine, as soon as it is there."""
    folder = Path(f"/proc/{process.pid}")
    children, own = folder / f"task/{process.pid}/children", (folder / "cmdline").read_bytes()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for child in children.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if command == own or b"EngineCore" in command:  # forked, and not yet named
                return int(child)
        time.sleep(0.05)
    raise AssertionError(f"no engine was started; exit code {process.poll()}")
