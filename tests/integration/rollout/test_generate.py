"""Trajectories as a real engine samples them, against transformers on the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from headrace.base.errors import LeaseLost
from headrace.config import Config
from headrace.net.replica_client import SampleRequest
from headrace.records.trajectory import Sampling, Span, Trajectory
from headrace.replay import Lease
from headrace_services.rollout.calls import complete
from headrace_services.rollout.engine import running_engine
from headrace_services.rollout.generate import (
    GenerationError,
    RequestAborted,
    Saver,
    generate,
    prompt_problem,
    request_id,
    sampled_tokens,
    sampling_params,
)
from headrace_services.rollout.http import BehindTraining
from headrace_services.rollout.sequence_slots import SequenceSlots
from headrace_services.trainer.data.model_tokens import ModelTokens
from headrace_services.trainer.network.packing import Packing, pack
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel, mask_kept
from tests.support.buffer import make_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 1024
VERSION = 7


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Any]:
    config = Config.model_validate(
        {
            "policy": {
                "model_name": str(tiny_model),
                "precision": "float32",
                "max_total_sequence_length": CONTEXT,
                "generation": {
                    "max_new_tokens": 64,
                    "vllm_cfg": {"kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 64},
                },
            }
        }
    )
    from vllm.model_executor.models import registry

    before = dict(os.environ)
    # with an empty cache, it starts no process to look at the model's class
    unknown = mock.patch.object(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", return_value=None)
    alone = mock.patch.object(registry, "subprocess", None)
    # so that the engine is forked: the threads that this process has hold nothing that the engine takes
    one_thread = mock.patch.object(threading, "active_count", return_value=1)
    try:
        with contextlib.ExitStack() as stack:
            with unknown, alone, one_thread:
                engine = stack.enter_context(running_engine(config))
            yield engine
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def named_weights(engine: Any) -> None:
    await engine.update_weight_version(str(VERSION))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


PROMPT = (3, 7, 8, 15, 9, 6, 4)


def lease(prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Lease:
    fields = {"temperature": 1.0, "max_new_tokens": 40, **sampling}
    group = make_group(0, n=4, prompt_token_ids=np.array(prompt, np.int32), sampling=Sampling(**fields))
    return Lease(group, "token", 2, 0, VERSION, "timeline", "incarnation", 15.0, group.n, tuple(range(group.n)))


class Shelf:
    """Where a test has unfinished trajectories saved."""

    def __init__(self) -> None:
        self.saved: list[Trajectory] = []

    async def save(self, trajectory: Trajectory) -> None:
        trajectory.check()
        self.saved.append(trajectory)

    def saver(self, every: int | None) -> Saver:
        return Saver(every, self.save)


def going_on(from_: Trajectory, **sampling: Any) -> Lease:
    """The lease of another replica, that goes on from there."""
    return msgspec.structs.replace(lease(**sampling), token="another", prefixes={from_.index: from_})


def log_probabilities(model: Any, trajectory: Trajectory, temperature: float) -> np.ndarray:
    """[T] of the completion's tokens, by transformers."""
    prompt, completion = trajectory.prompt_token_ids, trajectory.completion_token_ids
    ids = torch.as_tensor(np.concatenate([prompt, completion]), dtype=torch.long)[None]
    with torch.no_grad():
        logits = model(ids).logits[0] / temperature
    rows = logits.log_softmax(-1).gather(-1, ids[0].roll(-1)[:, None])[:, 0]
    return rows[prompt.size - 1 : -1].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probabilities_are_those_of_the_draw(engine: Any, model: Any, temperature: float) -> None:
    it = await generate(engine, lease(temperature=temperature), 0, "me")
    assert np.abs(it.logprobs - log_probabilities(model, it, temperature)).max() < 1e-4


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 4},
        {"top_p": 0.6},
        {"top_k": 9, "top_p": 0.8, "temperature": 1.3},
        {"bad_words": ("1", "2", "3")},
        {"bad_words": ("4",), "top_k": 9, "temperature": 0.8},
    ],
    ids=["top-k", "top-p", "both", "words", "words-top-k"],
)
async def test_filtered_log_probabilities_are_the_trainer_s(
    engine: Any, tiny_model: Path, sampling: dict[str, Any]
) -> None:
    policy = PolicyModel(Config.model_validate({"policy": {"model_name": str(tiny_model), "precision": "float32"}}))
    words = {"bad_words": list(sampling.get("bad_words", ()))}
    settings = Config.model_validate({"policy": {"model_name": str(tiny_model), "generation": words}})
    excluded = ModelTokens.load(settings, engine.renderer.get_tokenizer()).excluded
    filtered = {key: value for key, value in sampling.items() if key != "bad_words"}
    warper = LogitsWarper(**{"temperature": 1.0, **filtered}, excluded=excluded)
    for index in range(4):
        it = await generate(engine, lease(**sampling), index, "me")
        assert not {*excluded} & {*it.completion_token_ids.tolist()}
        packed = pack([it], (((0,),),), Packing(mode="padded", paths=1, tokens=None))
        with torch.no_grad():
            found = policy.forward(packed, warper)
        np.testing.assert_allclose(it.logprobs, found.logprobs.numpy(), atol=1e-4)
        assert found.unfiltered is not None
        assert (found.unfiltered < found.logprobs - 0.05).any()  # the filter did leave something out


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("top_k", [None, 1, 7, 40])
async def test_the_trainer_keeps_what_vllm_keeps(top_k: int | None, top_p: float) -> None:
    """Logits with many ties."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = (torch.randn(200, 40, generator=torch.Generator().manual_seed(0)) * 2).round() / 2
    k = None if top_k is None else torch.full((200,), top_k, dtype=torch.int32)
    p = None if top_p == 1 else torch.full((200,), top_p)
    theirs = apply_top_k_top_p_pytorch(logits.clone(), k, p, allow_cpu_sync=True)
    assert torch.equal(mask_kept(logits, LogitsWarper(1.0, top_k, top_p)), theirs > -torch.inf)


async def test_a_trajectory_is_a_whole_record(engine: Any) -> None:
    it = await generate(engine, lease(), 3, "me")
    assert (it.group_id, it.attempt, it.index, it.replica) == ("e0-train-0", 2, 3, "me")
    assert it.prompt_token_ids.tolist() == list(PROMPT)
    assert it.turns == ((0, it.completion_token_ids.size),)
    assert it.loss_mask.tolist() == [1] * it.completion_token_ids.size
    assert it.timings["generate_s"] > 0
    assert Trajectory.decode(it.encode()).spans == it.spans


async def running(engine: Any, task: asyncio.Task[Trajectory]) -> None:
    """Return once the engine has given `task` its first token. `task` must not end early: it could end between two looks."""
    states = engine.output_processor.request_states
    while not any(state.detokenizer.num_output_tokens() for state in states.values()):  # the engine tells nobody
        assert not task.done(), "the trajectory ended before it was seen to run"
        await asyncio.sleep(0)


@pytest.mark.nightly  # law 2, below, has spans of such a pause by day, and weights/test_refit.py compares them with both weights
async def test_spans_name_the_weights_of_every_token(engine: Any) -> None:
    task = asyncio.create_task(generate(engine, lease(temperature=0.0, max_new_tokens=400), 0, "me"))
    await running(engine, task)
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.update_weight_version(str(VERSION + 1))
    await engine.resume_generation()
    it = await task
    assert [span.version for span in it.spans] == [VERSION, VERSION + 1]
    assert (it.oldest_version, it.newest_version) == (VERSION, VERSION + 1)
    it.check()


async def test_tokens_of_weights_that_no_refit_has_named_never_leave(engine: Any) -> None:
    await engine.update_weight_version("default")
    with pytest.raises(GenerationError, match="no refit has given a version"):
        await generate(engine, lease(), 0, "me")


async def test_the_end_token_belongs_to_the_completion_and_not_to_its_text(engine: Any) -> None:
    free = await generate(engine, lease(temperature=0.0), 0, "me")
    ids = free.completion_token_ids.tolist()
    first = max(map(ids.index, ids))  # where the last token appears that is new
    end = ids[first]
    it = await generate(engine, lease(temperature=0.0, stop_token_ids=(end,)), 0, "me")
    assert it.finish_reason == "stop"
    assert it.completion_token_ids.tolist() == ids[: first + 1]
    # although it is no special token, whoever looks for a stop string, and whoever sampled the beginning
    assert it.text == (await generate(engine, lease(temperature=0.0, max_new_tokens=first), 0, "me")).text
    stops = {"temperature": 0.0, "stop_token_ids": (end,), "stop_strings": ("never written",)}
    assert (await generate(engine, lease(**stops), 0, "me")).text == it.text
    assert (await generate(engine, going_on(_first(free, first), **stops), 0, "other")).text == it.text


async def test_a_completion_that_is_cut_off_says_length(engine: Any) -> None:
    it = await generate(engine, lease(temperature=0.0, max_new_tokens=3), 0, "me")
    assert it.finish_reason == "length"
    assert it.completion_token_ids.size == 3


async def test_a_completion_ends_with_the_context(engine: Any) -> None:
    prompt = PROMPT * ((CONTEXT - 4) // len(PROMPT))
    it = await generate(engine, lease(prompt, temperature=0.0, max_new_tokens=500), 0, "me")
    assert it.finish_reason == "length"
    assert it.prompt_token_ids.size + it.completion_token_ids.size == CONTEXT


async def test_a_stop_string_ends_a_completion(engine: Any) -> None:
    free = await generate(engine, lease(temperature=0.0), 0, "me")
    stop = free.text[3:5]
    it = await generate(engine, lease(temperature=0.0, stop_strings=(stop,)), 0, "me")
    assert it.finish_reason == "stop"
    assert it.text == free.text[: free.text.index(stop)]
    assert it.logprobs.size == it.completion_token_ids.size


async def test_a_token_costs_no_text_and_no_look_at_variables(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a completion with stop strings, whose text the engine does need."""
    from vllm import envs

    for name in envs.environment_variables:
        monkeypatch.setitem(envs.environment_variables, name, partial(pytest.fail, f"{name} is looked up"))
    params = sampling_params(Sampling(temperature=1.0, max_new_tokens=40, stop_strings=("no such text",), seed=1), 0)
    (output,) = [each async for each in engine.generate({"prompt_token_ids": list(PROMPT)}, params, "texts")]
    assert output.outputs[0].text
    assert set(output.outputs[0].logprobs.decoded_tokens) == {None}


