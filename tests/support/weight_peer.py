"""A receiver as a plain process: joins a group, takes transfers, and writes one JSON line for each thing that happens."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from headrace.base.errors import WeightChannelError
from headrace_services.refit.channel import Channel, GroupRank
from headrace_services.refit.manifest import Manifest
from headrace_services.refit.transfer import receive


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(spec: dict[str, Any]) -> None:
    manifest = Manifest.decode(spec["manifest"])
    membership = GroupRank(
        group_id=spec["group_id"],
        backend="gloo",
        host="127.0.0.1",
        port=spec["port"],
        rank=spec["rank"],
        world_size=spec["world_size"],
        device=torch.device("cpu"),
        secret=bytes.fromhex(spec["secret"]),
    )
    started = time.monotonic()
    try:
        channel = Channel.follow(membership, time.monotonic() + spec["timeout_s"])
        say(event="joined")
        for _ in range(spec["transfers"]):
            started = time.monotonic()
            sums = {}
            for bucket in receive(channel, manifest, started + spec["timeout_s"]):
                say(event="bucket")
                sums.update({name: tensor.double().sum().item() for name, tensor, _ in bucket})
            say(event="received", sums=sums)
    except WeightChannelError as error:
        say(event="error", type=type(error).__name__, message=str(error), seconds=time.monotonic() - started)
