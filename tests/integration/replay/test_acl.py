"""Users of the Redis server: each role does its whole job through the real client with its own user, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from headrace import Environment, Sample
from headrace.base.errors import ReplayDenied, ReplayUnavailable
from headrace.cli.app import app
from headrace.env.server import serving
from headrace.net.credentials import REDIS_ROLES
from headrace.records.score import Score
from headrace.replay import EnvironmentLimits, Limits, ReplayClient
from headrace.replay.build import BUILD
from headrace.replay.connection import function_name, open_redis
from headrace.replay.leases import CARRIED_BYTES
from headrace.replay.retry import BufferRetry
from headrace_services.replay import acl, library
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.buffer import healthy_replica, make_call, make_group, make_trajectory, nonce, push_all, reserve
from tests.support.ports import free_port
from tests.support.reward_hub import scoring, start_hub
from tests.support.waiting import eventually

RUN = "guarded"
PASSWORDS = {role: f"secret of {role}" for role in REDIS_ROLES}
ADMIN = f"headrace-admin:{PASSWORDS['admin'].replace(' ', '%20')}"


@pytest.fixture(scope="module")
def server(redis_binary: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server that knows the users of the run, and lets nobody else in."""
    server = EmbeddedServer(tmp_path_factory.mktemp("acl"), "127.0.0.1", free_port(), binary=redis_binary)

    async def start() -> None:
        await server.start()
        async with open_redis(server.url) as redis:
            for line in acl.users(RUN, PASSWORDS)[::-1]:  # the default user is shut out last
                await redis.execute_command("ACL", "SETUSER", *line.split()[1:])

    asyncio.run(start())
    yield server
    asyncio.run(server.stop())


def url_of(server: EmbeddedServer, role: str) -> str:
    user, _, password = ADMIN.partition(":") if role == "admin" else (f"{RUN}-{role}", "", PASSWORDS[role])
    return server.url.replace("redis://", f"redis://{user}:{password.replace(' ', '%20')}@")


@contextlib.asynccontextmanager
async def connected(server: EmbeddedServer, role: str, run_id: str = RUN) -> AsyncIterator[ReplayClient]:
    client = ReplayClient(open_redis(url_of(server, role)), run_id)
    yield client
    await client.aclose()


@pytest.fixture
async def opened(server: EmbeddedServer, limits: Limits) -> EmbeddedServer:
    """The run is there, made by the replay service's user."""
    async with connected(server, "admin") as admin:
        for pattern in (f"hr:{{{RUN}}}*", "hr:{other}*", "headrace:run"):
            async for key in admin.redis.scan_iter(match=pattern):
                await admin.redis.unlink(key)
        await library.load(admin.redis)
    async with connected(server, "replay") as replay:
        await library.load(replay.redis)  # it is there
        await replay.open_run(dataclasses.replace(limits, environments={"game": EnvironmentLimits(episodes=True)}))
    return server