async def test_a_request_from_outside_gets_the_text_of_each_token(engine: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=40, stop=["no such text"], logprobs=1, seed=1)
    *_, output = [each async for each in engine.generate({"prompt_token_ids": list(PROMPT)}, params, "outside")]
    texts = {token: each.decoded_token for at in output.outputs[0].logprobs for token, each in at.items()}
    assert texts == {token: engine.renderer.get_tokenizer().decode([token]) for token in texts} != {}


async def test_greedy_takes_the_likeliest_token(engine: Any, model: Any) -> None:
    it = await generate(engine, lease(temperature=0.0, max_new_tokens=8), 0, "me")
    ids = list(PROMPT)
    for token in it.completion_token_ids.tolist():
        with torch.no_grad():
            assert model(torch.tensor([ids])).logits[0, -1].argmax() == token
        ids.append(token)


async def test_seeds_repeat_a_trajectory_and_tell_trajectories_apart(engine: Any) -> None:
    async def sample(index: int, seed: int | None) -> list[int]:
        return (await generate(engine, lease(seed=seed), index, "me")).completion_token_ids.tolist()

    one, again, other = await asyncio.gather(sample(0, 11), sample(0, 11), sample(1, 11))
    assert one == again != other
    assert await sample(1, 10) == one
    assert await sample(0, None) != await sample(0, None)


