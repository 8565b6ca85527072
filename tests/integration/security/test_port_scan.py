"""Every port that `headrace up` opens tells a stranger nothing; with the run's own credentials the pages answer."""

from __future__ import annotations

import asyncio
import re
import signal
import stat
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from headrace.net.credentials import Credentials
from headrace.replay import ReplayClient
from tests.support.command import headrace
from tests.support.light_services import instead_of
from tests.support.port_scan import listening, told_by
from tests.support.ports import free_port
from tests.support.up import Up
from tests.support.waiting import wait_until

CONFIG = """
run: {{id: test, dir: {folder}/runs}}
policy: {{max_total_sequence_length: 64, generation: {{max_new_tokens: 6}}}}
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 2, use_leave_one_out_baseline: false}}
data: {{train: {{dataset_name: arithmetic, env_name: math}}}}
env:
  math: {{type: math}}
  talk: {{type: function, function: "tests.support.hostile_program:play", episodes: true}}
replay: {{port: 0, redis_port: {redis_port}}}
reward: {{port: 0, http_port: 0, workers: 1}}
"""


SERVICES = {
    "rollout": "idle_rollout",
    "trainer": "served_trainer",
    "reward": "looked_up_reward",
    "agents": "looked_up_agents",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_port_of_a_run_refuses_who_has_no_credentials(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, redis_port=free_port()))
    folder = tmp_path / "runs" / "test"
    environ = instead_of(tmp_path / "services", **SERVICES)
    run = Up(config, output=tmp_path / "up.out", environ=environ)
    try:
        run.wait_for("trainer: ready")
        run.wait_for("page: ready")
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        gateway, runner = ports_of_runner(folder / "logs" / "agents-1.log")
        pages = {
            saved["replay"]["port"],
            saved["reward"]["http_port"],
            saved["trainer"]["port"],
            saved["page"]["port"],
            runner,
        }
        hub, redis = saved["reward"]["port"], saved["replay"]["redis_port"]
        addresses = listening(run.started())
        assert {port for _, port in addresses} == {*pages, hub, redis, gateway}
        assert {host.removeprefix("::ffff:") for host, _ in addresses} == {"127.0.0.1"}
        for port, said in asyncio.run(told_by("127.0.0.1", (port for _, port in addresses))).items():
            expected = {
                hub: {"grpc": "UNAUTHENTICATED"},
                redis: {"redis": "NOAUTH"},
                gateway: {"http": "401 404 405, /healthz 404"},  # it answers episodes alone
            }
            pages_say = {"http": "401, /healthz 200"}
            assert said == expected.get(port, pages_say), port

        credentials = Credentials(folder / "credentials")
        private = [folder / "config.yaml", folder / "credentials", folder / "code", folder / "replay" / "users.acl"]
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *private)] == [0o700, *[0o600] * 4]
        tokens = [line.split()[-1] for line in (folder / "credentials").read_text().splitlines()]
        assert not_told(run, folder, tokens)
        for port in pages:
            reader = {"Authorization": f"Bearer {credentials.token('reader')}"}
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=reader, trust_env=False) as client:
                # no replica of this run has weights
                assert client.get("/readyz").status_code == (503 if port == runner else 200)
                assert client.get("/metrics").text.startswith("# HELP")
        signs_in_once(run)
        assert "next step     0" in headrace("status", "--run", folder).stdout
        assert headrace("groups", "list", "--run", folder).returncode == 0
        assert asyncio.run(reader_may_not_write(redis, credentials))
    finally:
        if run.process.poll() is None:
            run.stop(signal.SIGTERM)


def ports_of_runner(log: Path) -> tuple[int, int]:
    """Of its gateway and its pages, which it chooses itself."""
    found = wait_until(lambda: log.exists() and re.search(r"gateway on \S+:(\d+), HTTP on \S+:(\d+)", log.read_text()))
    assert isinstance(found, re.Match)
    return int(found[1]), int(found[2])


def not_told(run: Up, folder: Path, tokens: list[str]) -> bool:
    """No token is on a command line, in an environment, in a log or among what `up` said."""
    places = [run.said(), *(path.read_text() for path in (folder / "logs").iterdir())]
    processes = [run.process.pid, *run.started()]
    # a forked one has its command line and environment in the process that it stands for
    processes += [child.pid for each in processes for child in psutil.Process(each).children()]
    for pid in processes:
        places += [Path(f"/proc/{pid}/{name}").read_text(errors="replace") for name in ("cmdline", "environ")]
    return not any(token in place for place in places for token in tokens)


def signs_in_once(run: Up) -> None:
    """The address that `up` printed signs a browser in, and nobody after it."""
    found = re.search(r"^page: (http://127\.0\.0\.1:\d+)/runs/test#code=(\S+)$", run.said(), re.MULTILINE)
    assert found
    with httpx.Client(base_url=found[1], trust_env=False) as browser:
        page = browser.get("/", headers={"Accept": "text/html"})
        assert page.status_code == 401
        assert "code" in page.text
        assert "script-src 'sha256-" in page.headers["content-security-policy"]
        answer = browser.post("/session", json={"code": found[2]}, headers={"Origin": found[1]})
        assert answer.status_code == 204
        assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]
        view = browser.get("/runs/test")
        assert view.status_code == 200
        assert "<!doctype html>" in view.text
        assert view.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert view.headers["x-content-type-options"] == "nosniff"
        assert browser.get("/", headers={"Host": "evil.example"}).status_code == 403
    with httpx.Client(base_url=found[1], trust_env=False) as other:
        assert other.post("/session", json={"code": found[2]}).status_code == 401
        assert other.get("/").status_code == 401


async def reader_may_not_write(port: int, credentials: Credentials) -> bool:
    from headrace.base.errors import ReplayUnavailable

    url = f"redis://test-reader:{credentials.token('redis reader')}@127.0.0.1:{port}/0"
    client = await ReplayClient.connect(url, "test")
    try:
        await client.rewind(0, "timeline")
    except ReplayUnavailable as error:  # a right may be granted while a service runs
        return "may not run FCALL" in str(error)
    finally:
        await client.aclose()
    return False
