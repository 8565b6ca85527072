"""How the failure of a refit in an engine's worker decides whether the replica is at fault."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.base.errors import Restartable, WeightChannelError
from headrace.config import Config
from headrace_services.refit.receiver import RefitFailure, TransferInterrupted, WeightReceiver

FAILED = RefitFailure("failed", "no such parameter")
INTERRUPTED = RefitFailure("interrupted", "a peer died")
HANGS = RefitFailure("hangs", "only a new process can continue")


async def raised_by(*answers: RefitFailure | None) -> Exception | None:
    async def collective_rpc(method: str, kwargs: dict[str, Any]) -> Any:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answers))

    engine: Any = SimpleNamespace(collective_rpc=collective_rpc)
    receiver = WeightReceiver(Config(), engine, SimpleNamespace(), "replica")
    try:
        await receiver._workers("receiving weights", "receive_weights", 5.0)
    except (WeightChannelError, Restartable) as error:
        return error
    return None


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ((None, INTERRUPTED), TransferInterrupted, "receiving weights was interrupted: a peer died"),
        ((None, FAILED), WeightChannelError, "receiving weights: no such parameter"),
        ((INTERRUPTED, FAILED), WeightChannelError, "receiving weights: no such parameter"),
        ((FAILED, INTERRUPTED, HANGS), Restartable, "receiving weights: only a new process can continue"),
        ((FAILED, RefitFailure("failed", "second")), WeightChannelError, "receiving weights: no such parameter"),
    ],
)
async def test_the_kind_of_a_failure_decides_who_is_to_blame(
    answers: tuple[RefitFailure | None, ...], kind: type[Exception], message: str
) -> None:
    error = await raised_by(*answers)
    assert (type(error), str(error)) == (kind, message)


async def test_no_failure_raises_nothing() -> None:
    assert await raised_by(None, None) is None


@pytest.mark.parametrize("reason", ["transfer interrupted: so said a loader", "the collective hangs, said a loader"])
async def test_the_words_of_a_failure_blame_nobody(reason: str) -> None:
    assert type(await raised_by(RefitFailure("failed", reason))) is WeightChannelError


def test_a_failure_passes_through_a_pickle() -> None:
    # between the engine's core and the workers of a tensor-parallel replica
    assert pickle.loads(pickle.dumps(FAILED)) == FAILED
