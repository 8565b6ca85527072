"""`headrace up`: how it ends, what it leaves, and what it does when a service dies.

What keeps services running doesn't ask what they compute. So `make test` has light ones here, and the real pipeline, with its kill,
in tests/e2e; `make test-all` has every test of this file on the real one as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from headrace.base.scratch import remove_abandoned
from headrace.config import load
from headrace.net.credentials import REDIS_ROLES
from headrace.run import snapshots
from headrace.run.folder import SAVED
from headrace_services.replay import acl
from tests.support import nvml
from tests.support.light_services import instead_of
from tests.support.ports import free_port, free_ports
from tests.support.processes import gone
from tests.support.redis_servers import RedisServer
from tests.support.up import Up
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
run: {{id: test, dir: {folder}/runs}}
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 2
  max_num_steps: {steps}
  use_leave_one_out_baseline: false
  val_period: 2
  val_at_start: false
  max_val_samples: 4
  async_grpo: {{enabled: true, max_trajectory_age_steps: 1}}
loss_fn: {{reference_policy_kl_penalty: 0}}
policy:
  model_name: {model}
  precision: float32
  max_total_sequence_length: 64
  train_micro_batch_size: 8
  generation: {{max_new_tokens: 6, vllm_cfg: {{kv_cache_memory_bytes: 67108864}}}}
data:
  train: {{dataset_name: arithmetic, env_name: math, size: 2000}}
  validation: {{dataset_name: arithmetic, env_name: math, size: 20, seed: 1}}
env:
  math: {{type: math}}
replay: {{port: 0, redis_port: {redis_port}}}
reward: {{port: 0, http_port: 0, workers: 1}}
trainer: {{num_threads: 1}}
checkpointing: {{save_period: 2}}
"""


# A run that a signal ends takes steps alone while it is waited for.
ENDLESS = ("grpo.val_period=0", "checkpointing.save_period=1000")
PAGELESS = "page.port=null"  # a process less, where the page is not looked at

Start = Callable[..., Up]


