"""Runs a program that ends with its parent: `python parent_death.py PARENT_PID PROGRAM ARGS...` (Linux only).

A script that execs the program, because ``preexec_fn`` is not safe in a process with gRPC's threads. Imports nothing
of Torchrelay, so that it costs milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied_to_this_process(command: Sequence[str]) -> tuple[str, ...]:
    """Wraps the command so that it gets SIGTERM when this process ends, or the thread that started it (Linux only)."""
    if sys.platform != "linux":
        return tuple(command)
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def main() -> None:
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before prctl
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
