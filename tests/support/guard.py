"""Ends what an interrupted run of the tests has left: processes, and files in shared memory.

A guard is a process beside pytest's. It waits until pytest has ended, even by ``kill -9``. Then it terminates the
processes whose environment names the run, kills those that do not end, and removes the run's shared memory. Network
namespaces have a reaper (``tests/lab/reaper.py``), which the guard lets end by itself.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

RUN = "TORCHRELAY_TEST_RUN"  # the name of the run, in the environment of every process that it starts
_SHARED_MEMORY = Path("/dev/shm")
_TERMINATION_S = 30.0  # a platform stops its services one after the other
_POLL_S = 0.1


def start_guard() -> subprocess.Popen[bytes]:
    """Names this run in the environment, and starts its guard."""
    run = f"torchrelay-test-{secrets.token_hex(4)}"
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, run, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[RUN] = run
    return guard


def shared_memory_path(name: str) -> Path:
    """A path in shared memory that belongs to this run; ``name`` tells the run's files apart."""
    return _SHARED_MEMORY / f"{os.environ.get(RUN, 'torchrelay-test')}-{name}"  # benches have no run


def living_processes(run: str) -> list[int]:
    """The processes whose environment names ``run``, without this process.

    Redis overwrites its environment: the tests' own servers end with the process that has started them.
    """
    marker = f"{RUN}={run}".encode()
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if pid != os.getpid() and marker in _environment(pid)]


def shared_memory_of(run: str) -> list[Path]:
    return list(_SHARED_MEMORY.glob(f"{run}-*"))


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or has more rights, so the run did not start it
        return []


def _end(run: str) -> None:
    deadline = time.monotonic() + _TERMINATION_S
    terminated: set[int] = set()
    while living := living_processes(run):
        is_late = time.monotonic() > deadline
        for pid in living:
            if is_late or pid not in terminated:
                _send(pid, run, signal.SIGKILL if is_late else signal.SIGTERM)
        terminated.update(living)
        time.sleep(_POLL_S)
    for path in shared_memory_of(run):
        path.unlink(missing_ok=True)


def _send(pid: int, run: str, number: signal.Signals) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if f"{RUN}={run}".encode() in _environment(pid):  # asked again now that the pid cannot change hands
            signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(process)


def _main() -> None:
    run, pytest_pid = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends last
    process = os.pidfd_open(pytest_pid)
    if os.getppid() == pytest_pid:  # otherwise pytest has ended, and the pid may be another's
        select.select([process], [], [])
    _end(run)


if __name__ == "__main__":
    _main()
