"""Environments that dial in to the hub: real processes that share work, die, freeze and come back, and peers that break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import headrace
from headrace import Sample
from headrace.base.errors import ConfigError
from headrace.records.score import Score
from headrace.v1 import environment_pb2, reward_pb2
from tests.chaos import runs
from tests.support.attached_peer import SCORE, Peer
from tests.support.reward_hub import WAIT_S, Hub, attach_environment, credit_wait, hurried, start_hub, told
from tests.support.waiting import eventually

ODD = Path(__file__).parents[2] / "support" / "odd_environment.py"
ATTACHED = {"odd": {"attached": True}}


def odd(completion: str, **info: str) -> Sample:
    return Sample(completion, info, environment="odd")


def of(score: Score) -> tuple[str, float | None]:
    return score.status, score.reward


async def scored(hub: Hub) -> float:
    """Rewards that the hub has counted."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{hub.http_port}") as http:
        lines = (await http.get("/metrics")).text.splitlines()
    found = (line for line in lines if line.startswith("headrace_reward_results_total{") and 'status="SCORED"' in line)
    return sum(float(line.split()[-1]) for line in found if 'environment="odd"' in line)


@pytest.mark.usefixtures("executed")  # which is shown to import nothing heavy
async def test_what_waits_for_an_attachment_is_named_and_scored_later() -> None:
    async with start_hub(ATTACHED) as hub:
        (score,) = await hub.score([odd("abc")])
        remedy = f'no process is attached; run headrace.attach("127.0.0.1:{hub.port}", …, name="odd")'
        assert (score.status, score.message) == ("NOT_STARTED", remedy)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{hub.http_port}") as http:
            ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["waits_for"]) == (200, [f"environment odd: {remedy}"])
        async with attach_environment(ODD, hub) as process:
            await hub.attached("odd", 16)
            listed = (await hub.environments())["odd"]
            assert (listed.kind, listed.ready, listed.target) == (reward_pb2.EnvironmentStatus.KIND_ATTACHED, True, "")
            assert (listed.description.name, listed.description.build) == ("Odd", "2")
            fine, raised, nan, heavy = await hub.score([odd(text) for text in ("abc", "raise", "nan", "modules")])
            process.terminate()
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
        (after,) = await hub.score([odd("abc")])
    assert (of(fine), fine.environment, fine.build) == (("SCORED", 3), "Odd", "2")
    assert [of(raised), of(nan)] == [("FAILED", None)] * 2
    assert "RuntimeError: the judge is out" in raised.message
    assert heavy.metadata == {"heavy": []}
    assert (after.status, after.message) == ("NOT_STARTED", remedy)


