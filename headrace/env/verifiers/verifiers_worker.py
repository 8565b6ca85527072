"""Plays the episodes of a verifiers environment, in its own Python: `PYTHON -P verifiers_worker.py check|tasks|serve`.

It imports nothing of Headrace, which that Python needn't have. The first line of its input is a JSON object that names the environment
(`verifiers`, as in section [env] of verifiers' own configuration). It answers with lines of JSON; `{"problem": …}` is why it can't.

- `check`: one line, `{}`.
- `tasks`: a line for each task of the task set that `select` selects, or for the first `size` of an endless one.
- `serve`: `{"software": […]}`, the versions that decide rewards. After that each connection to the socket `address` is an episode: a line
  with task, base_url and api_key, answered by a line with its outcome. The process ends with its input; a caller that disconnects ends its
  episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

RELEASE = "0.4"
# The largest line with an episode, or its outcome.
MOST_BYTES = 16 * 1024**2
_TRACEBACK = 2000
# Headers of a request that belong to one connection, or identify the caller.
_OF_A_CONNECTION = frozenset({
    "accept-encoding", "authorization", "connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding",
    "upgrade", "x-session-id",
})  # fmt: skip


class UnsupportedEnvironment(Exception):
    """Raised when an environment, task or configuration can't be used; the message has the remedy."""


# -- decisions ---------------------------------------------------------------------------------------------------------------


def find_policy(agents: Mapping[str, Any]) -> str:
    """Return the name of the agent that is the policy: the one of `agents` without its own client. Raises `UnsupportedEnvironment`."""
    policies = [name for name, agent in agents.items() if agent.client is None]
    if not policies:
        raise UnsupportedEnvironment(
            f"its agents ({', '.join(agents)}) have a client each, so none is the policy; leave client out of the one to train"
        )
    if len(policies) > 1:
        raise UnsupportedEnvironment(
            f"its agents {' and '.join(policies)} would all be the policy, each with its own reward, but an episode has one reward; give "
            "all but the one to train a client and a model, as in judge: {client: {base_url: …}, model: …}"
        )
    return policies[0]


def find_retry(retries: Mapping[str, Any]) -> str | None:
    """Return the key of one of the `retries` that would repeat an episode within itself; None if there is none."""
    for key, retry in retries.items():
        if retry.max_retries or any(rule.max_retries for rule in retry.rules):
            return key
    return None


def outcome(episode: Any, policy: str) -> dict[str, Any]:
    """Return the outcome of a verifiers episode. It has a reward only if the rubric gave one, as the reward of a failed trace is 0."""
    if not episode.ok:
        errors = [*(error for trace in episode.traces if not trace.ok for error in trace.errors), *episode.errors]
        if not errors:
            return _failure("the episode is not ok, but has no error")
        last = errors[-1]
        return {**_failure(f"{last.type}: {last.message}"), "traceback": (last.traceback or "")[-_TRACEBACK:]}
    traces = [trace for trace in episode.traces if trace.agent.name == policy]
    if len(traces) != 1:
        return _failure(
            f"{policy} was run {len(traces)} times in one episode, with a reward each time, but an episode has one reward"
        )
    (trace,) = traces
    if not trace.rewards:
        return _failure("its task records no reward; give it a method with @vf.reward")
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        return _failure(f"{', '.join(unscored)} was not computed ({trace.stop_condition})")
    return {
        "status": "SCORED",
        "reward": trace.reward,
        "components": {name: reward.value for name, reward in trace.rewards.items()},
        "metadata": {"stop": trace.stop_condition, "metrics": dict(trace.metrics)},
    }


def _failure(message: str) -> dict[str, Any]:
    return {"status": "FAILED", "message": message}


def _line(outcome: dict[str, Any]) -> bytes:
    try:
        return json.dumps(outcome).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps(_failure(f"its outcome is not JSON: {error}")).encode() + b"\n"


def make_row(task: Any) -> dict[str, Any]:
    """Return what other processes get of a task: its identity, and the messages that it begins with. A task without messages, because its
    user is played, is shown by its name."""
    data, messages = task.data, []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [{"role": each.role, "content": _text(each.content)} for each in data.prompt or ()]
    if not messages or messages[-1]["role"] in ("system", "assistant"):
        messages.append({"role": "user", "content": data.name or f"task {data.idx}"})
    return {"task": {"index": data.idx, "key": task.key}, "messages": messages}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or () if part.type == "text")