async def test_text_is_what_the_engine_would_say(engine: Any) -> None:
    from vllm.inputs.engine import tokens_input

    it = await generate(engine, lease(seed=5), 0, "me")
    params = sampling_params(lease(seed=5).group.sampling, 0)
    params.detokenize = True
    async for output in engine.generate(tokens_input(list(PROMPT)), params, "text"):
        assert list(output.outputs[0].token_ids) == it.completion_token_ids.tolist()
        assert output.outputs[0].text == it.text != ""


async def test_an_unfinished_trajectory_is_saved_each_time_it_has_grown(engine: Any, model: Any) -> None:
    shelf = Shelf()
    it = await generate(engine, lease(max_new_tokens=200, temperature=0.0), 0, "me", shelf.saver(32))
    lengths = [saved.completion_token_ids.size for saved in shelf.saved]
    # a reader that is late gets several steps of the engine at once
    assert 1 < len(lengths) <= (it.completion_token_ids.size - 1) // 32
    assert all(later - earlier >= 32 for earlier, later in itertools.pairwise([0, *lengths]))
    for saved in shelf.saved:
        size = saved.completion_token_ids.size
        assert saved.completion_token_ids.tolist() == it.completion_token_ids[:size].tolist()
        assert saved.logprobs.tolist() == it.logprobs[:size].tolist()
        assert saved.spans == (Span(VERSION, 0, size),)
        assert saved.finish_reason == "length"
    assert np.abs(it.logprobs - log_probabilities(model, it, 1.0)).max() < 1e-4
    assert it.writers == (("me", 0, it.completion_token_ids.size),)


