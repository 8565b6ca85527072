"""A program that is after what is not its own gets none of it (acceptance 9)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from headrace.config import Config
from headrace.env.episode import Episode, EpisodeOutcome
from headrace.net import rpc
from headrace.net.credentials import Credentials, complete
from headrace.net.service import bind
from headrace.records.trajectory import Sampling
from headrace_services.agents.program_starter import HubPrograms
from tests.integration.agents.stage import N, Stage
from tests.support.buffer import make_group
from tests.support.ports import free_port
from tests.support.processes import UNPRIVILEGED
from tests.support.reward_hub import WAIT_S
from tests.support.toy_policy import END

PASSWORD = "password-of-the-buffer"


class Heard(HubPrograms):
    """What programs left, too."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.left: list[dict[str, Any]] = []

    async def run(self, episode: Episode) -> EpisodeOutcome:
        outcome = await super().run(episode)
        self.left.append(outcome.artifacts)
        return outcome


@contextlib.asynccontextmanager
async def hub_process(
    config: dict[str, Any], folder: Path, *overrides: str, **environ: str
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """`headrace reward`, as a user without privileges runs it."""
    file, log = folder / "run.yaml", folder / "hub.log"
    file.write_text(yaml.safe_dump(config))
    command = (*UNPRIVILEGED, sys.executable, "-m", "headrace.cli", "reward", "--config", str(file), *overrides)
    with log.open("wb") as out:
        hub = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environ})  # noqa: ASYNC220
    try:
        while b"reward hub on" not in log.read_bytes():
            assert hub.poll() is None, log.read_text()
            await asyncio.sleep(0.05)
        yield hub
    finally:
        hub.terminate()
        assert await asyncio.to_thread(hub.wait, WAIT_S) == 0, log.read_text()


@pytest.mark.slow
async def test_a_hostile_program_gets_nothing_and_earns_nothing(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # why an episode begins anew, if one does
    credentials = tmp_path / "credentials"
    complete(credentials, ["operator", "agents", "scorer"])
    tokens = [line.split()[-1] for line in credentials.read_text().splitlines()]
    program = {
        "type": "function",
        "function": "tests.support.hostile_program:play",
        "public": ["listens", "hub"],
        "grader": "length",
    }
    env: dict[str, Any] = {"talk": program, "length": {"max_tokens": 3}}
    stage.config = Config.model_validate({**stage.config.model_dump(exclude_unset=True), "env": env})
    port = free_port()
    service = {
        "run": {"id": "hostile"},
        "env": env,
        "reward": {"http_port": 0, "workers": 1},
        "security": {"credentials": str(credentials)},
    }
    with contextlib.closing(bind("127.0.0.1", 0, "port")) as listens:
        listens.listen()
        listens.setblocking(False)
        async with (
            hub_process(
                service,
                tmp_path,
                f"reward.port={port}",
                HEADRACE_REPLAY__REDIS_URL=f"redis://user:{PASSWORD}@127.0.0.1:1",
            ) as hub,
            rpc.channel(
                f"127.0.0.1:{port}", token=Credentials(credentials).make_token_source("agents"), keep_alive=True
            ) as channel,
        ):
            told = {"listens": f"127.0.0.1:{listens.getsockname()[1]}", "hub": f"127.0.0.1:{port}", "answer": "the key"}
            group = make_group(0, n=N, env_name="talk")
            group = msgspec.structs.replace(
                group, extra_env_info=told, sampling=Sampling(1.0, 64, stop_token_ids=(END,))
            )
            await stage.replay.enqueue([group], (await stage.replay.state()).timeline)
            programs = Heard([channel])
            async with stage.runner(programs):
                # handed in, and not scored: what a program says of its reward is not asked for where a grader says it
                await stage.until(scoring=1)
            assert listener_of(port) == f"{hub.pid} {tmp_path / 'run.yaml'}"
        with pytest.raises(BlockingIOError):
            listens.accept()
    assert len(programs.left) == N
    for left in programs.left:
        assert not [secret for secret in (PASSWORD, "HEADRACE_", "the key", *tokens) if secret in left["environment"]]
        assert set(left["parent"].values()) == {"PermissionError"}
        assert set(left["keys"]) <= {401, 404}
        assert set(left["fetched"]) == {400}
        assert left["options"] == [400, 400, 400, 400, 200]
        assert set(left["hub"]) == {"UNAUTHENTICATED"}
        assert left["asked"] == 200
    found = [await stage.replay.trajectory("e0-train-0", index) for index in range(N)]
    assert [score for _, score in filter(None, found)] == [None] * N


def listener_of(port: int) -> str:
    """The hidden hub as another process of its user finds it: by its configuration."""
    code = "import sys; from headrace.net.listeners import *; at = listener(int(sys.argv[1])); print(at.pid, saved_config(at))"
    command = (*UNPRIVILEGED, sys.executable, "-c", code, str(port))
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
