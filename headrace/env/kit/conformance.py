"""The conformance kit (`headrace env check`): calls an environment in all the ways that a run may, and reports what is right and what is
wrong.

The environment is called over gRPC, whatever language it is written in. Everything that it answers is checked against the contract in
`proto/headrace/v1`, and against its own description from `Describe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.base.errors import CodecError, ServiceError
from headrace.env.asking import ask
from headrace.env.environment import Sample, check_range
from headrace.env.kit import conformance_episodes
from headrace.env.kit.conformance_episodes import EpisodeExamination
from headrace.env.kit.example_samples import ODD_COMPLETIONS, ORDINARY, GoldenSample, close
from headrace.env.wire import bounds, sample_to_wire, score_from_wire
from headrace.records.score import Score, reward_problem
from headrace.v1 import environment_pb2 as pb
from headrace.v1 import environment_pb2_grpc, trajectory_pb2

TIMEOUT_S = 10.0
# The hub's timeout for Describe.
_DESCRIBE_S = 1.0
# A batch that takes less than this is not called with a shorter deadline: the result would measure how busy the machine is.
_SLOW_S = 1.0
_LARGEST_BATCH = 64
_MOST_HANGS = 3
_PAUSE_S = 0.05
# With this many rounds, a random reward hardly ever looks as if it depended on the previous sample.
_ROUNDS = 5
_SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

Verdict = Literal["right", "note", "wrong", "skipped"]

# The checks, in the order of the table, with their remedies. For an environment that runs episodes, those of `conformance_episodes` follow.
_ANY = {
    "start": "answer Describe at once, even while samples are being scored: load what takes long before you listen, and score in "
    "separate threads or processes",
    "description": "state name, build and capacity in Describe; reward_min is at most reward_max",
    "health and reflection": "serve grpc.health.v1.Health and server reflection, if your library has them",
}
_SCORING = {
    "one by one": "give every ordinary sample a reward; if these samples lack fields of your extra_env_info, give yours: --samples FILE",
    "golden samples": "the environment or the sample is wrong; correct one of them",
    "calls at a time": "score several calls at a time, up to the capacity that Describe states; state less if it is less",
    "equal keys": "when a sample is sent again under the same key, answer as the first time",
    "deterministic": "draw no random numbers and keep nothing from one sample to the next, or don't state deterministic",
    "samples apart": "keep nothing from one sample to the next: in a run, other samples come between them",
    "batches": "return results in the order of the trajectories, and score each independently: a call's samples come from any groups",
    "malformed requests": "refuse them with INVALID_ARGUMENT, and continue to score",
    "deadline": "answer shortly before the call's deadline, with TIMED_OUT for unfinished samples; otherwise finished rewards are lost too",
    "cancelled calls": "abandon a cancelled call, or finish it; then continue to score",
    "odd completions": "a completion is data: whatever it is, it earns a reward, a wrong one the least; limit the time that one can take",
    "mixed batches": "return a Result of its own for a sample that can't be scored; the others of the call keep their rewards",
    "one result each": "return exactly one Result for each trajectory, whatever happens to it",
    "rewards": "with SCORED, return a reward and components between -1e9 and 1e9; without a reward, return FAILED with a reason",
    "range": "return rewards from reward_min to reward_max, or state another range in Describe",
    "statuses": "return one of the statuses, with a reason in message unless it is SCORED, and a reward only if it is",
    "metadata": "make metadata_json a JSON object, and a score at most 8 KiB",
}
REMEDIES = _ANY | _SCORING


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check. `remedy` is how to fix what is wrong."""

    check: str
    verdict: Verdict
    said: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.said}" + (f" ({self.remedy})" if self.remedy else "")


async def examine(
    channel: grpc.aio.Channel,
    samples: Sequence[GoldenSample] = (),
    timeout_s: float = TIMEOUT_S,
    renew: Callable[[], Awaitable[None]] | None = None,
    metadata: Sequence[tuple[str, str]] = (),
) -> list[Finding]:
    """Check an environment, and return a finding for each check. `samples` are the author's ordinary samples; `timeout_s` is the timeout of
    a call.

    `renew` restarts the process after it died or hangs. `metadata` go with streams, to which the channel adds no token. Raises
    `ServiceError` if no environment answers.
    """
    examination = _Examination(channel, samples, timeout_s, renew, metadata)
    with contextlib.suppress(_Stop):  # a finding has the reason
        await examination.run()
    return examination.findings()


