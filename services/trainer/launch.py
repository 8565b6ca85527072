"""`python -m headrace_services.trainer.launch N [OPTIONS] -m MODULE …` runs N ranks on this machine, under torchrun. With torchrun's option
`--nnodes` they are some of the ranks of several machines.

torchrun exits with 1 whatever happened to its ranks, and 1 means "an error that you must fix". This program exits as the first rank that
failed did, and with 70 if the machines lost each other, so that its parent knows whether to start it again.

At SIGTERM the ranks end their step and write a checkpoint, for which torchrun would give them 30 seconds. SIGUSR1 does the same, because
Slurm's srun hands it on, and kills its tasks at SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import main as torchrun

from headrace.base.parent import admit
from headrace.net.service import EXIT_INTERNAL_ERROR, SAVE_DEADLINE_S


def main(arguments: Sequence[str]) -> int:
    """Run the ranks and return the exit code: 128 plus the signal's number if a signal ended a rank or this process."""
    ranks, *program = arguments
    # those in `program` replace them
    options = ["--shutdown-timeout", f"{SAVE_DEADLINE_S:.0f}", "--nproc-per-node", ranks]
    if "--nnodes" not in program:
        options.append("--standalone")
    admit(True)  # torchrun doesn't hand the reserved port on to rank 0, which listens on it
    try:
        torchrun([*options, *program])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode
    except SignalException as error:
        return 128 + error.sigval.value
    except (DistError, RendezvousError):  # another machine's torchrun has ended, or never came
        traceback.print_exc()
        return EXIT_INTERNAL_ERROR
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
