"""Starts of the platform while other programs of the machine open and close ports all the time.

    unshare --net .venv/bin/python -m tests.hostile.platforms.port_changes FOLDER NUM_STARTS

In a network namespace of its own, with few ports to choose from: there, every free port is soon somebody's.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.support.platform import running_platform
from tests.support.programs import fork_programs

CHANGES_PER_S = 300
NUM_HELD = 400
FIRST_PORT, LAST_PORT = 40_000, 40_999
OPTIONS = (
    *("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "1"),
    *("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1", "--quiet"),
)


class PortChanges:
    """A thread that opens listening ports and closes the oldest, ``CHANGES_PER_S`` times a second."""

    def __init__(self) -> None:
        self.num_changes = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="port-changes")

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ending.set()
            self._thread.join()

    def _run(self) -> None:
        held: deque[socket.socket] = deque()
        while not self._ending.wait(1 / CHANGES_PER_S):
            try:
                held.append(socket.create_server(("127.0.0.1", 0)))
            except OSError:  # none is free at the moment
                held.popleft().close()
                continue
            if len(held) > NUM_HELD:
                held.popleft().close()
            self.num_changes += 1
        for each in held:
            each.close()


def leave_few_ports() -> None:
    """Only in a network namespace of its own: loopback and ``FIRST_PORT`` to ``LAST_PORT`` are all there is."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        if probe.connect_ex(("192.0.2.1", 9)) == 0:
            raise RuntimeError("this is not a network namespace of its own: run it by unshare --net")
    subprocess.run(("ip", "link", "set", "lo", "up"), check=True)
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{FIRST_PORT} {LAST_PORT}")


def main() -> None:
    folder, num_starts = Path(sys.argv[1]), int(sys.argv[2])
    leave_few_ports()
    fork_programs()
    changes, num_up = PortChanges(), 0
    with changes.running():
        for number in range(num_starts):
            try:
                with running_platform(folder / f"{number}", OPTIONS):
                    num_up += 1
            except AssertionError as error:
                print(error, file=sys.stderr)
    print(json.dumps({"starts": num_starts, "up": num_up, "port_changes": changes.num_changes}))


if __name__ == "__main__":
    main()