async def test_what_is_in_hand_and_how_the_last_minute_was_are_listed(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    async with start_hub(ATTACHED) as hub, attach_environment(ODD, hub):
        await hub.attached("odd", 16)
        await hub.score([odd("abc"), odd("abc"), odd("raise")])
        call = asyncio.create_task(hub.score([odd("hang once", touch=str(seen))]))
        await eventually(seen.exists)
        listed = (await hub.environments())["odd"]
        assert (listed.in_hand, [process.in_hand for process in listed.processes]) == (1, [1])
        assert (listed.recent.scored, listed.recent.failed) == (2, 1)
        assert 0 < listed.recent.p50_ms <= listed.recent.p99_ms
        call.cancel()


async def test_two_processes_share_the_load(tmp_path: Path) -> None:
    async with (
        start_hub(ATTACHED) as hub,
        attach_environment(ODD, hub, "--capacity", "1"),
        attach_environment(ODD, hub, "--capacity", "1"),
    ):
        await hub.attached("odd", 2)
        scores = await hub.score([odd("meet", folder=str(tmp_path))] * 2)
    assert [of(score) for score in scores] == [("SCORED", 4)] * 2


async def test_work_over_the_capacity_waits_for_credit_and_comes_back() -> None:
    async with start_hub({"odd": {"attached": True, "max_batch_size": 3}}) as hub, attach_environment(ODD, hub):
        await hub.attached("odd", 16)
        for _ in range(3):
            scores = await hub.score([odd("x" * length) for length in range(50)])
            assert [score.reward for score in scores] == list(range(50))


async def test_what_a_killed_process_held_goes_to_another_once(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    async with start_hub(ATTACHED) as hub, attach_environment(ODD, hub), attach_environment(ODD, hub):
        await hub.attached("odd", 32)
        before = await scored(hub)
        call = asyncio.create_task(hub.score([odd("a"), odd("hang once", touch=str(seen)), odd("bb")]))
        await eventually(lambda: seen.exists() and seen.read_text() != "")
        os.kill(int(seen.read_text()), signal.SIGKILL)
        assert [of(score) for score in await call] == [("SCORED", 1), ("SCORED", 9), ("SCORED", 2)]
        assert await scored(hub) - before == 3
        assert (await hub.environments())["odd"].description.capacity == 16


async def test_what_kills_two_processes_is_interrupted_and_the_third_lives() -> None:
    async with start_hub(ATTACHED) as hub, contextlib.AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(attach_environment(ODD, hub)) for _ in range(3)]
        await hub.attached("odd", 48)
        (score,) = await hub.score([odd("die")])
        await hub.attached("odd", 16)
        assert of(score) == ("INTERRUPTED", None)
        assert "attached process has gone" in score.message
        await eventually(lambda: sum(process.returncode is None for process in processes) == 1)
        assert of((await hub.score([odd("abc")]))[0]) == ("SCORED", 3)


async def test_what_the_only_process_held_is_interrupted(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    async with start_hub(ATTACHED) as hub, attach_environment(ODD, hub) as process:
        await hub.attached("odd", 16)
        call = asyncio.create_task(hub.score([odd("hang once", touch=str(seen))]))
        await eventually(seen.exists)
        with credit_wait(0):
            process.kill()
            (score,) = await call
    assert of(score) == ("INTERRUPTED", None)


@pytest.mark.slow
async def test_a_frozen_process_loses_its_work_and_comes_back(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    async with start_hub(ATTACHED) as hub, attach_environment(ODD, hub), attach_environment(ODD, hub):
        await hub.attached("odd", 32)
        before = await scored(hub)
        call = asyncio.create_task(hub.score([odd("hang once", touch=str(seen))]))
        await eventually(lambda: seen.exists() and seen.read_text() != "")
        frozen = int(seen.read_text())
        os.kill(frozen, signal.SIGSTOP)
        try:
            assert of((await call)[0]) == ("SCORED", 9)
        finally:
            os.kill(frozen, signal.SIGCONT)
        await hub.attached("odd", 32)
        assert await scored(hub) - before == 1


@pytest.mark.slow
@pytest.mark.parametrize("story", ["cut_off", "lost_machine"])
def test_a_silent_process_loses_its_work_and_it_or_another_is_found(tmp_path: Path, story: str) -> None:
    if lacks := runs.missing():
        pytest.skip(lacks)
    script = [*runs.NAMESPACES, sys.executable, "-m", f"tests.support.{story}", str(tmp_path)]
    done = subprocess.run(script, cwd=runs.ROOT, capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr


async def test_a_process_long_on_its_way_is_not_taken_for_a_younger_one() -> None:
    """The newest process says which build scores: one that comes back through a slow network must not."""
    arrived, may_pass, from_here = asyncio.Event(), asyncio.Event(), asyncio.Queue[int]()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await may_pass.wait()
        answers, onward = await asyncio.open_connection("127.0.0.1", hub.port)
        from_here.put_nowait(onward.get_extra_info("sockname")[1])

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(2**16):
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, onward), copy(answers, writer), return_exceptions=True)

    async with contextlib.AsyncExitStack() as stack:
        hub = await stack.enter_async_context(start_hub(ATTACHED))
        network = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        stack.callback(network.close)
        address = f"127.0.0.1:{network.sockets[0].getsockname()[1]}"
        await stack.enter_async_context(attach_environment(ODD, hub, "--attach", address))
        await arrived.wait()
        await stack.enter_async_context(attach_environment(ODD, hub))
        await hub.attached("odd", 16)
        may_pass.set()
        await hub.attached("odd", 32)
        older, _ = (await hub.environments())["odd"].processes
        assert older.address == f"127.0.0.1:{await from_here.get()}"


async def test_a_hub_that_was_restarted_under_load_is_found_again(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    async with contextlib.AsyncExitStack() as processes:
        async with start_hub(ATTACHED) as hub:
            await processes.enter_async_context(attach_environment(ODD, hub))
            await hub.attached("odd", 16)
            call = asyncio.create_task(hub.score([odd("hang once", touch=str(seen))]))
            await eventually(seen.exists)
            port = hub.port
        await asyncio.gather(call, return_exceptions=True)
        async with start_hub(ATTACHED, port=port) as hub:
            await hub.attached("odd", 16)
            assert of((await hub.score([odd("hang once", touch=str(seen))]))[0]) == ("SCORED", 9)


async def test_a_sample_that_hangs_is_timed_out_and_keeps_its_room() -> None:
    async with start_hub(ATTACHED) as hub, attach_environment(ODD, hub, "--capacity", "2"):
        await hub.attached("odd", 2)
        with told(5.0):
            hung, fine = await hub.score([odd("hang"), odd("abc")])
        assert [of(hung), of(fine)] == [("TIMED_OUT", None), ("SCORED", 3)]
        with credit_wait(WAIT_S):
            scores = await hub.score([odd("a"), odd("bb"), odd("ccc")])
        assert [of(score) for score in scores] == [("SCORED", 1), ("SCORED", 2), ("SCORED", 3)]


REPLACING = """
import asyncio, sys, headrace

class One(headrace.Environment):
    def score(self, sample):
        return 1.0

class Two(headrace.Environment):
    def score(self, sample):
        return 2.0

async def notebook():  # a cell runs in an event loop
    hub = sys.argv[2]
    headrace.attach(hub, One(), "odd", capacity=3, wait=False)
    await asyncio.to_thread(sys.stdin.readline)
    headrace.attach(hub, Two(), "odd", capacity=5)

asyncio.run(notebook())
"""


async def test_in_a_running_loop_attaching_again_replaces_the_former(tmp_path: Path) -> None:
    script = tmp_path / "cell.py"
    script.write_text(REPLACING)
    async with start_hub(ATTACHED) as hub, attach_environment(script, hub, stdin=asyncio.subprocess.PIPE) as process:
        await hub.attached("odd", 3)
        assert of((await hub.score([odd("x")]))[0]) == ("SCORED", 1)
        assert process.stdin is not None
        process.stdin.write(b"go on\n")
        await hub.attached("odd", 5)
        assert of((await hub.score([odd("x")]))[0]) == ("SCORED", 2)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def test_on_a_terminal_a_line_shows_the_counts() -> None:
    terminal, end = os.openpty()
    try:
        async with start_hub(ATTACHED) as hub, attach_environment(ODD, hub, stdout=end):
            await hub.attached("odd", 16)
            await hub.score([odd("abc"), odd("raise")])
            shown = ""
            async with asyncio.timeout(WAIT_S):
                while (
                    f"\renvironment odd, attached to 127.0.0.1:{hub.port}: 0 at work, 1 scored, 1 failed" not in shown
                ):
                    shown += (await asyncio.to_thread(os.read, terminal, 4096)).decode()
    finally:
        os.close(terminal)
        os.close(end)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"hub": "hub.internal:50390"}, r"hub 'hub.internal:50390' is on another machine: .*`headrace env token odd`"),
        ({"token": "a", "token_file": "b"}, "token and token_file 'b'"),
        ({"capacity": 0}, "capacity 0: give 1 or more"),
        ({"token_file": "/nowhere"}, "/nowhere can't be read"),
    ],
)
def test_arguments_that_can_not_be_used_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        headrace.attach(**{"hub": "127.0.0.1:1", "environment": headrace.Environment(), "name": "odd", **arguments})