@pytest.mark.parametrize("up", [False, True])
async def test_each_role_does_its_whole_job_with_its_own_user(opened: EmbeddedServer, limits: Limits, up: bool) -> None:
    """A run from its first prompt to a restore. With `up`, one user stands for all roles, as under `headrace up`."""
    async with contextlib.AsyncExitStack() as stack:
        replay, trainer, rollout, agents, operator, reader = [
            await stack.enter_async_context(connected(opened, "up" if up and role != "reader" else role))
            for role in ("replay", "trainer", "rollout", "agents", "operator", "reader")
        ]
        state = await trainer.rewind(0, nonce())
        groups = [make_group(order) for order in range(8)] + [make_group(0, lane="validation")]
        assert await trainer.enqueue(groups, state.timeline) == 9

        replica = nonce()
        await rollout.register(replica, {"host": "here"})
        await transfer(trainer, rollout, replica, 0)
        await rollout.wait_work(0.01)
        await rollout.heartbeat(replica, [])
        leases = await rollout.lease(replica, 64)
        await rollout.heartbeat(replica, [lease.token for lease in leases])
        await rollout.release(leases[-1], "shutdown", failed=False)
        for lease in leases[:-1]:
            await rollout.push_many([(lease, make_trajectory(lease, index)) for index in range(2)])

        await replay.release_scoring()
        await replay.wait_scoring(0.01)
        while jobs := await replay.take_scoring({"math": 64}):
            assert not any(
                await replay.score_many([(job, Score("SCORED", 1.0 + job.trajectory.index)) for job in jobs])
            )

        batch = await reserve(trainer, 0)
        assert len(await trainer.read([t.key for t in batch.trajectories])) == 4
        assert len(await trainer.read_groups(batch.groups)) == 2
        done, _, _ = await trainer.read_evaluated(["e0-validation-0"])
        assert len(done) == 1
        await trainer.drop_validation(state.timeline, 1)
        await trainer.publish_metrics("train", 1, {"reward": 1.0}, state.timeline)
        await trainer.commit(1, state.timeline)
        await trainer.close(state.timeline)
        await trainer.wait_ready(0.01)
        (failing, *_) = await rollout.lease(replica, 1)
        await rollout.reject(failing, "too long")
        assert await operator.retry({failing.group.order: 0}) == 1
        assert await trainer.read_wanted() == [failing.group.order]
        assert await trainer.enqueue(groups[failing.group.order :][:1], state.timeline, refill=True) == 1

        await transfer(trainer, rollout, replica, 1)
        await run_an_episode(trainer, agents)
        await people_look(reader)
        await people_look(replay)
        await rollout.deregister(replica)
        restored = await trainer.restore(1, nonce(), nonce(), 1)
        assert await trainer.enqueue([make_group(1)], restored.timeline, refill=True) == 1
        await replay.open_run(limits)


async def run_an_episode(trainer: ReplayClient, agents: ReplayClient) -> None:
    group = make_group(1, lane="validation", env_name="game")
    assert await trainer.enqueue([group], (await trainer.state()).timeline, validation=1) == 1
    runner = nonce()
    await agents.register_runner(runner, {"host": "here"})
    await agents.wait_work(0.01)
    (lease,) = await agents.lease_episodes(runner, 0, 2)
    await agents.append(lease, 0, 0, nonce(), make_call())
    long = msgspec.structs.replace(make_trajectory(lease, 0), text="7" * CARRIED_BYTES)
    await agents.finish(lease, 0, long, Score("SCORED", 1.0))
    assert (await agents.runner_heartbeat(runner, [lease.token])).alive
    await agents.release(lease, "shutdown", failed=False)
    await agents.deregister_runner(runner)


async def transfer(trainer: ReplayClient, rollout: ReplayClient, replica: str, version: int) -> None:
    epoch = nonce()
    await trainer.open_epoch(epoch, version, (await trainer.state()).timeline, {})
    await rollout.acknowledge(replica, epoch)
    await trainer.begin_epoch(epoch, {}, [0.0], 1e-3)
    assert (await rollout.verify(replica, epoch, [0.0])).verified
    await trainer.end_epoch(epoch, aborted=False)
    assert [member.state for member in await trainer.replicas()] == ["HEALTHY"]


async def people_look(client: ReplayClient) -> None:
    assert (await client.state()).next_step == 1
    assert (await client.stats())["replicas"]
    assert await client.metrics()
    assert await client.events("0", 0.01)
    assert await client.newest_event()
    found = await client.group("e0-train-2")
    assert found is not None
    assert await client.trajectory("e0-train-2", 0) is not None


@pytest.mark.parametrize("role", acl.ROLES)
async def test_every_other_function_is_refused(opened: EmbeddedServer, role: str) -> None:
    allowed = acl.list_functions(role)
    async with connected(opened, role) as client:
        for name in library.built_in().transitions:
            if name not in allowed:
                with pytest.raises(ReplayDenied, match=rf"'{RUN}-{role}' .* may not run FCALL {function_name(name)} "):
                    await client._connection.call(name)


FORBIDDEN = {
    "replay": ("retry", "reserve", "rewind", "restore", "commit", "enqueue", "lease", "push", "verify"),
    "trainer": ("retry", "lease", "push", "score", "take_scoring", "verify", "register", "open_run"),
    "rollout": (
        "retry",
        "reserve",
        "rewind",
        "restore",
        "commit",
        "enqueue",
        "close",
        "score",
        "take_scoring",
        "open_epoch",
        "open_run",
    ),
    "reader": ("reserve", "rewind", "restore", "commit", "enqueue", "lease", "push", "score", "register", "open_run"),
    "agents": ("reserve", "rewind", "enqueue", "lease", "push", "heartbeat", "verify", "score", "open_run", "retry"),
    "operator": ("reserve", "rewind", "enqueue", "lease", "push", "score", "open_run"),
}


