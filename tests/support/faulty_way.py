"""A way to a gateway that loses things: a proxy between a client and its episode, with a fault for each request in turn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, Literal

import httpx
from fastapi import FastAPI, Request, Response

from headrace.net.service import bind, serve_openly

# 500 and 503: the request doesn't arrive. Of one that does, the answer is `lost` (a 502 comes instead), `cut` in its middle, or so `late`
# that its client has gone.
Fault = Literal["500", "503", "lost", "cut", "late"]
FAULTS: tuple[Fault, ...] = ("500", "503", "lost", "cut", "late")
# When to ask again, as OpenAI's clients read it.
_AT_ONCE = {"retry-after-ms": "1"}


@contextlib.asynccontextmanager
async def faulty_way(
    address: str, faults: Iterable[Fault | None], *, of_first_tries: bool = False
) -> AsyncIterator[str]:
    """The address of the proxy to `address`. None is no fault; so are all requests behind the last of `faults`. `of_first_tries`: requests
    that a client marks as a retry have none either."""
    app = FastAPI()
    coming = iter(faults)
    async with httpx.AsyncClient(timeout=60.0, verify=False) as client:

        async def handle(request: Request) -> Response:
            spared = of_first_tries and request.headers["x-stainless-retry-count"] != "0"
            fault = next(coming, None) if request.method == "POST" and not spared else None
            return _Passed(client, address, fault)

        app.add_api_route("/{path:path}", handle, methods=["GET", "POST"])
        with contextlib.closing(bind("127.0.0.1", 0, "the way's port")) as sock:
            async with serve_openly(app, sock):
                yield f"http://127.0.0.1:{sock.getsockname()[1]}"


class _Passed(Response):
    """What becomes of one request."""

    def __init__(self, client: httpx.AsyncClient, address: str, fault: Fault | None) -> None:
        super().__init__()
        self._client, self._address, self._fault = client, address, fault

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._fault in ("500", "503"):
            await Response(b"the way is broken", int(self._fault), _AT_ONCE)(scope, receive, send)
            return
        request = Request(scope, receive)
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        answer = await self._client.request(
            scope["method"], self._address + scope["path"], content=body, headers=headers
        )
        if self._fault == "lost":
            await Response(b"the answer was lost", 502, _AT_ONCE)(scope, receive, send)
            return
        if self._fault == "late":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        kept = [(name, value) for name, value in answer.headers.raw if name.lower() == b"content-type"]
        length = (b"content-length", str(len(answer.content)).encode())
        await send({"type": "http.response.start", "status": answer.status_code, "headers": [*kept, length]})
        if self._fault == "cut":
            await send(
                {"type": "http.response.body", "body": answer.content[: len(answer.content) // 2], "more_body": True}
            )
            return  # the server closes a connection whose answer is not whole
        await send({"type": "http.response.body", "body": answer.content, "more_body": False})
