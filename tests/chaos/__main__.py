"""`make chaos`: runs of the real pipeline under faults, each judged by the auditor.

    python -m tests.chaos --faults 100 --seed 7

A run takes up to 34 faults, and five more for each thing that not every run has (plan.py); more faults are as many runs, with seeds one
after the other. Runs go round the embedded server, two servers of their own, and `headrace up`, unless --server names one; every
other one that `headrace up` does not start is of episodes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import get_args

from tests.chaos import runs
from tests.chaos.plan import Topology, has_episodes, make_shape, topology_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", choices=get_args(Topology))
    parser.add_argument("--episodes", action="store_true", help="every run is of episodes")
    parser.add_argument("--model", type=Path, help="a model's directory; a tiny one is made if it is not there")
    parser.add_argument("--folder", type=Path, help="takes a folder a run: logs, evidence")
    options = parser.parse_args()
    if options.episodes and options.server == "up":
        parser.error("--episodes needs another --server: under `headrace up` replicas have real engines")
    if lacks := runs.missing():
        sys.stderr.write(f"error: {lacks}\n")
        return 2
    folder = options.folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    model = options.model or folder / "tiny"
    if not model.exists():
        from headrace_services.trainer.demo_models import tiny

        tiny.make(model, warmup=False)
    bad, seed, left = 0, options.seed, options.faults
    while left > 0:
        topology: Topology = options.server or topology_of(seed)
        if options.episodes and topology == "up":
            topology = "embedded"
        episodes = options.episodes or (topology != "up" and has_episodes(seed))
        faults = min(make_shape(seed, left, topology, episodes=episodes).whole, left)
        place = folder / f"seed-{seed}"
        place.mkdir(parents=True)
        verdict = runs.run(seed, faults, topology, model.absolute(), place.absolute(), episodes=episodes)
        bad += not verdict.good
        sys.stdout.write(
            f"seed {seed}: {'every law held' if verdict.good else 'NOT GOOD'} under {faults} faults; {place}\n"
        )
        for line in filter(None, (verdict.problem, *verdict.objections)):
            sys.stdout.write(f"  {line}\n")
        sys.stdout.flush()
        seed, left = seed + 1, left - faults
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