async def test_law_2_age_a_trajectory_names_the_weights_of_every_token(engine: Any) -> None:
    shelf = Shelf()
    task = asyncio.create_task(generate(engine, lease(temperature=0.0, max_new_tokens=400), 0, "me", shelf.saver(16)))
    while not shelf.saved:  # noqa: ASYNC110  # the engine tells nobody
        await asyncio.sleep(0)
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.update_weight_version(str(VERSION + 1))
    await engine.resume_generation()
    it = await task
    boundary = it.spans[0].end
    before = [saved for saved in shelf.saved if saved.completion_token_ids.size <= boundary]
    after = [saved for saved in shelf.saved if saved.completion_token_ids.size > boundary]
    assert before
    assert after
    for saved in before:
        assert saved.spans == (Span(VERSION, 0, saved.completion_token_ids.size),)
    for saved in after:
        assert saved.spans == (Span(VERSION, 0, boundary), Span(VERSION + 1, boundary, saved.completion_token_ids.size))


async def test_another_replica_goes_on_where_one_was_cut_off(engine: Any, model: Any) -> None:
    shelf = Shelf()
    task = asyncio.create_task(generate(engine, lease(max_new_tokens=900, seed=7), 2, "one", shelf.saver(None)))
    await running(engine, task)
    await engine.abort(request_id(lease(), 2))
    with pytest.raises(RequestAborted, match="trajectory 2: aborted after"):
        await task
    (begun,) = shelf.saved
    size = begun.completion_token_ids.size
    assert size > 0
    await engine.update_weight_version(str(VERSION + 1))
    it = await generate(engine, going_on(begun, max_new_tokens=size + 60, seed=7), 2, "other", shelf.saver(16))
    total = it.completion_token_ids.size
    assert size < total <= size + 60
    assert it.completion_token_ids[:size].tolist() == begun.completion_token_ids.tolist()
    assert it.logprobs[:size].tolist() == begun.logprobs.tolist()
    # the tokens of either replica are what the model would have written after all before
    assert np.abs(it.logprobs - log_probabilities(model, it, 1.0)).max() < 1e-4
    assert it.spans == (Span(VERSION, 0, size), Span(VERSION + 1, size, total))
    assert it.writers == (("one", 0, size), ("other", size, total))
    assert (it.replica, it.turns) == ("other", ((0, total),))
    assert it.prompt_token_ids.tolist() == list(PROMPT)
    assert it.timings["generate_s"] > begun.timings["generate_s"]
    assert Trajectory.decode(it.encode()).writers == it.writers
    # what the second saved begins with what the first had
    for saved in shelf.saved[1:]:
        assert saved.written[0] == ("one", 0, size)
        assert saved.spans[0] == Span(VERSION, 0, size)


