"""Ends a lab: kills whatever runs in its namespaces and removes them.

A reaper is a process beside the lab's. It waits for a line on its standard input (the lab closes) or for that input's
end (the lab's process died, even by kill -9), so no lab outlives its owner. It touches only the given namespaces and
their processes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_NETNS = Path("/run/netns")
_KILL_S = 10.0


class Reaper:
    """The handle of a reaper for ``namespaces``, which need not exist yet."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *namespaces],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def close(self) -> str:
        """End the lab now; returns what could not be ended, or an empty string."""
        # A line, not the pipe's end: a forked child of the lab's process may hold the pipe open as well.
        _, complaint = self._process.communicate("close\n", timeout=2 * _KILL_S)
        status = self._process.returncode
        return "" if status == 0 else f"its reaper ended with status {status}: {complaint.strip()}"


def pids_in(namespaces: Sequence[str]) -> list[int]:
    """The processes of this machine that live in one of ``namespaces``."""
    identities = _identities(namespaces)
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _lives_in(int(entry), identities)]


def end(namespaces: Sequence[str], spared: frozenset[int]) -> None:
    """Kill all that runs in ``namespaces``, wait for it, remove them. Raises TimeoutError after 10 s of killing."""
    identities = _identities(namespaces)
    deadline = time.monotonic() + _KILL_S
    while doomed := [pid for pid in pids_in(namespaces) if pid not in spared]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"still running after SIGKILL: {doomed}")
        for pid in doomed:
            _kill_and_wait(pid, identities)
    for name in namespaces:
        if (_NETNS / name).exists():
            subprocess.run(["ip", "netns", "delete", name], check=True, timeout=_KILL_S)


def _identities(namespaces: Sequence[str]) -> frozenset[tuple[int, int]]:
    return frozenset(_identity(_NETNS / name) for name in namespaces if (_NETNS / name).exists())


def _identity(namespace: Path) -> tuple[int, int]:
    """The identity of a namespace, equal for all its paths: device and inode."""
    status = namespace.stat()
    return status.st_dev, status.st_ino


def _lives_in(pid: int, identities: frozenset[tuple[int, int]]) -> bool:
    try:
        return _identity(Path(f"/proc/{pid}/ns/net")) in identities
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    except PermissionError:  # it has more rights than the lab, so the lab did not start it
        return False


def _kill_and_wait(pid: int, identities: frozenset[tuple[int, int]]) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _lives_in(pid, identities):  # asked again now that the pid cannot change hands
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], 1.0)
    except ProcessLookupError:
        return
    finally:
        os.close(process)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when its owner has ended
    owner = os.getppid()
    sys.stdin.readline()
    try:
        end(sys.argv[1:], spared=frozenset({os.getpid(), owner}))
    except (TimeoutError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
