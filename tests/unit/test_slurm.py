"""`headrace deploy slurm`: what each node gets, and what the job does when its time ends or a service fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import parse_url

from headrace.base.devices import Site
from headrace.launch.slurm import place
from headrace.net.service import EXIT_STOPPED, EXIT_USER_ERROR
from tests.support import slurm
from tests.support.command import headrace, refused, said
from tests.support.waiting import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu_32b_16gpus.yaml"
SMALL = st.integers(1, 20)


@given(ranks=SMALL, replicas=SMALL, slice_size=st.integers(1, 9), nodes=st.integers(1, 5), gpus=st.integers(1, 9))
def test_every_process_has_gpus_of_its_own(ranks: int, replicas: int, slice_size: int, nodes: int, gpus: int) -> None:
    placed = place(ranks=ranks, replicas=replicas, slice_size=slice_size, nodes=nodes, gpus=gpus)
    room = Site(None, None, nodes * gpus, gpus).replicas_beside(ranks, slice_size)
    assert (placed is not None) == (room is not None and room >= replicas)  # as `config check` judges
    if placed is None:
        return
    assert len(placed) == nodes
    assert sum(len(node.ranks) for node in placed) == ranks
    assert len({len(node.ranks) for node in placed if node.ranks}) == 1
    assert placed[0].ranks
    slices = [replica.split(",") for node in placed for replica in node.replicas]
    assert [len(each) for each in slices] == [slice_size] * replicas
    for node in placed:
        used = [*node.ranks, *(gpu for replica in node.replicas for gpu in replica.split(","))]
        assert len(set(used)) == len(used)
        assert {int(gpu) for gpu in used} <= set(range(gpus))


@given(ranks=SMALL, replicas=SMALL, nodes=st.integers(1, 5))
def test_without_gpus_ranks_and_replicas_are_spread(ranks: int, replicas: int, nodes: int) -> None:
    placed = place(ranks=ranks, replicas=replicas, slice_size=1, nodes=nodes, gpus=0)
    assert placed is not None
    counts = [len(node.replicas) for node in placed]
    assert sum(len(node.ranks) for node in placed) == ranks
    assert sum(counts) == replicas
    assert max(counts) - min(counts) <= 1


def test_the_example_takes_both_nodes_as_its_first_lines_say() -> None:
    text = said("deploy", "slurm", EXAMPLE, "run.id=big", "--nodes", "2", "--gpus-per-node", "8")
    assert 'ranks=("6" "6")' in text
    assert 'replicas=("6,7" "6,7")' in text
    assert "#SBATCH --gpus-per-node=8" in text


def test_the_job_has_the_ports_of_the_configuration() -> None:
    given = "replay.redis_port=7001", "reward.port=7002", "agents.port=7003"
    text = said("deploy", "slurm", EXAMPLE, "run.id=big", *given, "--nodes", "2", "--gpus-per-node", "8")
    assert "redis_port=7001 reward_port=7002 agents_port=7003 " in text
    assert not re.search("6390|50390|8394", text)


def test_a_folder_may_have_any_name() -> None:
    text = said("deploy", "slurm", EXAMPLE, "run.id=big", "run.dir=/it's#1&%+", "--nodes", "2", "--gpus-per-node", "8")
    address = re.search("HEADRACE_REPLAY__REDIS_URL=.*", text)[0]  # type: ignore[index]
    of_the_job = [line for line in text.splitlines() if line.startswith("run_folder=")]
    script = "\n".join(
        [
            *of_the_job,
            "first=a redis_port=1",
            "secrets=$run_folder/secrets",
            address,
            "echo $HEADRACE_REPLAY__REDIS_URL",
        ]
    )
    url = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert parse_url(url)["ssl_ca_certs"] == "/it's#1&%+/big/secrets/ca.pem"  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ((), ("run.id",)),
        (("run.id=a", "--nodes", "1"), ("--nodes 1", "headrace up")),
        (("run.id=a", "--nodes", "2", "--gpus-per-node", "4"), ("trainer.num_processes 12", "--gpus-per-node")),
        (("run.id=a", "--nodes", "24", "--gpus-per-node", "1"), ("tensor_parallel_size 2", "does not span nodes")),
    ],
)
def test_what_has_no_place_is_refused(arguments: tuple[str, ...], tokens: tuple[str, ...]) -> None:
    error = refused("deploy", "slurm", EXAMPLE, *arguments)
    for token in tokens:
        assert token in error


@contextlib.contextmanager
def submitted(folder: Path, programs: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The example's job on two nodes, which are this machine; `programs` in the place of `redis-server` and of the environment's. It writes
    to `folder/told`."""
    text = said("deploy", "slurm", EXAMPLE, "run.id=big", f"run.dir={folder}")
    for name, code in {"redis-server": "exec sleep 600", "headrace": "exec sleep 600", **programs}.items():
        (folder / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / name).chmod(0o755)
    job = folder / "job.sh"
    job.write_text(re.sub("^bin=[^ ]+", f"bin={folder}", text, flags=re.MULTILINE))
    slurm.commands(folder, {"node-1": ["env", "NODE=1"], "node-2": ["env", "NODE=2"]})
    (folder / "ip").write_text("#!/bin/sh\necho 'x dev eth0 src 10.0.0.'$NODE' uid 0'\n")
    (folder / "ip").chmod(0o755)
    with (folder / "told").open("w") as told:
        process = subprocess.Popen(["bash", job], env=slurm.environ(folder), start_new_session=True, stderr=told)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