async def test_going_on_takes_other_numbers_than_the_beginning_took(engine: Any) -> None:
    whole = await generate(engine, lease(seed=7), 0, "one")
    half = _first(whole, 12)
    again = await generate(engine, going_on(half, seed=7), 0, "other")
    assert again.completion_token_ids[:12].tolist() == whole.completion_token_ids[:12].tolist()
    assert again.completion_token_ids[12:24].tolist() != whole.completion_token_ids[12:24].tolist()
    assert again.completion_token_ids[12:24].tolist() != whole.completion_token_ids[:12].tolist()
    assert again.text.startswith(half.text)


def _first(it: Trajectory, size: int) -> Trajectory:
    return msgspec.structs.replace(
        it,
        completion_token_ids=it.completion_token_ids[:size],
        logprobs=it.logprobs[:size],
        loss_mask=it.loss_mask[:size],
        spans=(Span(VERSION, 0, size),),
        turns=((0, size),),
        writers=((it.replica, 0, size),),
        finish_reason="length",
        text="",
    )


async def test_a_stop_string_that_begins_before_the_cut_ends_the_completion(engine: Any) -> None:
    free = await generate(engine, lease(temperature=0.0), 0, "one")
    stop = free.text[9:13]  # a character a token
    cut = free.text.index(stop) + 2
    expected = await generate(engine, lease(temperature=0.0, stop_strings=(stop,)), 0, "one")
    it = await generate(engine, going_on(_first(free, cut), temperature=0.0, stop_strings=(stop,)), 0, "other")
    assert it.finish_reason == "stop"
    assert it.text == expected.text
    assert it.completion_token_ids.tolist() == expected.completion_token_ids.tolist()
    assert it.writers == (("one", 0, cut), ("other", cut, expected.completion_token_ids.size))
    it.check()


async def test_a_save_that_is_refused_ends_the_request(engine: Any) -> None:
    async def refuse(trajectory: Trajectory) -> None:
        raise LeaseLost(f"the lease of group {trajectory.group_id} is over")

    with pytest.raises(LeaseLost):
        await generate(engine, lease(temperature=0.0, max_new_tokens=900), 0, "me", Saver(16, refuse))
    assert engine.get_num_unfinished_requests() == 0


async def test_trajectories_of_a_group_run_side_by_side(engine: Any) -> None:
    tasks = [asyncio.create_task(generate(engine, lease(seed=7), index, "me")) for index in range(4)]
    most = 0
    while not all(task.done() for task in tasks):
        most = max(most, engine.get_num_unfinished_requests())
        await asyncio.sleep(0)
    assert most == 4
    assert len({tuple(task.result().completion_token_ids.tolist()) for task in tasks}) > 1