def problems(result: trajectory_pb2.Result, description: pb.DescribeResponse) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with one result: the key of `REMEDIES`, and the description."""
    scored = result.status == trajectory_pb2.STATUS_SCORED
    known = result.status in trajectory_pb2.Status.values() and result.status != trajectory_pb2.STATUS_UNSPECIFIED
    if not known:
        yield "statuses", f"status {result.status} is unknown"
    elif not scored and not result.message.strip():
        yield "statuses", f"{trajectory_pb2.Status.Name(result.status)} without a message that gives the reason"
    if not scored and result.HasField("reward"):
        yield "statuses", f"reward {result.reward:g} with a status that allows none ({result.status})"
    score = score_from_wire(result)
    if scored and score.status != "SCORED":
        rewarded = result.HasField("reward") and reward_problem(result.reward, result.components) is None
        yield "metadata" if rewarded else "rewards", score.message
    outside = check_range(score, *bounds(description))
    if scored and score.status == "SCORED" and outside.status != "SCORED":
        yield "range", outside.message
    try:
        score.encode()
    except CodecError as error:
        yield "metadata", str(error)


def same(one: Score, other: Score) -> bool:
    """Whether two scores of a sample agree, except in metadata and times."""
    if one.status != other.status or one.components.keys() != other.components.keys():
        return False
    pairs = [(one.reward or 0.0, other.reward or 0.0)]
    pairs += [(value, other.components[name]) for name, value in one.components.items()]
    return all(close(*pair) for pair in pairs)


def _depends(one: Sequence[Score], other: Sequence[Score]) -> bool:
    """Whether a sample always gets one score after one sample, and always another score after another."""
    return (
        all(same(one[0], each) for each in one)
        and all(same(other[0], each) for each in other)
        and not same(one[0], other[0])
    )


class _Stop(Exception):
    """Raised when nothing more can be checked."""


@dataclasses.dataclass(frozen=True)
class _Scores:
    """The result of one call: a score for each sample, or the failure. `hung`: there was no answer by the deadline; `lost`: the connection
    was lost."""

    scores: tuple[Score, ...] = ()
    failure: str = ""
    hung: bool = False
    lost: bool = False
    took_s: float = 0.0


class _Examination:
    def __init__(
        self,
        channel: grpc.aio.Channel,
        samples: Sequence[GoldenSample],
        timeout_s: float,
        renew: Callable[[], Awaitable[None]] | None,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        self._channel = channel
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        self._golden = samples
        self._timeout_s = timeout_s
        self._renew = renew
        self._metadata = metadata
        self._description = pb.DescribeResponse()
        self._wrong: dict[str, list[str]] = {}
        self._said: dict[str, tuple[Verdict, str]] = {}
        self._results = 0
        # samples that get a reward, with their scores alone, the first and the second time
        self._ordinary: list[tuple[Sample, Score, Score]] = []

    def findings(self) -> list[Finding]:
        applies = (REMEDIES if self._scores else _ANY) | (conformance_episodes.REMEDIES if self._plays else {})
        return [self._finding(check, remedy) for check, remedy in applies.items()]

    def _finding(self, check: str, remedy: str) -> Finding:
        if wrong := self._wrong.get(check):
            more = f" (and {len(wrong) - 1} more of the kind)" if len(wrong) > 1 else ""
            return Finding(check, "wrong", wrong[0] + more, remedy)
        return Finding(check, *self._said.get(check, ("skipped", "")))

    async def run(self) -> None:
        await self._start()
        await self._services()
        if self._scores:
            await self._scoring()
        if self._plays:
            await EpisodeExamination(
                self._stub,
                self._golden or ORDINARY,
                self._timeout_s,
                self._fault,
                lambda check, detail: self._say(check, "right", detail),
            ).run()

    async def _scoring(self) -> None:
        await self._one_by_one()
        await self._equal_keys()
        await self._samples_apart()
        await self._batches()
        took_s = await self._full_batch()
        await self._calls_at_a_time()
        await self._check_malformed()
        await self._deadline(took_s)
        await self._check_cancelled(took_s)
        await self._check_mixed(await self._odd_completions())
        self._judge_promises()

    # -- the checks

    async def _start(self) -> None:
        began = time.monotonic()
        try:
            self._description = await self._stub.Describe(
                pb.DescribeRequest(), timeout=self._timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                code, remedy = error.code(), "is it running, and is this its address?"
                answered = f"{code.name}: {error.details()}"
                if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                    answered = f"no answer within {self._timeout_s:g} s"
                elif code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    remedy = "give its token: --token-file FILE --name NAME"
                raise ServiceError(f"no environment answers ({answered}); {remedy}") from error
            self._say("start", "note", "it has no Describe")
            self._say("description", "note", "the hub can't know its build and capacity")
            return
        self._say("start", "right", f"answered Describe after {time.monotonic() - began:.2f} s")
        description = self._description
        least, most = bounds(description)
        if least is not None and most is not None and not least <= most:
            self._fault("description", f"reward_min {least:g} and reward_max {most:g}: no reward is between them")
        wanted = ("name", "build", *(("capacity",) if self._scores else ()))
        missing = [field for field in wanted if not getattr(description, field)]
        room = [f"capacity {description.capacity}"] if self._scores else []
        room += [f"{description.episodes} episodes at a time"] if self._plays else []
        stated = f"{description.name} build {description.build or '(none)'}, {', '.join(room)}"
        self._say(
            "description", "note" if missing else "right", stated + (f"; no {', '.join(missing)}" if missing else "")
        )

    async def _services(self) -> None:
        missing = []
        try:
            await health_pb2_grpc.HealthStub(self._channel).Check(
                health_pb2.HealthCheckRequest(), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError:
            missing.append("health checking")
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(self._channel).ServerReflectionInfo(
            iter([ask]), timeout=self._timeout_s, metadata=self._metadata
        )
        try:
            listed = await call.read()
            names = [service.name for service in listed.list_services_response.service]
        except (grpc.aio.AioRpcError, AttributeError):  # a stream that ends at once reads as EOF
            names = []
        if _SERVICE not in names:
            missing.append("reflection")
        detail = f"no {' and no '.join(missing)}" if missing else "both are on"
        self._say("health and reflection", "note" if missing else "right", detail)

    async def _one_by_one(self) -> None:
        golden = self._golden or ORDINARY
        first = [await self._alone("one by one", each.sample()) for each in golden]
        again = [await self._alone("one by one", each.sample()) for each in reversed(golden)][::-1]
        check = "golden samples" if self._golden else "one by one"  # built-in samples only have to earn a reward
        for each, score in zip(golden, first, strict=True):
            if (difference := each.difference(score)) is not None:
                self._fault(check, f"{_shorten(each.completion)}: {difference}")
        if self._golden:
            self._say(check, "right", f"{len(golden)} are as expected")
        else:
            self._say("golden samples", "note", "none were given (--samples FILE)")
        self._ordinary = [
            (each.sample(), score, second)
            for each, score, second in zip(golden, first, again, strict=True)
            if score.status == "SCORED"
        ]
        if not self._ordinary:
            self._fault("one by one", f"no sample got a reward; the first was {_outcome(first[0])}")
            raise _Stop
        rewards = ", ".join(f"{score.reward:g}" for _, score, _ in self._ordinary)
        self._say("one by one", "right", f"{len(self._ordinary)} samples earned {rewards:.60}")

    async def _equal_keys(self) -> None:
        sample = self._ordinary[0][0]
        first, again = [await self._alone("equal keys", each) for each in (sample, sample)]
        equal = same(first, again)
        if again.status != "SCORED" or (self._description.deterministic and not equal):
            detail = f"{_shorten(sample.completion)} was {_outcome(first)}, and sent again {_outcome(again)}"
            self._fault("equal keys", detail)
        self._say("equal keys", "right", "sent again it earned " + ("the same" if equal else "another reward"))

    async def _samples_apart(self) -> None:
        """Score a sample after one other sample, and after a second one, in turn, to see whether the previous sample matters."""
        sample = self._ordinary[0][0]
        others = [each for each, _, _ in self._ordinary if each.completion != sample.completion]
        if not others:
            self._say("samples apart", "note", "can't be checked with only one sample")
            return
        before = others[0], (*others[1:], sample)[-1]
        after: tuple[list[Score], list[Score]] = [], []
        for _ in range(_ROUNDS):
            for scores, each in zip(after, before, strict=True):
                await self._alone("samples apart", _rename(each))
                scores.append(await self._alone("samples apart", _rename(sample)))
            if not _depends(*after):
                break
        else:
            shown = [_shorten(each.completion) for each in (sample, *before)]
            worth = [_outcome(scores[0]) for scores in after]
            self._fault("samples apart", f"{shown[0]} was {worth[0]} after {shown[1]}, and {worth[1]} after {shown[2]}")
        self._say("samples apart", "right", "the previous sample doesn't matter")

    async def _batches(self) -> None:
        """Score the samples in one call, in both orders."""
        expected = self._ordinary[: self._batch_size]
        if len({score.reward for _, score, _ in expected}) < 2:
            detail = "all samples earn the same, so the order can't be checked; give --samples that differ"
            self._say("batches", "note", detail)
        else:
            self._say("batches", "right", f"{len(expected)} samples in one call earn what they earn alone, in order")
        for batch in (expected, expected[::-1]):
            samples, alone = [sample for sample, _, _ in batch], [score for _, score, _ in batch]
            together = await self._together(samples)
            if all(map(same, together, alone)):
                continue
            stays = all(map(same, together, await self._together(samples)))
            one, other = list(map(_outcome, together)), list(map(_outcome, alone))
            order = ", in another order" if sorted(one) == sorted(other) else ""
            detail = f"together they earn {', '.join(one)}, but alone {', '.join(other)}{order}"
            self._say("batches", "note", detail)
            if self._settled and stays:
                self._fault("batches", detail)
            elif self._description.deterministic:
                self._fault("deterministic", detail)
            return

    async def _together(self, samples: Sequence[Sample]) -> Sequence[Score]:
        answer = await self._ask(list(map(_rename, samples)))
        self._blame("batches", f"a call of {len(samples)} samples", answer)
        return answer.scores

    async def _full_batch(self) -> float:
        """Score as many samples as one call may have, and return how long it took. Meanwhile Describe must be answered."""
        size = self._batch_size
        call = asyncio.create_task(self._ask(self._many(size)))
        await asyncio.sleep(_PAUSE_S)
        # the second time because the machine may have been busy
        if not await self._is_there() and not call.done() and not await self._is_there():
            self._fault(
                "start",
                f"no answer to Describe within {_DESCRIBE_S:g} s while it scored, so the hub would treat it as unreachable",
            )
        answer = await call
        self._blame("batches", f"a batch of {size}", answer)
        for score in answer.scores:
            if score.status != "SCORED":
                self._fault("batches", f"in a batch of {size}, which its description allows, one was {_outcome(score)}")
        return answer.took_s

    async def _is_there(self) -> bool:
        try:
            await self._stub.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_S)
        except grpc.aio.AioRpcError as error:
            return error.code() == grpc.StatusCode.UNIMPLEMENTED  # it answers, without a description
        return True

    async def _calls_at_a_time(self) -> None:
        count = min(8, self._description.calls or self._description.capacity or 8)
        samples = self._many(count)
        answers = await asyncio.gather(*(self._ask([sample]) for sample in samples))
        for answer in answers:
            self._blame("calls at a time", f"one of {count} calls", answer)
            for score in answer.scores:
                if score.status != "SCORED":
                    self._fault("calls at a time", f"of {count} calls one was {_outcome(score)}")
        self._say("calls at a time", "right", f"{count} were answered")

    async def _check_malformed(self) -> None:
        fine = sample_to_wire(self._ordinary[0][0])
        requests = {"bytes that are not a message": b"\xff\xff\xff\xff", "a call without trajectories": b""}
        for what, change in (
            ("extra_env_info_json that is not JSON", {"extra_env_info_json": "{"}),
            ("extra_env_info_json that is not an object", {"extra_env_info_json": "[4]"}),
            ("no finish_reason", {"finish_reason": trajectory_pb2.FINISH_REASON_UNSPECIFIED}),
            ("no environment", {"environment": ""}),
        ):
            bad = trajectory_pb2.Trajectory()
            bad.CopyFrom(fine)
            for name, value in change.items():
                setattr(bad, name, value)
            requests[what] = pb.EnvironmentServiceScoreRequest(trajectories=[bad]).SerializeToString()
        call = self._channel.unary_unary(f"/{_SERVICE}/Score")
        for what, request in requests.items():
            try:
                await call(request, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() in (*_LOST, grpc.StatusCode.DEADLINE_EXCEEDED):
                    self._fault("malformed requests", f"{what}: {error.code().name}: {error.details()}")
                    await self._go_on()
        await self._still_scores("malformed requests", "after them")
        self._say("malformed requests", "right", f"{len(requests)} did no harm")

    async def _deadline(self, took_s: float) -> None:
        """Call a batch with half the time that it takes. Only a second missing answer is a fault, because the machine may have been busy at
        the first. If all of the batch is done in half the time, the machine may have been busy when it was timed."""
        size, late = self._batch_size, 0
        while took_s >= _SLOW_S:
            answer = await self._ask(self._many(size), took_s / 2)
            done = sum(score.status == "SCORED" for score in answer.scores)
            if not answer.hung:
                self._blame("deadline", f"a call with {took_s / 2:.1f} s to answer", answer)
                if answer.failure or done < size:
                    self._say(
                        "deadline",
                        "right",
                        f"{took_s / 2:.1f} s for a batch that takes {took_s:.1f}: {done} of {size} were done",
                    )
                    break
                took_s = answer.took_s
            elif late:
                detail = (
                    f"a batch of {size} takes {took_s:.1f} s; with a deadline of {took_s / 2:.1f} s there was no answer"
                )
                self._fault("deadline", detail)
                break
            else:
                late += 1
        else:
            self._say("deadline", "right", f"a batch of {size} took {took_s:.2f} s, far from any deadline")
        await self._still_scores("deadline", "after a call past its deadline")

    async def _check_cancelled(self, took_s: float) -> None:
        request = pb.EnvironmentServiceScoreRequest(trajectories=map(sample_to_wire, self._many(self._batch_size)))
        call = self._stub.Score(request, timeout=self._timeout_s)
        await asyncio.sleep(min(_PAUSE_S, took_s / 4))
        call.cancel()
        await asyncio.wait([asyncio.ensure_future(call.code())])
        await self._still_scores("cancelled calls", "after a cancelled call")
        self._say("cancelled calls", "right", "it continues to score after one")

    async def _odd_completions(self) -> list[Sample]:
        """Score completions that no policy should write. Return those that did no harm."""
        base, hangs = self._ordinary[0][0], 0
        odd = {
            name: dataclasses.replace(_rename(base), completion=text, completion_token_ids=tuple(text.encode()[:4096]))
            for name, text in ODD_COMPLETIONS.items()
        }
        odd["cut off at the maximum length"] = dataclasses.replace(_rename(base), finish_reason="length")
        harmless = []
        for name, sample in odd.items():
            answer = await self._ask([sample])
            statuses = [score.status for score in answer.scores]
            if answer.failure:
                self._fault("odd completions", f"{name}: {answer.failure}")
            elif statuses != ["SCORED"]:
                self._fault("odd completions", f"{name}: {' '.join(map(_outcome, answer.scores))}")
            if answer.hung or answer.lost or "TIMED_OUT" in statuses:
                await self._go_on()
                hangs += not answer.lost
            else:
                harmless.append(sample)
            if hangs == _MOST_HANGS:
                self._fault("odd completions", "three hung, so the others were not tried")
                break
        self._say("odd completions", "right", f"{len(odd)} earned rewards")
        return harmless

    async def _check_mixed(self, odd: Sequence[Sample]) -> None:
        """Score two ordinary samples with odd completions between them, in one call."""
        if self._batch_size < 3:
            self._say("mixed batches", "note", f"a call has at most {self._batch_size} samples")
            return
        ordinary = self._ordinary[0], self._ordinary[-1]
        between = [_rename(each) for each in odd[: self._batch_size - 2]]
        answer = await self._ask([_rename(ordinary[0][0]), *between, _rename(ordinary[1][0])])
        self._blame("mixed batches", "a call of ordinary and odd completions", answer)
        for (sample, score, _), got in zip(ordinary, (*answer.scores[:1], *answer.scores[-1:]), strict=False):
            if got.status != "SCORED" or (self._settled and not same(got, score)):
                detail = f"{_shorten(sample.completion)} is {_outcome(score)} alone, but {_outcome(got)} among odd completions"
                self._fault("mixed batches", detail)
        self._say("mixed batches", "right", "ordinary samples keep their rewards among odd ones")

    def _judge_promises(self) -> None:
        """Judge what the environment states in Describe, and what holds for all of its results."""
        differing = [each for each in self._ordinary if not same(each[1], each[2])]
        if self._description.deterministic:
            for sample, first, second in differing:
                detail = f"{_shorten(sample.completion)} earned {_outcome(first)}, then {_outcome(second)}"
                self._fault("deterministic", detail)
            self._say("deterministic", "right", "equal samples earned the same")
        elif differing:
            self._say("deterministic", "right", "it is not, and doesn't state it")
        else:
            self._say("deterministic", "note", "equal samples earned the same; if they always do, state deterministic")
        least, most = bounds(self._description)
        for check, detail in {
            "one result each": f"of {self._results} results",
            "rewards": "finite numbers",
            "statuses": "all are valid",
            "metadata": "within the limit",
        }.items():
            self._say(check, "right", detail)
        if least is None and most is None:
            self._say("range", "note", "no reward_min and reward_max are stated")
        else:
            self._say("range", "right", f"from {_format_bound(least)} to {_format_bound(most)}")

    # -- calls

    async def _alone(self, check: str, sample: Sample) -> Score:
        answer = await self._ask([sample])
        self._blame(check, _shorten(sample.completion), answer)
        return answer.scores[0] if answer.scores else Score("FAILED", message=answer.failure)

    async def _ask(self, samples: Sequence[Sample], timeout_s: float | None = None) -> _Scores:
        """Score samples in one call, and those that it has no room for in another."""
        began, timeout_s = time.monotonic(), timeout_s or self._timeout_s
        try:
            scores = await ask(self._call, samples, timeout_s)
        except CodecError as error:
            return _Scores(failure=str(error))
        except grpc.aio.AioRpcError as error:
            late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            detail = f"no answer within {timeout_s:.1f} s" if late else f"{error.code().name}: {error.details()}"
            return _Scores(failure=detail, hung=late, lost=error.code() in _LOST)
        return _Scores(tuple(scores), took_s=time.monotonic() - began)

    async def _call(self, samples: Sequence[Sample], timeout_s: float) -> Sequence[trajectory_pb2.Result]:
        request = pb.EnvironmentServiceScoreRequest(trajectories=map(sample_to_wire, samples))
        response = await self._stub.Score(request, timeout=timeout_s)
        results: Sequence[trajectory_pb2.Result] = response.results
        self._results += len(results)
        if len(results) != len(samples):
            self._fault("one result each", f"{len(results)} results for {len(samples)} trajectories")
        for sample, result in zip(samples, results, strict=False):
            for check, detail in problems(result, self._description):
                self._fault(check, f"{_shorten(sample.completion)}: {detail}")
        return results

    async def _still_scores(self, check: str, when: str) -> None:
        answer = await self._ask([_rename(self._ordinary[0][0])])
        if answer.failure or answer.scores[0].status != "SCORED":
            self._fault(check, f"{when} it stopped scoring: {answer.failure or _outcome(answer.scores[0])}")
            await self._go_on()

    async def _go_on(self) -> None:
        """Continue after the environment died, or something in it hangs. Raises `_Stop` if it no longer scores."""
        if self._renew is not None:
            await self._renew()
        with contextlib.suppress(grpc.aio.AioRpcError):  # the sample below decides
            await self._stub.Describe(pb.DescribeRequest(), timeout=self._timeout_s, wait_for_ready=True)
        answer = await self._ask([_rename(self._ordinary[0][0])])
        if answer.failure or answer.scores[0].status != "SCORED":
            raise _Stop

    def _blame(self, check: str, what: str, answer: _Scores) -> None:
        """Note a call that failed. Raises `_Stop` if the process seems to be gone, or hangs on ordinary samples."""
        if answer.failure:
            self._fault(check, f"{what}: {answer.failure}")
        if answer.hung or answer.lost:
            raise _Stop

    # -- reports

    def _fault(self, check: str, detail: str) -> None:
        self._wrong.setdefault(check, []).append(detail)

    def _say(self, check: str, verdict: Verdict, detail: str) -> None:
        self._said[check] = verdict, detail

    @property
    def _plays(self) -> bool:
        return self._description.episodes > 0

    @property
    def _scores(self) -> bool:
        return self._description.capacity > 0 or not self._plays

    @property
    def _settled(self) -> bool:
        """Whether every sample earned the same both times."""
        return all(same(score, again) for _, score, again in self._ordinary)

    @property
    def _batch_size(self) -> int:
        """The number of samples in one call, as many as the hub would send."""
        description = self._description
        capacity = description.capacity or _LARGEST_BATCH
        return max(1, min(_LARGEST_BATCH, capacity // description.calls if description.calls else capacity))

    def _many(self, count: int) -> list[Sample]:
        return [_rename(self._ordinary[place % len(self._ordinary)][0]) for place in range(count)]


def _rename(sample: Sample) -> Sample:
    """Return the same sample under another key."""
    return dataclasses.replace(sample, idempotency_key=secrets.token_hex(8))


def _shorten(completion: str) -> str:
    return f"{completion[:40]!r}" + ("…" if len(completion) > 40 else "")


def _outcome(score: Score) -> str:
    return f"{score.reward:g}" if score.reward is not None else f"{score.status} ({score.message:.160})"


def _format_bound(value: float | None) -> str:
    return "(none)" if value is None else f"{value:g}"
