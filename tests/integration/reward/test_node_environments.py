"""Environments in JavaScript (examples/environments/node), written from the .proto files alone, against a real hub."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace import Sample
from headrace.records.score import Score
from tests.support.reward_hub import WAIT_S, Hub, attach_environment, credit_wait, start_environment, start_hub, told

ROOT = Path(__file__).parents[3]
FILES = ROOT / "examples" / "environments" / "node"
ATTACHED = {"exact": {"attached": True}}
# of a registry that can't be reached from here, as npm names them
UNREACHABLE = re.compile(
    r"network timeout|\bE(NOTFOUND|AI_AGAIN|CONNREFUSED|CONNRESET|NETUNREACH|HOSTUNREACH|TIMEDOUT|\w*TIMEOUT)\b"
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its packages installed."""
    if lacking := [program for program in ("node", "npm") if shutil.which(program) is None]:
        pytest.skip(f"{' and '.join(lacking)} not installed here: apt-get install nodejs npm")
    folder = tmp_path_factory.mktemp("node") / "environment"
    shutil.copytree(FILES, folder, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    patience = ["--fetch-retries=1", "--fetch-timeout=30000"]
    done = subprocess.run([*install, *patience], cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode and (unreachable := UNREACHABLE.search(done.stderr)):
        pytest.skip(
            f"the npm registry can't be reached from here ({unreachable[0]}), and npm's cache lacks the packages"
        )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is not beside the .proto files."""
    monkeypatch.setenv("PROTO", str(ROOT / "proto"))


@contextlib.asynccontextmanager
async def attached(node: Path, hub: Hub, *arguments: str, **pipes: int) -> AsyncIterator[asyncio.subprocess.Process]:
    async with attach_environment(node / "attached.js", hub, *arguments, program="node", **pipes) as process:
        yield process


def with_reward(node: Path, name: str, first: str) -> Path:
    """A copy whose reward begins with this line."""
    folder = node.parent / name
    shutil.copytree(node, folder, symlinks=True)
    source = (folder / "environment.js").read_text()
    marked = "async function reward(trajectory) {"
    assert marked in source
    (folder / "environment.js").write_text(source.replace(marked, f"{marked}\n  {first}"))
    return folder


def exact(completion: str, answer: object = "132") -> Sample:
    return Sample(completion, {} if answer is None else {"answer": answer}, environment="exact")


def of(score: Score) -> tuple[str, float | None]:
    return score.status, score.reward


# right, wrong, unusable, and an answer that no double can hold
SAMPLES = [exact(" 132\n"), exact("13"), exact("132", None), exact("9007199254740993", "9007199254740993")]
SCORES = [("SCORED", 1), ("SCORED", 0), ("INVALID", None), ("SCORED", 1)]


async def test_attached_it_scores_and_leaves(node: Path) -> None:
    async with start_hub(ATTACHED) as hub, attached(node, hub) as process:
        await hub.attached("exact", 16)
        scores = await hub.score(SAMPLES)
        assert [of(score) for score in scores] == SCORES
        assert scores[0].environment == "Exact"
        assert scores[2].message == "extra_env_info has no answer"
        process.terminate()
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
        assert not (await hub.environments())["exact"].ready


async def test_work_over_its_capacity_waits_for_credit_and_comes_back(node: Path) -> None:
    """A process that granted more would be refused for good, one that granted less would be out of credit in the second round."""
    settings = {"exact": {"attached": True, "max_batch_size": 2}}
    async with start_hub(settings) as hub, attached(node, hub, "--capacity", "3") as process:
        await hub.attached("exact", 3)
        for _ in range(3):
            scores = await hub.score([exact(str(number), str(number % 2)) for number in range(50)])
            assert [score.reward for score in scores] == [float(number < 2) for number in range(50)]
        assert process.returncode is None


async def test_a_hub_that_was_restarted_is_found_again(node: Path) -> None:
    async with contextlib.AsyncExitStack() as processes:
        async with start_hub(ATTACHED) as hub:
            await processes.enter_async_context(attached(node, hub))
            await hub.attached("exact", 16)
            port = hub.port
        async with start_hub(ATTACHED, port=port) as hub:
            await hub.attached("exact", 16)
            assert [of(score) for score in await hub.score(SAMPLES)] == SCORES


async def test_what_is_late_is_timed_out_and_keeps_its_room_until_done(node: Path) -> None:
    slow = with_reward(node, "slow", "if (trajectory.completion === 'hang') await new Promise(() => {});")
    async with start_hub(ATTACHED) as hub, attached(slow, hub, "--capacity", "2"):
        await hub.attached("exact", 2)
        with told(4.0):
            hung, fine = await hub.score([exact("hang"), exact("132")])
            assert [of(hung), of(fine)] == [("TIMED_OUT", None), ("SCORED", 1)]
            assert of((await hub.score([exact("hang")]))[0]) == ("TIMED_OUT", None)
        with credit_wait(0):
            (full,) = await hub.score([exact("132")])
        assert full.status == "NOT_STARTED"
        assert "at capacity" in full.message


SPEECHLESS = "it threw a value without text (object)"
NO_REWARD = "the reward is neither a number nor a Result with a status"
# what the code of a reward does, and what its message says
THROWN = {
    "throw new TypeError('too long')": "TypeError: too long (",
    "throw 'words'": "words",
    "throw null": "null",
    "throw undefined": "undefined",
    "throw Symbol('s')": "Symbol(s)",
    "throw Object.create(null)": SPEECHLESS,
    "throw { toString() { throw 1; } }": SPEECHLESS,
    "throw Object.defineProperty(new Error('x'), 'stack', { get() { throw 1; } })": SPEECHLESS,
    "throw Object.defineProperty(new Error('x'), 'message', { get() { throw 1; } })": SPEECHLESS,
    "throw new Proxy({}, { get() { throw 1; } })": SPEECHLESS,
    "throw Promise.reject(new TypeError('in a promise'))": "[object Promise]",
    "Promise.reject(new TypeError('left alone')); return new Promise(() => {})": "TypeError: left alone (",
    "setTimeout(() => { throw new TypeError('later'); }); return new Promise(() => {})": "TypeError: later (",
    "process.nextTick(() => { throw null; }); return new Promise(() => {})": "null",
    "throw '\\ud800'": "\ufffd",
    "return Promise.reject()": "undefined",
    "return { then() { throw 4; } }": "4",
    "return null": NO_REWARD,
    "return undefined": NO_REWARD,
    "return '1'": NO_REWARD,
    "return {}": NO_REWARD,
    "return 1n": NO_REWARD,
    "return NaN": "the reward is NaN, not a finite number",
    "return { status: 'STATUS_SCORED' }": "the reward is undefined, not a finite number",
    "return { get status() { throw 5; } }": "5",
    "return { status: 'STATUS_SCORED', reward: 1, components: 5 }": "components: object expected",
    "return { status: 'STATUS_INVALID', message: Object.create(null) }": "Cannot convert object to primitive value",
}


async def test_what_it_throws_or_returns_fails_its_own_sample_alone(node: Path) -> None:
    code = "if (/throw|return/.test(trajectory.completion)) return new Function(trajectory.completion)();"
    done = with_reward(node, "done", code)
    samples = [exact(code) for code in THROWN]
    async with start_hub(ATTACHED) as hub, attached(done, hub, "--capacity", str(len(samples) + 1)) as process:
        await hub.attached("exact", len(samples) + 1)
        for _ in range(2):
            *scores, fine = await hub.score([*samples, exact("132")])
            assert of(fine) == ("SCORED", 1)
            for code, score in zip(THROWN, scores, strict=True):
                assert (score.status, score.reward) == ("FAILED", None), code
                assert THROWN[code] in score.message, code
        (half,) = await hub.score([exact("return { status: 'STATUS_SCORED', reward: 1, build: '\\ud800' }")])
        assert half.reward == 1
        assert half.build.startswith("\ufffd")
        assert process.returncode is None


async def test_a_name_that_the_run_doesn_t_have_ends_it_with_the_reason(node: Path) -> None:
    async with (
        start_hub(ATTACHED) as hub,
        attached(node, hub, "--name", "other", stderr=asyncio.subprocess.PIPE) as process,
    ):
        _, stderr = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 1
    assert f"127.0.0.1:{hub.port} refused environment other: NOT_FOUND" in stderr.decode()


async def test_served_it_scores(node: Path) -> None:
    async with (
        start_environment(node / "served.js", program="node") as process,
        start_hub({"exact": {"target": process.target}}) as hub,
    ):
        scores = await hub.score(SAMPLES)
        assert [of(score) for score in scores] == SCORES
        listed = (await hub.environments())["exact"]
        assert (listed.description.name, listed.description.capacity) == ("Exact", 16)
        for _ in range(2):  # its room is free again
            many = await hub.score([exact(str(number), "7") for number in range(16)])
            assert [score.reward for score in many] == [float(number == 7) for number in range(16)]
        assert await process.stop() == 0


@pytest.mark.parametrize(("token", "status"), [("own", "SCORED"), ("foreign", "NOT_STARTED")])
async def test_served_it_answers_who_has_its_token_alone(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, status: str
) -> None:
    """`headrace up`, which starts it as a `command`, says by this variable whom it answers."""
    tokens, mine = tmp_path / "credentials", tmp_path / "mine"
    tokens.write_text("scorer judge\noperator boss\nenvironment exact own\n")
    tokens.chmod(0o600)
    mine.write_text(f"environment exact {token}\n")
    monkeypatch.setenv("ENVIRONMENT_TOKEN_FILE", str(mine))
    served = start_environment(node / "served.js", program="node")
    async with served as process, start_hub({"exact": {"target": process.target}}, tokens) as hub:
        (score,) = await hub.score([exact("132")])
        assert score.status == status
        assert ("UNAUTHENTICATED" in score.message) == (token == "foreign")


async def test_beyond_this_machine_it_serves_nothing_without_tls(node: Path) -> None:
    argv = ["node", str(node / "served.js"), "--host", "0.0.0.0", "--port", "0"]
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    _, stderr = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 2
    assert "0.0.0.0:0 is not on" in stderr.decode()


async def test_attached_it_presents_its_token(node: Path, tmp_path: Path) -> None:
    tokens, mine = tmp_path / "credentials", tmp_path / "mine"
    tokens.write_text("scorer judge\noperator boss\nenvironment exact own\n")
    tokens.chmod(0o600)
    mine.write_text("environment exact own\n")
    async with start_hub(ATTACHED, tokens) as hub, attached(node, hub, "--token-file", os.fspath(mine)):
        await hub.attached("exact", 16)
        assert [of(score) for score in await hub.score(SAMPLES)] == SCORES