TOKENS = "scorer judge\noperator boss\nenvironment odd own\nenvironment other foreign\n"


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("foreign", "PERMISSION_DENIED: the token of environment other"),
        ("judge", "PERMISSION_DENIED: 'scorer' may not call /headrace.v1.RewardService/Attach"),
        ("wrong", "UNAUTHENTICATED"),
        ("own", None),
        ("environment odd own", None),
        ("boss", None),
    ],
)
async def test_only_who_has_its_token_attaches(tmp_path: Path, token: str, said: str | None) -> None:
    tokens = tmp_path / "credentials"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    pipe = asyncio.subprocess.PIPE
    async with (
        start_hub(ATTACHED, tokens) as hub,
        attach_environment(ODD, hub, "--token", token, stderr=pipe) as process,
    ):
        if said is None:
            await hub.attached("odd", 16)
            assert of((await hub.score([odd("abc")]))[0]) == ("SCORED", 3)
            return
        _, stderr = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 1
    assert f"ServiceError: 127.0.0.1:{hub.port} refused environment 'odd': {said}" in stderr.decode()


@contextlib.asynccontextmanager
async def peer(hub: Hub) -> AsyncIterator[Peer]:
    call = hub.stub.Attach()
    try:
        yield Peer(call)
    finally:
        call.cancel()


