"""The programs of `benchmarks.agents`, in a process of their own, as programs are: reads jobs and says which are done.

A job is a line of JSON: a conversation of so many `calls` through a gateway, or the `bodies` of calls to a replica, one after another. Both
use the same light client, so that what they cost here is not what is compared.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from headrace.base.http_client import HttpClient

_MOST_BYTES = 2**24
# So long that there are blocks for a prefix cache, of 128 tokens on a CPU.
_TOLD = "1+1" * 20


class Jobs:
    def __init__(self) -> None:
        self._clients: dict[str, HttpClient] = {}

    async def do(self, job: dict[str, Any]) -> None:
        client = self._clients.setdefault(job["address"], HttpClient(job["address"], None, most=_MOST_BYTES))
        for body in job.get("bodies", ()):
            await self._post(client, job["path"], body.encode())
        messages = job.get("messages", [])
        for _ in range(job.get("calls", 0)):
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            answer = await self._post(client, job["path"], body)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": _TOLD}]
        sys.stdout.write(f"{job['id']}\n")
        sys.stdout.flush()

    async def _post(self, client: HttpClient, path: str, body: bytes) -> Any:
        status, answer = await client.post(path, {}, body)
        if status != 200:
            raise SystemExit(f"{path} answered {status}: {answer[:500]!r}")
        return json.loads(answer)


async def main() -> None:
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    jobs = Jobs()
    async with asyncio.TaskGroup() as running:
        while line := await reader.readline():
            running.create_task(jobs.do(json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main())
