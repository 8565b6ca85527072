"""The API key of a model that is served beyond the loopback interface (`headrace serve`)."""

from __future__ import annotations

import hmac
import os
from typing import Any

VARIABLE = "VLLM_API_KEY"
_OPEN = ("/health", "/ping")


class KeyGuard:
    """ASGI middleware for vLLM's server that requires the key in `VLLM_API_KEY` as `Authorization: Bearer KEY`.

    Only liveness checks need no key. vLLM itself asks for the key under some paths only.
    """

    def __init__(self, app: Any) -> None:
        """Read the key from the environment. Raises `KeyError` if it is not set."""
        self._app = app
        self._key = os.environ[VARIABLE].encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            from starlette.responses import JSONResponse  # it is vLLM's, and this module the command's too

            error = {"message": "give the API key as `Authorization: Bearer KEY`", "code": 401}
            await JSONResponse({"error": error}, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _admits(self, scope: Any) -> bool:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in _OPEN:
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
