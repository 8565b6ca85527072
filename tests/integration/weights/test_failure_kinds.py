"""What a worker's failure is called, and that its kind survives vLLM's RPC."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from headrace.base.errors import Restartable, WeightChannelAborted, WeightChannelError
from headrace_services.refit.receiver import RefitFailure, TransferInterrupted


@pytest.mark.slow
def test_a_worker_reports_the_kind_of_its_failure() -> None:
    from vllm.config import VllmConfig

    from headrace_services.refit.engine_extension import _interrupting, returning_failure

    class Worker:
        vllm_config = VllmConfig()

        @returning_failure
        def call(self, error: Exception, *, in_collective: bool) -> None:
            with _interrupting() if in_collective else contextlib.nullcontext():
                raise error

    def failing(error: Exception, *, in_collective: bool = False) -> RefitFailure | None:
        return Worker().call(error, in_collective=in_collective)

    gone = WeightChannelAborted("the group is over")
    assert failing(gone, in_collective=True) == RefitFailure("interrupted", "the group is over")
    assert failing(TransferInterrupted("late")) == RefitFailure("interrupted", "late")
    assert failing(WeightChannelError("no such parameter")) == RefitFailure("failed", "no such parameter")
    assert failing(KeyError("layer"), in_collective=True) == RefitFailure("failed", "KeyError: 'layer'")
    assert failing(Restartable("it hangs"), in_collective=True) == RefitFailure("hangs", "it hangs")


@pytest.mark.slow
@pytest.mark.parametrize("pickles", ["0", "1"])
def test_the_kind_of_a_failure_survives_the_engines_rpc(monkeypatch: pytest.MonkeyPatch, pickles: str) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", pickles)
    answers = [None, RefitFailure("interrupted", "a peer died")]
    sent = MsgpackEncoder().encode(UtilityResult(answers))
    received = MsgpackDecoder(UtilityResult).decode(sent).result
    assert msgspec.convert(received, list[RefitFailure | None]) == answers
