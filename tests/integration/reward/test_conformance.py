"""The conformance kit against environments with planted faults: it finds each, and blames nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import Environment, Sample
from headrace.base.errors import ServiceError
from headrace.env.kit.conformance import REMEDIES, Finding, examine
from headrace.env.kit.example_samples import GoldenSample
from headrace.env.server import serving
from headrace.net import rpc
from headrace.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2
from tests.support.command import error_of, headrace
from tests.support.raw_environment import Answer, Request, raw_environment, scored

ENVIRONMENT = """
import os
import headrace

class Mine(headrace.Environment):
    build = "1"

    def score(self, sample):
        {body}
"""


def worth(completion: str) -> float:
    return min(len(completion), 100) / 100


async def found(target: str, samples: Sequence[GoldenSample] = (), timeout_s: float = 30.0) -> dict[str, Finding]:
    async with rpc.channel(target) as channel:
        return {each.check: each for each in await examine(channel, samples, timeout_s)}


async def blamed(answer: Answer, timeout_s: float = 30.0, **description: Any) -> dict[str, str]:
    """What is wrong with an environment that answers so, by what was looked at."""
    async with raw_environment(answer, **description) as target:
        findings = await found(target, timeout_s=timeout_s)
    assert list(findings) == list(REMEDIES)
    return {name: each.said for name, each in findings.items() if each.verdict == "wrong"}


def each_by_itself(score: Any) -> Answer:
    async def answer(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        return [score(trajectory) for trajectory in request.trajectories]

    return answer


async def test_a_right_environment_is_found_right() -> None:
    async with raw_environment(
        each_by_itself(lambda each: scored(worth(each.completion))), deterministic=True, reward_min=0, reward_max=1
    ) as target:
        findings = await found(target)
    notes = {name for name, each in findings.items() if each.verdict == "note"}
    assert notes == {"golden samples"}
    assert {each.verdict for each in findings.values()} == {"right", "note"}


async def test_fault_1_a_reward_that_is_no_number() -> None:
    wrong = await blamed(each_by_itself(lambda each: scored(float(each.completion) if each.completion == "nan" else 1)))
    assert set(wrong) == {"rewards", "odd completions"}
    assert "reward is nan" in wrong["rewards"]


async def test_a_reward_too_large_to_be_summed_is_blamed_on_rewards() -> None:
    wrong = await blamed(each_by_itself(lambda each: scored(1.7e308 if "nan" in each.completion else 1)))
    assert set(wrong) == {"rewards", "odd completions"}
    assert "reward is 1.7e+308" in wrong["rewards"]


async def test_fault_2_fewer_results_than_trajectories() -> None:
    async def answer(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        return [scored(worth(each.completion)) for each in request.trajectories][
            : max(1, len(request.trajectories) - 1)
        ]

    wrong = await blamed(answer)
    assert set(wrong) == {"one result each", "batches", "mixed batches"}
    assert wrong["one result each"].startswith("3 results for 4 trajectories")


async def test_fault_3_results_in_another_order() -> None:
    async def answer(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        return sorted((scored(worth(each.completion)) for each in request.trajectories), key=lambda each: each.reward)

    wrong = await blamed(answer)
    assert set(wrong) == {"batches", "mixed batches"}
    assert wrong["batches"].endswith("in another order")


async def test_fault_4_a_status_without_a_reason() -> None:
    failed = trajectory_pb2.Result(status=trajectory_pb2.STATUS_FAILED)
    wrong = await blamed(each_by_itself(lambda each: scored(1) if each.completion else failed))
    assert set(wrong) == {"statuses", "odd completions"}
    assert wrong["statuses"].startswith("'': STATUS_FAILED without a message")


async def test_fault_5_random_rewards_of_what_says_it_is_deterministic() -> None:
    drawn = random.Random(7)
    answer = each_by_itself(lambda each: scored(drawn.random()))
    assert {"deterministic"} <= set(await blamed(answer, deterministic=True)) <= {"deterministic", "equal keys"}
    assert not await blamed(answer), "it may be random where it doesn't promise otherwise"


async def test_fault_6_a_completion_on_which_it_hangs() -> None:
    async def answer(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        if any(each.completion.endswith("!") for each in request.trajectories):
            await asyncio.Event().wait()
        return [scored(worth(each.completion)) for each in request.trajectories]

    wrong = await blamed(answer, timeout_s=5.0)
    assert set(wrong) == {"odd completions"}
    assert "no answer within 5.0 s" in wrong["odd completions"]


async def test_fault_7_it_fails_on_what_is_not_ascii() -> None:
    wrong = await blamed(each_by_itself(lambda each: scored(worth(each.completion.encode("ascii").decode()))))
    assert set(wrong) == {"odd completions", "mixed batches"}
    assert wrong["odd completions"].startswith("not ASCII: UNKNOWN: ")


def test_fault_7_it_dies_of_what_is_not_ascii(tmp_path: Path) -> None:
    file = tmp_path / "dies.py"
    file.write_text(ENVIRONMENT.format(body="sample.completion.isascii() or os._exit(3)\n        return 1"))
    done = headrace("env", "check", file)
    assert done.returncode == 1, done.stdout
    (wrong,) = [line for line in done.stdout.splitlines() if line.startswith("wrong")]
    assert wrong.split(maxsplit=3)[3].startswith("not ASCII: UNAVAILABLE")
    assert "skipped" not in done.stdout, "it is started again, and goes on"


@pytest.mark.parametrize("completion", ["4", "nan"])
async def test_fault_8_a_reward_out_of_its_range(completion: str) -> None:
    answer = each_by_itself(lambda each: scored(1.5 if each.completion == completion else worth(each.completion)))
    wrong = await blamed(answer, reward_min=0, reward_max=1)
    assert set(wrong) == {"range"}
    assert wrong["range"].startswith(f"'{completion}': reward 1.5 is not between")


@pytest.mark.parametrize("heeds", [True, False])
async def test_fault_9_it_ignores_the_deadline(heeds: bool) -> None:
    async def answer(request: Request, context: Any) -> list[trajectory_pb2.Result]:
        results = [trajectory_pb2.Result(status=trajectory_pb2.STATUS_TIMED_OUT, message="late")] * len(
            request.trajectories
        )
        for place, each in enumerate(request.trajectories):
            if heeds and context.time_remaining() < 0.6:
                break
            await asyncio.sleep(0.5 if len(request.trajectories) == 4 else 0)
            results[place] = scored(worth(each.completion))
        return results

    wrong = await blamed(answer, capacity=4)
    assert set(wrong) == (set() if heeds else {"deadline"})


async def test_fault_10_it_keeps_something_of_the_sample_before() -> None:
    before = ""

    def score(each: trajectory_pb2.Trajectory) -> trajectory_pb2.Result:
        nonlocal before
        before, last = each.completion, before
        return scored(worth(last))

    wrong = await blamed(each_by_itself(score))
    assert set(wrong) == {"samples apart"}
    assert wrong["samples apart"].startswith("'4' was ")


async def test_fault_10_it_counts_what_it_has_scored() -> None:
    seen = 0

    def score(_: trajectory_pb2.Trajectory) -> trajectory_pb2.Result:
        nonlocal seen
        seen += 1
        return scored(seen)

    assert "deterministic" in await blamed(each_by_itself(score), deterministic=True)


async def test_what_a_sample_earns_must_not_depend_on_its_call() -> None:
    async def answer(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        return [scored(worth(each.completion) / len(request.trajectories)) for each in request.trajectories]

    assert set(await blamed(answer)) == {"batches", "mixed batches"}


async def test_more_capacity_than_there_is() -> None:
    async def answer(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        late = trajectory_pb2.Result(status=trajectory_pb2.STATUS_TIMED_OUT, message="late")
        results = [scored(worth(each.completion)) for each in request.trajectories]
        return [*results[:32], *[late] * len(results[32:])]

    wrong = await blamed(answer)
    assert set(wrong) == {"batches"}
    assert wrong["batches"].endswith("one was TIMED_OUT (late) (and 31 more of the kind)")


async def test_a_reward_with_a_failure_and_metadata_that_are_no_json() -> None:
    def score(each: trajectory_pb2.Trajectory) -> trajectory_pb2.Result:
        if each.completion == "nan":
            return trajectory_pb2.Result(status=trajectory_pb2.STATUS_FAILED, reward=0, message="no number")
        result = scored(worth(each.completion))
        result.metadata_json = "{" if each.completion == "-inf" else ""
        return result

    wrong = await blamed(each_by_itself(score))
    assert set(wrong) == {"statuses", "metadata", "odd completions"}
    assert "reward 0 with a status" in wrong["statuses"]
    assert "metadata_json is not JSON" in wrong["metadata"]


async def test_one_that_scores_no_more_is_not_looked_at_further() -> None:
    calls = 0

    async def answer(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        nonlocal calls
        calls += 1
        if calls > 8:
            await asyncio.Event().wait()
        return [scored(worth(each.completion)) for each in request.trajectories]

    async with raw_environment(answer) as target:
        findings = await found(target, timeout_s=5.0)
    assert findings["equal keys"].said == "'4': no answer within 5.0 s"
    assert findings["odd completions"].verdict == "skipped"


async def test_golden_samples_are_compared_and_ordinary() -> None:
    class Exact(Environment):
        def score(self, sample: Sample) -> float:
            return float(sample.completion == sample.extra_env_info["wanted"])

    async with serving(Exact()) as port:
        target, wanted = f"127.0.0.1:{port}", {"wanted": "7"}
        fine = [
            GoldenSample(completion=text, extra_env_info=wanted, reward=reward) for text, reward in (("7", 1), ("8", 0))
        ]
        findings = await found(target, fine)
        assert {each.check for each in findings.values() if each.verdict == "wrong"} == set()
        findings = await found(target, [*fine, GoldenSample(completion="8", extra_env_info=wanted, reward=1)])
        assert findings["golden samples"].said == "'8': reward 0, not 1"
        lacking = await found(target)
    assert lacking["one by one"].verdict == "wrong"
    assert "KeyError: 'wanted'" in lacking["one by one"].said
    assert lacking["batches"].verdict == "skipped"


async def test_a_sample_that_is_refused_the_second_time() -> None:
    seen: set[str] = set()

    def score(each: trajectory_pb2.Trajectory) -> trajectory_pb2.Result:
        if each.idempotency_key in seen:
            return trajectory_pb2.Result(status=trajectory_pb2.STATUS_INVALID, message="seen before")
        seen.add(each.idempotency_key)
        return scored(worth(each.completion))

    wrong = await blamed(each_by_itself(score))
    assert set(wrong) == {"equal keys"}
    assert "'4' was 0.01" in wrong["equal keys"]


async def test_room_that_a_cancelled_call_never_gives_back() -> None:
    is_busy = False

    async def answer(request: Request, _: Any) -> list[trajectory_pb2.Result]:
        nonlocal is_busy
        if is_busy:
            full = trajectory_pb2.Result(status=trajectory_pb2.STATUS_NOT_STARTED, message="no room")
            return [full] * len(request.trajectories)
        is_busy = True
        await asyncio.sleep(0.2 if len(request.trajectories) == 4 else 0)
        is_busy = False
        return [scored(worth(each.completion)) for each in request.trajectories]

    wrong = await blamed(answer, timeout_s=5.0, capacity=4)
    assert set(wrong) == {"cancelled calls"}
    assert "NOT_STARTED (no room)" in wrong["cancelled calls"]


async def test_what_need_not_be_there_is_noted_alone() -> None:
    class Bare(environment_pb2_grpc.EnvironmentServiceServicer):
        async def Score(self, request: Request, context: Any) -> environment_pb2.EnvironmentServiceScoreResponse:
            results = [scored(worth(each.completion)) for each in request.trajectories]
            return environment_pb2.EnvironmentServiceScoreResponse(results=results)

    server = rpc.server()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(Bare(), server)
    port = rpc.listen(server, "127.0.0.1", 0, "port")
    await server.start()
    try:
        findings = await found(f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
    assert {each.verdict for each in findings.values()} == {"right", "note"}
    assert findings["start"].said == "it has no Describe"
    assert "no reflection" in findings["health and reflection"].said


async def test_an_address_where_nobody_answers_is_one_clear_error() -> None:
    with pytest.raises(ServiceError, match=r"answers.*0\.2 s"):
        await found("127.0.0.1:1", timeout_s=0.2)


def test_the_command_says_what_is_wrong_and_how_to_mend_it(tmp_path: Path) -> None:
    file, samples = tmp_path / "mine.py", tmp_path / "samples.jsonl"
    file.write_text(ENVIRONMENT.format(body="return len(sample.completion)"))
    samples.write_text('{"completion": "four", "reward": 4}\n{"completion": "five!", "reward": 5}\n')
    fine = headrace("env", "check", file, "--samples", samples)
    assert fine.returncode == 0, fine.stdout
    assert fine.stdout.endswith("nothing is wrong\n")
    samples.write_text('{"completion": "\\u001b[2Jfour", "reward": 1}\n')
    wrong = headrace("env", "check", f"{file}:Mine", "--samples", samples)
    assert wrong.returncode == 1
    (line,) = [line.strip().split(maxsplit=3) for line in wrong.stdout.splitlines() if line.startswith("wrong")]
    assert line[1:] == ["golden", "samples", r"'\x1b[2Jfour': reward 8, not 1"]
    assert "to fix golden samples" in wrong.stdout
    assert "\x1b" not in wrong.stdout


def test_what_can_not_be_checked_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class A: pass\n")
    said = error_of(headrace("env", "check", file))
    assert "headrace.Environment (A)" in said
    file.write_text(ENVIRONMENT.format(body="return 1") + "\n    def __init__(self, key):\n        pass\n")
    done = headrace("env", "check", file)
    assert done.returncode == 1
    assert f"{file}:Mine: Mine() raised TypeError" in done.stderr
    assert "nowhere is neither FILE.py" in error_of(headrace("env", "check", "nowhere"))
    assert "give --name NAME" in error_of(headrace("env", "check", "127.0.0.1:1", "--token-file", file))
