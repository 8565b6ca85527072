"""Two gloo ranks, sharded by FSDP2, against one process that holds every sample."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import shaken
from tests.integration.trainer.learner_ranks import SAVED, SETTINGS, STEPS, run_rank, settings, whole_batch
from tests.support.forks import fork_ranks

# By day the steps of episodes are those of GRPO too, and an adapter's of a frozen model.
BY_DAY = ("ppo", "lora", "episodes")
GAP = "on_policy_distillation/teacher_student_logprob_gap_mean"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(tiny_model, tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def two_ranks(
    tiny_model: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    log = folder / "log"
    kinds = list(SETTINGS) if pytestconfig.getoption("nightly") else BY_DAY
    with fork_ranks(2, run_rank, tiny_model, teacher, folder, kinds, log=log) as ranks:
        for rank in ranks:
            assert rank.wait() == 0, log.read_text()
    return folder


def results(folder: Path, name: str, rank: int) -> Any:
    return json.loads((folder / f"{name}{rank}.json").read_text())


@pytest.fixture(
    scope="module",
    params=[kind if kind in BY_DAY else pytest.param(kind, marks=pytest.mark.nightly) for kind in SETTINGS],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def one_rank(tiny_model: Path, teacher: Path, kind: str) -> tuple[Learner, list[Batch], list[dict[str, float]]]:
    learner = Learner(settings(kind, tiny_model, teacher))
    batches = [whole_batch(step, kind) for step in range(STEPS)]
    return learner, batches, [train_step(learner, batch) for batch in batches]


def test_two_ranks_take_the_same_steps_to_the_same_numbers(
    two_ranks: Path, kind: str, one_rank: tuple[Learner, list[Batch], list[dict[str, float]]]
) -> None:
    learner, _, expected = one_rank
    found = results(two_ranks, kind, 0)
    if kind == "opd":
        assert all(metrics[GAP] < -0.1 for metrics in expected), "the teacher is to differ from the policy"
    assert len(found["metrics"]) == len(expected)
    for ours, theirs in zip(found["metrics"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-5)
    weights = torch.load(two_ranks / f"{kind}.pt")
    for name, tensor in learner.policy.weights():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=0, msg=name)
    np.testing.assert_allclose(found["probe"], learner.probe(np.arange(20, dtype=np.int32)), atol=1e-4)


def test_the_columns_of_two_ranks_are_those_of_one(
    two_ranks: Path, kind: str, one_rank: tuple[Learner, list[Batch], list[dict[str, float]]]
) -> None:
    """The last step's second rank has no trajectory."""
    for step, (whole, metrics) in enumerate(zip(one_rank[1], results(two_ranks, kind, 0)["metrics"], strict=True)):
        found = np.load(two_ranks / f"{kind}{step}.npz")
        assert np.nansum(found["token_losses"].astype(np.float64)) == pytest.approx(metrics["loss"], abs=1e-6)
        for name in found:
            np.testing.assert_allclose(found[name], getattr(whole, name), rtol=1e-3, atol=2e-5, err_msg=name)


def test_every_rank_reports_the_same(two_ranks: Path, kind: str) -> None:
    assert results(two_ranks, kind, 0) == results(two_ranks, kind, 1)


def test_a_checkpoint_of_two_ranks_goes_on_bit_for_bit(two_ranks: Path, kind: str) -> None:
    found = results(two_ranks, kind, 0)
    assert found["again"] == found["metrics"][SAVED:]


def test_a_checkpoint_of_two_ranks_resumes_with_one(
    two_ranks: Path, kind: str, tiny_model: Path, teacher: Path
) -> None:
    described = json.loads((two_ranks / kind / "policy" / "config.json").read_text())
    assert described["architectures"] == ["Qwen2ForCausalLM"]
    learner = Learner(settings(kind, tiny_model, teacher), two_ranks / kind)
    assert learner.version == SAVED
    for step, theirs in zip(range(SAVED, STEPS), results(two_ranks, kind, 0)["metrics"][SAVED:], strict=True):
        assert train_step(learner, whole_batch(step, kind)) == pytest.approx(theirs, rel=2e-5, abs=1e-5)


def test_what_one_rank_refuses_every_rank_raises(two_ranks: Path) -> None:
    for rank in range(2):
        invalid, overflow = results(two_ranks, "refused", rank)
        assert "'g'[4]: its reward is nan" in invalid
        assert "not both finite, because of trajectory 'g'[4];" in overflow


def test_what_one_rank_can_not_write_every_rank_raises(two_ranks: Path) -> None:
    said = results(two_ranks, "unwritten", 0)
    assert f"can't write a checkpoint to {two_ranks / 'disk1'}" in said
    assert results(two_ranks, "unwritten", 1) == said
