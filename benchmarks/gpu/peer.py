"""Rank 1 of a group of two, as a process: takes `broadcasts` of `nbytes`."""

from __future__ import annotations

import json
import sys
import time

import torch

from headrace_services.refit import nccl
from headrace_services.refit.channel import Channel, GroupRank


def main() -> None:
    spec = json.loads(sys.argv[1])
    device = torch.device(spec["device"])
    secret = bytes.fromhex(spec["secret"])
    place = GroupRank(spec["group_id"], spec["backend"], "127.0.0.1", spec["port"], 1, 2, device, secret)
    nccl.prepare_environment(spec["timeout_s"])
    deadline = time.monotonic() + spec["timeout_s"]
    channel = Channel.follow(place, deadline)
    tensor = torch.empty(spec["nbytes"], dtype=torch.uint8, device=device)
    for _ in range(spec["broadcasts"]):
        channel.broadcast(tensor, deadline)
    sys.stdin.read()  # the leader ends this process


if __name__ == "__main__":
    main()
