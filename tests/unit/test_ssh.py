"""`headrace deploy ssh`: which hosts it takes, what each gets, and how what runs there ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import parse_url

from headrace.base.errors import ConfigError
from headrace.launch import host_check, remote
from headrace.launch.hosts import parse_hosts, spread
from headrace.launch.remote import FILES, NO_CONNECTION, Command
from headrace.launch.runs import held
from headrace.net.service import EXIT_ALARM, EXIT_USER_ERROR
from headrace.run.history import RUN_LOCK
from tests.support import ssh
from tests.support.command import refused
from tests.support.ports import free_port
from tests.support.waiting import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic_tiny.yaml"


@pytest.mark.parametrize(
    ("given", "destination", "port"),
    [
        ("gpu-1", "gpu-1", None),
        ("me@gpu-1.lan:2222", "me@gpu-1.lan", 2222),
        ("10.0.0.1:22", "10.0.0.1", 22),
        ("fd00::1", "fd00::1", None),
        ("me@[fd00::1]:22", "me@fd00::1", 22),
    ],
)
def test_hosts_are_taken_as_ssh_takes_them(given: str, destination: str, port: int | None) -> None:
    (host,) = parse_hosts(given)
    assert (host.destination, host.port) == (destination, port)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("", ("''",)),
        ("a,,b", ("''",)),
        ("-oProxyCommand=x", ("-oProxyCommand=x", "USER@NAME:PORT")),
        ("me@-x", ("-x",)),
        ("a b", ("'a b'",)),
        ("a:x", ("'x'", "65535")),
        ("a:70000", ("70000",)),
        ("a,b,a", ("a is there twice",)),
        ("me@a,me@a:", ("twice",)),
    ],
)
def test_what_is_no_host_is_refused(given: str, tokens: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hosts(given)
    for token in tokens:
        assert token in str(error.value)


SMALL = st.integers(0, 9)


@given(ranks=SMALL, replicas=SMALL, slice_size=st.integers(1, 4), gpus=st.lists(SMALL, min_size=1, max_size=4))
def test_every_process_has_gpus_of_its_own(ranks: int, replicas: int, slice_size: int, gpus: list[int]) -> None:
    placed = spread(ranks=ranks, replicas=replicas, slice_size=slice_size, gpus=gpus)
    if any(gpus):
        room = max(0, gpus[0] - ranks) // slice_size + sum(own // slice_size for own in gpus[1:])
        assert (placed is not None) == (ranks <= gpus[0] and replicas <= room)
    if placed is None:
        return
    counts = [len(own) for own in placed]
    assert sum(counts) == replicas
    assert (
        counts[0] == 0
        or len(gpus) == 1
        or (any(gpus) and all(len(own) == most // slice_size for own, most in zip(placed[1:], gpus[1:], strict=True)))
    )
    for host, own in enumerate(placed):
        used = [*(range(ranks) if host == 0 else ()), *(gpu for replica in own for gpu in replica)]
        assert len(set(used)) == len(used)
        assert any(gpus) <= all(len(replica) == slice_size and max(replica) < gpus[host] for replica in own)


# a host's Python that says what is there, without the time that Headrace takes to import: by the host's address
SEES = """
set -- $SSH_CONNECTION
time=1000 digest='"same"'
case $3 in
10.0.0.11) echo "sh: $0: not found" >&2; exit 127 ;;
10.0.0.12) digest=null ;;
10.0.0.13) digest='"other"' ;;
10.0.0.14) echo "too old" >&2; exit 2 ;;
10.0.0.15) time=1 ;;
esac
echo "a greeting"
echo "{\\"time\\": $time, \\"digest\\": $digest, \\"gpus\\": [], \\"address\\": \\"$3\\", \\"problems\\": []}"
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs are that hosts have."""
    folder = tmp_path / "bin"
    folder.mkdir()
    ssh.install(folder, {"redis-server": "exec sleep 600", "python": SEES})
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(host_check, "digest", lambda: "same")
    monkeypatch.chdir(tmp_path)
    return folder


def launch(hosts: str, *arguments: str) -> str:
    return refused("deploy", "ssh", EXAMPLE, *arguments, "--hosts", hosts, "--python", "python")


def test_hosts_that_can_not_be_used_are_all_named_with_the_remedy(path: Path) -> None:
    error = launch("10.0.0.1,unknown,me@locked:2222,away,near,10.0.0.11,10.0.0.12,10.0.0.13,10.0.0.14")
    for line in (
        "unknown: Host key verification failed.; log in once by hand, `ssh unknown`",
        "me@locked:2222: user@locked: Permission denied (publickey,password).; no password is asked for",
        "away: ssh: connect to host away port 22: Connection timed out; see that `ssh away` works",
        "near: it is reached at 127.0.1.1",
        "10.0.0.11: python can't be run there (sh: ",
        "10.0.0.12: python has no Headrace",
        "10.0.0.13: python has another build of Headrace",
        "10.0.0.14: python ended with 2: too old",
    ):
        assert line in error
    assert "10.0.0.1: " not in error


@pytest.mark.parametrize(
    ("hosts", "arguments", "tokens"),
    [
        ("10.0.0.1,twin", (), ("10.0.0.1 and twin are the same machine",)),
        ("10.0.0.1,10.0.0.15", (), ("10.0.0.15: its clock and that of 10.0.0.1 are 999 s apart",)),
        ("10.0.0.1,10.0.0.2,10.0.0.3", (), ("10.0.0.3 would have no replica", "rollout.replicas 1")),
        ("10.0.0.1", ("replay.redis_url=redis://x",), ("replay.redis_url", "leave it out")),
    ],
)
def test_hosts_that_do_not_suit_the_run_are_refused(
    path: Path, hosts: str, arguments: tuple[str, ...], tokens: tuple[str, ...]
) -> None:
    error = launch(hosts, *arguments)
    for token in tokens:
        assert token in error


def test_what_a_host_lacks_is_told_by_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 4000 10.0.0.1 22")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        seen = host_check.look(str(tmp_path), "/proc/none", port)
        assert [str(problem).partition(" ")[0] for problem in seen["problems"]] == ["/proc", "redis-server", "port"]
        assert f"port {port}" in seen["problems"][-1]
    assert seen["address"] == "10.0.0.1"
    assert seen["digest"] == host_check.digest() != ""
    (missing,) = host_check.look("/nowhere", "runs", None)["problems"]
    assert "/nowhere" in missing
    assert host_check.look(str(tmp_path), "runs", None)["problems"] == []


def test_a_second_start_of_a_run_is_refused_before_it_has_a_server(tmp_path: Path) -> None:
    """Given another port, its server would write into the files of the first."""
    with held(tmp_path / "runs" / "three" / RUN_LOCK, "", ""):
        problems = host_check.look(str(tmp_path), "runs/three", free_port())["problems"]
    assert "the run of runs/three is up there" in problems[0]


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check.tempfile, "TemporaryFile", lambda dir: Path(dir, "/dev/full").open("wb"))  # noqa: SIM115
    (full,) = host_check.look(str(tmp_path), "runs", None)["problems"]
    assert "(No space left on device)" in full


@pytest.mark.skipif(shutil.which("ssh") is None, reason="apt-get install openssh-client")
def test_what_a_person_has_set_for_a_host_is_not_in_the_way(tmp_path: Path) -> None:
    settings = tmp_path / "config"
    settings.write_text(
        "RemoteCommand tmux\nControlMaster auto\nLocalForward 18394 localhost:8394\nExitOnForwardFailure yes\n"
    )
    (host,) = parse_hosts("gpu-1")
    command = host.ssh("true")
    said = subprocess.run(
        ["ssh", "-G", "-F", settings, *command[1:-1]], capture_output=True, text=True, check=True
    ).stdout
    found = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    assert (found["controlmaster"], found["clearallforwardings"]) == ("false", "yes")
    assert found.get("remotecommand", "none") == "none"


def test_up_starts_no_fewer_replicas_than_none() -> None:
    error = refused("up", EXAMPLE, "--elsewhere", "2")
    assert "--elsewhere 2: rollout.replicas is 1" in error


@contextlib.contextmanager
def running(folder: Path, code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A shell with this code on a host, as the supervisor starts it."""
    ssh.install(folder, {})
    command = Command(["bash", "-c", code], str(folder), 20, {"KEY": f"{FILES}/key"}, {"key": "secret"})
    (folder / "command").write_bytes(remote.encode(command))
    module = [sys.executable, "-P", "-m", "headrace.launch.remote"]
    far = " ".join([*module, "far"])
    process = subprocess.Popen(
        [*module, "near", folder / "command", folder / "ssh", "10.0.0.1", far], start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


TELLS = "ls -l $KEY > told; echo $KEY >> told; trap 'echo ended >> told; exit 7' TERM; echo >> told; while :; do sleep 0.05; done"


@pytest.mark.parametrize("how", ["told", "killed"])
def test_a_command_on_a_host_ends_as_one_here_and_leaves_no_file(tmp_path: Path, how: str) -> None:
    told = tmp_path / "told"
    with running(tmp_path, TELLS) as process:
        wait_until(lambda: told.exists() and len(told.read_text().splitlines()) == 3)
        mode, key = told.read_text().splitlines()[:2]
        assert mode.startswith("-rw-------")
        assert Path(key).read_text() == "secret"
        if how == "told":
            process.terminate()
            assert process.wait(60) == 7
        else:
            process.kill()
        wait_until(lambda: "ended" in told.read_text())
        wait_until(lambda: not Path(key).parent.exists())


def test_a_command_on_a_host_that_is_cut_off_ends(tmp_path: Path) -> None:
    """Its connection stands, and nothing comes."""
    code = "import sys; from headrace.launch import remote; remote.SILENT_S = 0.2; sys.exit(remote.far())"
    command = Command(["sleep", "600"], str(tmp_path), 20)
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE) as far:
        assert far.stdin is not None
        far.stdin.write(remote.encode(command))
        far.stdin.flush()
        assert far.wait(60) == 128 + signal.SIGTERM