@pytest.fixture(params=["light", pytest.param("real", marks=pytest.mark.nightly)])
def real(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "real")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of the run."""
    return tmp_path / "runs" / "test"


@pytest.fixture
def up(tmp_path: Path, tiny_model: Path, real: bool) -> Iterator[Start]:
    """Starts the run of CONFIG for so many steps; `services` take the place of the real ones, if those are not asked for."""
    started: list[Up] = []
    redis_port = free_port()

    def start(steps: int, *overrides: str, gpus: str = "", stdout: int | None = None, **services: str) -> Up:
        config = tmp_path / "run.yaml"
        config.write_text(CONFIG.format(folder=tmp_path, model=tiny_model, steps=steps, redis_port=redis_port))
        number = len(started)
        environ = os.environ if real else instead_of(tmp_path / f"services-{number}", executed=bool(gpus), **services)
        if gpus:
            environ = nvml.environ(tmp_path, gpus, environ)
        started.append(Up(config, *overrides, output=tmp_path / f"up-{number}.out", environ=environ, stdout=stdout))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.stop(signal.SIGTERM)


# tests/e2e has the same of the demo by day, killed where this run is stopped
@pytest.mark.parametrize("real", [pytest.param("real", marks=pytest.mark.nightly)], indirect=True)
def test_a_run_ends_with_its_table_and_goes_on_by_its_id(up: Start, folder: Path) -> None:
    first = up(2)
    first.wait_for("step 1:")
    left = first.started()
    assert first.ends() == 0, first.said()
    assert all(gone(pid) for pid in left)
    assert "validation accuracy" in first.said()
    assert "left out: " in first.said()
    assert "steps: 2 (grpo.max_num_steps)" in first.said()
    policy = folder / "checkpoints" / "step_2" / "policy"
    assert str(policy) in first.said().splitlines()[-1]
    assert f"best:           {policy} (val:accuracy" in first.said()
    assert f"headrace samples {folder}" in first.said()
    assert '"state":"finished"' in (folder / "run.json").read_text()
    assert (policy / "model.safetensors").exists()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert logs >= {"replay.log", "reward.log", "rollout-1.log", "trainer.log"}
    assert trained(folder) == [0, 1]

    again = up(2, "grpo.max_num_steps=100000")
    again.wait_for("step 3: reward")
    assert "changed: grpo.max_num_steps: 2 -> 100000" in again.said()
    assert f"continues from checkpoint 2 ({policy.parent})" in again.said()
    assert "step 1: reward" not in again.said(), "what an earlier start trained is no news"
    assert trained(folder)[:4] == [0, 1, 2, 3]

    # each step ends with a refit, during which the replica is STALE
    wait_until(lambda: re.search(r"^\S+ +HEALTHY +\d+ .* http://127\.0\.0\.1:\d+ *$", status_of(folder), re.MULTILINE))
    assert again.stop(signal.SIGTERM) == []
    assert again.process.returncode == 143
    assert "SIGTERM: saving a checkpoint" in again.said()
    newest = max((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    version = json.loads((newest / "state.json").read_text())["version"]
    assert version > 2
    assert trained(folder)[-1] == version - 1
    assert set(trained(folder)) >= set(range(version))
    assert f"checkpoint {version} ({newest})" in again.said()


def test_a_run_survives_the_kill_of_any_service_and_ctrl_c_ends_all(
    up: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in a shell with a proxy that leads nowhere, and with a secret
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HR_TOKEN", "canary-7f3a")
    monkeypatch.setenv("HEADRACE_LOGGER__WANDB__NAME", "canary-7f3a")
    secret = "logger.wandb.project=${oc.env:HR_TOKEN}"
    memory = f"checkpointing.snapshot_dir={folder.parents[1]}"
    run = up(100_000, *ENDLESS, secret, memory, rollout="refusable_rollout", trainer="talking_trainer")
    for line in ("step 1:", "page: ready"):
        run.wait_for(line)
    kept = snapshots.locate(load(folder / SAVED, [], os.environ))
    assert kept is not None
    kept.mkdir(exist_ok=True)
    assert re.search(r"^page: http://127\.0\.0\.1:\d+/runs/test#code=\S+$", run.said(), re.MULTILINE)
    for service in ("page", "rollout", "reward", "replay", "trainer"):
        name = "rollout-1" if service == "rollout" else service
        victim, before = run.pid_of("headrace.cli", f" {service} "), run.said().count(f"\n{name}: ready")
        os.kill(victim, signal.SIGKILL)
        assert gone(victim)
        for port in chosen_ports(folder):
            with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                listen_again(thief, port)
        run.wait_for(f"{name}: killed by signal 9; restarting it")
        wait_until(partial(is_back, run, service, name, before))
        goes_on(run)
    assert run.stop(signal.SIGINT) == []
    assert run.process.returncode == 130
    assert json.loads((folder / "start.json").read_text())["origins"]["grpo.val_period"] == "command line"
    assert "project: ${oc.env:HR_TOKEN}" in (folder / "config.yaml").read_text()
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in written if b"canary" in path.read_bytes()] == []
    assert "canary" not in run.said()
    assert not kept.exists(), "no memory is left either"


@pytest.mark.parametrize("real", ["light"], indirect=True)  # what waits is the supervisor
def test_law_6_what_is_restarted_in_an_outage_waits(up: Start, folder: Path, tmp_path: Path) -> None:
    """The server refuses it; later a file is away. A first start ends with the words: nobody knows of a time when it was let in."""
    secrets, users, port = tmp_path / "secrets", tmp_path / "users.acl", free_port()
    passwords = {role: f"secret-of-{role}" for role in REDIS_ROLES}
    secrets.write_text("".join(f"redis {role} {password}\n" for role, password in passwords.items()))
    users.write_text("\n".join(acl.users("test", passwords, own_server=True)) + "\n")
    server = RedisServer(tmp_path / "server", port, "--port", str(port), "--aclfile", str(users))
    admin = Redis(port=port, username="headrace-admin", password=passwords["admin"])
    light = {"reward": "idle_reward", "rollout": "refusable_rollout", "trainer": "talking_trainer"}
    arguments = (*ENDLESS, PAGELESS, f"replay.redis_url={server.url}", f"security.credentials={secrets}")

    def refuse() -> None:
        admin.execute_command("ACL", "SETUSER", "test-replay", "-fcall")
        admin.execute_command("ACL", "SETUSER", "test-trainer", "off")

    server.start()
    try:
        wait_until(lambda: _answers(admin))
        refuse()
        first = up(100_000, *arguments, **light)
        assert first.ends() == 1
        assert re.search(
            r"replay can't continue: user 'test-replay' .* may not run FCALL .*`headrace acl`", first.said()
        )
        admin.execute_command("ACL", "LOAD")

        run = up(100_000, *arguments, **light)
        run.wait_for("step 1:")
        refuse()
        for service in ("replay", "trainer"):
            os.kill(run.pid_of("headrace.cli", f" {service} "), signal.SIGKILL)
        for service, why in (
            ("replay", "user 'test-replay' .* may not run FCALL"),
            ("trainer", "login of user 'test-trainer'"),
        ):
            run.wait_for(f"waits for the buffer's server, for {service}, ")
            said = status_of(folder)
            assert re.search(rf"for {service}: .*{why} .*`headrace acl`.*\(since \d", said), said
        admin.execute_command("ACL", "LOAD")
        for service in ("replay", "trainer"):
            run.wait_for(f"no longer waits for the buffer's server, for {service}")
        goes_on(run)
        assert "the buffer's server" not in status_of(folder)

        admin.execute_command("ACL", "SETUSER", "test-reader", "nocommands")  # by which `up` watches
        away = secrets.rename(tmp_path / "late")
        for service in ("replay", "trainer"):
            os.kill(run.pid_of("headrace.cli", f" {service} "), signal.SIGKILL)
        for service in ("replay", "trainer"):
            run.wait_for(f"waits for the start of {service}, ")
        record = json.loads((folder / "run.json").read_text())
        assert all(f"security.credentials {secrets} can't be read" in wait for wait in record["waits"]), record
        away.rename(secrets)
        admin.execute_command("ACL", "LOAD")
        for service in ("replay", "trainer"):
            run.wait_for(f"no longer waits for the start of {service}")
        goes_on(run)
        assert run.stop(signal.SIGTERM) == []
    finally:
        admin.close()
        server.kill()


def _answers(redis: Redis) -> bool:
    with contextlib.suppress(RedisConnectionError):
        return bool(redis.ping())
    return False


@pytest.mark.nightly  # by day a run of light services ends so below, and tests/unit/cli/test_watch_folder.py tells the words apart
@pytest.mark.parametrize(
    "elsewhere", [pytest.param(False, id="all in it"), pytest.param(True, id="checkpoints elsewhere")]
)
def test_a_run_whose_folder_is_deleted_says_so_and_leaves_no_process(
    up: Start, folder: Path, tmp_path: Path, elsewhere: bool
) -> None:
    (tmp_path / "kept").mkdir()
    where = [f"checkpointing.checkpoint_dir={tmp_path / 'kept'}"] if elsewhere else []
    light = {"reward": "idle_reward", "rollout": "refusable_rollout", "trainer": "talking_trainer"}
    run = up(100_000, *ENDLESS, PAGELESS, *where, **light)
    run.wait_for("step 1:")
    check_end_without_folder(run, folder, elsewhere=elsewhere)


def check_end_without_folder(run: Up, folder: Path, *, elsewhere: bool = False) -> None:
    """It says what became of its folder and, unless these are `elsewhere`, of its checkpoints; and leaves no process."""
    left = run.started()
    while folder.exists():  # what is written meanwhile may outlast one try
        shutil.rmtree(folder, ignore_errors=True)
    assert run.ends() == 1, run.said()
    assert all(gone(pid) for pid in left)
    last = run.said().splitlines()[-1]
    assert last.startswith(f"error: the run's folder {folder} was deleted or moved")
    assert ("and so were its checkpoints" in last) != elsewhere
    assert "Traceback" not in run.said()
    assert not folder.exists(), [*folder.rglob("*")]


@pytest.mark.parametrize(
    "last",
    ["run test in", pytest.param("step 1:", marks=pytest.mark.nightly)],  # services end as by SIGTERM, below
)
def test_a_run_whose_lines_nobody_reads_any_more_stops(up: Start, folder: Path, last: str) -> None:
    light = {"reward": "idle_reward", "rollout": "refusable_rollout", "trainer": "talking_trainer"}
    run = up(100_000, *ENDLESS, PAGELESS, stdout=subprocess.PIPE, **light)
    assert run.process.stdout is not None
    while last.encode() not in (line := run.process.stdout.readline()):
        assert line, run.said()
    left = run.started()
    run.process.stdout.close()
    assert run.ends() == 128 + signal.SIGPIPE
    assert all(gone(pid) for pid in left)
    (line,) = run.said().splitlines()
    assert "standard output" in line
    assert '"state":"stopped"' in (folder / "run.json").read_text()


def chosen_ports(folder: Path) -> list[int]:
    config = load(folder / "config.yaml")
    return [config.replay.port, config.reward.port, config.reward.http_port, config.trainer.port]


def listen_again(sock: socket.socket, port: int) -> None:
    """Listen on a port that somebody else has had, as a server does that is restarted."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()