async def test_answers_to_unknown_work_second_and_late_answers_mean_nothing() -> None:
    async with start_hub(ATTACHED) as hub, peer(hub) as mine:
        await mine.register(2)
        await mine.grant(2)
        call = asyncio.create_task(hub.score([odd("a")]))
        work = await mine.work()
        await mine.answer("unknown", 9.0)
        await mine.answer(work.work_id, 1.0)
        await mine.answer(work.work_id, 2.0)
        await mine.grant(1)
        assert of((await call)[0]) == ("SCORED", 1)

        with hurried(3.0):
            call = asyncio.create_task(hub.score([odd("a")] * 2))
            late = await mine.work()
            assert [of(score) for score in await call] == [("TIMED_OUT", None)] * 2
        cancel = (await mine.read()).cancel
        assert (cancel.work_id, cancel.reason) == (late.work_id, "its deadline has passed")
        # it has no room until the withdrawn piece is answered
        with credit_wait(0):
            (full,) = await hub.score([odd("a")])
        assert full.status == "NOT_STARTED"
        assert "at capacity" in full.message
        await mine.answer(late.work_id, 5.0, 5.0)
        await mine.grant(2)
        call = asyncio.create_task(hub.score([odd("a")]))
        await mine.answer((await mine.work()).work_id, 3.0)
        assert of((await call)[0]) == ("SCORED", 3)


async def test_answers_that_break_the_contract_are_failed() -> None:
    async with start_hub(ATTACHED) as hub, peer(hub) as mine:
        await mine.register(2)
        for rewards, message in (
            ((1.0,), "an attached process returned 1 results for 2 trajectories"),
            ((float("nan"), 1.0), "not a finite number"),
            ((), "returned 0 results"),
        ):
            await mine.grant(2)
            call = asyncio.create_task(hub.score([odd("a")] * 2))
            await mine.answer((await mine.work()).work_id, *rewards)
            first, _ = await call
            assert of(first) == ("FAILED", None)
            assert message in first.message


async def test_a_batch_is_split_to_fit_and_what_never_fits_is_invalid() -> None:
    async with start_hub(ATTACHED) as hub, peer(hub) as mine:
        await mine.register(8, max_message_bytes=4096)
        await mine.grant(8)
        call = asyncio.create_task(hub.score([odd("a" * length) for length in (1500, 1500, 1500, 9000, 10)]))
        first, second = await mine.work(), await mine.work()
        third = await mine.work()
        sizes = [len(work.score.trajectories) for work in (first, second, third)]
        assert sizes == [2, 1, 1]
        for work in (third, first, second):
            await mine.answer(work.work_id, *(len(each.completion) for each in work.score.trajectories))
        scores = await call
        assert [of(score) for score in scores] == [*[("SCORED", 1500)] * 3, ("INVALID", None), ("SCORED", 10)]
        assert "accepts (4096)" in scores[3].message


async def test_a_score_of_100_mb_is_failed_without_those_beside_it() -> None:
    async with start_hub(ATTACHED) as hub, attach_environment(ODD, hub):
        await hub.attached("odd", 16)
        fine, huge = await hub.score([odd("abc"), odd("huge")])
        assert (of(fine), of(huge)) == (("SCORED", 3), ("FAILED", None))
        assert "a score of 1000000" in huge.message
        assert "share of a message" in huge.message
        assert of((await hub.score([odd("abc")]))[0]) == ("SCORED", 3)


HUGE = """
import asyncio, sys
from headrace.net import rpc
from headrace.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from tests.support.attached_peer import Peer

async def main():
    async with rpc.channel(f"127.0.0.1:{sys.argv[1]}", 200_000_000) as channel:  # it would send as much
        mine = Peer(reward_pb2_grpc.RewardServiceStub(channel).Attach())
        await mine.register(1)
        await mine.grant(1)
        work = await mine.work()
        print("has it", flush=True)
        answer = reward_pb2.Answer(work_id=work.work_id)
        answer.score.results.add(status=trajectory_pb2.STATUS_SCORED, reward=1, message="x" * 100_000_000)
        await mine.send(answer=answer)
        code, details = await mine.ends()
        print(code.name, details)

asyncio.run(main())
"""


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Of this process's memory since then."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


