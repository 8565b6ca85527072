"""What all services share."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import weakref
from typing import Any

import pytest

from headrace.net.service import bind, importing, serve_openly, stop_signals


@pytest.fixture
def frozen() -> None:
    """What the process of the tests holds is left out of the collections of this one, which would take a second of a core to search it."""
    gc.freeze()


@pytest.mark.usefixtures("frozen")
def test_what_is_garbage_before_an_import_is_not_kept() -> None:
    class Node:
        itself: Node

    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    del node
    with importing():
        pass
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("frozen")
def test_what_was_imported_is_not_looked_through_by_later_collections() -> None:
    before = gc.get_freeze_count()
    with importing():
        imported = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= before + len(imported)
    assert not any(each is imported for each in gc.get_objects())


@pytest.mark.usefixtures("frozen")
def test_garbage_is_not_collected_during_imports_and_is_afterwards() -> None:
    with importing():
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer import goes on"
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


async def test_an_answer_in_two_parts_waits_for_no_acknowledgement() -> None:
    accepted = asyncio.get_running_loop().create_future()
    with bind("127.0.0.1", 0, "port") as sock:
        server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=sock)
        async with server:
            _, writer = await asyncio.open_connection(*sock.getsockname())
            served = await accepted
            own = served.get_extra_info("socket")
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for end in (served, writer):
                end.close()


async def test_a_caller_that_reads_when_a_server_ends_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await asyncio.Event().wait()

    sock = bind("127.0.0.1", 0, "port")
    async with serve_openly(endless, sock):
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"first")
    writer.close()
    assert [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"] == []


def test_a_hangup_stops_a_service_unless_nohup_keeps_it_away() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT}
    finally:
        signal.signal(signal.SIGHUP, before)