def is_back(run: Up, service: str, name: str, before: int) -> bool:
    """Whether the service runs again; and it was ready once more than `before`, if it is one that tells."""
    runs_again = any(f" {service} " in command for command in run.started().values())
    return runs_again and (not before or run.said().count(f"\n{name}: ready") > before)


def has_started(run: Up, name: str) -> bool:
    """Whether the replica has been seen to wait for weights, or with some: weights can be there before anybody looks."""
    return any(f"\n{name}: {state}" in run.said() for state in ("waiting for weights", "ready"))


def test_what_gives_up_or_hangs_costs_itself_and_a_deleted_run_ends(up: Start, folder: Path, real: bool) -> None:
    light = {"reward": "idle_reward", "rollout": "refusable_rollout", "trainer": "talking_trainer"}
    run = up(100000, *ENDLESS, PAGELESS, "rollout.replicas=2", "run.hang_timeout_s=4", **light)
    run.wait_for("step 1:")
    for name in ("rollout-1", "rollout-2"):  # one that is still starting would be refused, too
        wait_until(partial(has_started, run, name))
    if not real:
        (folder / "refused").touch()
        os.kill(replicas(run)[0], signal.SIGKILL)
        run.wait_for("The run continues with the other replicas.")
        assert "can't continue: this machine has no place for it" in run.said()
        (folder / "refused").unlink()
        goes_on(run)

    os.kill(replicas(run)[-1], signal.SIGSTOP)
    run.wait_for("(run.hang_timeout_s); killed, to be restarted")
    goes_on(run)

    os.kill(run.pid_of("valkey-server"), signal.SIGSTOP)
    log = folder / "logs" / "replay.log"
    wait_until(lambda: "run.hang_timeout_s); killing it" in log.read_text())
    goes_on(run)
    check_end_without_folder(run, folder)