@pytest.mark.parametrize("role", acl.ROLES)
async def test_no_role_does_what_another_is_there_for(opened: EmbeddedServer, role: str) -> None:
    async with connected(opened, role) as client:
        for name in FORBIDDEN[role]:
            with pytest.raises(ReplayDenied, match=f"may not run FCALL {function_name(name)} "):
                await client._connection.call(name)


OUTSIDE = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
    ("FUNCTION", "FLUSH"),
    ("FUNCTION", "DELETE", library.built_in().name),
    ("FUNCTION", "LOAD", "REPLACE", library.built_in().source()),
    ("ACL", "SETUSER", "me", "on"),
    ("EVAL", "return 1", 0),
    ("KEYS", "*"),
    ("SHUTDOWN",),
    ("REPLICAOF", "NO", "ONE"),
    ("GET", "hr:{other}:x"),
    ("MGET", "hr:{other}:x"),
    ("XRANGE", "hr:{other}:metrics", "-", "+"),
    ("SUBSCRIBE", "hr:{other}:wake:work"),
    ("FCALL", function_name("state"), 1, "hr:{other}"),
    ("FCALL", function_name("state"), 1, "hr:{guarded-too}"),
]


@pytest.mark.parametrize("role", [*acl.ROLES, "up"])
async def test_the_server_and_other_runs_are_out_of_reach(opened: EmbeddedServer, role: str) -> None:
    async with connected(opened, role) as client:
        for command in OUTSIDE:
            with pytest.raises(ReplayDenied, match=f"'{RUN}-{role}' .* may not run {command[0]}"):
                await client._connection.command(*command)


async def test_people_who_read_write_nothing(opened: EmbeddedServer) -> None:
    key = f"hr:{{{RUN}}}"
    async with connected(opened, "reader") as client:
        for command in (
            ("SET", f"{key}:x", "1"),
            ("HSET", key, "next_step", "7"),
            ("UNLINK", key),
            ("XADD", f"{key}:metrics", "*", "a", "b"),
            ("PUBLISH", f"{key}:wake:work", "1"),
            ("SET", "headrace:run", "other"),
        ):
            with pytest.raises(ReplayDenied, match="may not run"):
                await client._connection.command(*command)
    for role in ("rollout", "trainer"):
        async with connected(opened, role) as client:
            with pytest.raises(ReplayDenied, match="may not run SET"):
                await client._connection.command("SET", "headrace:run", "other")


async def test_a_wrong_password_is_said_at_once_with_the_user(opened: EmbeddedServer) -> None:
    for login in (f"{RUN}-trainer:wrong@", "nobody:x@", f":{PASSWORDS['trainer'].replace(' ', '%20')}@", ""):
        url = opened.url.replace("redis://", f"redis://{login}")
        user = login.partition(":")[0] or "default"
        with pytest.raises(ReplayDenied, match=rf"login of user '{user}' .*`headrace acl` prints"):
            await ReplayClient.connect(url, RUN)
        async with open_redis(url) as redis:  # with all its retries, which are for what may pass
            with pytest.raises(ReplayDenied, match=f"'{user}'"):
                await ReplayClient(redis, RUN).state()


async def test_the_administrator_of_a_shared_server_loads_the_functions(opened: EmbeddedServer) -> None:
    async with connected(opened, "admin") as admin, connected(opened, "replay") as replay:
        await admin.redis.function_delete(library.built_in().name)
        with pytest.raises(
            ReplayDenied, match=rf"no functions of this build \({library.built_in().name}\).*`headrace functions \|"
        ):
            await library.load(replay.redis)
        with pytest.raises(ReplayUnavailable, match=f"no functions of this program's build {BUILD}"):
            await replay.state()
        await admin.redis.function_load(CliRunner().invoke(app, ["functions"]).stdout)
        await library.load(replay.redis)
        await replay.state()


