"""`python -m headrace_services.trainer.launch N -m MODULE …`: N ranks on this machine, under torchrun.

torchrun exits with 1 whatever happened to its ranks, which says "an error that you must fix". This exits as the rank did that failed
first, so that whoever started it knows whether to start it again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(arguments: Sequence[str]) -> int:
    """The exit code; 128 + the signal's number for a rank that a signal ended, and if a signal ended this process."""
    ranks, *program = arguments
    try:
        torchrun(["--standalone", "--nproc-per-node", ranks, *program])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode
    except SignalException as error:
        return 128 + error.sigval.value
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