class Tasks:
    """The tasks of a task set by index. An endless task set is read as far as needed."""

    def __init__(self, taskset: Any) -> None:
        """Read the whole task set, if it ends. Raises `UnsupportedEnvironment`."""
        self._rest: Iterator[Any] = iter(taskset)
        with loading():
            self._read: list[Any] = list(self._rest) if taskset.bounded else []

    def find(self, asked: Any) -> Any:
        """Return the task that a row names. Raises `UnsupportedEnvironment`."""
        match asked:
            case {"index": int(index), "key": str(key)} if index >= 0:
                self._read += itertools.islice(self._rest, max(0, index + 1 - len(self._read)))
            case _:
                raise UnsupportedEnvironment(
                    f"task {asked!r:.200} names no task; take the rows from `dataset_name: verifiers`"
                )
        if index >= len(self._read):
            raise UnsupportedEnvironment(
                f"task {index} does not exist: the task set has {len(self._read)}, and had others when the run's rows were made"
            )
        task = self._read[index]
        if task.key != key:
            raise UnsupportedEnvironment(
                f"task {index} has changed since the run's rows were made (its key is {task.key}, and was {key}), but the task set must be "
                "the same each time it is loaded; give it a seed, and all processes of the run the same version"
            )
        return task


def sources(modules: Mapping[str, Any], names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the sources of the packages in which these modules are, as names and digests. verifiers itself is identified by its version."""
    for package in sorted({name.partition(".")[0] for name in names} - {"verifiers"}):
        file = Path(modules[package].__file__)
        files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
        digest = hashlib.sha256()
        for each in files:
            digest.update(str(each.relative_to(file.parent)).encode() + b"\0" + each.read_bytes() + b"\0")
        yield package, digest.hexdigest()[:16]


# -- with verifiers ----------------------------------------------------------------------------------------------------------


def load(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the environment, and the name of the agent that is the policy. Raises `UnsupportedEnvironment`."""
    try:
        version = importlib.metadata.version("verifiers")
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import agent_config_fields
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"{sys.executable} can't import verifiers ({error}); install it there: pip install 'verifiers=={RELEASE}.*' uv"
        ) from error
    if not version.startswith(f"{RELEASE}."):
        raise UnsupportedEnvironment(
            f"{sys.executable} has verifiers {version}; install {RELEASE} there: pip install 'verifiers=={RELEASE}.*'"
        )
    # after installed packages, as for a function's modules
    sys.path.append(os.getcwd())
    try:
        resolved = vf.resolve_env_config(dict(config))
        agents = agent_config_fields(resolved)
        policy = find_policy(agents)
        budgets = {"retries": resolved.retries, **{f"{name}.retries": agent.retries for name, agent in agents.items()}}
        if (key := find_retry(budgets)) is not None:
            raise UnsupportedEnvironment(
                f"{key}: a run itself restarts failed episodes (replay.max_attempts); leave it out"
            )
        return vf.load_environment(resolved), policy
    except UnsupportedEnvironment:
        raise
    except (Exception, SystemExit) as error:  # errors of its code are for the user
        raise UnsupportedEnvironment(f"{type(error).__name__}: {error}") from error