async def test_the_replay_service_loads_its_own_servers_functions(opened: EmbeddedServer) -> None:
    users = {line.split()[1]: line.split()[2:] for line in acl.users(RUN, PASSWORDS, own_server=True)}
    assert {name for name, rights in users.items() if "+function|load" in rights} == {f"{RUN}-replay", f"{RUN}-up"}
    shared = {line.split()[1]: line.split()[2:] for line in acl.users(RUN, PASSWORDS)}
    async with connected(opened, "admin") as admin, connected(opened, "replay") as replay:
        await admin.redis.function_delete(library.built_in().name)
        await admin.redis.execute_command("ACL", "SETUSER", f"{RUN}-replay", *users[f"{RUN}-replay"])
        try:
            await library.load(replay.redis)
            await replay.state()
        finally:
            await admin.redis.execute_command("ACL", "SETUSER", f"{RUN}-replay", *shared[f"{RUN}-replay"])


@pytest.mark.parametrize("role", [*acl.ROLES, "up"])
async def test_the_functions_of_another_build_are_refused(opened: EmbeddedServer, role: str) -> None:
    async with connected(opened, role) as client:
        with pytest.raises(
            ReplayDenied, match=r"may not run FCALL hr_0a1b2c3d_state .* `headrace acl` of this version"
        ):
            await client._connection.command("FCALL", "hr_0a1b2c3d_state", 1, f"hr:{{{RUN}}}")


async def test_rights_that_a_function_lacks_inside_are_named(opened: EmbeddedServer, limits: Limits) -> None:
    """An ACL that somebody trimmed, say: the function may be called, but not all that it is made of."""
    rights = [line.split()[3:] for line in acl.users(RUN, PASSWORDS) if line.split()[1] == f"{RUN}-rollout"]
    async with connected(opened, "admin") as admin:
        await admin.redis.execute_command("ACL", "SETUSER", "stale", "on", ">x", *rights[0], "-hmget", "-zrem")
        await admin.redis.execute_command("ACL", "SETUSER", "opener", "on", ">x", "~*", "&*", "+@all", "-hset")
    said = r"may not run FCALL hr_\w+_{} .*right to {} is missing.* load the ACL"
    async with open_redis(opened.url.replace("redis://", "redis://stale:x@")) as redis:
        with pytest.raises(ReplayDenied, match=said.format("deregister", "hmget, zrem")):
            await ReplayClient(redis, RUN).deregister("r")
    async with open_redis(opened.url.replace("redis://", "redis://opener:x@")) as redis:
        with pytest.raises(ReplayDenied, match=said.format("open_run", "hset")):
            await ReplayClient(redis, "unopened").open_run(limits)


async def test_rights_taken_away_while_a_service_runs_are_waited_for(opened: EmbeddedServer) -> None:
    async with connected(opened, "admin") as admin, connected(opened, "rollout") as rollout:
        for right in ("fcall", "hset"):
            await rollout.register(nonce(), {"host": "here"})
            await admin.redis.execute_command("ACL", "SETUSER", f"{RUN}-rollout", f"-{right}")
            try:
                with pytest.raises(ReplayUnavailable, match=rf"'{RUN}-rollout' .* may not run FCALL .* load the ACL"):
                    await rollout.register(nonce(), {"host": "here"})
                waits = asyncio.create_task(
                    BufferRetry(first_pause_s=0.01)(lambda: rollout.register(nonce(), {"host": "here"}))
                )
                await asyncio.sleep(0)
            finally:
                await admin.redis.execute_command("ACL", "SETUSER", f"{RUN}-rollout", f"+{right}")
            await asyncio.wait_for(waits, 60)


@contextlib.asynccontextmanager
async def without_right(server: EmbeddedServer, role: str, right: str) -> AsyncIterator[None]:
    async with connected(server, "admin") as admin:
        await admin.redis.execute_command("ACL", "SETUSER", f"{RUN}-{role}", f"-{right}")
        try:
            yield
        finally:
            await admin.redis.execute_command("ACL", "SETUSER", f"{RUN}-{role}", f"+{right}")


