"""A reward in a script that dials in to the run: it listens nowhere, and works from behind NAT and from a notebook.

The run's configuration declares the name, and where the hub is found:

    env:
      exact:
        attached: true
    reward:
      port: 50390

Start this before the run, after it, or twice: several processes share the load. Ctrl-C ends it, and the run waits for the next one.

    python examples/attached_environment.py 127.0.0.1:50390

On another machine it also needs the token that `headrace env token exact --run RUN` prints (`docs/environments.md`).
"""

from __future__ import annotations

import sys

import headrace


class Exact(headrace.Environment):
    """1 for the expected answer and nothing else."""

    def score(self, sample: headrace.Sample) -> float:
        return float(sample.completion.strip() == sample.extra_env_info["answer"])


if __name__ == "__main__":
    headrace.attach(sys.argv[1], Exact(), name="exact", capacity=64)