async def test_an_answer_of_100_mb_ends_the_stream_and_its_work_moves_on() -> None:
    script = sys.executable, "-c", HUGE
    async with start_hub(ATTACHED) as hub, peer(hub) as staying:
        huge = await asyncio.create_subprocess_exec(
            *script, str(hub.port), stdout=asyncio.subprocess.PIPE, cwd=runs.ROOT
        )
        try:
            await hub.attached("odd", 1)
            await staying.register(1, "staying")
            forget_peak()
            before = peak_bytes()
            call = asyncio.create_task(hub.score([odd("a")]))
            assert huge.stdout is not None
            assert await asyncio.wait_for(huge.stdout.readline(), WAIT_S) == b"has it\n"
            await staying.grant(1)
            await staying.answer((await staying.work()).work_id, 1.0)
            assert of((await call)[0]) == ("SCORED", 1)
            grown = peak_bytes() - before
            said, _ = await asyncio.wait_for(huge.communicate(), WAIT_S)
        finally:
            if huge.returncode is None:
                huge.kill()
                await huge.wait()
    assert said.decode().startswith("RESOURCE_EXHAUSTED")
    assert grown < 50_000_000


async def test_one_that_scores_whole_calls_gets_no_more_than_it_takes() -> None:
    async with start_hub(ATTACHED) as hub, peer(hub) as mine:
        await mine.register(8, environment=environment_pb2.DescribeResponse(name="mine", calls=1))
        await mine.grant(8)
        call = asyncio.create_task(hub.score([odd("a")] * 2))
        work = await mine.work()
        with credit_wait(0):
            (refused,) = await hub.score([odd("a")])
        assert refused.status == "NOT_STARTED"
        assert "at capacity" in refused.message
        await mine.answer(work.work_id, 1.0, 1.0)
        assert [score.reward for score in await call] == [1, 1]


async def test_law_7_failure_is_not_zero_a_reward_out_of_range_is_failed() -> None:
    async with start_hub(ATTACHED) as hub, peer(hub) as mine:
        await mine.register(2, environment=environment_pb2.DescribeResponse(name="mine", reward_max=1.0))
        await mine.grant(2)
        call = asyncio.create_task(hub.score([odd("a")] * 2))
        await mine.answer((await mine.work()).work_id, 1.0, 1.5)
        fine, over = await call
        assert of(fine) == ("SCORED", 1)
        assert of(over) == ("FAILED", None)
        assert "reward 1.5 is not between" in over.message


async def test_a_process_that_drains_gets_no_more_and_its_rest_goes_on() -> None:
    async with start_hub(ATTACHED) as hub, peer(hub) as leaving, peer(hub) as staying:
        await leaving.register(2, "leaving")
        await leaving.grant(2)
        call = asyncio.create_task(hub.score([odd("a"), odd("b")]))
        held = await leaving.work()
        await leaving.send(drain=reward_pb2.Drain())
        await staying.register(1, "staying")
        await staying.grant(1)
        await hub.attached("odd", 1)
        await leaving.done()  # without an answer
        first = await staying.work()
        await staying.answer(first.work_id, 1.0)
        await staying.grant(1)
        await staying.answer((await staying.work()).work_id, 2.0)
        assert [of(score) for score in await call] == [("SCORED", 1), ("SCORED", 2)]
        assert (await leaving.ends())[0] == grpc.StatusCode.OK
        assert first.score.trajectories[0] == held.score.trajectories[0]


def of_build(build: str) -> environment_pb2.DescribeResponse:
    return environment_pb2.DescribeResponse(name="mine", build=build)


async def test_the_newest_build_has_the_work_until_all_of_it_have_gone() -> None:
    """Also where a process of the older one comes back later."""
    async with start_hub(ATTACHED) as hub, peer(hub) as newer, peer(hub) as older:
        await newer.register(1, "newer", environment=of_build("2"), age_ms=60_000)
        await newer.grant(1)
        await older.register(4, "older", environment=of_build("1"), age_ms=90_000)
        await older.grant(4)
        call = asyncio.create_task(hub.score([odd("a")]))
        await newer.answer((await newer.work()).work_id, 2.0)
        (score,) = await call
        assert (of(score), score.build) == (("SCORED", 2), "2")
        listed = (await hub.environments())["odd"].description
        assert (listed.build, listed.capacity) == ("2", 1)
        first, second = (await hub.environments())["odd"].processes
        assert [(one.build, one.capacity, one.works) for one in (first, second)] == [("1", 4, False), ("2", 1, True)]
        assert first.age_ms >= 90_000 > second.age_ms >= 60_000
        assert first.address.startswith("127.0.0.1:") != second.address
        await newer.done()
        await hub.attached("odd", 4)
        call = asyncio.create_task(hub.score([odd("a")]))
        await older.answer((await older.work()).work_id, 1.0)
        (score,) = await call
        assert (of(score), score.build) == (("SCORED", 1), "1")