@pytest.mark.parametrize(
    ("role", "command"),
    [
        ("rollout", ("MGET", f"hr:{{{RUN}}}:x")),
        ("rollout", ("SET", f"hr:{{{RUN}}}:x", "1", "PX", "1")),
        ("replay", ("GET", "headrace:run")),
        ("replay", ("INFO", "persistence")),
        ("replay", ("SMEMBERS", f"hr:{{{RUN}}}:old")),
        ("trainer", ("SCAN", 0, "MATCH", f"hr:{{{RUN}}}:x")),
        ("trainer", ("UNLINK", f"hr:{{{RUN}}}:x")),
        ("up", ("XRANGE", f"hr:{{{RUN}}}:metrics", "-", "+")),
        ("reader", ("XREVRANGE", f"hr:{{{RUN}}}:metrics", "+", "-")),
        ("reader", ("XREAD", "STREAMS", f"hr:{{{RUN}}}:events", "$")),
    ],
    ids=lambda case: case if isinstance(case, str) else case[0],
)
async def test_any_command_whose_right_is_taken_away_is_waited_for(
    opened: EmbeddedServer, role: str, command: tuple[object, ...]
) -> None:
    async with connected(opened, role) as client:
        await client.state()
        async with without_right(opened, role, str(command[0]).lower()):
            for send in (client._connection.command(*command), client._connection.pipeline([command])):
                with pytest.raises(
                    ReplayUnavailable, match=f"'{RUN}-{role}' .* may not run {command[0]} .* load the ACL"
                ):
                    await send
        await client._connection.command(*command)


class Constant(Environment):
    """Gives every completion 1."""

    build = "1"

    def score(self, sample: Sample) -> float:
        return 1.0


async def test_the_scorer_waits_for_a_right_to_read_and_says_so(
    opened: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        connected(opened, "up") as up,
        connected(opened, "replay") as replay,
        serving(Constant()) as port,
        start_hub({"math": {"target": f"127.0.0.1:{port}"}}) as hub,
    ):
        await up.enqueue([make_group(0, n=2)], (await up.state()).timeline)
        (lease,) = await up.lease(await healthy_replica(up), 1)
        async with scoring(replay, hub.port) as scorer:
            async with without_right(opened, "replay", "mget"):
                await push_all(up, lease)
                await eventually(lambda: scorer.done() or "may not run MGET" in caplog.text)
                assert not scorer.done()
            await eventually(lambda: is_ready(up))


async def is_ready(replay: ReplayClient) -> bool:
    return (await replay.state()).counts.get("ready") == 1


async def test_a_user_that_may_not_subscribe_is_told_so_by_its_wait(opened: EmbeddedServer) -> None:
    async with connected(opened, "admin") as admin, connected(opened, "rollout") as replica:
        rights = ("ACL", "SETUSER", f"{RUN}-rollout")

        async def waits(times: int) -> None:
            for _ in range(times):  # the first may return, as wake-ups before the subscription may have been missed
                await replica.wait_work(30.0)

        await admin.redis.execute_command(*rights, "-subscribe")
        try:
            with pytest.raises(ReplayDenied, match=f"'{RUN}-rollout' .* may not run SUBSCRIBE .* load the ACL"):
                await waits(3)
        finally:
            await admin.redis.execute_command(*rights, "+subscribe")
        await waits(2)


def test_every_function_belongs_to_a_role() -> None:
    reachable = {name for role in acl.ROLES for name in acl.list_functions(role)}
    assert reachable == set(library.built_in().transitions)


def test_a_server_takes_the_printed_file(tmp_path: Path, redis_binary: str | None) -> None:
    """As `aclfile`, which is read more strictly than ACL SETUSER."""
    import subprocess

    from headrace.base.parent import die_with_parent
    from headrace_services.replay.embedded import _find_bundled

    path = tmp_path / "users.acl"
    path.write_text("\n".join(acl.users(RUN, PASSWORDS)) + "\n")
    port = free_port()
    process = subprocess.Popen(
        [
            redis_binary or _find_bundled(),
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(tmp_path),
            "--aclfile",
            str(path),
        ],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ready to accept connections" in line:
            break
    process.kill()
    assert process.wait() == -9, "".join(said)


async def test_no_password_but_the_right_one_is_in_the_file() -> None:
    lines = acl.users(RUN, PASSWORDS)
    assert not any(word in line for word in PASSWORDS.values() for line in lines)
    assert lines[0].startswith("user default off")
    assert [line.split()[1] for line in lines[1:]] == [
        *(f"{RUN}-{role}" for role in (*acl.ROLES, "up")),
        "headrace-admin",
    ]