# Takes a second, so that a run that waits for a process to start takes few steps meanwhile.
JUDGE = """
import os, pathlib, time, headrace

class Judge(headrace.Environment):
    def score(self, sample):
        time.sleep(1)
        return float(len(sample.extra_env_info["answer"]) % 2 == len(sample.completion) % 2)
"""


@pytest.mark.nightly  # a minute of a core; each of these is tested every day without a run
def test_environments_are_started_attached_and_repaired_in_the_run(up: Start, folder: Path, tmp_path: Path) -> None:
    """Four of them: `file` is served by `up` and has a misspelt field, `program` is a program that `up` starts, `away` is one that
    somebody else starts, later, and `mine` is a script that is given an address and nothing else; it is killed once, and another takes
    its place."""
    misspelt, fine, script = tmp_path / "misspelt.py", tmp_path / "fine.py", tmp_path / "cell.py"
    misspelt.write_text(JUDGE.replace("answer", "anwser"))
    fine.write_text(JUDGE)
    script.write_text(f"{JUDGE}\nimport sys\nheadrace.attach(sys.argv[1], Judge(), 'mine')\n")
    port, hub = free_ports(2)
    serve = [sys.executable, "-m", "headrace.cli", "env", "serve", f"{fine}:Judge"]
    source = "{{dataset_name: arithmetic, size: 2000, seed: {}, env_name: {}}}"
    sources = ", ".join(source.format(seed, name) for seed, name in enumerate(("file", "program", "away", "mine")))
    run = up(
        100000,
        *ENDLESS,
        "grpo.num_prompts_per_step=4",
        f"env.file.target={misspelt}:Judge",
        f"env.program.command={json.dumps(serve)}",
        f"env.away.target=127.0.0.1:{port}",
        "env.mine.attached=true",
        f"reward.port={hub}",
        f"data.train=[{sources}]",
        "replay.max_scoring_attempts=1",
        rollout="small_rollout",
    )
    for service in ("replay", "reward", "trainer"):
        run.wait_for(f"\n{service}: http://127.0.0.1:")
    run.wait_for(f"waits for environment away at 127.0.0.1:{port}, ")
    run.wait_for("waits for environment mine, ")
    run.wait_for(f'no process is attached; run headrace.attach("127.0.0.1:{hub}", …, name="mine")')
    run.wait_for(" s: it is broken: KeyError: 'anwser' (")
    run.wait_for(f"; fix {misspelt}, and the run continues\n")
    log = folder / "logs" / "environment-file.log"
    assert "Judge raised KeyError" in log.read_text()
    assert "completion: " in log.read_text()
    assert re.search(r"environment file, broken for .*KeyError: 'anwser'", status_of(folder))
    assert "step 0:" not in run.said()

    for name in ("file", "program"):
        told = Path(f"/proc/{run.pid_of('environment', 'misspelt' if name == 'file' else 'fine')}/environ").read_text()
        token = folder / f"environment-{name}.credentials"
        assert f"ENVIRONMENT_TOKEN_FILE={token}\0" in told
        assert [each for each in told.split("\0") if each.startswith("HEADRACE_")] == []  # a key of the configuration
        (line,) = token.read_text().splitlines()
        assert line.startswith(f"environment {name} ")
        assert token.stat().st_mode & 0o077 == 0

    attach = [sys.executable, script, f"127.0.0.1:{hub}"]
    others = [subprocess.Popen([*serve, "--port", str(port)], stderr=subprocess.DEVNULL), subprocess.Popen(attach)]
    try:
        run.wait_for(f"no longer waits for environment away at 127.0.0.1:{port}")
        run.wait_for("no longer waits for environment mine")
        misspelt.write_text(JUDGE)
        run.wait_for(f"environment-file: {misspelt} has changed; killed, to be restarted")
        run.wait_for("step 1: reward")
        assert_attached(folder, "mine")
        others[1].kill()
        others[1].wait()
        others.append(subprocess.Popen(attach))
        os.kill(run.pid_of("environment", "fine"), signal.SIGKILL)
        run.wait_for("environment-program: killed by signal 9; restarting it")
        goes_on(run)
        assert_attached(folder, "mine")
        assert run.stop(signal.SIGTERM) == []
    finally:
        for process in others:
            process.kill()
            process.wait()


