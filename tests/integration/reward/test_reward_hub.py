"""The hub on real gRPC, with real worker processes and environments in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace import Environment, Sample
from headrace.base.errors import ConfigError, ServiceError
from headrace.config import Config
from headrace.config.environments import MathConfig
from headrace.env.server import serving
from headrace.env.wire import sample_to_wire
from headrace.net import rpc
from headrace.net.service import bind
from headrace.v1 import reward_pb2, trajectory_pb2
from headrace_services.reward.pool import WorkerPool
from headrace_services.reward.sandbox import Level
from tests.support.processes import started
from tests.support.raw_environment import Request, raw_environment, scored
from tests.support.reward_hub import WAIT_S, hurried, start_environment, start_hub
from tests.support.waiting import eventually

ODD = Path(__file__).parents[2] / "support" / "odd_environment.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_environment.py"
MATH = Sample("132", {"answer": "132"}, environment="math")
# sympy sets out to write this number down
ENDLESS = Sample("9^9^9^9", {"answer": "132"}, environment="math")


def children_of(parent: int) -> set[int]:
    children: set[str] = set()
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile has none
            children.update((task / "children").read_text().split())
    return {int(pid) for pid in children}


def workers_of(parent: int | None = None) -> set[int]:
    """The scoring processes that `parent`, or else this process, started; other children are not the hub's."""
    return {
        pid
        for pid in children_of(parent or os.getpid())
        if b"headrace_services.reward.scoring_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def descendants(parent: int) -> set[int]:
    try:
        children = children_of(parent)
    except FileNotFoundError:  # it ended meanwhile
        return set()
    return children.union(*map(descendants, children))


def running(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has buried yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_batch_that_mixes_environments_comes_back_in_order() -> None:
    async with start_environment(ODD) as odd:
        env = {"math": {}, "odd": {"target": odd.target, "max_batch_size": 2}}
        async with start_hub(env) as hub:
            odds = [Sample("x" * length, environment="odd") for length in range(5)]
            unknown = Sample("x", environment="orange")
            wrong = Sample("131", {"answer": "132"}, environment="math")
            scores = await hub.score([MATH, *odds, unknown, wrong])
    assert [score.reward for score in scores] == [1, 0, 1, 2, 3, 4, None, 0]
    # built in or served, an environment says how long it took
    assert all(score.timings["environment"] > 0 for score in scores if score.reward is not None)
    assert {(score.environment, score.build) for score in scores[1:6]} == {("Odd", "2")}
    assert scores[6].status == "INVALID"
    assert "no environment 'orange' (it has: math, odd)" in scores[6].message


@pytest.mark.usefixtures("executed")
async def test_a_custom_environment_runs_without_anything_heavy() -> None:
    async with start_environment(ODD) as odd, start_hub({"odd": {"target": odd.target}}) as hub:
        (score,) = await hub.score([Sample("modules", environment="odd")])
    assert score.metadata == {"heavy": []}


async def test_the_example_runs_as_it_stands() -> None:
    info = {"answer": "26", "numbers": [3, 5, 7]}
    completions = ["(7 * 3) + 5", "7 + 5 + 3", "26", "I give up", "7 / (5 - 5) + 3", "__import__('os')"]
    async with start_environment(EXAMPLE) as example, start_hub({"countdown": {"target": example.target}}) as hub:
        scores = await hub.score([Sample(text, info, environment="countdown") for text in completions])
        (invalid,) = await hub.score([Sample("1", environment="countdown")])
        assert await example.stop() == 0
    assert [score.reward for score in scores] == [1, pytest.approx(0.1), 0, 0, 0, 0]
    assert scores[0].components == {"format": 1, "correct": 1}
    assert (scores[0].environment, scores[0].build) == ("countdown", "1.0")
    assert invalid.status == "INVALID"


async def test_law_7_failure_is_not_zero_a_failing_sample_costs_no_other() -> None:
    async with start_environment(ODD) as odd, start_hub({"odd": {"target": odd.target}}) as hub:
        fine, raised, nan = await hub.score([Sample(text, environment="odd") for text in ("abc", "raise", "nan")])
    assert fine.reward == 3
    assert (raised.status, raised.reward) == ("FAILED", None)
    assert re.fullmatch(
        r"RuntimeError: the judge is out \(.*odd_environment.py:\d+, in score: raise .*\)", raised.message
    )
    assert (nan.status, nan.reward) == ("FAILED", None)


async def test_law_6_liveness_a_hanging_sample_is_timed_out_alone() -> None:
    async with (
        start_environment(ODD, "--answer-within", 5.0) as odd,
        start_hub({"odd": {"target": odd.target}, "math": {}}) as hub,
    ):
        hang, fine, sum_ = await hub.score([Sample("hang", environment="odd"), Sample("abc", environment="odd"), MATH])
        assert (hang.status, hang.reward) == ("TIMED_OUT", None)
        assert (fine.reward, sum_.reward) == (3, 1)
        assert await odd.stop() == 0  # though a thread of it still hangs


async def test_a_process_killed_in_a_call_has_a_successor_that_scores(tmp_path: Path) -> None:
    async with start_environment(ODD) as odd, start_hub({"odd": {"target": odd.target}, "math": {}}) as hub:
        seen = tmp_path / "seen"
        hang = Sample("hang", {"touch": str(seen)}, environment="odd")
        call = asyncio.create_task(hub.score([hang, MATH]))
        await eventually(seen.exists)
        odd.kill()
        killed, sum_ = await call
        assert (killed.status, killed.reward, sum_.reward) == ("INTERRUPTED", None, 1)
        assert odd.target in killed.message
        async with start_environment(ODD, port=odd.port):
            (again,) = await hub.score([Sample("abc", environment="odd")])
        assert again.reward == 3


async def test_an_environment_not_running_has_not_started_and_is_named() -> None:
    with bind("127.0.0.1", 0, "port") as sock:
        target = f"127.0.0.1:{sock.getsockname()[1]}"
    async with start_hub({"gone": {"target": target, "timeout_s": 1.0}}) as hub:
        (score,) = await hub.score([Sample("x", environment="gone")])
        assert (score.status, score.reward) == ("NOT_STARTED", None)
        assert f"env.gone.target {target} can't be reached" in score.message
        gone = (await hub.environments())["gone"]
        assert not gone.ready
        assert target in gone.message
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{hub.http_port}") as http:
            ready = await http.get("/readyz")
            assert ready.status_code == 200, "it is waited for; the others are scored"
            assert f"environment gone: env.gone.target {target}" in ready.json()["waits_for"][0]
            (report,) = (await http.get("/v1/environments")).json()
            assert (report["name"], report["address"], report["ready"]) == ("gone", target, False)
            assert "can't be reached" in report["message"]


async def test_a_hub_without_headrace_up_says_who_has_to_start_a_program() -> None:
    mine = {"command": ["./judge", "-v"]}
    with pytest.raises(ConfigError, match=r"env\.mine\.command \./judge -v:.*env\.mine\.command=null"):
        async with start_hub({"mine": mine}):
            pass
    async with start_hub({"mine": {**mine, "port": 1}}) as hub:  # started by hand, where the configuration says
        assert (await hub.environments())["mine"].target == "127.0.0.1:1"


async def test_an_environment_that_breaks_the_contract_is_failed() -> None:
    async def short(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        return [trajectory_pb2.Result(status=trajectory_pb2.STATUS_SCORED)] * min(1, len(request.trajectories))

    async with raw_environment(short) as target, start_hub({"short": {"target": target}}) as hub:
        sample = Sample("x", environment="short")
        two, one = await hub.score([sample, sample]), await hub.score([sample])
    assert [score.status for score in two] == ["FAILED", "FAILED"]
    assert "returned 1 results for 2 trajectories" in two[0].message
    assert (one[0].status, one[0].reward) == ("FAILED", None)
    assert "SCORED without a reward" in one[0].message


async def test_law_7_failure_is_not_zero_a_reward_out_of_range_is_failed() -> None:
    async def lengths(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        return [scored(len(each.completion)) for each in request.trajectories]

    async with raw_environment(lengths, reward_max=2.0) as target, start_hub({"raw": {"target": target}}) as hub:
        listed = (await hub.environments())["raw"]
        assert (listed.description.reward_max, listed.description.HasField("reward_min")) == (2, False)
        fine, over = await hub.score([Sample("ab", environment="raw"), Sample("abc", environment="raw")])
    assert fine.reward == 2
    assert (over.status, over.reward) == ("FAILED", None)
    assert over.message.startswith("reward 3 is not between")
    assert over.message.endswith("reward_max 2")


@pytest.mark.usefixtures("executed")
async def test_law_6_liveness_a_hanging_scorer_is_killed_alone() -> None:
    # the next worker takes the time that a busy machine needs to import math-verify
    env = {"math": {"timeout_s": 1.0}, "patient": {"type": "math", "timeout_s": WAIT_S}}
    async with start_hub(env, workers=1) as hub:
        (first,) = workers_of()
        endless, fine = await hub.score([ENDLESS, dataclasses.replace(MATH, environment="patient")])
        (second,) = workers_of()
    assert (endless.status, endless.reward) == ("TIMED_OUT", None)
    assert fine.reward == 1
    assert first == second  # its child is killed, not the worker
    assert not workers_of()


@pytest.mark.usefixtures("executed")
async def test_a_worker_killed_in_the_middle_fails_its_own_trajectory_alone() -> None:
    async with start_hub({"math": {}}, workers=1) as hub:
        (worker,) = workers_of()
        idle = descendants(worker)
        call = asyncio.create_task(hub.score([ENDLESS, MATH]))
        await eventually(lambda: descendants(worker) > idle)
        (child,) = descendants(worker) - idle
        os.kill(worker, signal.SIGKILL)
        killed, fine = await call
        await eventually(lambda: not running(child))
    assert (killed.status, killed.reward) == ("FAILED", None)
    assert "SIGKILL" in killed.message
    assert fine.reward == 1


async def test_law_6_liveness_the_hub_answers_within_the_callers_deadline() -> None:
    patient = {"timeout_s": 2 * WAIT_S}
    async with (
        start_environment(ODD) as odd,
        start_hub({"odd": {"target": odd.target, **patient}, "math": patient}) as hub,
    ):
        await hub.score([Sample("abc", environment="odd"), MATH])  # the deadline is not for what starts and connects
        with hurried(3.0):
            late, endless = await hub.score([Sample("hang", environment="odd"), ENDLESS])
    # the time of a built-in one is a worker's, and was not over
    assert (late.status, endless.status) == ("TIMED_OUT", "NOT_STARTED")


async def test_require_stop_is_a_rule_of_the_configuration() -> None:
    async with start_hub({"sums": {"type": "math", "require_stop": True}}, workers=1) as hub:
        cut = Sample("132", {"answer": "132"}, finish_reason="length", environment="sums")
        whole = Sample("132", {"answer": "132"}, environment="sums")
        scores = await hub.score([cut, whole])
    assert [score.reward for score in scores] == [0, 1]


async def test_garbage_on_the_port_harms_nobody() -> None:
    async with start_hub({"math": {}}, workers=1) as hub:
        for garbage in (
            b"\x00" * 4096,
            b"GET / HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(4096),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", hub.port)
            writer.write(garbage)
            await writer.drain()
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        (score,) = await hub.score([MATH])
    assert score.reward == 1


async def test_malformed_requests_get_a_typed_error_and_nothing_is_scored() -> None:
    async with start_hub({"math": {}}, workers=1, max_message_bytes=65536) as hub:
        raw = hub.channel.unary_unary("/headrace.v1.RewardService/Score")
        with pytest.raises(grpc.aio.AioRpcError) as garbage:
            await raw(b"\xff\xfe garbage")
        assert garbage.value.code() == grpc.StatusCode.INVALID_ARGUMENT

        bad = sample_to_wire(MATH)
        bad.group_id, bad.extra_env_info_json = "e0-train-7", "{"
        with pytest.raises(grpc.aio.AioRpcError) as malformed:
            await hub.stub.Score(reward_pb2.ScoreRequest(trajectories=[sample_to_wire(MATH), bad]))
        assert malformed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "'e0-train-7'[0]: extra_env_info_json" in str(malformed.value.details())

        with pytest.raises(grpc.aio.AioRpcError) as large:
            await raw(b"\x0a" + b"x" * 100_000)
        assert large.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

        assert await hub.score([]) == []
        assert (await hub.score([MATH]))[0].reward == 1


async def test_health_reflection_and_the_list_of_environments() -> None:
    env = {"math": {"timeout_s": 5.0}, "odd": {"max_batch_size": 8}}
    async with start_environment(ODD) as odd:
        env["odd"]["target"] = odd.target
        async with start_hub(env, workers=1) as hub, rpc.channel(odd.target) as direct:
            for channel, service in ((hub.channel, "RewardService"), (direct, "EnvironmentService")):
                name = f"headrace.v1.{service}"
                health = health_pb2_grpc.HealthStub(channel)
                for asked in ("", name):
                    answer = await health.Check(health_pb2.HealthCheckRequest(service=asked))
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
                reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
                request = reflection_pb2.ServerReflectionRequest(list_services="")
                reply = await reflection.ServerReflectionInfo(iter([request])).read()
                assert name in {found.name for found in reply.list_services_response.service}
            environments = await hub.environments()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{hub.http_port}") as http:
                assert (await http.get("/readyz")).status_code == 200
                await hub.score([MATH])
                assert (
                    'headrace_reward_results_total{environment="math",status="SCORED"}'
                    in (await http.get("/metrics/")).text
                )
    assert list(environments) == ["math", "odd"]
    assert environments["math"].kind == reward_pb2.EnvironmentStatus.KIND_BUILT_IN
    assert environments["math"].timeout_ms == 5000
    assert environments["math"].description.sandbox in (Level.A, Level.B)
    assert environments["odd"].kind == reward_pb2.EnvironmentStatus.KIND_SERVED
    assert environments["odd"].description.name == "Odd"
    assert environments["odd"].max_batch_size == 8
    assert all(environment.ready for environment in environments.values())


@pytest.mark.usefixtures("executed")
async def test_a_busy_port_is_one_clear_error() -> None:
    with bind("127.0.0.1", 0, "port") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ServiceError, match=rf"reward\.port:.*127\.0\.0\.1:{port}"):
            async with start_hub({}, port=port):
                pass
        with pytest.raises(ServiceError, match=rf"reward\.http_port:.*127\.0\.0\.1:{port}"):
            async with start_hub({}, http_port=port):
                pass
        with pytest.raises(ServiceError, match=rf"port:.*127\.0\.0\.1:{port}"):
            async with serving(Environment(), port=port):
                pass
    assert not workers_of()


@pytest.mark.usefixtures("executed")
async def test_workers_that_cannot_start_are_one_clear_error() -> None:
    pool = WorkerPool({"math": MathConfig.model_construct(type="none such")}, 2)
    with pytest.raises(ServiceError, match=r"worker.*status 1"):
        await pool.start()
    assert not workers_of()


@pytest.mark.parametrize(
    "signum",
    # SIGINT is handled as SIGTERM
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL],
)
async def test_the_service_ends_with_its_workers(signum: signal.Signals, tmp_path: Path) -> None:
    with bind("127.0.0.1", 0, "port") as first, bind("127.0.0.1", 0, "port") as second:
        port, http_port = first.getsockname()[1], second.getsockname()[1]
    config = Config.model_validate({"env": {"math": {}}, "reward": {"port": port, "http_port": http_port}})
    script = "import sys; from headrace.config import Config; from headrace_services.reward.main import main; "
    script += "main(Config.model_validate_json(sys.argv[1]))"
    async with started(sys.executable, "-c", script, config.model_dump_json()) as process:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.send_signal(signum)
        code = await asyncio.wait_for(process.wait(), WAIT_S)
    assert code == (0 if signum != signal.SIGKILL else -signal.SIGKILL)
    await eventually(lambda: not any(map(running, workers)))
