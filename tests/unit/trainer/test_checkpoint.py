from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.services import CheckpointingConfig
from headrace.errors import ServiceError
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState, superseded


def state(version: int, **metrics: float) -> CheckpointState:
    named = {f"val:{name}": value for name, value in metrics.items()}
    return CheckpointState(version=version, timeline="t1", ancestors=("t0",), cursor=9, run_id="r", metrics=named)


Publish = Callable[..., Path]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "runs" / "checkpoints", CheckpointingConfig(keep_top_k=2))


@pytest.fixture
def publish(checkpoints: Checkpoints) -> Publish:
    def publish(version: int, **metrics: float) -> Path:
        folder = checkpoints.begin(version)
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_text(str(version))
        return checkpoints.publish(
            state(version, **metrics), {version - 1: ["a", "b"]}, files={"ended": bytes([version])}
        )

    return publish


def test_what_was_published_is_read_back(checkpoints: Checkpoints, publish: Publish) -> None:
    assert checkpoints.newest() is None
    folder = publish(9)
    publish(10)
    assert checkpoints.published() == [9, 10]
    assert checkpoints.newest() == 10
    assert checkpoints.state(10) == state(10)
    assert checkpoints.ledger(10) == {9: ["a", "b"]}
    assert checkpoints.file(10, "ended") == bytes([10])
    with pytest.raises(ServiceError, match="step_10/trained can't be read"):
        checkpoints.file(10, "trained")
    assert folder == checkpoints.path(9)
    assert (folder / "policy" / "weights").read_text() == "9"


def test_half_written_checkpoints_are_never_listed_and_the_next_writer_removes_them(
    checkpoints: Checkpoints, publish: Publish
) -> None:
    publish(1)
    half = checkpoints.begin(2)
    (half / "state.json").write_text(state(2).model_dump_json())  # killed just before the rename
    (checkpoints.path(7)).mkdir()  # a copy by hand that was cut off
    assert checkpoints.published() == [1]
    again = checkpoints.begin(3)
    assert not half.exists()
    assert again == checkpoints.unfinished(3)


def test_newest_stays_and_the_best_stay(checkpoints: Checkpoints, publish: Publish) -> None:
    for version, accuracy in ((1, 0.9), (2, 0.5), (3, 0.8), (4, 0.1)):
        publish(version, accuracy=accuracy)
    assert checkpoints.published() == [1, 3, 4]
    publish(5)
    assert checkpoints.published() == [1, 3, 5]


def test_a_version_is_published_once(checkpoints: Checkpoints, publish: Publish) -> None:
    publish(1)
    with pytest.raises(ServiceError, match="exists already"):
        checkpoints.begin(1)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"version": 1}',
        '{"version":1,"timeline":"t","cursor":"x","run_id":"r"}',
        '{"version":1,"timeline":"t","cursor":4,"run_id":"r","trained":[[0,4]]}',  # of an older build
    ],
)
def test_a_damaged_state_is_an_error_that_says_what_to_do(
    checkpoints: Checkpoints, publish: Publish, content: str
) -> None:
    (publish(1) / "state.json").write_text(content)
    with pytest.raises(ServiceError, match=r"state\.json can't be read .*; remove .*step_1 to go on"):
        checkpoints.state(1)


def test_an_unwritable_place_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", CheckpointingConfig())
    with pytest.raises(ServiceError, match=r"can't write a checkpoint .*checkpointing\.checkpoint_dir"):
        checkpoints.begin(1)


histories = st.dictionaries(st.integers(0, 50), st.one_of(st.none(), st.floats(0, 1)), max_size=12)


@given(history=histories, k=st.integers(1, 5), higher=st.booleans())
def test_retention_keeps_the_newest_and_the_best(history: dict[int, float | None], k: int, higher: bool) -> None:
    metrics = {version: {} if value is None else {"val:accuracy": value} for version, value in history.items()}
    gone = superseded(metrics, CheckpointingConfig(keep_top_k=k, higher_is_better=higher))
    kept = set(metrics) - set(gone)
    assert min(k, len(metrics)) <= len(kept) <= k + 1
    if not metrics:
        return
    assert max(metrics) in kept
    best = kept if len(kept) <= k else kept - {max(metrics)}
    for lost in gone:
        for held in best:
            a, b = history[held], history[lost]
            assert b is None or (a is not None and (a >= b if higher else a <= b))


def test_without_a_metric_the_newest_are_kept_and_without_a_limit_all() -> None:
    metrics = {version: {"val:accuracy": 1.0 / (version + 1)} for version in range(5)}
    assert superseded(metrics, CheckpointingConfig(keep_top_k=2, metric_name=None)) == [0, 1, 2]
    assert superseded(metrics, CheckpointingConfig(keep_top_k=None)) == []