def assert_attached(folder: Path, name: str) -> None:
    """One process is attached as `name`, works and has scored."""
    mine = listed(folder, name)
    assert (mine["kind"], mine["ready"]) == ("KIND_ATTACHED", True)
    assert [process["works"] for process in mine["processes"]] == [True]
    assert mine["recent"]["scored"] > 0


def listed(folder: Path, name: str) -> dict[str, Any]:
    """What `headrace env list` says of an environment."""
    argv = [sys.executable, "-m", "headrace.cli", "env", "list", str(folder)]
    assert name in subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    found = json.loads(subprocess.run([*argv, "--json"], capture_output=True, text=True, check=True).stdout)
    assert name in {breaker["name"] for breaker in found["breakers"]}
    environment: dict[str, Any] = next(each for hub in found["hubs"].values() for each in hub if each["name"] == name)
    return environment


def test_an_environment_that_cant_start_ends_the_run_before_loading(up: Start, tmp_path: Path) -> None:
    file = tmp_path / "my_env.py"
    file.write_text(JUDGE)
    light = {"reward": "idle_reward", "rollout": "idle_rollout", "trainer": "talking_trainer"}
    unknown = up(1, PAGELESS, f"env.mine.target={file}:Jugde", **light)
    assert unknown.ends() == 1
    assert f"env.mine.target {file}:Jugde: {file} does not define Jugde; it defines Judge" in unknown.said()
    assert "replay: starting" not in unknown.said()

    file.write_text(f"import nonexistent_module\n{JUDGE}")
    raising = up(1, PAGELESS, f"env.mine.target={file}:Judge", **light)
    assert raising.ends() == 1
    assert "environment-mine can't continue: exit code 1" in raising.said()
    assert "No module named 'nonexistent_module'" in raising.said()
    assert "rollout-1: starting" not in raising.said()


@pytest.mark.parametrize("real", ["light"], indirect=True)
def test_a_hub_that_hangs_while_an_environment_starts_is_replaced(up: Start, tmp_path: Path) -> None:
    file = tmp_path / "my_env.py"
    file.write_text(JUDGE)
    run = up(1, PAGELESS, f"env.mine.target={file}:Judge", "run.hang_timeout_s=1", reward="hanging_reward")
    run.wait_for("reward: no answer for")


