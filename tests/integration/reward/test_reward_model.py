"""`reward_model`: a real sequence-classification model, in a process of its own."""

from __future__ import annotations

import asyncio
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from headrace import Sample
from headrace.base.errors import ServiceError
from headrace.config.environments import RewardModelConfig
from headrace_services.reward.model_process import Conversation, ModelSpecification, RewardModelOnDevice
from headrace_services.reward.reward_model import ModelProcess, RewardModel
from headrace_services.trainer.demo_models.tiny import make_tokenizer
from tests.support.hostile import DEADLY, hostile
from tests.support.reward_hub import start_hub
from tests.support.tiny_reward_model import CONTEXT, make_reward_model
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow  # starts processes that import torch
PROMPT = ({"role": "user", "content": "47+85"},)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start waits for the model, however busy the machine is."""
    monkeypatch.setattr(RewardModel, "patience_s", 600.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward_model"))


def on_device(directory: Path, **more: Any) -> RewardModelOnDevice:
    return RewardModelOnDevice(RewardModelConfig.model_validate(env_of(directory, **more)["helpful"]))


def conversation(completion: str) -> Conversation:
    return Conversation(list(PROMPT), completion)


def env_of(directory: Path, **more: Any) -> dict[str, Any]:
    return {"helpful": {"type": "reward_model", "model_name": str(directory), "device": "cpu", "batch_size": 4} | more}


def sample(completion: str, **more: Any) -> Sample:
    return Sample(completion, messages=PROMPT, environment="helpful", **more)


def test_a_reward_is_transformers_whatever_else_is_in_the_batch(directory: Path) -> None:
    tokenizer, model = make_tokenizer(), AutoModelForSequenceClassification.from_pretrained(directory)
    completions = ["132", "1", "32+100=132", "", "7" * 40]
    expected = []
    for completion in completions:
        whole = [*PROMPT, {"role": "assistant", "content": completion}]
        ids = tokenizer.apply_chat_template(whole, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.inference_mode():
            expected.append(model(input_ids=ids).logits.item())
    assert len({round(value, 3) for value in expected}) == len(expected)
    found = on_device(directory).rewards([conversation(completion) for completion in completions])
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_model_without_its_head_gives_no_rewards(tmp_path: Path) -> None:
    """transformers would draw the head at random, and so the rewards."""
    weights = load_file(make_reward_model(tmp_path) / "model.safetensors")
    weights["v_head.weight"] = weights.pop("score.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack.*score\.weight"):
        on_device(tmp_path)


def test_no_completion_can_end_its_turn(directory: Path) -> None:
    model = on_device(directory)
    special = set(make_tokenizer().all_special_ids)
    plain = [token for token in model._tokens(conversation("132")) if token in special]
    for completion in ("<eos><user>", "132<eos>", "<asst>132<pad>"):
        row = model._tokens(conversation(completion))
        assert [token for token in row if token in special] == plain, completion


def test_what_is_too_long_has_no_reward_and_the_others_have_theirs(directory: Path) -> None:
    model = on_device(directory)
    alone = model.rewards([conversation("132")])
    long, right = model.rewards([conversation("7" * CONTEXT), conversation("132")])
    assert isinstance(long, str)
    assert f"at most {CONTEXT}; raise max_model_len" in long
    assert [right] == pytest.approx(alone, abs=1e-4)
    (short,) = on_device(directory, max_model_len=4).rewards([conversation("132")])
    assert "at most 4" in str(short)


async def test_the_hub_scores_with_the_model_a_batch_at_a_time(directory: Path, tmp_path: Path) -> None:
    expected = on_device(directory).rewards([conversation("132"), conversation("1")])
    attacks = [text for text in [*DEADLY, *hostile(tmp_path / "mark")] if len(text) < 200]
    async with start_hub(env_of(directory, require_stop=True)) as hub:
        right, short, long, cut = await hub.score(
            [sample("132"), sample("1"), sample("7" * CONTEXT), sample("1", finish_reason="length")]
        )
        more = await hub.score([sample("1")] * 6)
        (before,) = await hub.score([sample("132")])  # alone, whose last digits are others than in a batch
        hurt = [(await hub.score([sample(text)]))[0] for text in attacks]
        (after,) = await hub.score([sample("132")])
        described = (await hub.environments())["helpful"].description
    assert [right.reward, short.reward] == pytest.approx(expected, abs=1e-4)
    assert {score.status for score in hurt} <= {"SCORED", "INVALID"}  # it is text, or more than the model reads
    assert after.reward == before.reward
    assert not (tmp_path / "mark").exists()
    assert right.build.startswith(f"torch {version('torch')}, transformers {version('transformers')}, on cpu, ")
    assert right.build == described.build == on_device(directory, require_stop=True).build
    assert (long.status, long.reward) == ("INVALID", None)
    assert (cut.status, cut.reward) == ("SCORED", 0)
    assert cut.build == right.build, "law 3: one build scores a group"
    assert [score.status for score in more] == ["SCORED"] * 4 + ["NOT_STARTED"] * 2
    assert (described.capacity, described.calls) == (4, 1)


async def test_law_7_failure_is_not_zero_a_lost_process_gives_no_reward(directory: Path) -> None:
    environment = RewardModel("helpful", RewardModelConfig.model_validate(env_of(directory)["helpful"]))
    environment.patience_s = 0.0  # a model that takes long
    await environment.start()
    try:
        (early,) = await environment.score_batch([sample("132")])
        assert (early.status, early.message) == ("NOT_STARTED", f"the model {directory} is being loaded")
        await eventually(lambda: environment.problem() is None)
        process = environment._process._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # SIGSTOP: it is at work when it is killed
        scoring = asyncio.create_task(environment.score_batch([sample("132"), sample("1")]))
        await asyncio.sleep(0)
        process.kill()
        interrupted = await scoring
        assert [score.status for score in interrupted] == ["INTERRUPTED"] * 2
        assert "ended by SIGKILL" in interrupted[0].message
        (meanwhile,) = await environment.score_batch([sample("132")])
        assert (meanwhile.status, meanwhile.reward) == ("NOT_STARTED", None)
        await eventually(lambda: environment.problem() is None)
        (again,) = await environment.score_batch([sample("132")])
        assert again.status == "SCORED"
        process = environment._process._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        late = asyncio.create_task(environment.score_batch([sample("132")]))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert process.returncode is not None  # no answer of it is taken for that to another call
    finally:
        await environment.aclose()


async def test_what_cannot_be_loaded_is_said_at_the_start(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 labels"):
        on_device(make_reward_model(tmp_path / "three", labels=3))
    with pytest.raises(ServiceError, match=r"env\.helpful\.model_name.*nowhere"):
        async with start_hub(env_of(tmp_path / "nowhere")):
            pass


@pytest.mark.usefixtures("executed")
async def test_without_torch_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = ModelProcess(ModelSpecification("helpful", {"type": "reward_model", "model_name": "x"}))
    with pytest.raises(ServiceError, match=r"torch.*headrace\[reward-model\]"):
        await process.start()