async def test_a_cancelled_trajectory_is_aborted_in_the_engine(engine: Any) -> None:
    task = asyncio.create_task(generate(engine, lease(temperature=0.0, max_new_tokens=900), 0, "me"))
    await running(engine, task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.get_num_unfinished_requests() == 0


async def test_tokens_are_counted_before_the_engine_returns_them(engine: Any) -> None:
    """It returns this trajectory whole."""
    given = lease(temperature=0.0, max_new_tokens=400)
    task = asyncio.create_task(generate(engine, given, 0, "me"))
    counts = [0]
    while not task.done() and counts[-1] < 3:
        counts.append(sampled_tokens(engine, request_id(given, 0)))
        await asyncio.sleep(0)
    assert 3 <= counts[-1] <= 400
    assert (await task).completion_token_ids.size >= counts[-1]
    assert sampled_tokens(engine, request_id(given, 0)) == 0


async def test_a_token_outside_the_vocabulary_leaves_the_engine_alive(engine: Any) -> None:
    from vllm.exceptions import VLLMClientError

    with pytest.raises(VLLMClientError, match="vocab"):
        await generate(engine, lease((3, 10_000)), 0, "me")
    assert (await generate(engine, lease(max_new_tokens=2), 0, "me")).completion_token_ids.size


async def test_a_prompt_that_fills_the_context_is_named_a_problem() -> None:
    assert prompt_problem(lease((3,) * 9).group, 10) is None
    problem = str(prompt_problem(lease((3,) * 10).group, 10))
    assert "10 tokens" in problem
    assert "max_total_sequence_length" in problem


async def test_seeded_prompts_beyond_one_step_are_all_completed(engine: Any) -> None:
    """Of a prompt that is computed in parts vLLM's CPU engine would die."""
    prompts = [(3 + number, *(7, 8, 15) * 320) for number in range(8)]
    them = await asyncio.gather(
        *(generate(engine, lease(each, seed=5, max_new_tokens=4), number, "me") for number, each in enumerate(prompts))
    )
    assert len(them) == 8


async def test_requests_find_what_was_computed_under_their_salt(engine: Any) -> None:
    """Those from outside, with a salt of their own or none, calls and trajectories."""
    prompt, now = (3, 7, 8, 15) * 50, ["one"]
    outside = BehindTraining(engine, SequenceSlots.of(engine), lambda: now[0])
    parameters = sampling_params(Sampling(1.0, 1), 0)

    async def cached(**more: str) -> int:
        asked = {"prompt_token_ids": list(prompt), **more}
        async for output in outside.generate(asked, parameters.clone(), f"outside-{time.monotonic()}"):
            found = output.num_cached_tokens
        return found

    async def call() -> int:
        asked = SampleRequest(prompt, 1, "timeline", 0)
        name = f"call-{time.monotonic()}"
        return (await complete(engine, asked, name, special_tokens=False, cache_salt=now[0])).cached_tokens

    for now[0] in ("one", "two"):
        assert [await cached(), await cached(cache_salt="mine"), await call()] == [0, 0, 0]
        assert 0 < await cached() == await cached(cache_salt="mine") == await call()
    now[0] = "three"
    await generate(engine, lease(prompt, max_new_tokens=1), 0, "me", cache_salt="three")
    assert await call() > 0


async def test_requests_from_outside_wait_for_the_runs_own(engine: Any) -> None:
    """Three times what the engine holds, whatever priority they ask for; a request of the run that comes last overtakes those that wait."""
    slots = SequenceSlots.of(engine)
    count = 3 * slots.count
    outside, parameters = BehindTraining(engine, slots, lambda: None), sampling_params(Sampling(1.0, 40), 0)
    parameters.ignore_eos = True
    waiting = set(range(count))

    async def ask(number: int) -> None:
        prompt = {"prompt_token_ids": list(PROMPT)}
        async for _ in outside.generate(prompt, parameters.clone(), f"outside-{number}", priority=-1_000_000):
            pass
        waiting.discard(number)

    asking = [asyncio.create_task(ask(number)) for number in range(count)]
    async with asyncio.timeout(120):
        while engine.get_num_unfinished_requests() + slots.waiting < len(asking):  # noqa: ASYNC110 - the engine sets no event
            await asyncio.sleep(0)
    async with slots.take():
        await generate(engine, lease(max_new_tokens=8), 0, "replica")
    assert len(waiting) > slots.count  # of three batches, it went into the second
    await asyncio.gather(*asking)