def test_a_signal_that_ends_a_command_on_a_host_is_in_the_exit_code(tmp_path: Path) -> None:
    with running(tmp_path, "kill -KILL $$") as process:
        assert process.wait(60) == 128 + signal.SIGKILL


def test_an_ssh_that_is_killed_is_a_lost_connection(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with running(tmp_path, TELLS) as process:
        wait_until(lambda: told.exists() and len(told.read_text().splitlines()) == 3)
        (ssh_process,) = psutil.Process(process.pid).children()
        ssh_process.kill()
        assert process.wait(60) == NO_CONNECTION


# what a host's Python does in a run: it makes the secrets, says that it was started, and ends when it is told
RUNS = f"""
told() {{ echo "$1" >> "$TOLD"; }}
case "$*" in
"-P - ["* | *remote\\ far | *json*) exec {sys.executable} "$@" ;;
"-P - "*)
  [[ $SSH_CONNECTION != *" $UNREACHING "* ]] || exit 1
  until grep -qs "redis begins" "$TOLD"; do sleep 0.05; done
  exit 0 ;;
*" certs "*)
  while [[ $1 != --dir ]]; do shift; done
  for each in ca "${{@:3}}"; do touch "$2/$each.pem" "$2/$each.key"; done
  exit 0 ;;
*" credentials "*) touch "${{@: -1}}/rollout.credentials"; exit 0 ;;
*" acl "*) exit 0 ;;
esac
service=$4
[[ $service != up ]] || cp "$5" "$TOLD.yaml"
told "$service begins $HEADRACE_ROLLOUT__ADVERTISE_HOST ${{*: -1}}"
trap 'told "$service ends"; exit 143' TERM
[[ $service != up || -z $ENDS ]] || exit $ENDS
[[ $service != rollout || -z $NO_MODEL ]] || {{ echo no model; exit 1; }}
while :; do sleep 0.05; done
"""
SERVER = """
[[ -z $BROKEN ]] || { echo no memory; exit 1; }
echo redis begins >> "$TOLD"
trap 'echo redis ends >> "$TOLD"; exit 0' TERM
while :; do sleep 0.05; done
"""


@contextlib.contextmanager
def deployed(path: Path, folder: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    ssh.install(path, {"redis-server": SERVER, "python": RUNS})
    arguments = [
        "run.id=three",
        "rollout.replicas=2",
        f"replay.redis_port={free_port()}",
        "--hosts",
        "10.0.0.1,10.0.0.2,10.0.0.3",
    ]
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "deploy",
        "ssh",
        str(EXAMPLE),
        *arguments,
        "--python",
        str(path / "python"),
    ]
    environ = {**os.environ, "TOLD": str(folder / "told"), **variables}
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process, folder / "told"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.communicate()


def test_services_are_on_the_first_host_and_end_in_order(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's #1 & 50% +x"
    folder.mkdir()
    with deployed(path, folder) as (process, told):
        wait_until(lambda: told.exists() and told.read_text().count("begins") == 4)
        url = yaml.safe_load(Path(f"{told}.yaml").read_text())["replay"]["redis_url"]
        assert parse_url(url)["ssl_ca_certs"] == str(folder / "runs/three/secrets/ca.pem")  # type: ignore[typeddict-item]
        began = told.read_text().splitlines()
        assert began[0] == "redis begins"
        assert "up begins  2" in began
        assert sorted(line.split()[2] for line in began if line.startswith("rollout")) == ["10.0.0.2", "10.0.0.3"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        ended = told.read_text().splitlines()[4:]
        assert sorted(ended) == ["redis ends", "rollout ends", "rollout ends", "up ends"]
        assert ended[-1] == "redis ends"


def test_a_run_ends_with_the_exit_code_of_up(path: Path, tmp_path: Path) -> None:
    with deployed(path, tmp_path, ENDS="3") as (process, told):
        assert process.wait(60) == EXIT_ALARM
        assert told.read_text().splitlines()[-1] == "redis ends"


def test_replicas_that_all_have_an_error_end_the_run(path: Path, tmp_path: Path) -> None:
    with deployed(path, tmp_path, NO_MODEL="1") as (process, told):
        _, error = process.communicate(timeout=60)
        assert process.returncode == EXIT_USER_ERROR
        assert "The run continues with the other replicas" in error
        for token in ("rollout-1 on 10.0.0.2 can't continue: exit code 1", "rollout-2 on 10.0.0.3 can't", "no model"):
            assert token in error
        assert told.read_text().splitlines()[-1] == "redis ends"


@pytest.mark.nightly  # as the one before, but for the message
def test_a_first_host_that_is_lost_is_named(path: Path, tmp_path: Path) -> None:
    with deployed(path, tmp_path, ENDS=str(NO_CONNECTION)) as (process, _):
        _, error = process.communicate(timeout=60)
        assert process.returncode == EXIT_USER_ERROR
        assert "headrace up on 10.0.0.1: the connection was lost" in error
        assert "run.id=three" in error


@pytest.mark.parametrize(
    ("variable", "tokens"),
    [
        ("UNREACHING", ("10.0.0.3 does not reach 10.0.0.1 at 10.0.0.1:", "open this port")),
        pytest.param(
            "BROKEN", ("redis on 10.0.0.1 can't continue: exit code 1", "no memory"), marks=pytest.mark.nightly
        ),  # the same end
    ],
)
def test_a_buffer_that_hosts_do_not_reach_ends_the_start(
    path: Path, tmp_path: Path, variable: str, tokens: tuple[str, ...]
) -> None:
    with deployed(path, tmp_path, **{variable: "10.0.0.3"}) as (process, told):
        _, error = process.communicate(timeout=60)
        assert process.returncode == EXIT_USER_ERROR
        for token in tokens:
            assert token in error
        assert not told.exists() or "up begins" not in told.read_text()
