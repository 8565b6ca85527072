"""Checkpoints of a real learner: what comes back is what was saved, whatever stopped the writer."""

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.errors import ServiceError
from headrace.config.services import CheckpointingConfig
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.network import backbone
from tests.integration.trainer import resuming_ranks
from tests.integration.trainer.learner_cases import config, random_batch
from tests.integration.trainer.learner_saves import PPOConfig, train_and_save
from tests.support.forks import fork, fork_ranks


def assert_same_weights(a: Learner, b: Learner) -> None:
    for (name, ours), (_, theirs) in zip(a.policy.weights(), b.policy.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_going_on_from_a_checkpoint_gives_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(tiny_model, loss_fn={"reference_policy_kl_penalty": 0.1})
    straight = Learner(settings)
    for seed in range(2):
        train_step(straight, random_batch(5, seed))
    straight.snapshot()(tmp_path)
    resumed = Learner(settings, tmp_path)
    assert resumed.version == 2
    assert_same_weights(straight, resumed)
    for seed in range(2, 5):
        # the reference policy is still the initial model, so that the KL term agrees too
        assert train_step(straight, random_batch(5, seed)) == train_step(resumed, random_batch(5, seed))
    assert_same_weights(straight, resumed)


@pytest.mark.parametrize(
    "sections",
    [{"ppo": PPOConfig}, {"policy": {"lora_cfg": {"enabled": True, "dim": 4}}}],
    ids=["whole models", "adapter"],
)
def test_training_changes_nothing_of_a_snapshot_being_written(
    tiny_model: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    settings = config(tiny_model, **sections)
    learner = Learner(settings)
    train_step(learner, random_batch(4))
    snapshot = learner.snapshot()
    metrics = [train_step(learner, random_batch(4, seed)) for seed in (1, 2)]
    snapshot(tmp_path)
    resumed = Learner(settings, tmp_path)
    assert [train_step(resumed, random_batch(4, seed)) for seed in (1, 2)] == metrics
    assert_same_weights(learner, resumed)


def test_saving_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    saved, other = Learner(config(tiny_model)), Learner(config(tiny_model))
    saved.snapshot()(tmp_path)
    assert train_step(saved, random_batch(5)) == train_step(other, random_batch(5))
    assert_same_weights(saved, other)


def test_a_process_alone_saves_and_leaves_no_process_group(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(config(tiny_model))
    train_step(learner, random_batch(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.snapshot()(tmp_path)
        assert not dist.is_initialized()
        assert Learner(config(tiny_model), tmp_path).version == 1
    assert not dist.is_initialized()


def test_transformers_loads_the_policy_and_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(config(tiny_model))
    train_step(learner, random_batch(5))
    learner.snapshot()(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    ids = np.arange(20, dtype=np.int32)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(learner.probe(ids), expected.numpy(), atol=2e-5)
    described = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert described["architectures"] == json.loads((tiny_model / "config.json").read_text())["architectures"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    messages = [{"role": "user", "content": "1+2"}]
    assert tokenizer.apply_chat_template(messages) == learner.tokenizer.apply_chat_template(messages)


def test_the_runs_own_chat_template_asks_and_stays_in_the_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}<asst>"
    learner = Learner(config(tiny_model, policy={"tokenizer": {"chat_template": template}}))
    learner.snapshot()(tmp_path)
    for tokenizer in (learner.tokenizer, AutoTokenizer.from_pretrained(tmp_path / "policy")):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "1+2"}], return_dict=False)
        assert tokenizer.decode(ids) == "1+2<asst>"


def copied(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder))


def test_generation_settings_are_saved_though_transformers_refuses(tiny_model: Path, tmp_path: Path) -> None:
    """As many models that follow instructions have it."""
    model = copied(tiny_model, tmp_path / "model")
    odd = {"do_sample": False, "temperature": 0.6, "top_p": 0.95}
    (model / "generation_config.json").write_text(json.dumps(odd))
    learner = Learner(config(model))
    (tmp_path / "trial").mkdir()
    learner.try_saving(tmp_path / "trial")
    learner.snapshot()(tmp_path / "saved")
    for folder in ("trial", "saved"):
        saved = json.loads((tmp_path / folder / "policy" / "generation_config.json").read_text())
        assert {name: saved.get(name, False) for name in odd} == odd
    assert Learner(config(model), tmp_path / "saved").version == 0


def test_what_transformers_will_not_save_is_found_at_the_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(config(tiny_model, ppo=PPOConfig))
    learner.try_saving(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "value"]
    monkeypatch.setattr(learner.policy.model.config, "temperature", 0.5, raising=False)
    with pytest.raises(ServiceError, match=r"saved.*policy\.model_name.*Generation parameters"):
        learner.try_saving(tmp_path)


def test_a_disk_too_small_for_weights_and_moments_is_found_at_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 2 MiB of weights and 4 MiB of moments."""
    learner = Learner(config(tiny_model))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    with pytest.raises(ServiceError, match=r"checkpoint.*2 MiB.*4.*5 MiB"):
        learner.try_saving(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7 << 20))
    learner.try_saving(tmp_path)
    with pytest.raises(ServiceError, match=r"2 times.*snapshot_dir"):
        learner.require_room(tmp_path, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    settings = config(tiny_model, checkpointing={"save_optimizer": False})
    Learner(settings).try_saving(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", lambda whole: whole[:3000]),
        ("model.safetensors", lambda _: b""),
        ("model.safetensors", lambda _: b"version https://git-lfs.github.com/spec/v1\n" * 3),
        ("config.json", lambda _: b'{"model_type": "unheard_of"}'),
        ("config.json", lambda whole: whole.replace(b'"hidden_size": 128', b'"hidden_size": 64')),
        ("tokenizer.json", lambda _: b"{}"),
        ("tokenizer.json", lambda whole: whole[:300]),
    ],
    ids=["cut", "empty", "pointer", "unknown", "shapes", "tokenizer", "cut tokenizer"],
)
def test_a_model_that_cant_be_loaded_is_an_error_with_its_name(
    tiny_model: Path, tmp_path: Path, name: str, content: Callable[[bytes], bytes]
) -> None:
    model = copied(tiny_model, tmp_path / "model")
    file = model / name
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ServiceError, match=rf"policy\.model_name '{model}'.*directory"):
        Learner(config(model))


def test_a_model_that_was_moved_away_is_told_as_that(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"gone'.*tokenizer.*exist"):
        Learner(config(tmp_path / "gone"))


def test_what_generates_with_a_checkpoint_ends_where_the_run_did(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(tiny_model, policy={"generation": {"stop_token_ids": [9]}})
    Learner(settings).snapshot()(tmp_path)
    end = AutoTokenizer.from_pretrained(tiny_model).eos_token_id
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").generation_config.eos_token_id == [end, 9]


def test_who_may_read_a_checkpoint_is_for_the_umask_to_say(tiny_model: Path, tmp_path: Path) -> None:
    for umask in (0o022, 0o077):
        folder, before = tmp_path / f"{umask:o}", os.umask(umask)
        try:
            folder.mkdir()
            Learner(config(tiny_model)).snapshot()(folder)
        finally:
            os.umask(before)
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert any(path.suffix == ".safetensors" for path in files)
        assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_a_policy_too_large_for_one_file_is_written_to_several(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backbone, "SHARD_SIZE", "1MB")
    learner = Learner(config(tiny_model))
    learner.snapshot()(tmp_path)
    assert len([*(tmp_path / "policy").glob("model-*-of-*.safetensors")]) > 1
    assert_same_weights(learner, Learner(config(tiny_model), tmp_path))


def test_the_configuration_s_learning_rate_holds_after_a_resume(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(config(tiny_model))
    train_step(learner, random_batch(5))
    learner.snapshot()(tmp_path)
    resumed = Learner(config(tiny_model, policy={"optimizer": {"kwargs": {"lr": 5e-5}}}), tmp_path)
    assert train_step(resumed, random_batch(5))["lr"] == 5e-5


def test_without_optimizer_state_the_weights_still_go_on(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(tiny_model, checkpointing={"save_optimizer": False})
    learner = Learner(settings)
    train_step(learner, random_batch(5))
    learner.snapshot()(tmp_path)
    resumed = Learner(settings, tmp_path)
    assert resumed.version == 1
    assert_same_weights(learner, resumed)
    train_step(resumed, random_batch(5))


def test_a_damaged_training_state_is_an_error_with_the_remedy(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(config(tiny_model))
    train_step(learner, random_batch(5))
    learner.snapshot()(tmp_path)
    (data,) = (tmp_path / "training").glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ServiceError, match=r"training state.*remove"):
        Learner(config(tiny_model), tmp_path)
    (tmp_path / "training" / "state.json").unlink()
    with pytest.raises(ServiceError, match=r"training state.*remove"):
        Learner(config(tiny_model), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, pytest.param(0, marks=pytest.mark.nightly)])  # the other way round
def test_two_ranks_skip_a_checkpoint_that_one_finds_damaged(tiny_model: Path, tmp_path: Path, place: int) -> None:
    """Each reads every second file, the largest first, and one bit has changed in the file at `place`."""
    trainer = {"num_processes": 2, "device": "cpu"}
    learner, checkpoints = Learner(config(tiny_model)), Checkpoints(tmp_path, CheckpointingConfig())
    checkpoints.start("t", 0)
    for version in (1, 2):
        train_step(learner, random_batch(5, version))
        learner.snapshot()(checkpoints.begin(version, "t"))
        checkpoints.publish(CheckpointState(version=version, timeline="t", cursor=0, run_id="r"), {version - 1: ["g"]})
    file = sorted(checkpoints.path(2).rglob("*.*"), key=lambda path: path.stat().st_size)[-1 - place]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    log = tmp_path / "log"
    settings = config(tiny_model, trainer=trainer).model_dump_json()
    with fork_ranks(2, resuming_ranks.run, settings, tmp_path, log=log) as ranks:
        assert [rank.wait(240) for rank in ranks] == [0, 0], log.read_text()
    assert f"{file} is not what was written" in log.read_text()
    assert [(tmp_path / f"loaded_by_{rank}").read_text() for rank in range(2)] == ["1", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["policy", "value", "training"])
def test_sigkill_in_the_middle_of_a_save_leaves_the_newest_usable(tiny_model: Path, tmp_path: Path, stage: str) -> None:
    checkpoints, log = Checkpoints(tmp_path, CheckpointingConfig()), tmp_path / "log"
    process = fork(train_and_save, tiny_model, tmp_path, log=log)
    try:
        deadline = time.monotonic() + 120
        while checkpoints.newest() is None or not [*tmp_path.glob(f".unfinished-step_*/{stage}/*")]:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    newest = checkpoints.newest()
    assert newest is not None
    assert checkpoints.state(newest).version == newest
    assert checkpoints.ledger(newest) == {newest - 1: ["g"]}
    learner = Learner(config(tiny_model, ppo=PPOConfig), checkpoints.path(newest))
    train_step(learner, random_batch(4, newest))
    checkpoints.start("u", newest)
    assert [*tmp_path.glob(".unfinished*")] == []
    learner.snapshot()(checkpoints.begin(learner.version, "u"))
    assert [path.name for path in tmp_path.glob(".unfinished*")] == [f".unfinished-step_{newest + 1}-u"]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1_000_000, 3_000_000], ids=["policy", "optimizer"])
def test_a_disk_without_room_leaves_the_newest_usable(tiny_model: Path, tmp_path: Path, limit: int) -> None:
    """Policy and value model take 2.1 MB each, their optimizers twice that."""
    log = tmp_path / "log"
    assert fork(train_and_save, tiny_model, tmp_path, limit, log=log).wait() == 1
    last = log.read_text().strip().splitlines()[-1]
    assert "ServiceError: can't write a checkpoint" in last
    assert "untouched. Free space" in last
    checkpoints = Checkpoints(tmp_path, CheckpointingConfig())
    assert checkpoints.find_published() == [1]
    train_step(Learner(config(tiny_model, ppo=PPOConfig), checkpoints.path(1)), random_batch(4))
