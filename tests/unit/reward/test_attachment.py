"""What an attached process does by itself: the size of its answers, and the options to its hub."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import Environment
from headrace.base.errors import ConfigError, HeadraceError, ServiceError, UnusableFile
from headrace.env import attachment
from headrace.env.attachment import Attachment, DialOptions, dial_options
from headrace.env.wire import fit_results
from headrace.v1 import trajectory_pb2
from headrace.v1.trajectory_pb2 import Result


def test_results_too_large_for_a_message_are_failed_alone() -> None:
    small = Result(status=trajectory_pb2.STATUS_SCORED, reward=1, environment="Mine", build="7")
    large = Result(
        status=trajectory_pb2.STATUS_SCORED, reward=1, metadata_json="x" * 3000, environment="Mine", build="7"
    )
    assert fit_results([small, large], 10_000) == [small, large]
    first, second, third = fit_results([small, large, small], 3000)
    assert (first, third) == (small, small)
    assert (second.status, second.HasField("reward")) == (trajectory_pb2.STATUS_FAILED, False)
    assert (second.environment, second.build) == ("Mine", "7")
    assert "share of a message (900)" in second.message


@pytest.mark.parametrize("token", ["own", " environment mine own\n"])
def test_a_token_is_given_as_it_was_printed_or_alone(token: str) -> None:
    options = dial_options("hub.internal:1", "mine", token=token, token_file=None, tls_ca=None, insecure=False)()
    assert options.token is not None
    assert (options.token(), options.tls) == ("own", True)


@pytest.mark.parametrize(
    ("hub", "tls_ca", "insecure", "tls"),
    [
        ("127.0.0.1:1", None, False, False),
        ("127.0.0.1:1", "ca.pem", False, True),
        ("hub.internal:1", "ca.pem", False, True),
        ("hub.internal:1", None, True, False),
    ],
)
def test_no_token_leaves_the_machine_in_plain_text_unless_told_to(
    hub: str, tls_ca: str | None, insecure: bool, tls: bool
) -> None:
    assert dial_options(hub, "mine", token="own", token_file=None, tls_ca=tls_ca, insecure=insecure)().tls == tls


def test_a_token_file_that_lacks_the_environment_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("environment other foreign\n")
    file.chmod(0o600)
    options = dial_options("hub:1", "mine", token=None, token_file=str(file), tls_ca=None, insecure=False)()
    assert options.token is not None
    with pytest.raises(ConfigError, match="'environment mine'"):
        options.token()


class Dialling(Attachment):
    """Finds at each dial what is next of `hub`: it is admitted, and the stream ends; or the error is raised. The last ends it."""

    hub_says: Iterator[BaseException | None]

    @contextlib.asynccontextmanager
    async def _dialled(self) -> AsyncIterator[tuple[Any, list[tuple[str, str]]]]:
        if (error := next(self.hub_says)) is not None:
            raise error
        yield None, []

    async def _serve(self, stub: Any, metadata: Any) -> None:
        self._admitted = True


def refusal(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "no such token")


AWAY = UnusableFile("the file of tokens is half written"), refusal(grpc.StatusCode.UNAUTHENTICATED)


@pytest.mark.parametrize("away", AWAY, ids=["own", "of the hub"])
def test_law_6_replaced_tokens_end_only_what_was_never_attached(
    away: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_FIRST_PAUSE_S", 0.001)

    def ends(*hub_says: BaseException | None) -> tuple[str, list[BaseException | None]]:
        Dialling.hub_says = iter(hub_says)
        with pytest.raises(HeadraceError) as ended:
            Dialling("hub:1", Environment(), "mine", 1, DialOptions).wait()
        return str(ended.value), [*Dialling.hub_says]

    over = ServiceError("over")
    assert ends(None, away, away, None, over) == ("over", [])
    said, rest = ends(away, over)
    assert ("token" in said, rest) == (True, [over])
    said, rest = ends(None, refusal(grpc.StatusCode.PERMISSION_DENIED), over)
    assert ("PERMISSION_DENIED" in said, rest) == (True, [over])