async def test_a_newer_stream_of_a_process_takes_over() -> None:
    async with start_hub(ATTACHED) as hub, peer(hub) as lost, peer(hub) as newer:
        await lost.register(1)
        await lost.grant(1)
        call = asyncio.create_task(hub.score([odd("a")]))
        await lost.work()
        await newer.register(1)
        await newer.grant(1)
        await newer.answer((await newer.work()).work_id, 1.0)
        assert of((await call)[0]) == ("SCORED", 1)
        assert await lost.ends() == (grpc.StatusCode.UNAVAILABLE, "its process has opened another stream")


async def test_who_gives_up_waiting_has_his_work_withdrawn() -> None:
    async with start_hub(ATTACHED) as hub, peer(hub) as mine:
        await mine.register(1)
        await mine.grant(1)
        call = asyncio.create_task(hub.score([odd("a")]))
        work = await mine.work()
        call.cancel()
        cancel = (await mine.read()).cancel
        assert (cancel.work_id, cancel.reason) == (work.work_id, "the caller has gone")


def register(**changes: Any) -> reward_pb2.AttachRequest:
    offer = {"capacity": 1, "name": "odd", "kind": SCORE, **changes}
    return reward_pb2.AttachRequest(register=reward_pb2.Register(process_id="p", offers=[reward_pb2.Offer(**offer)]))


def credit(amount: int, name: str = "odd", kind: Any = SCORE) -> reward_pb2.AttachRequest:
    return reward_pb2.AttachRequest(credit=reward_pb2.Credit(name=name, kind=kind, amount=amount))


@pytest.mark.parametrize(
    ("events", "code", "said"),
    [
        ([credit(1)], "INVALID_ARGUMENT", "event credit: send register"),
        ([], "INVALID_ARGUMENT", "event nothing: send register"),
        ([register(name="orange")], "NOT_FOUND", r"attach to this run \(odd\)"),
        ([register(name="away")], "NOT_FOUND", "'away' is not"),
        ([register(capacity=0)], "INVALID_ARGUMENT", "capacity is 0"),
        ([register(capacity=65537)], "INVALID_ARGUMENT", "its capacity is 65537"),
        ([register(kind=reward_pb2.WORK_KIND_STEP)], "INVALID_ARGUMENT", "WORK_KIND_SCORE and WORK_KIND_EPISODE"),
        ([register(), register()], "INVALID_ARGUMENT", "event register: "),
        ([register(), credit(2)], "INVALID_ARGUMENT", "credit of 2 is an overdraft"),
        ([register(), credit(1), credit(1)], "INVALID_ARGUMENT", "credit of 1 is an overdraft"),
        ([register(), credit(0)], "INVALID_ARGUMENT", "credit of 0 is an overdraft"),
        ([register(), credit(1, "orange")], "INVALID_ARGUMENT", "credit for 'orange'"),
        ([register(), credit(1, kind=3)], "INVALID_ARGUMENT", r"credit for 'odd' \(WORK_KIND_EPISODE\)"),
        ([register(), credit(1, kind=2)], "INVALID_ARGUMENT", r"credit for 'odd' \(WORK_KIND_STEP\)"),
        ([register(), credit(1, kind=77)], "INVALID_ARGUMENT", r"credit for 'odd' \(77\)"),
        ([register(), reward_pb2.AttachRequest()], "INVALID_ARGUMENT", "event nothing"),
    ],
)
async def test_a_stream_that_breaks_the_rules_is_closed_with_the_reason(
    events: list[reward_pb2.AttachRequest], code: str, said: str
) -> None:
    async with start_hub({**ATTACHED, "away": {"target": "127.0.0.1:1"}}) as hub:
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            async for _ in hub.stub.Attach(iter(events), timeout=WAIT_S):
                pass
        assert refused.value.code().name == code
        assert not (await hub.environments())["odd"].ready
