"""Asks a cloud whether it is about to take this machine away.

Each cloud tells its machines by a metadata server that only they reach: AWS two minutes before, Google and Azure 30 seconds.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Literal

from headrace.base.errors import ServiceError

Cloud = Literal["aws", "azure", "gcp"]

SERVERS: Mapping[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "azure": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
}
_ANSWER_S = 2.0
_TOKEN_S = 60  # of one look
_MOST = 1 << 20  # bytes of an answer


class Notices:
    """The notices of a cloud's metadata server."""

    def __init__(self, cloud: Cloud, server: str | None = None) -> None:
        self._cloud = cloud
        self._server = (server or SERVERS[cloud]).rstrip("/")
        # the metadata server is never behind a proxy
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def find(self) -> str | None:
        """Return what the cloud says that it will do to this machine; None if nothing. Raises `ServiceError` if it does not answer."""
        try:
            match self._cloud:
                case "aws":
                    return self._aws()
                case "azure":
                    return self._azure()
                case "gcp":
                    taken = self._ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
                    return "it is preempted" if taken == "TRUE" else None
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise ServiceError(
                f"the metadata server of {self._cloud} at {self._server} does not answer as one ({error}); give --cloud the cloud of this "
                "machine"
            ) from error

    def _aws(self) -> str | None:
        # one for each look, since an older one may have ended
        token = self._ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}, method="PUT")
        try:
            notice = json.loads(
                self._ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
            )
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        return f"it will {notice['action']} at {notice['time']}"

    def _azure(self) -> str | None:
        headers = {"Metadata": "true"}
        events: list[Any] = json.loads(self._ask("/metadata/scheduledevents?api-version=2020-07-01", headers))["Events"]
        leaving = [event for event in events if event["EventType"] in ("Preempt", "Terminate")]
        if not leaving:
            return None
        # the server tells of all machines of a scale set
        own = self._ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
        for event in leaving:
            if own in event["Resources"]:
                return f"{event['EventType']}, not before {event['NotBefore'] or 'now'}"
        return None

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(self._server + path, headers=dict(headers), method=method)
        with contextlib.closing(self._opener.open(request, timeout=_ANSWER_S)) as answer:
            text: str = answer.read(_MOST).decode()
            return text.strip()