def select_rows(env: Any, select: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the tasks. Raises `UnsupportedEnvironment`."""
    from verifiers.v1 import SelectConfig

    try:
        taskset = env.taskset.select(SelectConfig.model_validate(dict(select)))
    except ValueError as error:
        raise UnsupportedEnvironment(
            f"task_config {dict(select)}: verifiers refuses it as `select` ({error})"
        ) from error
    with loading():
        yield from map(make_row, taskset if taskset.bounded else taskset.take(size))


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Convert any exception of a task set's own code to `UnsupportedEnvironment`, with its message."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UnsupportedEnvironment(f"its task set can't be loaded: {type(error).__name__}: {error}") from error


class Relay:
    """Gives verifiers one address for all episodes, and forwards each call to its episode's own address. So verifiers never has an
    episode's key. One address is also needed because verifiers keeps a client for each address until it ends.

    A call names its trace by 128 random bits that no other process knows.
    """

    def __init__(self) -> None:
        self.base_url = ""
        self.episodes: dict[str, tuple[str, str]] = {}  # by trace: base_url and api_key
        self._client: Any = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        import aiohttp
        from aiohttp import web

        app = web.Application(client_max_size=0)  # the gateway limits it
        app.router.add_route("*", "/v1/{path:.+}", self._carry)
        # a client that disconnects cancels its call at the gateway too
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            connector = aiohttp.TCPConnector(limit=0)
            patience = aiohttp.ClientTimeout(total=None)  # the run has its own timeouts
            async with aiohttp.ClientSession(connector=connector, timeout=patience) as self._client:
                yield
        finally:
            await runner.cleanup()

    async def _carry(self, request: Any) -> Any:
        import aiohttp
        from aiohttp import web

        base_url, key = self.episodes.get(request.headers.get("x-session-id", ""), ("", ""))
        if not base_url:
            return web.json_response(_error("the call belongs to no episode, or to one that has ended"), status=401)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_A_CONNECTION}
        headers["Authorization"] = f"Bearer {key}"
        url, body = f"{base_url}/{request.match_info['path']}", await request.read()
        try:
            answering = await self._client.request(request.method, url, data=body or None, headers=headers)
        except aiohttp.ClientError as error:
            return web.json_response(_error(f"the policy can't be reached ({type(error).__name__})"), status=502)
        async with answering as answer:
            kept = {name: answer.headers[name] for name in ("content-type", "retry-after") if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "relay_error"}}


class Player:
    """Plays episodes, each on its own connection."""

    def __init__(self, env: Any, policy: str, relay: Relay) -> None:
        self._env, self._policy, self._relay = env, policy, relay
        self._tasks = Tasks(env.taskset)
        self._playing: set[asyncio.Task[dict[str, Any]]] = set()

    async def aclose(self) -> None:
        """End every episode, with its processes."""
        for playing in self._playing:
            playing.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        playing = asyncio.create_task(self._play(json.loads(await reader.readline())))
        gone = asyncio.create_task(reader.read())
        self._playing.add(playing)
        playing.add_done_callback(self._playing.discard)
        try:
            await asyncio.wait([playing, gone], return_when=asyncio.FIRST_COMPLETED)
            if playing.done() and not playing.cancelled():
                writer.write(_line(playing.result()))
                await writer.drain()
        finally:
            playing.cancel()
            gone.cancel()
            await asyncio.gather(playing, gone, return_exceptions=True)
            writer.close()

    async def _play(self, asked: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig

        try:
            task = self._tasks.find(asked["task"])
        except UnsupportedEnvironment as error:
            return {"status": "INVALID", "message": str(error)}
        # the policy must get no key of the user: no variable has this name
        client = EvalClientConfig(base_url=self._relay.base_url, api_key_var="HEADRACE_HAS_NO_KEY_HERE")
        # the run decides about sampling and limits
        context = ModelContext(client=client, model="policy", sampling=SamplingConfig())
        traces = []

        def minted(trace: Any) -> None:
            if trace.agent.name == self._policy:
                traces.append(trace.id)
                self._relay.episodes[trace.id] = (asked["base_url"], asked["api_key"])

        try:
            (slot,) = self._env.slots(task)
            return outcome(await self._env.run_slot(slot, context, on_trace=minted), self._policy)
        except (
            BaseException
        ) as error:  # whatever was raised reaches the caller as FAILED, unless the episode is given up
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            message = traceback.format_exception_only(error)[-1].strip()
            return {**_failure(message), "traceback": traceback.format_exc()[-_TRACEBACK:]}
        finally:
            for trace in traces:
                self._relay.episodes.pop(trace, None)


async def serve(env: Any, policy: str, address: str, say: Any) -> None:
    relay = Relay()
    async with relay.serving(), env.serving():
        player = Player(env, policy, relay)
        task = type(env.taskset).task_type()
        decides = {each.__module__ for each in (type(env), type(env.taskset), task)}
        digests = [f"{package} {digest}" for package, digest in sources(sys.modules, decides)]
        async with await asyncio.start_unix_server(player.serve, address, limit=MOST_BYTES):
            say({"software": [f"verifiers {importlib.metadata.version('verifiers')}", *digests]})
            await _end_of_input()
            await player.aclose()


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass


def main(mode: str) -> int:
    request = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the environment prints must not get between the answers

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        env, policy = load(request["verifiers"])
        if mode == "check":
            say({})
        elif mode == "tasks":
            for row in select_rows(env, request["select"], request["size"]):
                say(row)
        else:
            asyncio.run(serve(env, policy, request["address"], say))
    except UnsupportedEnvironment as error:
        say({"problem": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