def replicas(run: Up) -> list[int]:
    """Process ids, oldest first."""
    return sorted(pid for pid, command in run.started().items() if "headrace.cli rollout" in command)


def goes_on(run: Up) -> None:
    before = last_step(run)
    wait_until(lambda: last_step(run) > before + 1)


# A process that is killed while it has a scratch folder, whose path it prints.
KILLED = """
import os, sys
from headrace.base.scratch import scratch_folder
with scratch_folder("headrace-killed-") as folder:
    sys.stdout.write(str(folder))
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.nightly  # by day other runs of this folder are stopped, below and while an evaluation starts, and tests/e2e kills the demo
@pytest.mark.parametrize(
    ("signum", "code", "moment"),
    [
        (signal.SIGTERM, 143, "rollout-1: starting"),
        (signal.SIGKILL, -9, "rollout-1: starting"),
        (signal.SIGKILL, -9, "step 1:"),
    ],
)
def test_however_it_is_stopped_no_process_is_left(up: Start, signum: int, code: int, moment: str) -> None:
    run = up(100_000, PAGELESS, reward="idle_reward", rollout="idle_rollout", trainer="talking_trainer")
    run.wait_for(moment)
    check_stop(run, signum, code)


def check_stop(run: Up, signum: int, code: int) -> None:
    """It leaves no process, and no scratch folder of one that was killed."""
    abandoned = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False).stdout
    assert run.stop(signum) == []
    assert run.process.returncode == code
    if signum == signal.SIGKILL:  # it removed nothing itself
        remove_abandoned()
    assert abandoned
    assert not Path(abandoned).exists()


@pytest.mark.parametrize("real", ["light"], indirect=True)  # the real services would look for these GPUs
def test_each_service_sees_its_own_gpus_and_status_says_which(up: Start, folder: Path) -> None:
    light = {"reward": "idle_reward", "rollout": "idle_rollout", "trainer": "talking_trainer"}
    on_gpus = ("trainer.device=cuda", "rollout.device=cuda", "rollout.replicas=2")
    run = up(100_000, *ENDLESS, *on_gpus, gpus="GPU-a GPU-b GPU-c GPU-d", **light)
    run.wait_for("step 1:")
    seen = {
        service: re.findall(rb"CUDA_VISIBLE_DEVICES=([^\0]*)", Path(f"/proc/{pid}/environ").read_bytes())
        for pid, command in run.started().items()
        for service in re.findall(r"headrace\.cli (\w+) ", command)
    }
    assert seen.keys() == {"replay", "reward", "rollout", "trainer", "page"}
    assert seen["trainer"] == [b"GPU-a"]
    assert seen["rollout"] in ([b"GPU-b"], [b"GPU-c"])
    assert seen["reward"] == [b"GPU-d"]
    assert seen["page"] == [b""]
    plan = ["trainer    GPU 0", "rollout-1  GPU 1", "rollout-2  GPU 2", "left over  GPU 3"]
    assert all(f"\n{line} (Stand-in, 80 GiB)" in run.said() for line in plan)
    said = status_of(folder)
    assert all(f" {line} (Stand-in, 80 GiB)" in said for line in plan)
    check_stop(run, signal.SIGTERM, 143)


@pytest.mark.parametrize("real", ["light"], indirect=True)
def test_on_one_gpu_the_trainer_starts_when_the_engine_is_up(up: Start, folder: Path) -> None:
    light = {"reward": "idle_reward", "rollout": "loading_rollout", "trainer": "talking_trainer"}
    run = up(100_000, *ENDLESS, PAGELESS, "trainer.device=cuda", "rollout.device=cuda", gpus="GPU-a", **light)
    run.wait_for("rollout-1: loading")
    assert not [command for command in run.started().values() if "headrace.cli trainer " in command]
    (folder / "loaded").touch()
    run.wait_for("step 1:")


def trained(folder: Path) -> list[int]:
    """Steps that the run says were trained, in its order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "train"]


def status_of(folder: Path) -> str:
    """What `headrace status` says through a pipe."""
    argv = [sys.executable, "-m", "headrace.cli", "status", "--run", str(folder)]
    status = subprocess.run(argv, capture_output=True, text=True)
    assert status.returncode == 0, status.stderr
    return status.stdout


def last_step(run: Up) -> int:
    steps = [line.split()[1] for line in run.said().splitlines() if line.startswith("step ") and "reward" in line]
    return int(steps[-1].rstrip(":"))