SECRETS = (
    '[[ $1 != credentials ]] || exec touch "${@: -1}/trainer.credentials"; [[ $1 != certs && $1 != acl ]] || exit 0'
)
TRAINS = "echo $NODE $* >> {0}/trains; trap 'echo $NODE >> {0}/saved; exit 143' USR1; while :; do sleep 0.05; done"


def test_a_job_whose_time_ends_lets_every_rank_save(tmp_path: Path) -> None:
    programs = {"headrace": f"{SECRETS}; exec sleep 600", "python": TRAINS.format(tmp_path)}
    trains = tmp_path / "trains"
    with submitted(tmp_path, programs) as job:
        wait_until(lambda: trains.exists() and len(trains.read_text().splitlines()) == 2)
        assert all("trainer.launch 6 --nnodes 2" in line for line in trains.read_text().splitlines())
        assert "10.0.0.1:29500" in trains.read_text()
        assert {log.name for log in (tmp_path / "big" / "logs").glob("rollout-*")} == {"rollout-1.log", "rollout-2.log"}
        job.terminate()  # as Slurm does: the script alone, by --signal=B:TERM
        assert job.wait(60) == EXIT_STOPPED
        assert sorted((tmp_path / "saved").read_text().split()) == ["1", "2"]


def test_a_service_that_ends_with_an_error_ends_the_job(tmp_path: Path) -> None:
    reward = f"{SECRETS}; [[ $1 != reward ]] || {{ echo 'error: no such environment'; exit 1; }}; exec sleep 600"
    with submitted(tmp_path, {"headrace": reward, "python": TRAINS.format(tmp_path)}) as job:
        assert job.wait(60) == EXIT_USER_ERROR
        told = (tmp_path / "told").read_text()
        assert "error: reward ended with 1" in told
        assert "no such environment" in told


def test_a_rank_that_dies_is_followed_by_another_start(tmp_path: Path) -> None:
    """Of all ranks, on both nodes; the second time they end as they should."""
    ranks = (
        f"echo $NODE >> {tmp_path}/trains; n=$(grep -c $NODE {tmp_path}/trains); ((n == 1)) || exit 0; "
        "((NODE == 1)) || exit 70; exit 143"
    )
    with submitted(tmp_path, {"headrace": f"{SECRETS}; exec sleep 600", "python": ranks}) as job:
        assert job.wait(60) == 0, (tmp_path / "told").read_text()
        assert sorted((tmp_path / "trains").read_text().split()) == ["1", "1", "2", "2"]


def test_the_script_is_valid_bash_whatever_the_names(tmp_path: Path) -> None:
    odd = tmp_path / "it's $HOME; rm -rf" / "run.yaml"
    odd.parent.mkdir()
    odd.write_text("defaults: " + str(EXAMPLE) + "\n")
    text = said("deploy", "slurm", odd, "run.id=big", "run.dir=/tmp/it's")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0
    head = text[: text.index("secrets=")].replace("set -euo pipefail", "set -euo pipefail; cd() { :; }")
    done = subprocess.run(["bash"], input=head + '\necho "$config"', text=True, capture_output=True, check=True)
    assert done.stdout.strip() == str(odd)
    assert headrace("deploy", "--help").returncode == 0
