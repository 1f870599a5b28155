"""A host of the lab: its address, its processes, its link."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.lab.iproute import LabError, batch, ip
from tests.lab.namespace import entered
from tests.lab.shaping import shape

DEVICE = "eth0"
# States of a bridge's port. NOTE: a change of the device, such as another MTU, enables a disabled port again; so does
# setting the state by `ip`, which changes the device as well. `bridge` sets only the state, and tc leaves it.
_PORT_DISABLED, _PORT_FORWARDING = 0, 3
_NICENESS = "-10"


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface, `eth0`, on the lab's switch. Made by Lab, usable until it is closed."""

    name: str
    address: str
    namespace: str
    switch: str
    port: str
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False, compare=False)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` on this host to its end, capturing its output; ``env`` adds to this process's environment.

        Raises LabError when its status is not 0 (unless ``check`` is off), TimeoutExpired after ``timeout_s``.
        """
        done = subprocess.run(
            self._inside_command(command), env=_environment(env), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout_s, check=False, start_new_session=True,
        )  # fmt: skip
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise LabError(f"on {self.name}, `{' '.join(command)}` ended with status {done.returncode}: {said}")
        return done

    def spawn(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: str | Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` on this host; it is killed, with all it starts, when the lab closes or its process dies.

        ``env`` adds to this process's environment. The Popen's pid is the command's own (`ip netns exec` becomes it)
        and leads a session of its own, so that a signal, or Ctrl-C at the terminal, reaches whom it is meant for.

        It has priority over the processes of this machine that are on no host: a real host has cores of its own, and
        a source that waits for a core looks slow to its receiver, which then asks another source for the same bytes.
        """
        process = subprocess.Popen(
            ["nice", "-n", _NICENESS, *self._inside_command(command)], env=_environment(env), cwd=cwd,
            stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        group = Path(f"/proc/{process.pid}/autogroup")
        if group.exists():  # then niceness counts within a session only, and sessions have a niceness of their own
            group.write_text(_NICENESS)
        return process

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread to this host: sockets it opens, and threads it starts, in this block are the host's.

        NOTE: threads that already run stay where they are, those of gRPC's pool and of an executor among them.
        """
        with entered(self.namespace):
            yield

    def bytes_out(self) -> int:
        """Bytes that have left through the link; headers count once per TCP packet (up to 64 KiB), not per frame."""
        return self._counter("tx")

    def bytes_in(self) -> int:
        """Bytes that have arrived through the link, counted as in ``bytes_out``."""
        return self._counter("rx")

    def set_rate(self, outgoing_mbit: float | None = None, incoming_mbit: float | None = None) -> None:
        """Hold a direction to a rate in Mbit/s from now on; None leaves it as it is, math.inf lifts its limit."""
        if outgoing_mbit is not None:
            shape(self.namespace, DEVICE, outgoing_mbit)
        if incoming_mbit is not None:
            shape(self.switch, self.port, incoming_mbit)

    def cut(self) -> None:
        """Drop every packet to and from this host, silently: no reset, no loss of carrier, no unreachable neighbour.

        What the host still sends into the cut link counts in ``bytes_out``.
        """
        self._set_port_state(_PORT_DISABLED)

    def restore(self) -> None:
        """Undo ``cut``."""
        self._set_port_state(_PORT_FORWARDING)

    def kill_all(self) -> None:
        """Kill what ``spawn`` started; the lab's closing does it, and kills what those processes started as well."""
        for process in self._processes:
            process.kill()

    def reap(self) -> None:
        """Wait for what ``spawn`` started, so that no zombie is left."""
        for process in self._processes:
            process.wait(timeout=10)

    def _set_port_state(self, state: int) -> None:
        batch("bridge", self.switch, [f"link set dev {self.port} state {state}"])

    def _counter(self, direction: str) -> int:
        (link,) = json.loads(ip("-n", self.namespace, "-j", "-s", "link", "show", "dev", DEVICE))
        return int(link["stats64"][direction]["bytes"])

    def _inside_command(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if extra is None else {**os.environ, **extra}
