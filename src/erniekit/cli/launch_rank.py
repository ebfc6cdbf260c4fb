"""What a rank started by the launcher runs: `erniekit` itself, tied to the launcher's life.

python -m erniekit.cli.launch_rank train RECIPE ...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from erniekit.cli.interrupts import interrupts_wait_for_imports
from erniekit.cli.main import main
from erniekit.launch.failure import LAUNCHED

_PR_SET_PDEATHSIG = 1  # prctl: the signal to get when the parent dies


def die_with_the_launcher() -> None:
    """No rank outlives its launcher, however that ended: an orphan would hold the device and the output folder."""
    launcher = os.environ.get(LAUNCHED)
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it ended before prctl took effect
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_the_launcher()
    interrupts_wait_for_imports(silent=True)
    code = main(sys.argv[1:])
    if code not in (0, 75):
        # Leave now: closing process groups and threads can wait for a peer that is no more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
