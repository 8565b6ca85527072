"""What a person must mend is one line on standard error that names the value and the remedy, exit code 1, and no traceback."""

from __future__ import annotations

import fcntl
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import runs
from headrace.config import load
from tests.support.command import error_of, headrace, headrace_process
from tests.support.ports import free_port

CONFIG = """
run: {{id: test, dir: {folder}/runs}}
policy: {{model_name: {folder}/no-such-model, precision: float32}}
data:
  train: {{dataset_name: arithmetic, env_name: math}}
env:
  math: {{type: math}}
replay: {{port: 0, redis_port: {redis_port}}}
reward: {{port: 0, http_port: 0, workers: 1}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, redis_port=free_port()))
    return path


def refused(*args: object) -> str:
    return error_of(headrace(*args))


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield int(sock.getsockname()[1])


@pytest.fixture
def old_redis() -> Iterator[int]:
    """A server that says it is Redis 6.2: no such server can be had, and refusing it is the fault to be shown."""
    info = b"# Server\r\nredis_version:6.2.14\r\n"

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while header := self.rfile.readline():
                words = []
                for _ in range(int(header[1:])):
                    words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2].upper())
                answers = {b"INFO": b"$%d\r\n%s\r\n" % (len(info), info), b"HELLO": b"%1\r\n+proto\r\n:3\r\n"}
                self.wfile.write(answers.get(words[0], b"+OK\r\n"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "command", [("config", "check"), ("config", "show"), ("up",), ("status",), ("trainer", "--config")]
)
def test_a_bad_configuration_is_refused_by_every_command(config: Path, command: tuple[str, ...]) -> None:
    said = refused(*command, config, "grpo.num_prompt_per_step=8")
    assert said == (
        "error: grpo.num_prompt_per_step: unknown key, value 8 (command line); did you mean grpo.num_prompts_per_step?\n"
    )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "can't read the configuration" in refused("up", tmp_path / "none.yaml")


def test_a_good_configuration_is_not(config: Path) -> None:
    assert headrace("config", "check", config).returncode == 0


@pytest.mark.parametrize(
    "key", ["replay.redis_port", "replay.port", "reward.port", "trainer.port", "weight_channel.port"]
)
def test_a_busy_port_is_named_before_anything_starts(config: Path, busy_port: int, key: str) -> None:
    said = refused("up", config, f"{key}={busy_port}")
    assert f"{key}: can't listen on 127.0.0.1:{busy_port}" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("key", ["replay.host", "replay.redis_host", "reward.host", "rollout.host", "trainer.host"])
def test_what_would_listen_beyond_loopback_unprotected_is_named_before_anything_starts(config: Path, key: str) -> None:
    said = refused("up", config, f"{key}=0.0.0.0")
    assert said.startswith(f"error: {key} 0.0.0.0: ")
    assert "security.insecure: true" in said
    assert len(said.splitlines()) == 1


def test_two_replicas_cant_share_a_port(config: Path) -> None:
    assert "set rollout.port to 0" in refused("up", config, "--rollouts", 2, f"rollout.port={free_port()}")


def test_a_run_that_is_up_is_not_started_twice(config: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "test").mkdir(parents=True)
    with (tmp_path / "runs" / "test" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "run test is already up" in refused("up", config)


def test_a_run_doesnt_go_on_with_another_seed(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "test"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(headrace("config", "show", config).stdout)
    said = refused("up", config, "grpo.seed=7", "grpo.max_num_steps=5")
    assert "run test can't go on" in said
    assert "grpo.seed: 42 -> 7" in said
    assert "max_num_steps" not in said


def test_a_wrong_model_path_ends_the_run_with_the_services_words(config: Path, tmp_path: Path) -> None:
    said = error_of(headrace_process("up", config))
    assert "can't go on: exit code 1" in said
    assert f"{tmp_path}/no-such-model" in said


def test_an_unreachable_redis_is_named(config: Path) -> None:
    port = free_port()
    for command in ("status", "up"):
        said = error_of(headrace_process(command, config, f"replay.redis_url=redis://127.0.0.1:{port}/0"))
        assert f"127.0.0.1:{port}" in said
        assert "start it, or correct replay.redis_url" in said


def test_a_redis_older_than_7_is_refused(config: Path, old_redis: int) -> None:
    url = f"redis://127.0.0.1:{old_redis}/0"
    for command in ("status", "up"):
        said = error_of(headrace_process(command, config, f"replay.redis_url={url}"))
        assert "6.2.14" in said
        assert "7" in said


def test_a_service_without_a_run_id_says_what_to_give(config: Path) -> None:
    assert "run.id is not set" in refused("replay", "--config", config, "run.id=null")


def test_status_needs_to_know_which_run() -> None:
    assert "give either CONFIG or --run FOLDER" in refused("status")


def test_a_run_that_has_ended_says_where_what_it_left_is(config: Path) -> None:
    saved = runs.save(load(config, environ={}))
    error = refused("status", "--run", saved.parent)
    assert "run test does not answer" in error
    assert f"`headrace up {saved}` goes on with it" in error
